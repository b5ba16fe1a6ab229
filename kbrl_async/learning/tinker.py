"""The engine of `learner.engine=tinker`: a LoRA adapter at Tinker, trained by our flow of updates.

::

    loss_at=here      samples ─▶ forward ─▶ log π ─▶ `loss`, corrections ─▶ d loss/d log π ─▶ backward ─▶ optim_step
    loss_at=service   samples, A·weight ─▶ forward_backward(importance_sampling | ppo) ─▶ log π: metrics ─▶ optim_step

    save: save_state ─▶ step-000040/tinker.json      publish: save_weights_for_sampler ─▶ policy-v40/tinker.json

Invariants
* No step is taken with gradients of a loss that isn't finite, or of an answer that doesn't fit the batch.
* After a failure nobody knows which of its requests the service has done: the training client is given up, and `resume`
  makes another one, in a session of its own, from the newest state that was saved. So no batch is trained twice.
* Log-probs of the canaries are those of the training client itself, so that a sampler is held to what was trained.
* The service keeps no more states and versions than the run's folder has.
"""

# ruff: noqa: N806 - capital suffixes of names give tensor shapes
from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kbrl_async.durable import file_sha256, numbered
from kbrl_async.errors import CheckpointError, ConfigError, InfraError, NonFiniteLoss, SessionLost
from kbrl_async.learning import checkpoints
from kbrl_async.learning import metrics as m
from kbrl_async.learning.engine import LearnerSetup
from kbrl_async.learning.forward_backward import Scored, Tick, Visit
from kbrl_async.learning.losses import token_weights
from kbrl_async.learning.optimizer import BETAS
from kbrl_async.learning.policies import versions
from kbrl_async.learning.settings import UpdateSettings
from kbrl_async.learning.updates import EncodedGroups, Updates
from kbrl_async.tinker_service import KIND, Account, path_in, write_path
from kbrl_async.weights import FILES
from protocols.records import TrainGroup, TrainSample

EPSILON = 1e-8
"""Of AdamW, as PyTorch has it."""
FAR = 1e-3
"""Above 0 by this much, a log-prob is none."""


def start(setup: LearnerSetup) -> TinkerLearner:
    """The engine of `learner.engine=tinker`.

    :raises MissingTool: the library is not installed.
    :raises ConfigError: no key, a key that is refused, a model that is not served.
    """
    account = Account(setup.base_url, setup.api_key_env, setup.settings.learner.deadline_s)
    try:
        account.positions(setup.model_name)
    except InfraError as error:
        if numbered(setup.checkpoints, checkpoints.PREFIX):
            raise  # it has answered before: this process is started again
        raise ConfigError(error.cause, "Is the service up, and sampler.base_url right?") from error
    base = setup.base()
    return TinkerLearner(setup, account, base)


