"""A published policy version → its running batches: weights proven by digest and canary before a token is drawn.

::

    manifest + folder ─ maker (any thread) ─▶ make() ─ engine's thread, between steps ─▶ [RunningBatch, one an adapter]

Invariants
* A version is served only after its weights' SHA-256 and its canary agree with the manifest (I8).
* Full versions are copies of the base; LoRA versions share one copy, so they come and go on the engine's thread only.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from kbrl_async.errors import CheckpointError
from kbrl_async.sampling.canary import check_canary
from kbrl_async.sampling.transformers.running_batch import RunningBatch
from kbrl_async.weights import FILES, prove, tensors
from protocols.records import PolicyVersion

MakeBatch = Callable[[int, torch.nn.Module, Callable[[], None], str], RunningBatch]
"""From version, model, what activates its adapter, and the adapter's name."""


class VersionLoader:
    """Loads versions over one base, whose weights are never changed."""

    def __init__(self, base: torch.nn.Module, make_batch: MakeBatch) -> None:
        self._base, self._make_batch = base, make_batch
        self._peft: Any = None
        self.canary_error = 0.0
        """Largest difference of the newest version's canary."""

    def maker(self, manifest: PolicyVersion, folder: Path) -> Callable[[], list[RunningBatch]]:
        """What can be done off the engine's thread is done here; the rest is the answer."""
        return (self._full if manifest.kind == "full" else self._lora)(manifest, folder)

    def retire(self, batch: RunningBatch) -> None:
        """Free an adapter that nothing decodes with any more."""
        if self._peft is not None:
            self._peft.delete_adapter(adapter_name(batch.version, batch.adapter))

    def _full(self, manifest: PolicyVersion, folder: Path) -> Callable[[], list[RunningBatch]]:
        weights = tensors.read(folder / FILES["full"], manifest.weights_sha256)
        return self.of_tensors(manifest, weights.items())

    def of_tensors(
        self, manifest: PolicyVersion, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Callable[[], list[RunningBatch]]:
        """A copy of the base with these weights, proven by its canary. A tensor is copied before the next is asked for.
        Sequences in flight go on meanwhile, by the version that they began with."""
        model = _with_weights(self._base, named, f"policy v{manifest.version}").eval()
        self.canary_error = check_canary(manifest, model)
        return lambda: [self._make_batch(manifest.version, model, lambda: None, "")]

    def _lora(self, manifest: PolicyVersion, folder: Path) -> Callable[[], list[RunningBatch]]:
        """Adapters share the base, so they are added on the engine's thread, between two steps."""
        prove(folder, manifest)
        return lambda: [self._adapter(manifest, folder, adapter) for adapter in ("", *manifest.adapters)]

    def _adapter(self, manifest: PolicyVersion, folder: Path, adapter: str) -> RunningBatch:
        from peft import PeftModel

        name, place = adapter_name(manifest.version, adapter), str(folder / adapter)
        with warnings.catch_warnings():
            # peft asks transformers for a property by its deprecated name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
            if self._peft is None:
                self._peft = PeftModel.from_pretrained(copy.deepcopy(self._base), place, adapter_name=name)
            else:
                self._peft.load_adapter(place, adapter_name=name)
        self._activate(name)
        inner = self._peft.get_base_model().eval()
        self.canary_error = check_canary(manifest, inner, adapter=adapter)
        return self._make_batch(manifest.version, inner, lambda: self._activate(name), adapter)

    def _activate(self, name: str) -> None:
        if self._peft.active_adapter != name:
            self._peft.set_adapter(name)


def adapter_name(version: int, adapter: str) -> str:
    """`policy-v17`, or `policy-v17-verifier`: the version is in the name, so that no stale one can be served (I8)."""
    return f"policy-v{version}-{adapter}" if adapter else f"policy-v{version}"


@torch.no_grad()
def _with_weights(base: torch.nn.Module, named: Iterable[tuple[str, torch.Tensor]], what: str) -> torch.nn.Module:
    """A model beside `base`, with weights of its own in the same number format and place."""
    held = base.state_dict(keep_vars=True)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if name not in held or held[name].shape != tensor.shape:
            raise CheckpointError(f"{what} is of another model ({name})", "Use its base model")
        made[name] = torch.empty_like(held[name]).copy_(tensor)
    tied = {id(held[name]): tensor for name, tensor in made.items()}  # aliases travel once
    missing = [name for name, tensor in held.items() if id(tensor) not in tied]
    if missing:
        raise CheckpointError(f"{what} is of another model ({missing[0]})", "Use its base model")
    # Without a copy of the base's weights, which would be one more set of them for a moment.
    model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    model.load_state_dict({name: tied[id(tensor)] for name, tensor in held.items()}, assign=True)
    return model
