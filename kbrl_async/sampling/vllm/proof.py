"""The attestation of an engine (I8): the canaries, asked the way that rollouts go.

::

    ids ─▶ one token at the training temperature, log-probs of the prompt ─▶ judge: published? stale? the base's?
    ids + that token ─▶ log-probs of the prompt ───────────────────────────▶ at which temperature was it drawn?
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kbrl_async.errors import PolicyMismatch
from kbrl_async.sampling.canary import ENGINE_TOLERANCE, TOLERANCE_DEFAULT, canaries_of, check_temperature, judge, rms
from protocols.records import CanaryPrompt, PolicyVersion

Ask = Callable[[list[int], dict[str, Any]], Awaitable[Any]]
"""From prompt ids and settings of `SamplingParams` to vLLM's last output."""
Row = dict[int, float]
"""Log-prob by token id at one position."""
COMPARED = 8
"""Tokens of one position by which the temperature is measured."""
REMEMBERED = 4
"""Earlier versions that a new one is told from, beside the first and the base."""


class Prover:
    """Proves versions one after the other, and remembers what each of them must give."""

    def __init__(self, dtype: str, temperature: float) -> None:
        self._allowed = ENGINE_TOLERANCE.get(dtype, TOLERANCE_DEFAULT)
        self._temperature = temperature
        self._published: dict[str, OrderedDict[str, list[float]]] = {}
        self._base: list[float] | None = None
        self._base_ids: list[list[int]] = []
        self.error = 0.0
        """Root mean square of the newest proof."""

    async def meet_base(self, manifest: PolicyVersion, ask_base: Ask) -> None:
        """Remembers what the base gives, so that it is known when it is served by mistake."""
        canaries = canaries_of(manifest)
        ids = [canary.ids for canary in canaries]
        if self._base is None or ids != self._base_ids:
            self._base = [value for canary in canaries for value in (await self._logprobs(canary, ask_base))[0]]
            self._base_ids = ids

    async def prove(self, manifest: PolicyVersion, role: str, ask: Ask, ask_base: Ask | None) -> None:
        """PolicyMismatch unless what `ask` reaches is that version. `ask_base` reaches the base, where it still can."""
        if ask_base is not None:
            await self.meet_base(manifest, ask_base)
        canaries = canaries_of(manifest, role)
        served: list[float] = []
        pairs: list[list[tuple[float, float]]] = []
        for canary in canaries:
            logprobs, row = await self._logprobs(canary, ask)
            served += logprobs
            pairs.append(await self._pairs(canary.ids, row, ask))
        published = [value for canary in canaries for value in canary.logprobs]
        claim = f"policy v{manifest.version}" + (f" ({role})" if role else "")
        self.error = judge(claim, served, published, self._others(role, canaries, published), self._allowed)
        check_temperature(pairs, self._temperature)
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

    async def _logprobs(self, canary: CanaryPrompt, ask: Ask) -> tuple[list[float], Row]:
        """Of the canary's tokens, and the recorded ones of the position behind it."""
        settings = {"temperature": self._temperature, "prompt_logprobs": 0, "logprobs": COMPARED}
        output = await ask(canary.ids, settings)
        table = rows(output.prompt_logprobs)
        try:
            values = [row[token] for row, token in zip(table[1:], canary.ids[1:], strict=True)]
            return values, rows(output.outputs[0].logprobs)[0]
        except (KeyError, IndexError, ValueError) as error:
            raise PolicyMismatch("the engine returns no log-probs of a canary", "Use a vLLM of 0.20 to 0.26") from error

    async def _pairs(self, ids: list[int], recorded: Row, ask: Ask) -> list[tuple[float, float]]:
        """(log-prob at temperature 1, recorded one) of the tokens of one position."""
        token = max(recorded, key=lambda t: recorded[t])
        settings = {"temperature": self._temperature, "prompt_logprobs": COMPARED}
        at_one = rows((await ask([*ids, token], settings)).prompt_logprobs)[-1]
        return [(at_one[t], value) for t, value in recorded.items() if t in at_one and value > float("-inf")]


def rows(table: Any) -> list[Row]:
    """One row a position of what vLLM returns, a flat table or a dictionary a position, by version; empty where the
    position has none (the first of a prompt)."""
    if table is None:
        return []
    if hasattr(table, "start_indices"):
        parts = zip(table.start_indices, table.end_indices, strict=True)
        return [dict(zip(table.token_ids[a:b], table.logprobs[a:b], strict=True)) for a, b in parts]
    return [{} if row is None else {token: entry.logprob for token, entry in row.items()} for row in table]


def chosen(table: Any, token_ids: Sequence[int]) -> list[float]:
    """The log-probs of the tokens that were drawn."""
    if hasattr(table, "start_indices") and len(table.logprobs) == len(token_ids):
        flat: list[float] = list(table.logprobs)  # nothing but the drawn tokens was asked for
        return flat
    return [row[token] for row, token in zip(rows(table), token_ids, strict=True)]
