"""A causal LM of torch alone, as far as a trainer asks for one: it starts in half the time of one of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

VOCABULARY, HIDDEN, LAYERS = 64, 16, 2


class PlainPolicy(nn.Module):
    """Each position sees its own token and the mean of those before it."""

    config = SimpleNamespace(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        model_type="plain",
    )

    def __init__(self) -> None:
        super().__init__()
        self.decoder = _Decoder()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        """:param input_ids: tokens [B, L]. :returns: `last_hidden_state` [B, L, H]."""
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(last_hidden_state=hidden)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, L, H], before and behind it."""
        count = torch.arange(1, hidden.shape[1] + 1)[:, None]
        before = hidden.cumsum(1) / count
        return hidden + torch.tanh(self.mlp(torch.cat([hidden, before], -1)))
