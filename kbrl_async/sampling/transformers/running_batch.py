"""All sequences of one policy version: a continuous batch over its weights. No threads, no asyncio: join, step, drop.

::

    join ─▶ prefill (twins and cached prompts once) ─▶ rows 0 … n−1 ─ step ─▶ finished rows leave at once

Invariants
* A sequence sees one set of weights from its first to its last token.
* The prefix cache lives and dies with its cohort, so K/V of other weights can't be reused.
* Prefix cache and rows are bounded (I10).
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from kbrl_async.sampling.transformers.draw import draw
from kbrl_async.sampling.transformers.graphs import GraphedSteps
from kbrl_async.sampling.transformers.kv_cache import PromptCapture, SlotCache
from protocols.records import SamplingParams

Prompt = list[tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass
class RunningSequence:
    """One sequence in flight."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    rng: random.Random
    started_at: float = 0.0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    adapter: str = ""
    """The role's adapter that it asks for; the main one where the version has none of that name."""


@dataclasses.dataclass
class CohortStats:
    decode_steps: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_prompts: int = 0


class RunningBatch:
    """A continuous batch on `causal_lm`. `activate` is called before every forward pass (LoRA: choose the adapter)."""

    def __init__(
        self,
        version: int,
        causal_lm: torch.nn.Module,
        eos_ids: frozenset[int],
        stats: CohortStats,
        activate: Callable[[], None] = lambda: None,
        prefix_tokens: int = 16_384,
        prefill_tokens: int = 4096,
        adapter: str = "",
        graphs: bool = True,
    ) -> None:
        """`graphs`: decode by CUDA graphs where the model is on a GPU."""
        self.version, self.adapter = version, adapter
        self.rows: list[RunningSequence] = []
        self._model = causal_lm
        self._device = next(causal_lm.parameters()).device
        self._eos = eos_ids
        self._stats = stats
        self._activate = activate
        self._cache = SlotCache()
        self._graphs = (
            GraphedSteps(self._logits, self._cache, self._device) if graphs and self._device.type == "cuda" else None
        )
        self._prefixes: OrderedDict[tuple[int, ...], tuple[Prompt, torch.Tensor]] = OrderedDict()
        self._prefix_budget, self._prefill_budget = prefix_tokens, prefill_tokens

    @torch.inference_mode()
    def join(self, sequences: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Takes sequences in and draws their first token; returns those that ended with it."""
        if not sequences:
            return []
        prompts = self._prompts(sequences)
        logits = torch.stack([prompts[tuple(s.prompt_ids)][1] for s in sequences])
        for sequence in sequences:
            self._cache.write_prompt(len(self.rows), prompts[tuple(sequence.prompt_ids)][0])
            self.rows.append(sequence)
        self._append(sequences, logits)
        return self._remove_finished()

    @torch.inference_mode()
    def step(self) -> list[RunningSequence]:
        """One token for every row; returns the rows that ended."""
        if not self.rows:
            return []
        # The newest token of a row is not in the cache yet: it goes in at this position, then predicts the next one.
        places = [len(r.prompt_ids) + len(r.token_ids) - 1 for r in self.rows]
        latest = [r.token_ids[-1] for r in self.rows]
        logits_NV = self._graphs.step(latest, places) if self._graphs is not None else None
        if logits_NV is None:
            positions = torch.tensor(places, device=self._device)
            tokens = torch.tensor(latest, device=self._device)[:, None]
            logits_NV = self._logits(tokens, positions[:, None], self._cache.begin_step(positions))
        self._append(self.rows, logits_NV)
        self._stats.decode_steps += 1
        return self._remove_finished()

    @torch.inference_mode()
    def drop(self, request_id: str) -> bool:
        """Frees the row of `request_id`; False where there is none."""
        for index, row in enumerate(self.rows):
            if row.request_id == request_id:
                self._leave(index)
                return True
        return False

    def _append(self, rows: Sequence[RunningSequence], logits_NV: torch.Tensor) -> None:
        temperature_N = torch.tensor([r.params.temperature for r in rows], device=self._device)
        uniform_N = torch.tensor([r.rng.random() for r in rows], device=self._device)
        top_p_N = None
        if any(r.params.top_p < 1.0 for r in rows):
            top_p_N = torch.tensor([r.params.top_p for r in rows], device=self._device)
        token_N, logp_N = draw(logits_NV, temperature_N, uniform_N, top_p_N)
        for row, token, logp in zip(rows, token_N.tolist(), logp_N.tolist(), strict=True):
            row.token_ids.append(token)
            row.logprobs.append(logp)
            if token in self._eos:
                row.finish_reason = "stop"
            elif len(row.token_ids) >= row.params.max_tokens:
                row.finish_reason = "length"
        self._stats.generated_tokens += len(rows)

    def _remove_finished(self) -> list[RunningSequence]:
        finished = [row for row in self.rows if row.finish_reason]
        for index in reversed([i for i, row in enumerate(self.rows) if row.finish_reason]):
            self._leave(index)
        return finished

    def _leave(self, index: int) -> None:
        last = len(self.rows) - 1
        moved = self.rows.pop()
        if index != last:
            self._cache.move(last, index, len(moved.prompt_ids) + len(moved.token_ids))
            self.rows[index] = moved

    def _prompts(self, sequences: Sequence[RunningSequence]) -> dict[tuple[int, ...], tuple[Prompt, torch.Tensor]]:
        """K/V and last logits of every distinct prompt."""
        wanted = {tuple(s.prompt_ids) for s in sequences}
        found = {key: self._prefixes[key] for key in wanted if key in self._prefixes}
        self._stats.cached_prompts += len(sequences) - (len(wanted) - len(found))
        for key in found:
            self._prefixes.move_to_end(key)
        for wave in _waves(sorted(wanted - found.keys(), key=len), self._prefill_budget):
            found.update(self._prefill(wave))
        return found

    def _prefill(self, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[Prompt, torch.Tensor]]:
        longest = len(prompts[-1])
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = torch.tensor(ids)
        # Right-padded and causal: no real token can see the padding, whose K/V are never copied.
        index = torch.arange(longest, device=self._device)
        mask = (index[:, None] >= index[None, :])[None, None]
        capture = PromptCapture()
        hidden_NLH = self._decode(tokens.to(self._device), index[None], mask, capture)
        last = torch.tensor([len(ids) - 1 for ids in prompts], device=self._device)
        logits_NV = self._head(hidden_NLH[torch.arange(len(prompts), device=self._device), last])
        out = {}
        for row, ids in enumerate(prompts):
            out[ids] = (capture.row(row, len(ids)), logits_NV[row])
            self._remember(ids, out[ids])
            self._stats.prefill_tokens += len(ids)
        return out

    def _remember(self, ids: tuple[int, ...], entry: tuple[Prompt, torch.Tensor]) -> None:
        self._prefixes[ids] = entry
        while sum(map(len, self._prefixes)) > self._prefix_budget:
            self._prefixes.popitem(last=False)

    def _decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: SlotCache | PromptCapture
    ) -> torch.Tensor:
        self._activate()
        out = self._model.get_decoder()(  # type: ignore[operator]
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _logits(self, tokens_N1: torch.Tensor, positions_N1: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[N, V] of one step on the cache."""
        return self._head(self._decode(tokens_N1, positions_N1, mask, self._cache)[:, 0])

    def _head(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden_NH)  # type: ignore[operator]
        return logits


def _waves(prompts: list[tuple[int, ...]], budget: int) -> list[list[tuple[int, ...]]]:
    """Splits prompts, sorted by length, into padded batches of at most `budget` tokens."""
    waves: list[list[tuple[int, ...]]] = []
    for ids in prompts:
        if waves and (len(waves[-1]) + 1) * len(ids) <= budget:
            waves[-1].append(ids)
        else:
            waves.append([ids])
    return waves
