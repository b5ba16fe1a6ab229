"""The shape of a decoder-only language model, read from its `config.json`: how many weights, and bytes a cached token.

Nothing is loaded or downloaded: a folder's file, the file in transformers' cache, or a small table of public models by
name. Families: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE; another one is read as a plain Llama, which is within a few
per cent for models of gated blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.errors import ConfigError, UserError

CONFIG = "config.json"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are in elements."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """The head is the embedding."""
    positions: int
    experts: int = 0
    """Of a layer whose block is a mixture; 0: one plain block, `intermediate` wide."""
    active_experts: int = 0

    @property
    def query(self) -> int:
        """Heads times their dimension."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """The same of keys; values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def width(self) -> int:
        """Of the gated block that one token passes."""
        return self.intermediate * max(1, self.active_experts)

    @property
    def has_query_norm(self) -> bool:
        """Queries and keys are normalised by heads, as Qwen3 does."""
        return self.family.startswith("qwen3")

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head(self) -> int:
        """Of its own; 0 where it is tied."""
        return 0 if self.tied else self.embedding

    @property
    def attention(self) -> int:
        """Matrices of one layer's attention."""
        return 2 * self.hidden * (self.query + self.key_value)

    @property
    def block(self) -> int:
        """Matrices of one layer's gated block, of all experts."""
        return 3 * self.hidden * self.intermediate * max(1, self.experts) + self.experts * self.hidden

    @property
    def linear(self) -> int:
        """Matrices of all layers."""
        return self.layers * (self.attention + self.block)

    @property
    def layer(self) -> int:
        """One layer with its biases and norms."""
        biases = self.query + 2 * self.key_value if self.family.startswith("qwen2") else 0
        return self.attention + self.block + biases + 2 * self.hidden + 2 * self.head_dim * self.has_query_norm

    @property
    def parameters(self) -> int:
        return self.embedding + self.head + self.layers * self.layer + self.hidden

    def adapter(self, rank: int) -> int:
        """LoRA on every linear layer: A and B of rank × (inputs + outputs). Experts are stacked matrices, not linear
        layers, and have none (Hu et al. 2021, "LoRA")."""
        sides = 2 * (self.hidden + self.query) + 2 * (self.hidden + self.key_value)
        if not self.experts:
            sides += 3 * (self.hidden + self.intermediate)
        return self.layers * rank * sides

    def kv_bytes(self, item: int) -> int:
        """Keys and values of one token in all layers, `item` bytes a number."""
        return 2 * self.layers * self.key_value * item

    def as_config(self) -> dict[str, Any]:
        """Its sizes by their names in `config.json`, which `shape_of` reads."""
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.active_experts,
            "moe_intermediate_size": self.intermediate,
        }
        return {
            "model_type": self.family,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
            **(experts if self.experts else {}),
        }


def _public(
    family: str, *values: int, tied: bool = False, depth: int = 0, experts: int = 0, active: int = 0
) -> ModelShape:
    layers, hidden, intermediate, heads, kv_heads, vocabulary, positions = values
    return ModelShape(
        family=family, layers=layers, hidden=hidden, intermediate=intermediate, heads=heads, kv_heads=kv_heads,
        head_dim=depth or hidden // heads, vocabulary=vocabulary, tied=tied, positions=positions, experts=experts,
        active_experts=active,
    )  # fmt: skip


