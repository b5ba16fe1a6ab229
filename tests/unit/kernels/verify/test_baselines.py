"""Compiled baselines beside a timing. That Inductor compiles them in the sandbox takes a minute: see `kbrl bench`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels.verify import Bench
from kbrl_async.kernels.verify.baselines import Baselines
from protocols.records import Problem, Timing

MINE = Timing(40, 3.0, 2.8, 3.2, 1.0, 3.0)
COMPILED = Timing(40, 1.5, 1.4, 1.6, 2.0, 3.0)
BROKEN = "import torch.nn as nn\n\nclass Model(nn.Module):\n    pass\n\ndef get_inputs():\n    raise ValueError('no inputs')\n\n\ndef get_init_inputs():\n    return []\n"  # noqa: E501 - one small file


class Known(Baselines):
    """Baselines whose times are known."""

    def measure(self, problem: Problem, name: str) -> Timing | str:
        return COMPILED if name == "compile" else "Inductor can't"


@pytest.fixture
def baselines(bench: Bench) -> Iterator[Baselines]:
    with Baselines(bench) as made:
        yield made


def test_a_timing_gets_its_speedup_over_each_baseline_that_there_is(bench: Bench) -> None:
    told: list[str] = []
    with Known(bench) as known:
        timing, missing = known.beside(
            Problem("L1/1", 1, "x", BROKEN),
            MINE,
            ("compile", "compile-max-autotune"),
            lambda name, _: told.append(name),
        )
    assert timing.baselines == {"compile": (2.0, 2.8 / 1.6, 3.2 / 1.4)}
    assert missing == {"compile-max-autotune": "Inductor can't"}
    assert told == ["compile"]


def test_a_reference_that_can_not_be_compiled_says_why(baselines: Baselines) -> None:
    assert baselines.measure(Problem("L1/1", 1, "x", BROKEN), "compile") == "ValueError: no inputs"


def test_a_compilation_that_died_is_tried_again_the_next_time(baselines: Baselines, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()  # by the one that died
    assert baselines.compiled(BROKEN, "compile", folder) == "ValueError: no inputs"
