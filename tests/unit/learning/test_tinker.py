"""`learner.engine=tinker` against a service that trains a real small model: what it learns, and what survives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import pytest
import torch

from kbrl_async.errors import CheckpointError, ConfigError, InfraError, KbrlError
from kbrl_async.learning.engine import LearnerSetup
from kbrl_async.learning.policies import versions
from kbrl_async.learning.policies.models import wrap_lora
from kbrl_async.learning.tinker import Remote, TinkerLearner, start
from kbrl_async.learning.trainer import Trainer
from kbrl_async.runs.config import Config
from kbrl_async.tinker_service import Account, path_in
from kbrl_async.weights import Canaries
from protocols.records import TrainBatch, TrainGroup
from services.learner import actor
from services.learner.actor import Learning, UpdateLost
from tests.models import EOS, SMALLER, drawn_sample, tiny_model, update_settings
from tests.unit.services.log import Log

tinker_service = pytest.importorskip("tests.tinker_service", reason="tinker is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # the library's connections live as long as its thread
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
torch.set_num_threads(1)  # threads that spin for a busy core make tiny operations ten times slower

KEY = "tml-the-key-of-a-test"
RANK = 4
CANARY = Canaries([1, 2, 3, 4, 5], [("a text", [7, 8, 9])])


class Running:
    """The service, and how it is reached."""

    def __init__(self) -> None:
        self.service = tinker_service.Service(
            models=[tinker_service.CausalLM("tiny", tiny_model(scale=1.0, **SMALLER), EOS)], keys=[KEY]
        )
        self.server = tinker_service.start(self.service)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    made = Running()
    yield made
    tinker_service.stop(made.server)


@pytest.fixture
def running(shared: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    shared.service.faults.clear()
    return shared


_parts = WeakKeyDictionary[Learning, tuple[TinkerLearner, Log]]()


def settings(**given: Any) -> Config:
    return update_settings(**{"epochs": 1, "minibatches": 1, "lora_rank": RANK, "deadline_s": 20.0, **given})


def setup(running: Running, folder: Path, **given: Any) -> LearnerSetup:
    return LearnerSetup(
        settings=settings(**given),
        model_name="tiny",
        lora_rank=RANK,
        base_url=running.url,
        api_key_env=None,
        checkpoints=folder / "checkpoints",
        policies=folder / "policies",
        base=lambda: "tiny",
        canaries=lambda _: CANARY,
        make_trainer=lambda _: pytest.fail("nothing is trained here"),
    )


def learning(running: Running, folder: Path, **given: Any) -> Learning:
    made = setup(running, folder, **given)
    service: Any = SimpleNamespace(
        config=made.settings, run_dir=folder, policies=folder / "policies", log=Log(), tell=lambda *_: None
    )
    engine = start(made)
    assert isinstance(engine, TinkerLearner)
    found = Learning(service, engine)
    _parts[found] = engine, service.log
    found.resume()
    return found


def warned(made: Learning) -> list[str]:
    return [line.event for line in _parts[made][1].at("warning")]


def batch(index: int) -> TrainBatch:
    return TrainBatch(f"batch-{index:06d}", index, 1.0, ["g0"])


def groups(seed: int) -> list[TrainGroup]:
    rng = random.Random(seed)
    prompts = [[1, 2, 3], [4, 5]]
    samples = [drawn_sample(rng, f"g0.r{r}", prompts[r % 2], 3 + r) for r in range(4)]
    return [TrainGroup("g0", "p", 1, samples)]


def nothing() -> None:
    pass


def adapter(running: Running) -> dict[str, torch.Tensor]:
    """The newest training model's weights, as the service has them."""
    return dict(list(running.service.trained.values())[-1].adapter.state())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 0.0) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


