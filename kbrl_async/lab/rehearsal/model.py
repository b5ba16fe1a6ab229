"""A model folder of random weights at a real shape: config, tokenizer and safetensors, made where there is room.

`python -m kbrl_async.lab.rehearsal.model FOLDER DEVICE`: a process of its own, so that nothing of a GPU stays taken.
The same folder is read by learner, samplers and vLLM, so their canaries agree as with any other model.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kbrl_async.durable import write_atomically
from kbrl_async.errors import UserError
from kbrl_async.shapes import CONFIG, ModelShape, cached_config, parse_shape, read_shape

ENTRIES = 1024
"""Of a tokenizer that is made here: it spells code with about as many tokens as those of public models do."""
LEAST_ENTRIES = 258
"""All bytes and two special tokens."""
PAD, EOS = "<pad>", "<eos>"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")
SHARD = "4GB"
FILLED = "weights.json"
"""Beside weights that are whole, the `config.json` that they were drawn for."""
SEED = 0


def describe(model: str, folder: Path, texts: Iterable[str]) -> None:
    """Writes all but the weights: the config of a folder, of transformers' cache or of a public model, and a tokenizer.

    :raises UserError: nobody knows that model, its config is damaged, or its vocabulary is too small to spell.
    """
    shape, source = read_shape(model), _config_of(model)
    content = json.loads(source.read_text()) if source is not None else config_of(shape)
    folder.mkdir(parents=True, exist_ok=True)
    there = source is not None and any((source.parent / name).is_file() for name in TOKENIZER[:2])
    if there and source is not None:
        for name in TOKENIZER:
            if (source.parent / name).is_file():
                shutil.copy(source.parent / name, folder)
    else:
        content |= _make_tokenizer(folder, texts, int(content["vocab_size"]))
    (folder / CONFIG).write_text(json.dumps(content, indent=1))


def _config_of(model: str) -> Path | None:
    own = Path(model).expanduser() / CONFIG
    return own if own.is_file() else cached_config(model)


def config_of(shape: ModelShape) -> dict[str, Any]:
    """The `config.json` of a shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.as_config())
    named: dict[str, Any] = config.to_dict()
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return {**named, "architectures": [kind.__name__]}


def _make_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int) -> dict[str, int | None]:
    """Byte-level BPE of these texts; what the config says of its special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary < LEAST_ENTRIES:
        raise UserError(f"a vocabulary of {vocabulary} can't spell every text", f"It takes {LEAST_ENTRIES}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, ENTRIES),
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=EOS, padding_side="left")
    tokenizer.save_pretrained(folder)
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}


def fill(folder: Path, device: str) -> None:
    """Random weights beside the config, drawn on `device`: bf16 of a GPU, fp32 of a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    for old in (folder / FILLED, *weights_of(folder)):
        old.unlink(missing_ok=True)
    torch.manual_seed(SEED)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.save_pretrained(folder, max_shard_size=SHARD)
    write_atomically(folder / FILLED, msgspec.json.encode(_drawn_by(folder)).decode())


def is_filled(folder: Path) -> bool:
    """Weights of this very shape are there, whole: a rehearsal before kept them."""
    try:
        return json.loads((folder / FILLED).read_text()) == _drawn_by(folder) and bool(weights_of(folder))
    except (OSError, ValueError):
        return False


def _drawn_by(folder: Path) -> dict[str, Any]:
    """What of the config says which tensors there are."""
    return parse_shape(folder / CONFIG).as_config()


def weights_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors*"))


if __name__ == "__main__":
    fill(Path(sys.argv[1]), sys.argv[2])
    print(msgspec.json.encode([path.name for path in weights_of(Path(sys.argv[1]))]).decode())
