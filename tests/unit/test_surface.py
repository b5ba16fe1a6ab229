"""The names that `import kbrl_async` offers: light, typed, and the same things as inside."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import kbrl_async

STUB = Path(kbrl_async.__file__).with_suffix(".pyi")


def test_the_stub_names_what_the_package_loads_and_from_where() -> None:
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    stated = {alias.name: node.module for node in imports for alias in node.names}
    assert stated == kbrl_async._LAZY
    assert all(getattr(kbrl_async, name) is not None for name in stated)
    assert set(stated) <= set(dir(kbrl_async))


def test_importing_it_takes_no_time_and_no_torch() -> None:
    code = (
        "import time, sys; began = time.perf_counter(); import kbrl_async; took = time.perf_counter() - began;"
        "print(took); kbrl_async.load_problems(); kbrl_async.reward, kbrl_async.Problem; print('torch' in sys.modules)"
    )
    took, has_torch = min(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(3)
    )
    assert float(took) < 0.15
    assert has_torch == "False"


def test_help_comes_at_once() -> None:
    def seconds() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kbrl_async", "--help"], capture_output=True, check=True)
        return time.perf_counter() - began

    assert min(seconds() for _ in range(3)) < 0.3