# ── what is computed ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "given",
    [
        {"loss": "dppo_tv"},
        {"loss": "ppo"},
        {"loss": "ppo", "loss_at": "service"},
        {"loss": "importance_sampling", "loss_at": "service", "normalise": "sequence_mean"},
        {"loss": "importance_sampling"},
        {"loss": "decoupled", "minibatches": 2},
        {"loss": "reinforce", "corrections": ["m2po"]},
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_an_update_there_is_the_one_that_this_host_makes(
    running: Running, tmp_path: Path, given: dict[str, Any]
) -> None:
    learner = start(setup(running, tmp_path, learning_rate=0.01, **given))
    learner.resume()
    model = tiny_model(scale=1.0, **SMALLER)
    torch.manual_seed(0)  # as the service begins an adapter
    here = Trainer(wrap_lora(model, RANK), settings(learning_rate=0.01, **given), "cpu")
    for seed in range(2):
        found, expected = (one.step(groups(seed), 1.0, nothing, 0) for one in (learner, here))
        names = ("loss", "mismatch_kl", "ess", "ratio_max", "dropped_share", "lr", "staleness_max")
        assert {n: found[n] for n in names if n in found} == pytest.approx(
            {n: expected[n] for n in names if n in expected}, rel=1e-3, abs=1e-5
        )
    ours = {name: p.detach() for name, p in here.parameters.items()}
    assert same(adapter(running), ours, 1e-5)
    assert "grad_norm" not in found, "the service does not tell"
    learner.close()


def test_ten_updates_raise_what_pays(running: Running, tmp_path: Path) -> None:
    made = learning(running, tmp_path, learning_rate=0.02, loss="ppo", loss_at="service", warmup_steps=0)
    rows = groups(0)
    trainer = _parts[made][0].trainer
    first = trainer.logprobs(rows[0].samples, 1.0)
    for index in range(10):
        made.train(batch(index), rows, nothing)
    last = trainer.logprobs(rows[0].samples, 1.0)
    rise = [sum(b) - sum(a) for a, b in zip(first, last, strict=True)]
    assert all((r > 0) == (s.advantage > 0) for r, s in zip(rise, rows[0].samples, strict=True))
    assert made.version == 10
    made.close()


def test_a_version_is_published_with_the_trained_weights_own_log_probs(running: Running, tmp_path: Path) -> None:
    made = learning(running, tmp_path, learning_rate=0.05)
    made.train(batch(0), groups(0), nothing)
    manifest, folder = versions.newest(tmp_path / "policies") or pytest.fail("nothing is published")
    saved = running.service.saved[path_in(folder)]
    served = saved.model.prompt_logprobs(saved.state, CANARY.ids)
    assert (manifest.version, manifest.kind, manifest.step) == (1, "tinker", 1)
    assert manifest.canary_logprobs == pytest.approx(served, abs=1e-5)
    assert manifest.canaries[0].logprobs == pytest.approx(saved.model.prompt_logprobs(saved.state, [7, 8, 9]), abs=1e-5)
    with pytest.raises(CheckpointError, match="held at Tinker"):
        versions.load_weights(folder, tiny_model(**SMALLER))
    made.close()


def test_the_service_keeps_no_more_than_the_run(running: Running, tmp_path: Path) -> None:
    made = learning(running, tmp_path, max_staleness=0)
    _, first = versions.newest(tmp_path / "policies") or pytest.fail("nothing is published")
    mine = path_in(first).split("/")[2]
    for index in range(actor.KEPT_VERSIONS + 3):
        made.train(batch(index), groups(0), nothing)
    kept = {path_in(folder) for folder in (tmp_path / "policies").glob("policy-v*")}
    kept |= {path_in(folder) for folder in (tmp_path / "checkpoints").glob("step-*")}

    def held() -> set[str]:
        return {path for path in running.service.saved if mine in path}

    _until(lambda: held() == kept)
    assert len(kept) == actor.KEPT_VERSIONS + 2
    made.close()


def _until(is_true: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ── what survives ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_learner_that_was_killed_goes_on_with_the_weights_and_the_optimizer(running: Running, tmp_path: Path) -> None:
    def after(folder: Path, killed_at: int) -> dict[str, torch.Tensor]:
        made = learning(running, folder, learning_rate=0.01, minibatches=2)
        for index in range(4):
            if index == killed_at:
                made = learning(running, folder, learning_rate=0.01, minibatches=2)  # the other says no goodbye
                assert made.version == index
            made.train(batch(index), groups(index), nothing)
        return adapter(running)

    unbroken = after(tmp_path / "a", killed_at=-1)
    assert same(after(tmp_path / "b", killed_at=2), unbroken, 1e-6)


def test_batches_after_the_last_checkpoint_are_trained_again_and_their_version_replaced(
    running: Running, tmp_path: Path
) -> None:
    given = {"learning_rate": 0.01, "checkpoint_every": 3}
    made = learning(running, tmp_path, **given)
    for index in range(2):
        made.train(batch(index), groups(index), nothing)
    expected, old = adapter(running), path_in(tmp_path / "policies" / "policy-v2")
    again = learning(running, tmp_path, **given)
    assert again.version == 2
    assert same(adapter(running), expected, 1e-6)
    assert path_in(tmp_path / "policies" / "policy-v2") != old
    assert again.train(batch(1), groups(1), nothing).policy_version == 2, "answered, not trained again"
    again.close()


FAULTS = [
    ("forward", "forward_backward", "error"),
    ("answer", "forward_backward", "garbage"),
    ("step", "optim_step", "error"),
    ("session", "optim_step", "lost"),
    ("gone", "forward_backward", "404"),
]


@pytest.mark.parametrize(("name", "kind"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_an_update_that_is_lost_is_made_again_from_the_checkpoint(
    running: Running, tmp_path: Path, name: str, kind: str
) -> None:
    made = learning(running, tmp_path, learning_rate=0.01)
    made.train(batch(0), groups(0), nothing)
    running.service.break_(name, kind)
    report = made.train(batch(1), groups(1), nothing)
    assert (report.policy_version, report.failure) == (2, "")
    assert "update lost" in warned(made)
    found = adapter(running)
    unbroken = learning(running, tmp_path / "unbroken", learning_rate=0.01)
    for index in range(2):
        unbroken.train(batch(index), groups(index), nothing)
    assert same(found, adapter(running), 1e-6), "each batch was trained once"


@pytest.mark.parametrize("status", ["500", "429", "503"])
def test_a_server_that_fails_for_a_moment_is_asked_again_by_the_library(
    running: Running, tmp_path: Path, status: str
) -> None:
    made = learning(running, tmp_path)
    running.service.break_("optim_step", status)
    assert made.train(batch(0), groups(0), nothing).policy_version == 1
    assert warned(made) == []
    made.close()


def test_an_update_that_fails_twice_comes_again_and_the_one_after_it_begins_at_the_checkpoint(
    running: Running, tmp_path: Path
) -> None:
    made = learning(running, tmp_path, learning_rate=0.01)
    running.service.break_("forward_backward", "error", 2)
    with pytest.raises(InfraError, match="a device was lost"):
        made.train(batch(0), groups(0), nothing)
    assert made.version == 0
    assert made.train(batch(0), groups(0), nothing).policy_version == 1
    made.close()


@pytest.mark.parametrize("name", ["save_weights", "save_weights_for_sampler"])
def test_what_was_trained_and_could_not_be_kept_is_kept_by_the_next_process(
    running: Running, tmp_path: Path, name: str
) -> None:
    made = learning(running, tmp_path, learning_rate=0.01)
    running.service.break_(name, "404")
    with pytest.raises(UpdateLost):
        made.train(batch(0), groups(0), nothing)
    again = learning(running, tmp_path, learning_rate=0.01)
    assert again.version == 1
    assert (tmp_path / "policies" / "policy-v1" / "COMPLETE").exists()
    assert again.train(batch(0), groups(0), nothing).policy_version == 1
    again.close()


def test_a_state_that_the_service_has_no_more_is_passed_over_for_the_one_before(
    running: Running, tmp_path: Path
) -> None:
    made = learning(running, tmp_path, learning_rate=0.01)
    for index in range(2):
        made.train(batch(index), groups(index), nothing)
    expected = adapter(running)
    del running.service.saved[path_in(tmp_path / "checkpoints" / "step-000002")]
    again = learning(running, tmp_path, learning_rate=0.01)
    assert again.version == 2
    assert same(adapter(running), expected, 1e-6)
    assert "checkpoint passed over" in warned(again)
    again.close()


def test_a_batch_whose_loss_is_not_finite_leaves_no_trace(running: Running, tmp_path: Path) -> None:
    made = learning(running, tmp_path, learning_rate=0.01)
    before = adapter(running)
    rows = groups(0)
    spoilt = [*rows[0].samples[:-1], msgspec.structs.replace(rows[0].samples[-1], advantage=3e38)]
    report = made.train(batch(0), [msgspec.structs.replace(rows[0], samples=spoilt)], nothing)
    assert "finite" in report.failure
    assert made.version == 0
    assert same(adapter(running), before)
    made.close()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def refused(running: Running, folder: Path, **given: Any) -> str:
    with pytest.raises(KbrlError) as caught:
        start(msgspec.structs.replace(setup(running, folder), **given)).resume()
    assert isinstance(caught.value, ConfigError)
    return str(caught.value)


def test_a_key_that_is_missing_or_refused_is_said_and_never_shown(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "")
    assert "TINKER_API_KEY is empty" in refused(running, tmp_path)
    for key in ("tml-of-somebody-else", "no-tinker-key"):
        monkeypatch.setenv("OTHER", key)
        said = refused(running, tmp_path, api_key_env="OTHER")
        assert "Put a valid key into the environment variable OTHER" in said
        assert key not in said + caplog.text


def test_a_model_that_is_not_served_is_refused_with_those_that_are(running: Running, tmp_path: Path) -> None:
    assert "serves no model 'huge'. Set model_name to one of: tiny" in refused(running, tmp_path, model_name="huge")


def test_an_address_where_nobody_answers_is_said_at_the_first_start(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> None:
        raise InfraError("Tinker gave no answer", "Is the service up?")

    monkeypatch.setattr(Account, "positions", silent)
    nowhere = setup(running, tmp_path)
    with pytest.raises(ConfigError, match="Is the service up"):
        start(nowhere)
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "COMPLETE").touch()
    with pytest.raises(InfraError):
        start(nowhere)


def test_a_key_that_is_taken_back_ends_the_run_with_a_word(running: Running, tmp_path: Path) -> None:
    made = learning(running, tmp_path)
    running.service.break_("forward_backward", "401", 2)
    with pytest.raises(ConfigError, match="Put a valid key"):
        made.train(batch(0), groups(0), nothing)


def test_a_service_that_is_silent_is_not_waited_for_for_ever(running: Running) -> None:
    account = Account(running.url, None, 0.3)
    import concurrent.futures

    ticks: list[int] = []
    with pytest.raises(InfraError, match=r"no answer to a thing within 0\.3 s"):
        account.result(concurrent.futures.Future(), "a thing", lambda: ticks.append(1))
    assert ticks


def test_log_probs_that_do_not_fit_the_batch_are_no_update(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(Account(running.url, None, 20.0))
    remote.begin("tiny", RANK, 0)
    samples = groups(0)[0].samples
    data = [remote.datum(s.prompt_ids, s.token_ids, weights=[1.0] * len(s.token_ids)) for s in samples]
    output = remote.call("forward", "log-probs", data, "cross_entropy")
    assert [len(part) for part in remote.logprobs(output, samples)] == [len(s.token_ids) for s in samples]
    with pytest.raises(InfraError, match="not those of the batch"):
        remote.logprobs(output, samples[:-1])
    remote.close()
