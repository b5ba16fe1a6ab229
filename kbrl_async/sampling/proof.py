"""The attestation of an engine that computes elsewhere (I8): the canaries, asked the way that rollouts go.

::

    ids ─▶ log-probs of the prompt ─▶ judge: as published? a stale version's? the base's?
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from kbrl_async.sampling.canary import canaries_of, engine_tolerance, judge, rms
from protocols.records import CanaryPrompt, PolicyVersion

Score = Callable[[list[int]], Awaitable[list[float]]]
"""From a prompt's ids to log p(ids[i] | ids[:i]) for i ≥ 1, at temperature 1."""
REMEMBERED = 4
"""Earlier versions that a new one is told from, beside the first and the base."""


class Prover:
    """Proves versions one after the other, and remembers what each of them must give."""

    def __init__(self, dtype: str, depth: int = 0) -> None:
        """`depth`: layers of the model, as far as that is known."""
        self._allowed = engine_tolerance(dtype, depth)
        self._published: dict[str, OrderedDict[str, list[float]]] = {}
        self._base: list[float] | None = None
        self._base_ids: list[list[int]] = []
        self.error = 0.0
        """Root mean square of the newest proof."""

    async def meet_base(self, manifest: PolicyVersion, score_base: Score) -> None:
        """Remembers what the base gives, so that it is known when it is served by mistake."""
        canaries = canaries_of(manifest)
        ids = [canary.ids for canary in canaries]
        if self._base is None or ids != self._base_ids:
            self._base = [value for canary in canaries for value in await score_base(canary.ids)]
            self._base_ids = ids

    async def prove(self, manifest: PolicyVersion, role: str, score: Score, score_base: Score | None) -> None:
        """PolicyMismatch unless what `score` reaches is that version. `score_base` reaches the base, where it still
        can."""
        if score_base is not None:
            await self.meet_base(manifest, score_base)
        canaries = canaries_of(manifest, role)
        served = [value for canary in canaries for value in await score(canary.ids)]
        published = [value for canary in canaries for value in canary.logprobs]
        claim = f"policy v{manifest.version}" + (f" ({role})" if role else "")
        self.error = judge(claim, served, published, self._others(role, canaries, published), self._allowed)
        self._remember(role, claim, published)

    def _others(
        self, role: str, canaries: Sequence[CanaryPrompt], published: Sequence[float]
    ) -> dict[str, list[float]]:
        """What other weights would give for the same tokens."""
        length = len(published)
        known = {name: values for name, values in self._published.get(role, {}).items() if len(values) == length}
        for other, versions in self._published.items():
            if other != role and versions:
                name, values = next(reversed(versions.items()))
                known |= {name: values[:length]} if len(values) >= length else {}
        is_asked = [c.ids for c in canaries] == self._base_ids[: len(canaries)]
        if self._base is not None and is_asked and not self._is_the_base(published):
            known["the base model"] = self._base[:length]
        return known

    def _is_the_base(self, published: Sequence[float]) -> bool:
        """A version that nobody has trained yet: what the base gives is right, and off by the number format alone."""
        base = (self._base or [])[: len(published)]
        return len(base) == len(published) and rms(base, published) <= self._allowed

    def _remember(self, role: str, claim: str, published: list[float]) -> None:
        known = self._published.setdefault(role, OrderedDict())
        known[claim] = published
        if len(known) > REMEMBERED + 1:
            del known[list(known)[1]]