KNOWN: dict[str, ModelShape] = {
    "Qwen2.5-0.5B": _public("qwen2", 24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "Qwen2.5-1.5B": _public("qwen2", 28, 1536, 8960, 12, 2, 151936, 131072, tied=True),
    "Qwen2.5-3B": _public("qwen2", 36, 2048, 11008, 16, 2, 151936, 32768, tied=True),
    "Qwen2.5-7B": _public("qwen2", 28, 3584, 18944, 28, 4, 152064, 131072),
    "Qwen2.5-14B": _public("qwen2", 48, 5120, 13824, 40, 8, 152064, 131072),
    "Qwen2.5-32B": _public("qwen2", 64, 5120, 27648, 40, 8, 152064, 131072),
    "Qwen3-0.6B": _public("qwen3", 28, 1024, 3072, 16, 8, 151936, 40960, tied=True, depth=128),
    "Qwen3-1.7B": _public("qwen3", 28, 2048, 6144, 16, 8, 151936, 40960, tied=True, depth=128),
    "Qwen3-4B": _public("qwen3", 36, 2560, 9728, 32, 8, 151936, 40960, tied=True, depth=128),
    "Qwen3-8B": _public("qwen3", 36, 4096, 12288, 32, 8, 151936, 40960, depth=128),
    "Qwen3-14B": _public("qwen3", 40, 5120, 17408, 40, 8, 151936, 40960, depth=128),
    "Qwen3-32B": _public("qwen3", 64, 5120, 25600, 64, 8, 151936, 40960, depth=128),
    "Qwen3-30B-A3B": _public("qwen3_moe", 48, 2048, 768, 32, 4, 151936, 40960, depth=128, experts=128, active=8),
    "Llama-3.1-8B": _public("llama", 32, 4096, 14336, 32, 8, 128256, 131072),
    "Mistral-7B": _public("mistral", 32, 4096, 14336, 32, 8, 32768, 32768),
}
"""By name, from the `config.json` that their authors publish; variants (Instruct, Coder …) have the same shape."""


def read_shape(model: str) -> ModelShape:
    """Of a folder with a `config.json`, of a name in the cache of transformers, or of a public model.

    :raises UserError: nobody here knows its shape. ConfigError: its file is damaged or of another kind.
    """
    folder = Path(model).expanduser()
    found = folder / CONFIG if (folder / CONFIG).is_file() else cached_config(model)
    if found is not None:
        return parse_shape(found)
    if (shape := known_shape(model)) is not None:
        return shape
    cure = f"Give a folder that holds its {CONFIG}, or one of {', '.join(KNOWN)}"
    raise UserError(f"the shape of {model} is not known here", cure)


def known_shape(model: str) -> ModelShape | None:
    """Of the public model whose name's parts all stand in this name, such as Qwen/Qwen2.5-Coder-7B-Instruct."""
    parts = model.rstrip("/").rsplit("/", 1)[-1].lower().split("-")
    fitting = [name for name in KNOWN if set(name.lower().split("-")) <= set(parts)]
    return KNOWN[max(fitting, key=len)] if fitting else None


def cached_config(model: str) -> Path | None:
    """The file of a hub name in the cache of transformers, where it was loaded once; the network is not asked."""
    home = (
        os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    )
    found = sorted(Path(home, "models--" + model.replace("/", "--"), "snapshots").glob(f"*/{CONFIG}"))
    return found[-1] if found else None


def parse_shape(path: Path) -> ModelShape:
    """
    :raises ConfigError: no JSON, or it names no sizes of a language model.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}", "Restore it from a copy") from None
    return shape_of(content, str(path))


def shape_of(config: Mapping[str, Any], origin: str = CONFIG) -> ModelShape:
    """
    :raises ConfigError: a size is missing or is no positive number.
    """
    content: Mapping[str, Any] = config.get("text_config") or config
    for name in NEEDED:
        if not isinstance(content.get(name), int) or content[name] < 1:
            raise ConfigError(f"{origin}: {name} is {content.get(name)!r}", "Give the config.json of a language model")
    hidden, heads = content["hidden_size"], content["num_attention_heads"]
    experts = content.get("num_experts") or content.get("num_local_experts") or 0
    width = content.get("moe_intermediate_size") if experts else None
    return ModelShape(
        family=str(content.get("model_type", "llama")),
        layers=content["num_hidden_layers"],
        hidden=hidden,
        intermediate=width or content.get("intermediate_size") or 4 * hidden,
        heads=heads,
        kv_heads=content.get("num_key_value_heads") or heads,
        head_dim=content.get("head_dim") or hidden // heads,
        vocabulary=content["vocab_size"],
        tied=bool(content.get("tie_word_embeddings", False)),
        positions=content.get("max_position_embeddings") or 0,
        experts=experts,
        active_experts=content.get("num_experts_per_tok") or 0,
    )