class Remote:
    """One training client and what it is asked for; it is of no use after a failure."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.types = account.tinker.types
        self._session: Any = None
        self._client: Any = None
        self.tick: Tick = lambda: None

    def begin(self, model_name: str, rank: int, seed: int) -> None:
        """A new adapter."""
        session = self._renewed()
        self._ask(lambda: session.create_lora_training_client(model_name, rank=rank, seed=seed), "a training client")

    def continue_from(self, path: str) -> None:
        """The adapter and optimizer of a saved state."""
        session = self._renewed()
        self._ask(lambda: session.create_training_client_from_state_with_optimizer(path), "a saved state")

    def _ask(self, make: Callable[[], Any], what: str) -> None:
        self._client = self.wait(make(), what)

    def _renewed(self) -> Any:
        self.close()
        self._session = self.account.connect(self.tick)
        return self._session

    def call(self, method: str, what: str, *arguments: Any, **named: Any) -> Any:
        """What a method of the training client gives."""
        if self._client is None:
            raise SessionLost("there is no training client", "Go back to a saved state")
        try:
            return self.wait(getattr(self._client, method)(*arguments, **named), what)
        except BaseException:
            self._client = None  # it takes no more requests, or nobody knows what it has done
            raise

    def wait(self, future: Any, what: str) -> Any:
        return self.account.result(future, what, self.tick)

    def close(self) -> None:
        if self._session is not None:
            self.account.end(self._session)
        self._session = self._client = None

    def datum(self, prompt_ids: Sequence[int], token_ids: Sequence[int], **values: Sequence[float]) -> Any:
        """One sequence. `values` are those of the response's tokens; of the prompt's they are 0."""
        ids, before = [*prompt_ids, *token_ids], max(0, len(prompt_ids) - 1)
        skipped = 0 if prompt_ids else 1  # the first token of all is predicted by nothing
        inputs: dict[str, Any] = {"target_tokens": torch.tensor(ids[1:], dtype=torch.long)}
        for name, given in values.items():
            inputs[name] = torch.tensor([*([0.0] * before), *given[skipped:]], dtype=torch.float32)
        return self.types.Datum(model_input=self.types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    def logprobs(self, output: Any, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
        """Of the response tokens of each sample, from a forward pass.

        :raises InfraError: the answer does not fit.
        """
        found = output.loss_fn_outputs
        tensors = [one["logprobs"].to_torch().float().flatten() for one in found if "logprobs" in one]
        lengths = [len(s.prompt_ids) + len(s.token_ids) - 1 for s in samples]
        if [len(t) for t in tensors] != lengths:
            raise self._odd(f"log-probs of {len(tensors)} sequences that are not those of the batch")
        parts = [t[len(s.prompt_ids) - 1 :] for t, s in zip(tensors, samples, strict=True)]
        if any(not bool(((t <= FAR) & t.isfinite()).all()) for t in parts):
            raise self._odd("log-probs that are none")
        return parts

    def _odd(self, what: str) -> InfraError:
        self._client = None
        return InfraError(f"{self.account.where} gave {what}", "The update is made again from the last checkpoint")


class TinkerPasses:
    """`ForwardBackward` at the service: the loss is computed here, from log-probs, and its gradient sent back."""

    name = "tinker"

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def run(self, samples: Sequence[TrainSample], temperature: float, visit: Visit, tick: Tick) -> None:
        assert temperature == 1.0, "the service computes log-probs at temperature 1"
        remote = self._remote
        remote.tick = tick
        data = [remote.datum(s.prompt_ids, s.token_ids, weights=[1.0] * len(s.token_ids)) for s in samples]
        output = remote.call("forward", "log-probs of a batch", data, "cross_entropy")
        scored = scored_of(remote.logprobs(output, samples), samples)
        loss = visit(scored)
        if loss is None:
            return
        slope_T = torch.autograd.grad(loss, scored.log_pi_T)[0] if loss.requires_grad else None
        if slope_T is None or not bool(slope_T.isfinite().all()):
            raise NonFiniteLoss(
                f"the gradient of loss {float(loss.detach())} is not finite", "Look at the batch's log-probs"
            )
        slopes = torch.split(slope_T, [len(s.token_ids) for s in samples])
        # cross-entropy is Σ −weight · log π, so −d loss/d log π as weights has the loss's own gradient.
        pairs = zip(samples, slopes, strict=True)
        data = [remote.datum(s.prompt_ids, s.token_ids, weights=(-slope).tolist()) for s, slope in pairs]
        remote.call("forward_backward", "gradients of a batch", data, "cross_entropy")


def scored_of(logprobs: Sequence[torch.Tensor], samples: Sequence[TrainSample]) -> Scored:
    """Tokens, their log-probs as leaves. The service tells no entropies; −log π of what was drawn estimates them."""
    log_pi_T = torch.cat(list(logprobs)).detach().requires_grad_(torch.is_grad_enabled())
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    sample_T = torch.arange(len(samples)).repeat_interleave(lengths)
    offset_T = torch.cat([torch.arange(int(n)) for n in lengths])
    inputs = sum(len(s.prompt_ids) + len(s.token_ids) for s in samples)
    return Scored(log_pi_T, -log_pi_T.detach(), sample_T, offset_T, inputs)


class TinkerTrainer(Updates):
    """The flow of updates over a training client."""

    def __init__(self, remote: Remote, settings: UpdateSettings) -> None:
        super().__init__(TinkerPasses(remote), settings, torch.device("cpu"))
        self._remote = remote

    def take_step(self, loss: float, rate: float) -> float | None:
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"loss {loss} is not finite; the step was not taken", "Look at the batch's log-probs")
        beta1, beta2 = BETAS
        adam = self._remote.types.AdamParams(
            learning_rate=rate, beta1=beta1, beta2=beta2, eps=EPSILON, grad_clip_norm=self.settings.learner.grad_clip
        )
        self._remote.call("optim_step", "an optimiser step", adam)
        return None

    def gradients(self, batch: EncodedGroups, chosen: list[int], log: m.StepLog) -> list[torch.Tensor]:
        if self.settings.learner.loss_at == "here":
            return super().gradients(batch, chosen, log)
        samples, learner = [batch.samples[i] for i in chosen], self.settings.learner
        lengths_S = torch.tensor([len(s.token_ids) for s in samples])
        weight_S = token_weights(lengths_S, torch.arange(len(samples)), learner.normalise, self.settings.max_tokens)
        where_S, remote = torch.tensor(chosen), self._remote
        remote.tick = batch.tick
        blank = scored_of([torch.tensor(s.logprobs) for s in samples], samples)
        recorded = batch.recorded.tokens(blank, where_S)
        # Both losses scale with the advantage, so a token's weight in the minibatch goes into it.
        weighted = torch.split(recorded.advantage_T * weight_S[blank.sample_T], lengths_S.tolist())
        data = [
            remote.datum(s.prompt_ids, s.token_ids, logprobs=s.logprobs, advantages=a.tolist())
            for s, a in zip(samples, weighted, strict=True)
        ]
        name, constants = self._at_service()
        output = remote.call("forward_backward", "gradients of a batch", data, name, constants)
        with torch.no_grad():
            scored = scored_of(remote.logprobs(output, samples), samples)
            tokens = batch.recorded.tokens(scored, where_S)
            loss_T, diagnostics = self.objective(tokens)
        log.microbatch(tokens, scored.entropy_T, diagnostics, scored.inputs)
        return [(loss_T * weight_S[scored.sample_T]).sum()]

    def _at_service(self) -> tuple[str, dict[str, float] | None]:
        """The service's name of the loss, and its constants."""
        learner = self.settings.learner
        if self.settings.loss == "importance_sampling":
            return "importance_sampling", None
        return "ppo", {"clip_low_threshold": 1 - learner.clip_low, "clip_high_threshold": 1 + learner.clip_high}

    def sequence_logprobs(self, ids: list[int]) -> list[float]:
        """log p(ids[i] | ids[:i]) for i ≥ 1, by the trained weights."""
        remote = self._remote
        sample = TrainSample("canary", ids[:1], ids[1:], [], 0.0, 0.0, 0)
        data = [remote.datum(ids[:1], ids[1:], weights=[1.0] * (len(ids) - 1))]
        output = remote.call("forward", "log-probs of a canary", data, "cross_entropy")
        values: list[float] = remote.logprobs(output, [sample])[0].tolist()
        return values


