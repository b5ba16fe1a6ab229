"""All sequences of one policy version: a continuous batch over its weights. No threads, no asyncio: join, step, drop.

::

    join ─▶ prefill (equal and cached prompts once) ─▶ rows 0 … n−1 ─ step ─▶ finished rows leave at once

Invariants
* A sequence sees one set of weights from its first to its last token.
* The prefix cache lives and dies with its batch, so K/V of other weights can't be reused.
* Prefix cache and rows are bounded (I10).
* The log-prob of what was drawn is `log_softmax(float32(logits) / temperature)`, exactly what the learner computes.

Suffixes: N rows, V vocabulary.
"""

# ruff: noqa: N803, N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from kbrl_async.sampling.forced import forced_ids
from kbrl_async.sampling.transformers.kv_cache import PromptCapture, SlotCache
from protocols.records import SamplingParams

Prompt = list[tuple[torch.Tensor, torch.Tensor]]
PREFIX_TOKENS = 16_384
"""Prompt tokens kept in a version's prefix cache."""
PREFILL_TOKENS = 4096
"""Most tokens, padding included, of one prefill."""


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
class BatchStats:
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
        stats: BatchStats,
        activate: Callable[[], None] = lambda: None,
        adapter: str = "",
        prefix_tokens: int = PREFIX_TOKENS,
        prefill_tokens: int = PREFILL_TOKENS,
    ) -> None:
        self.version, self.adapter = version, adapter
        self.rows: list[RunningSequence] = []
        self._model = causal_lm
        self._device = next(causal_lm.parameters()).device
        self._eos = eos_ids
        self._stats = stats
        self._activate = activate
        self._cache = SlotCache()
        self.prefixes: OrderedDict[tuple[int, ...], tuple[Prompt, torch.Tensor]] = OrderedDict()
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
        position_N = torch.tensor(places, device=self._device)
        token_N1 = torch.tensor([r.token_ids[-1] for r in self.rows], device=self._device)[:, None]
        mask = self._cache.begin_step(position_N)
        hidden_NLH = self._decode(token_N1, position_N[:, None], mask, self._cache)
        self._append(self.rows, self._head(hidden_NLH[:, 0]))
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
        forced_N = torch.tensor([_given(row) for row in rows], device=self._device)
        token_N, logp_N = draw(logits_NV, temperature_N, uniform_N, top_p_N, forced_N)
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
        found = {key: self.prefixes[key] for key in wanted if key in self.prefixes}
        self._stats.cached_prompts += len(sequences) - (len(wanted) - len(found))
        for key in found:
            self.prefixes.move_to_end(key)
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
        self.prefixes[ids] = entry
        while sum(map(len, self.prefixes)) > self._prefix_budget:
            self.prefixes.popitem(last=False)

    def _decode(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: SlotCache | PromptCapture
    ) -> torch.Tensor:
        self._activate()
        out = self._model.get_decoder()(  # type: ignore[operator]
            input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

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


def _given(row: RunningSequence) -> int:
    """The next token of an answer that is given; −1 where one is drawn."""
    forced, place = forced_ids(row.params), len(row.token_ids)
    return forced[place] if place < len(forced) else -1


def draw(
    logits_NV: torch.Tensor,
    temperature_N: torch.Tensor,
    uniform_N: torch.Tensor,
    top_p_N: torch.Tensor | None = None,
    forced_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-prob. `uniform_N` in [0, 1) is the randomness; temperature 0 is greedy. A token of
    `forced_N` that is not negative is taken instead.

    A greedy row's log-prob is that at temperature 1. With `top_p_N` the log-prob is under the truncated distribution.
    """
    greedy_N = temperature_N <= 0
    scale_N = torch.where(greedy_N, torch.ones_like(temperature_N), temperature_N)
    logp_NV = torch.log_softmax(logits_NV.float() / scale_N[:, None], dim=-1)
    if top_p_N is not None:
        logp_NV = _nucleus(logp_NV, top_p_N)
    cdf_NV = logp_NV.exp().cumsum(-1)
    # Scaled by the rounded total, so that u → 1 can't fall behind the last token; right=True never picks probability 0.
    point_N1 = (uniform_N * cdf_NV[:, -1])[:, None]
    drawn_N = torch.searchsorted(cdf_NV, point_N1, right=True).squeeze(-1).clamp(max=logits_NV.shape[-1] - 1)
    token_N = torch.where(greedy_N, logp_NV.argmax(-1), drawn_N)
    if forced_N is not None:
        token_N = torch.where(forced_N < 0, token_N, forced_N)
    return token_N, logp_NV.gather(-1, token_N[:, None]).squeeze(-1)


def _nucleus(logp_NV: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """Renormalised log-probs of the smallest set of tokens whose mass reaches top_p (Holtzman et al. 2019)."""
    ordered_NV, index_NV = logp_NV.sort(dim=-1, descending=True)
    before_NV = ordered_NV.exp().cumsum(-1) - ordered_NV.exp()
    kept_NV = ordered_NV.masked_fill(before_NV >= top_p_N[:, None], float("-inf"))
    return torch.log_softmax(torch.empty_like(logp_NV).scatter_(-1, index_NV, kept_NV), dim=-1)
