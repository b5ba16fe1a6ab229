"""One artificial run that the tests of this folder read and never change."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbrl_async.lab.report import read_run
from kbrl_async.lab.report.model import RunData
from tests import artificial_run

HOSTILE = "\n".join([
    "</script><script>document.title = 'broken out'</script><!-- <style>body{display:none}</style>",
    "\"><img src=x onerror=\"document.title='broken out'\">' & &lt;b&gt; ]]> ${1} {{2}}",
    "\x00\x1b[31m \x7f \u202e reversed \u2066 hidden\u200b",
    "x" * 60_000,
    *(f"line {i}" for i in range(900)),
])  # fmt: skip


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """192 rollouts of two turns; the best kernel's source is as hostile as it gets."""
    folder = tmp_path_factory.mktemp("runs") / "made-up"
    return artificial_run.make(folder, 384, problems=24, turns=2, hostile=HOSTILE)


@pytest.fixture(scope="session")
def run(run_folder: Path) -> RunData:
    return read_run(run_folder)