class TinkerLearner:
    """`LearnerEngine` over one adapter at the service."""

    is_remote = True
    is_saving = False

    def __init__(self, setup: LearnerSetup, account: Account, base: str) -> None:
        self._setup, self._account, self._base = setup, account, base
        self._canaries = setup.canaries(base)
        self._remote = Remote(account)
        self.trainer = TinkerTrainer(self._remote, setup.settings)

    def step(self, groups: Sequence[TrainGroup], temperature: float, tick: Tick, version: int) -> dict[str, float]:
        self._remote.tick = tick
        return self.trainer.update(groups, temperature, tick, version)

    def usage(self, metrics: dict[str, float]) -> dict[str, float]:
        return {}  # the service does not tell

    def save(self, progress: checkpoints.LearnerProgress, keep: int) -> None:
        name = f"state-{progress.version:06d}"
        saved = self._remote.call("save_state", "a saved state", name, overwrite=True)
        before = _paths(self._setup.checkpoints, checkpoints.PREFIX)
        told = functools.partial(write_path, path=saved.path)
        checkpoints.save_remote(self._setup.checkpoints, self.trainer, progress, told, keep)
        self._forget(before - _paths(self._setup.checkpoints, checkpoints.PREFIX))

    def resume(self) -> checkpoints.Resumed | None:
        """From the newest state that the service still has; a new adapter where nothing was saved yet."""
        found = checkpoints.resume_by(self._setup.checkpoints, self._restored, (CheckpointError, SessionLost))
        if found is not None:
            return found
        self._remote.begin(self._setup.model_name, self._setup.lora_rank, self._setup.settings.seed)
        return None

    def _restored(self, folder: Path) -> checkpoints.LearnerProgress:
        progress = checkpoints.restore_remote(folder, self.trainer)
        self._remote.continue_from(path_in(folder))
        return progress

    def publish(self, version: int, parent: int | None) -> None:
        """Written at once: it is a few bytes."""
        saved = self._remote.call("save_weights_for_sampler", "weights for the sampler", f"v{version:06d}")
        replaced = _paths(self._setup.policies, versions.POLICY_PREFIX, version)
        versions.prepare_as(
            self._setup.policies,
            KIND,
            functools.partial(_write, saved.path),
            self.trainer.sequence_logprobs,
            version,
            parent,
            self.trainer.optimizer_step,
            self._canaries,
            self._base,
        ).write()
        self._forget(replaced - {saved.path})

    def adopt(self, folder: Path) -> bool:
        """A training client can't begin with what was saved for samplers."""
        return False

    def collect(self, keep: int, needed: Iterable[int]) -> None:
        before = _paths(self._setup.policies, versions.POLICY_PREFIX)
        versions.collect_garbage(self._setup.policies, keep, needed)
        self._forget(before - _paths(self._setup.policies, versions.POLICY_PREFIX))

    def _forget(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._account.forget(path)

    def close(self) -> None:
        self._remote.close()


def _paths(directory: Path, prefix: str, only: int | None = None) -> set[str]:
    """The weights at the service that the complete folders of `directory` name."""
    found = set()
    for number, folder in numbered(directory, prefix):
        with contextlib.suppress(CheckpointError):
            found |= {path_in(folder)} if only in (None, number) else set()
    return found


def _write(path: str, folder: Path) -> Mapping[str, str]:
    write_path(folder, path)
    return {"": file_sha256(folder / FILES[KIND])}
