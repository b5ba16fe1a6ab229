"""Baselines besides eager: quotients with both uncertainties, and priors that are only that."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kbrl_async.kernels.timing import Interval
from kbrl_async.kernels.timing.baselines import Prior, Priors, over, prior_key, wrapper

SOURCE = "import torch.nn as nn\n\nclass Model(nn.Linear):\n    pass\n"


def test_a_speedup_over_a_baseline_carries_both_uncertainties() -> None:
    found = over(Interval(3.0, 2.8, 3.2), Interval(1.5, 1.4, 1.6))
    assert found == Interval(2.0, 2.8 / 1.6, 3.2 / 1.4)


def test_a_baseline_that_could_not_be_measured_claims_nothing() -> None:
    found = over(Interval(3.0, 2.8, 3.2), Interval(1.5, 0.0, float("inf")))
    assert (found.lo, found.hi) == (0.0, float("inf"))


def test_the_quotient_holds_the_truth() -> None:
    rng, hits = random.Random(0), 0
    for _ in range(1000):
        c, b = 3.0 * rng.lognormvariate(0, 0.01), 1.5 * rng.lognormvariate(0, 0.01)
        reach = 1.0233  # 2.33 standard errors
        found = over(Interval(c, c / reach, c * reach), Interval(b, b / reach, b * reach))
        hits += found.lo <= 2.0 <= found.hi
    assert hits >= 980


devices: list[str] = []


class Runner:
    """Stands for a compiled library."""

    def __init__(self, library: str, runners: int, device: str = "cpu") -> None:
        assert (library, runners) == ("p.so", 1)
        devices.append(device)

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        weight, bias, x = tensors
        return [x @ weight.T + bias]


@pytest.mark.parametrize("single", [True, False])
def test_a_wrapper_gives_the_references_weights_and_its_kind_of_output(
    monkeypatch: pytest.MonkeyPatch, single: bool
) -> None:
    monkeypatch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCpu", Runner)
    namespace: dict[str, type[torch.nn.Linear]] = {}
    exec(wrapper(SOURCE, "p.so", single=single), namespace)
    model, x = namespace["ModelNew"](3, 4), torch.ones(1, 3)
    output = model(x)
    assert set(model.state_dict()) == {"weight", "bias"}
    assert torch.allclose(output if single else output[0], torch.nn.functional.linear(x, model.weight, model.bias))


def test_on_a_gpu_the_library_runs_on_the_benchs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._aoti, "AOTIModelContainerRunnerCuda", Runner, raising=False)
    namespace: dict[str, type[torch.nn.Linear]] = {}
    exec(wrapper(SOURCE, "p.so", device="cuda:1"), namespace)
    namespace["ModelNew"](3, 4)
    assert devices[-1] == "cuda:1"


def test_priors_are_kept_by_problem_hardware_and_versions_and_the_oldest_go(tmp_path: Path) -> None:
    keys = [prior_key("source", "a chip", {"torch": version}, "compile") for version in ("1", "2", "3")]
    assert len({*keys, prior_key("source", "b chip", {"torch": "1"}, "compile")}) == 4
    priors = Priors(tmp_path / "cache" / "priors.json", limit=2)
    for number, key in enumerate(keys):
        priors.put(key, Prior(number, 1.0))
    assert [priors.get(key) for key in keys] == [None, Prior(1, 1.0), Prior(2, 1.0)]


def test_a_broken_file_of_priors_is_no_prior(tmp_path: Path) -> None:
    (tmp_path / "priors.json").write_text("{")
    assert Priors(tmp_path / "priors.json").get("x") is None
