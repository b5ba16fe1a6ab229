"""The KV cache of a continuous batch: one slot a sequence, each with its own length.

Rows 0 … n−1 are in use. A row that leaves is replaced by the last one (one copy), so the batch is always a slice and
never gathered. Buffers double when a longer sequence or a fuller batch comes.

Both classes are what a transformers model calls `past_key_values`: it only uses `update` and `get_seq_length`.
"""

from __future__ import annotations

import torch


class PromptCapture:
    """Catches the keys and values of a prefill: lists by layer of [rows, heads, length, dim]."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx == len(self.keys), "layers come in order"
        self.keys.append(keys)
        self.values.append(values)
        return keys, values

    def row(self, index: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies of one prompt's keys and values, [heads, length, dim] by layer."""
        return [
            (k[index, :, :length].clone(), v[index, :, :length].clone())
            for k, v in zip(self.keys, self.values, strict=True)
        ]


class SlotCache:
    """Keys and values of all rows, [slots, heads, capacity, dim] by layer."""

    def __init__(self, min_rows: int = 8, min_length: int = 128) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._min_rows, self._min_length = min_rows, min_length
        self._rows = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(0, dtype=torch.long)
        self._length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def write_prompt(self, row: int, prompt: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Puts a prompt's keys and values at the start of slot `row`."""
        length = prompt[0][0].shape[1]
        self._reserve(row + 1, length + 1, prompt)
        for layer, (keys, values) in enumerate(prompt):
            self._keys[layer][row, :, :length] = keys
            self._values[layer][row, :, :length] = values

    def move(self, source: int, target: int, length: int) -> None:
        """Copies slot `source` over slot `target`."""
        for buffer in (*self._keys, *self._values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def begin_step(self, positions: torch.Tensor) -> torch.Tensor:
        """Says where row i writes in the coming forward pass; returns the mask [n, 1, 1, longest], True = attend."""
        self._length = int(positions.max()) + 1
        self._reserve(len(positions), self._length)
        self._positions = positions
        self._rows = torch.arange(len(positions), device=positions.device)
        reach = torch.arange(self._length, device=positions.device)
        return (reach[None] <= positions[:, None])[:, None, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        all_keys, all_values = self._keys[layer_idx], self._values[layer_idx]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        n = len(self._rows)
        return all_keys[:n, :, : self._length], all_values[:n, :, : self._length]

    def _reserve(self, rows: int, length: int, like: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        if not self._keys:
            assert like is not None, "the first call brings a prompt"
            shape = (max(rows, self._min_rows), max(length, self._min_length))
            self._keys = [_buffer(k, shape) for k, _ in like]
            self._values = [_buffer(v, shape) for _, v in like]
            return
        have_rows, _, have_length, _ = self._keys[0].shape
        if rows > have_rows or length > have_length:
            grown = (_grown(have_rows, rows), _grown(have_length, length))
            self._keys = [_enlarge(k, grown) for k in self._keys]
            self._values = [_enlarge(v, grown) for v in self._values]


def _grown(have: int, wanted: int) -> int:
    return have if wanted <= have else max(wanted, 2 * have)


def _buffer(like: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    # Zeros, not empty: masked positions still enter a product, and 0 · NaN would poison the row.
    return like.new_zeros(shape[0], like.shape[0], shape[1], like.shape[2])


def _enlarge(old: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    new = old.new_zeros(shape[0], old.shape[1], shape[1], old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
