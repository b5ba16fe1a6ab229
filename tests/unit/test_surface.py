"""The names that `import kbrl_async` offers: light, typed, and the same as inside. Which actors take no torch."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kbrl_async
from kbrl_async.kernels import funnel


def stated(package: ModuleType) -> dict[str, str]:
    """What its stub says of each name: the module that it is from."""
    stub = Path(str(package.__file__)).with_suffix(".pyi")
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("package", [kbrl_async, funnel])
def test_the_stub_names_what_the_package_loads_and_from_where(package: ModuleType) -> None:
    names = stated(package)
    assert len(names) > 10
    assert all(getattr(package, name) is getattr(importlib.import_module(names[name]), name) for name in names)
    assert not hasattr(package, "nothing")


def test_what_is_loaded_late_is_listed_and_nothing_else() -> None:
    own = {*vars(kbrl_async)}
    assert set(stated(kbrl_async)) == {name for name in dir(kbrl_async) if name not in own}


@pytest.mark.parametrize("names", ["kbrl_async.kernels.funnel:Builder", "services.reward_aggregator.actor:Aggregator"])
def test_a_farm_and_an_aggregator_start_without_torch_and_scipy(names: str) -> None:
    module, _, name = names.partition(":")
    code = f"import sys; from {module} import {name}; print({{'torch', 'scipy.stats'}} & {{*sys.modules}})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_importing_it_takes_no_time_and_no_torch() -> None:
    code = (
        "import time, sys; began = time.process_time(); import kbrl_async; took = time.process_time() - began;"
        "print(took); kbrl_async.load_problems(); kbrl_async.reward, kbrl_async.Problem; print('torch' in sys.modules)"
    )
    took, has_torch = min(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    )
    assert float(took) < 0.15
    assert has_torch == "False"


def test_help_comes_at_once() -> None:
    """In seconds of a processor: those of the clock are of whoever else is on this host, too."""

    def seconds() -> float:
        before = os.times()
        subprocess.run([sys.executable, "-m", "kbrl_async", "--help"], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(3)) < 0.3
