"""The RL trainer of a model in this process: weights, optimizer and ranks under the flow of `updates`.

Invariants
* The host waits for a GPU once an optimiser step, to see that it is finite, and never between microbatches.
* Rank 0 calls, and every method that takes all ranks tells the others first; they call the same one in `follow`.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from kbrl_async.durable import disk_full, file_sha256, wants_room
from kbrl_async.errors import CheckpointError, ConfigError, InfraError, NonFiniteLoss
from kbrl_async.learning import metrics as m
from kbrl_async.learning import shards, training_state
from kbrl_async.learning.distributed import (
    Gather,
    Hold,
    Leave,
    LoadShares,
    Meet,
    Order,
    Probe,
    ProcessGroup,
    Save,
    Train,
)
from kbrl_async.learning.forward_backward import Tick, computes_bf16, forward_backward
from kbrl_async.learning.logprobs import rounded_weights, sequence_logprobs
from kbrl_async.learning.optimizer import guarded_step, make_adamw
from kbrl_async.learning.policies.models import DTYPES, causal_lm
from kbrl_async.learning.policies.snapshot import Snapshots
from kbrl_async.learning.settings import UpdateSettings
from kbrl_async.learning.sharded import ShardedModel
from kbrl_async.learning.updates import Updates
from kbrl_async.weights.groups import Meeting
from kbrl_async.weights.parts import PartSender
from protocols.records import TrainGroup, TrainSample


class Trainer(Updates):
    """Owns optimizer, step counter and data order of one policy.

    trainer = Trainer(model, config, "cpu")
    metrics = trainer.step(groups, temperature=1.0)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: UpdateSettings,
        device: str | torch.device = "cpu",
        *,
        reference: torch.nn.Module | None = None,
        process_group: ProcessGroup | None = None,
        sharded: ShardedModel | None = None,
        sharded_reference: ShardedModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`reference`: of a KL penalty, where no LoRA base serves. `sharded`: `model`, where ranks share it out."""
        learner, place = settings.learner, torch.device(device)
        self.model, self.process_group, self._sharded = model, process_group, sharded
        self._saving: Future[Any] | None = None
        self._part: PartSender | None = None
        self._has_met = False
        self._rows = Snapshots()
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """All that is trained, by name: switching between adapters hides the others' from `requires_grad`."""
        self.optimizer = make_adamw(
            self.parameters.values(), settings.learning_rate, eight_bit=learner.optimizer == "adamw_8bit"
        )
        super().__init__(forward_backward(model, learner, place, self._sharded), settings, place, clock)
        if self.objective.needs_reference and reference is None and not hasattr(model, "disable_adapter"):
            raise ConfigError("a KL penalty needs a reference policy", "Give one, or train a LoRA adapter")
        self._reference = None if reference is None else forward_backward(reference, learner, place, sharded_reference)

    @property
    def bf16(self) -> bool:
        """Forward and backward pass compute in bf16."""
        return computes_bf16(self.settings.learner, self.device)

    @property
    def is_sharded(self) -> bool:
        """Each rank holds a share of the weights, and no rank all."""
        return self._sharded is not None

    def step(
        self,
        groups: Sequence[TrainGroup],
        temperature: float,
        tick: Tick = lambda: None,
        version: int | None = None,
    ) -> dict[str, float]:
        """`update` on all ranks of the process group."""
        if self.process_group is not None:
            has_moments = bool(self.optimizer.state)
            data_order = self.order.get_state().numpy().tobytes()
            self._tell(Train(list(groups), temperature, version, self.optimizer_step, data_order, has_moments))
            if not self.is_sharded:
                self.process_group.share_state(self, has_moments)
        return self.update(groups, temperature, tick, version)

    def follow(self) -> None:
        """Other ranks: does with rank 0 what it does, until it says that there is no more."""
        assert self.process_group is not None
        for order in self.process_group.orders():
            try:
                self._obey(order)
            except (NonFiniteLoss, CheckpointError):
                continue  # rank 0 has seen it too, and says what comes now
        self._settle_quietly()

    def _obey(self, order: Order) -> None:
        match order:
            case Train():
                self._join_update(order)
            case Probe():
                self.sequence_logprobs(order.ids)
            case Save():
                self._settle_quietly()
                self.save(Path(order.folder))
            case LoadShares():
                self._settle_quietly()
                self.load(Path(order.folder), order.files)
            case Meet():
                self.meet(order.meeting, order.dtype, order.patience_s, two_copies=order.two_copies)
            case Hold():
                self._hold(order.version, order.keep)
            case Leave():
                self.leave()
            case Gather():
                collections.deque(self.gathered_weights() or (), maxlen=0)

    def _join_update(self, order: Train) -> None:
        assert self.process_group is not None
        if not self.is_sharded:
            self.process_group.share_state(self, order.has_moments)
        self.optimizer_step = order.optimizer_step
        self.order.set_state(torch.frombuffer(bytearray(order.data_order), dtype=torch.uint8))
        self.update(order.groups, order.temperature, version=order.version)

    def _tell(self, order: Order) -> None:
        if self.process_group is not None and self.process_group.rank == 0:
            self.process_group.tell(order)

    def close(self) -> None:
        """Waits for what is being written; rank 0 lets the others go."""
        self.settle()
        if self.process_group is not None:
            self.process_group.close()

    # ── what checkpoints and versions are made of, where no rank has all ─────────────────────────────────────────────

    def save(self, folder: Path, commit: Callable[[], None] = lambda: None) -> None:
        """Has every rank write its share into `folder`, and `commit` called when all have. Returns before that."""
        assert self.process_group is not None
        self._tell(Save(str(folder)))
        state = training_state.tensors(self)
        if self.process_group.rank == 0:
            state |= training_state.random_state(self)
        group = self.process_group
        self._saving = shards.write(state, folder, group.background, group.size, commit)

    @property
    def is_saving(self) -> bool:
        """Whether what `save` began is not done yet."""
        return self._saving is not None and not self._saving.done()

    def settle(self) -> None:
        """Returns when what `save` began is done.

        :raises DiskFull: there was no room for it.
        :raises InfraError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result()
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            if any(wants_room(cause) for cause in causes):
                raise disk_full(Path("a checkpoint")) from error
            raise InfraError(f"a checkpoint could not be written: {causes[0]!r}", "Look at its disk") from error

    def _settle_quietly(self) -> None:
        with contextlib.suppress(OSError, InfraError):  # rank 0 says so
            self.settle()

    def load(self, folder: Path, files: dict[str, str]) -> None:
        """Has every rank read its share of a folder that any number of ranks wrote. `files`: SHA-256 by name.

        :raises CheckpointError: it is damaged, or of another model; nothing has changed.
        """
        group = self.process_group
        assert group is not None
        self._tell(LoadShares(str(folder), files))
        damaged = [
            name for name in sorted(files)[group.rank :: group.size] if not _is_whole(folder / name, files[name])
        ]
        if not group.all_agree(not damaged):
            what = folder / damaged[0] if damaged else folder
            raise CheckpointError(f"{what} is truncated or changed (SHA-256 differs)", "Delete this folder")
        stored = shards.shapes(folder)
        training_state.check(self, {name: size for name, (size, _) in stored.items()}, folder)
        random = {name: torch.empty(*stored[name][0], dtype=torch.uint8) for name in stored if name.startswith("rng.")}
        shards.read(folder, {**training_state.to_read_into(self, stored), **random}, group.background)
        training_state.set_random_state(self, random)

    def gathered_weights(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """All trained weights by name, one whole tensor after the other, to be gone through at once: other ranks do.
        None where the model has them."""
        if self._sharded is None:
            return None
        self._tell(Gather())
        return self._sharded.gathered()

    def meet(self, meeting: Meeting, dtype: str, patience_s: float, *, two_copies: bool = False) -> bool:
        """Has every rank but this one send its rows of versions to samplers itself, rounded to a key of `DTYPES`. False
        where one of them can't reach the meeting: then none does."""
        group, can = self.process_group, True
        assert group is not None
        self._tell(Meet(meeting, dtype, patience_s, two_copies))
        if group.rank:
            self._rows = Snapshots(DTYPES[dtype], ahead=two_copies)
            try:
                self._part = PartSender(meeting, group.rank, group.device, patience_s)
            except InfraError:
                can = False
        self._has_met = group.all_agree(can)
        if not self._has_met:
            self._close_part()
        return self._has_met

    def leave(self) -> None:
        """Has no rank send rows any more, and returns when none does; nothing where they have not met."""
        if self._has_met:
            self._has_met = False
            assert self.process_group is not None
            self._tell(Leave())
            self._close_part()
            self.process_group.all_agree(True)

    def _close_part(self) -> None:
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def held(self, version: int, keep: Collection[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's rows of all trained weights, as every other rank's are from now on that version's (`meet`). Of
        the versions before it, those to `keep` are still written."""
        assert self._sharded is not None
        self._tell(Hold(version, list(keep)))
        return self._sharded.rows()

    def _hold(self, version: int, keep: Collection[int]) -> None:
        assert self._sharded is not None
        if self._part is not None:
            self._part.idle(keep)
            self._part.hold(version, self._rows.of(version, self._sharded.rows(), keep))

    @property
    def whole_shapes(self) -> dict[str, list[int]]:
        """Of all trained weights, whoever holds which rows."""
        return {name: list(parameter.shape) for name, parameter in self.parameters.items()}

    def take_step(self, loss: float, rate: float) -> float:
        return guarded_step(self.optimizer, loss, self.settings.learner.grad_clip, rate)

    def together(self, loss: torch.Tensor, log: m.StepLog) -> torch.Tensor:
        if self.process_group is None:
            return loss
        total = self.process_group.total(loss.to(self.device))
        if not self.is_sharded:  # shares of gradients are sums already
            self.process_group.sum_gradients(self.parameters.values())
        log.merge(self.process_group)
        return total

    def share(self, samples: list[TrainSample], chosen: Sequence[int]) -> list[int]:
        if self.process_group is None:
            return super().share(samples, chosen)
        lengths = [len(samples[i].prompt_ids) + len(samples[i].token_ids) for i in chosen]
        return self.process_group.part(lengths, self.settings.learner.context_parallel)

    def gathered(self, value_T: torch.Tensor) -> torch.Tensor:  # noqa: N803 - its shape
        return value_T if self.process_group is None else self.process_group.total(value_T)

    def reference_logprobs(self, samples: list[TrainSample], temperature: float, tick: Tick) -> torch.Tensor:
        """Of its own module, or the base under the LoRA adapter."""
        if self._reference is not None:
            return self.batch_logprobs(self._reference, samples, temperature, tick)
        with self.model.disable_adapter():  # type: ignore[operator]
            return self.batch_logprobs(self.passes, samples, temperature, tick)

    def sequence_logprobs(self, ids: list[int], rounded_to: torch.dtype = torch.float32) -> list[float]:
        """`logprobs.sequence_logprobs` of the policy, or of what is published of it; ranks that share the weights out
        round them when they gather them."""
        if self._sharded is None:
            with rounded_weights(causal_lm(self.model), rounded_to):
                return sequence_logprobs(causal_lm(self.model), ids)
        self._tell(Probe(ids))
        return self._sharded(lambda lm: sequence_logprobs(lm, ids))


def _is_whole(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) == sha256
