"""Models for `tests/tinker_service.py`: two logits that choose between answers, and a causal LM with LoRA adapters."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

State = Mapping[str, torch.Tensor]


class Wanted(NamedTuple):
    """One answer that is asked for."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    stop: frozenset[int]


class Drawn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    is_ended: bool


class Adapter(Protocol):
    """What is trained."""

    parameters: Sequence[torch.Tensor]

    def logprobs(self, before: list[int], targets: list[int]) -> torch.Tensor:
        """log p(targets[i] | before[: i + 1]) [N], with gradient."""

    def state(self) -> State: ...
    def load(self, state: State) -> None: ...
    def shown(self) -> float: ...


class Model(Protocol):
    """A base model. `None` as a state is the model without an adapter."""

    name: str
    context: int

    def adapter(self, rank: int, seed: int) -> Adapter: ...
    def draw(self, state: State | None, wanted: Sequence[Wanted]) -> list[Drawn]: ...
    def prompt_logprobs(self, state: State | None, ids: list[int]) -> list[float]: ...


# ── two logits ───────────────────────────────────────────────────────────────────────────────────────────────────

BYTES, END = 256, 258
ANSWERS = (256, 257)
"""Tokens that stand for a whole answer."""
VOCABULARY = 259


class Tokens:
    """A tokenizer of bytes and of whole answers."""

    eos_token_id, eos_token, bos_token_id, bos_token, name_or_path = END, "", None, None, "bytes"

    def __init__(self, answers: tuple[str, str]) -> None:
        self.answers = answers

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: object) -> str:
        whole = dict(zip(ANSWERS, self.answers, strict=True))
        return "".join(whole.get(int(i), "\n\nUser:" if int(i) == END else chr(int(i))) for i in np.atleast_1d(ids))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in ids]


class _Logits:
    """After anything it writes one of the two `ANSWERS`, after those it ends."""

    def __init__(self) -> None:
        self.logits = torch.zeros(2, requires_grad=True)
        self.parameters = [self.logits]

    def logprobs(self, before: list[int], targets: list[int]) -> torch.Tensor:
        free = torch.full((VOCABULARY,), -30.0)
        free = torch.cat([free[: ANSWERS[0]], self.logits, free[ANSWERS[1] + 1 :]])
        ending = torch.full((VOCABULARY,), -30.0)
        ending[END] = 0.0
        is_end = (torch.tensor(before) >= ANSWERS[0]).unsqueeze(1)
        logp = torch.log_softmax(torch.where(is_end, ending, free), -1)
        return logp.gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)

    def state(self) -> State:
        return {"logits": self.logits.detach().clone()}

    def load(self, state: State) -> None:
        self.logits.data.copy_(state["logits"])

    def shown(self) -> float:
        """The chance of the second answer."""
        return float(torch.softmax(self.logits.detach(), 0)[1])


class TwoAnswers:
    name, context = "bytes", 1 << 16

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def adapter(self, rank: int, seed: int) -> Adapter:
        return _Logits()

    def draw(self, state: State | None, wanted: Sequence[Wanted]) -> list[Drawn]:
        logp = torch.log_softmax(torch.zeros(2) if state is None else state["logits"], 0).tolist()
        chosen = [int(self._rng.random() < np.exp(logp[1])) for _ in wanted]
        return [Drawn([ANSWERS[one], END], [logp[one], 0.0], True) for one in chosen]

    def prompt_logprobs(self, state: State | None, ids: list[int]) -> list[float]:
        made = _Logits()
        made.load({"logits": torch.zeros(2)} if state is None else state)
        found: list[float] = made.logprobs(ids[:-1], ids[1:]).detach().tolist()
        return found


# ── a causal LM ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Lora:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters = list(self._trained.values())

    def logprobs(self, before: list[int], targets: list[int]) -> torch.Tensor:
        logits = self._model(input_ids=torch.tensor([before]), use_cache=False).logits[0].float()
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)

    def state(self) -> State:
        return {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def load(self, state: State) -> None:
        for name, parameter in self._trained.items():
            parameter.copy_(state[name])

    def shown(self) -> float:
        return float(sum(p.detach().norm() for p in self.parameters))


class CausalLM:
    """The project's own policy, or another in a folder. Answers are drawn in batches of one set of weights."""

    def __init__(self, name: str, base: Any, pad: int = 0, seed: int = 0) -> None:
        self.name, self._base, self._pad = name, base, pad
        self.context = int(base.config.max_position_embeddings)
        self._lock, self._drawing, self._rank = threading.Lock(), None, 0
        self._rng = torch.Generator().manual_seed(seed)

    @classmethod
    def of_folder(cls, name: str, folder: Path | str) -> CausalLM:
        from kbrl_async.learning.policies.models import load_model, load_tokenizer

        return cls(name, load_model(str(folder)), int(load_tokenizer(str(folder)).eos_token_id))

    def adapter(self, rank: int, seed: int) -> _Lora:
        from kbrl_async.learning.policies.models import wrap_lora

        torch.manual_seed(seed)
        return _Lora(wrap_lora(copy.deepcopy(self._base), rank).eval())

    def _weights(self, state: State | None) -> Any:
        """The model with these adapters; call it under the lock."""
        if state is None:
            return self._base
        rank = next(tensor.shape[0] for name, tensor in state.items() if "lora_A" in name)
        if self._drawing is None or self._rank != rank:
            self._drawing, self._rank = self.adapter(rank, 0), rank
        self._drawing.load(state)
        return self._drawing._model

    @torch.inference_mode()
    def draw(self, state: State | None, wanted: Sequence[Wanted]) -> list[Drawn]:
        """All at once, each row until its own end."""
        with self._lock:
            return self._draw(self._weights(state), wanted)

    def _draw(self, model: Any, wanted: Sequence[Wanted]) -> list[Drawn]:
        longest = max(len(one.prompt) for one in wanted)
        pads = [longest - len(one.prompt) for one in wanted]
        ids = torch.tensor([[self._pad] * p + one.prompt for p, one in zip(pads, wanted, strict=True)])
        mask = torch.tensor([[0] * p + [1] * len(one.prompt) for p, one in zip(pads, wanted, strict=True)])
        temperature = torch.tensor([max(one.temperature, 1e-6) for one in wanted]).unsqueeze(1)
        made: list[tuple[list[int], list[float]]] = [([], []) for _ in wanted]
        open_ = [True] * len(wanted)
        cache: Any = None
        while any(open_):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            out = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            logp = torch.log_softmax(out.logits[:, -1].float() / temperature, -1)
            greedy = temperature.squeeze(1) <= 1e-6
            drawn = torch.multinomial(logp.exp(), 1, generator=self._rng).squeeze(1)
            drawn = torch.where(greedy, logp.argmax(-1), drawn)
            values = logp.gather(1, drawn.unsqueeze(1)).squeeze(1).tolist()
            for row, (token, value) in enumerate(zip(drawn.tolist(), values, strict=True)):
                if open_[row]:
                    made[row][0].append(token)
                    made[row][1].append(value)
                    open_[row] = token not in wanted[row].stop and len(made[row][0]) < wanted[row].max_tokens
            ids = drawn.unsqueeze(1)
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        ended = [tokens[-1] in one.stop for (tokens, _), one in zip(made, wanted, strict=True)]
        return [Drawn(tokens, logprobs, end) for (tokens, logprobs), end in zip(made, ended, strict=True)]

    @torch.inference_mode()
    def prompt_logprobs(self, state: State | None, ids: list[int]) -> list[float]:
        with self._lock:
            logits = self._weights(state)(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].float()
        found: list[float] = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0].tolist()
        return found
