"""How vLLM is asked for its attestation (I8), and at which temperature it draws.

::

    ids ─▶ one token at the training temperature, log-probs of the prompt ─▶ `proof.Prover`
    ids + that token ─▶ log-probs of the prompt ───────────────────────────▶ at which temperature was it drawn?
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kbrl_async.errors import PolicyMismatch
from kbrl_async.sampling import proof
from kbrl_async.sampling.canary import NOISE, check_temperature, engine_tolerance
from protocols.records import PolicyVersion

Ask = Callable[[list[int], dict[str, Any]], Awaitable[Any]]
"""From prompt ids and settings of `SamplingParams` to vLLM's last output."""
Row = dict[int, float]
"""Log-prob by token id at one position."""
COMPARED = 8
"""Tokens of one position by which the temperature is measured."""


class VLLMProver:
    """`proof.Prover` over what vLLM returns; the temperature is part of each proof."""

    def __init__(self, dtype: str, temperature: float, depth: int = 0) -> None:
        self._prover, self._temperature = proof.Prover(dtype, depth), temperature
        self._noise = max(NOISE, engine_tolerance(dtype, depth))

    @property
    def error(self) -> float:
        """Root mean square of the newest proof."""
        return self._prover.error

    async def meet_base(self, manifest: PolicyVersion, ask_base: Ask) -> None:
        await self._prover.meet_base(manifest, self._scores(ask_base))

    async def prove(self, manifest: PolicyVersion, role: str, ask: Ask, ask_base: Ask | None) -> None:
        """PolicyMismatch unless what `ask` reaches is that version. `ask_base` reaches the base, where it still can."""
        pairs: list[list[tuple[float, float]]] = []
        base = None if ask_base is None else self._scores(ask_base)
        await self._prover.prove(manifest, role, self._scores(ask, pairs), base)
        check_temperature(pairs, self._temperature, self._noise)

    def _scores(self, ask: Ask, pairs: list[list[tuple[float, float]]] | None = None) -> proof.Score:
        """What `ask` gives for a prompt; `pairs` gets what the temperature shows by."""

        async def score(ids: list[int]) -> list[float]:
            logprobs, row = await self._logprobs(ids, ask)
            if pairs is not None:
                pairs.append(await self._pairs(ids, row, ask))
            return logprobs

        return score

    async def _logprobs(self, ids: list[int], ask: Ask) -> tuple[list[float], Row]:
        """Of a canary's tokens, and the recorded ones of the position behind it."""
        settings = {"temperature": self._temperature, "prompt_logprobs": 0, "logprobs": COMPARED}
        output = await ask(ids, settings)
        table = rows(output.prompt_logprobs)
        try:
            values = [row[token] for row, token in zip(table[1:], ids[1:], strict=True)]
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
