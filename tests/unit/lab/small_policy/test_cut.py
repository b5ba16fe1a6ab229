"""A small policy that ran out of time is called so, serves the run that made it, and is no whole one for the next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from kbrl_async.lab.small_policy import making
from kbrl_async.lab.small_policy.configured import small_options
from kbrl_async.learning.policies import versions
from kbrl_async.learning.sft import SftReport
from kbrl_async.runs import origins
from kbrl_async.runs.config import Config, load
from kbrl_async.weights import MADE
from services.learner import policy
from tests.models import SMALLER, tiny_model
from tests.unit.services.log import Log

STEPS = Config().sft.steps


@pytest.fixture
def makes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes policies of nothing in as many steps as are listed, the first one first."""
    left: list[int] = []

    def make(folder: Path, options: Any, *_: Any) -> SftReport:
        report = SftReport(left.pop(0), 1.0, 1, 0.1)
        facts = {"report": report._asdict(), "options": {"sft": {"steps": STEPS}}}
        (folder / MADE).write_bytes(msgspec.json.encode(facts))
        return report

    monkeypatch.setattr(making, "make_policy", make)
    return left


def test_a_cut_one_is_no_whole_one_for_the_next_who_asks(makes: list[int], tmp_path: Path) -> None:
    options = small_options(Config())
    makes += [134, STEPS]
    first = making.ensure_small_policy(tmp_path, options)
    assert origins.cut(first) == f"step 134 of {STEPS}"
    assert making.folder_of(tmp_path, options) is None
    whole = making.ensure_small_policy(tmp_path, options)
    assert (origins.cut(whole), makes) == ("", [])
    assert making.ensure_small_policy(tmp_path, options) == whole == making.folder_of(tmp_path, options)
    assert first.is_dir(), "the run that made it goes on with it"


def test_its_run_is_warned_and_goes_on_with_it(makes: list[int], tmp_path: Path) -> None:
    config = load(overrides=[f"cache_path={tmp_path / 'cache'}"])
    service: Any = SimpleNamespace(config=config, run_dir=tmp_path, policies=tmp_path / "policies", log=Log())
    makes += [20, STEPS]
    base = policy.base_model(service, lambda: False)
    (warned,) = service.log.at("warning")
    assert warned.facts["at"] == f"step 20 of {STEPS}"
    versions.publish(service.policies, tiny_model(**SMALLER), 0, None, 0, [1, 2], str(base))
    assert policy.base_model(service, lambda: False) == base
    assert makes == [STEPS], "nothing was made again"


def test_a_whole_one_and_other_models_are_not_called_cut(makes: list[int], tmp_path: Path) -> None:
    makes.append(STEPS)
    assert origins.cut(making.ensure_small_policy(tmp_path, small_options(Config()))) == ""
    assert origins.cut("owner/name") == ""
    (tmp_path / MADE).write_text("[]")
    assert origins.cut(tmp_path) == ""


@pytest.mark.parametrize("has_bf16", [True, False])
def test_it_is_made_in_bf16_where_the_processor_has_that(
    has_bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere torch does a product in bf16 twenty times as slowly as one in fp32."""
    asked: list[bool] = []

    def train(*_: Any, bf16: bool, **__: Any) -> SftReport:
        asked.append(bf16)
        return SftReport(1, 1.0, 1, 0.1)

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(making, "TOKENIZER_EXAMPLES", 20)
    monkeypatch.setattr(making, "train_sft", train)
    making.make_policy(tmp_path, small_options(Config()), lambda *_: None, "cpu")
    assert asked == [has_bf16]
