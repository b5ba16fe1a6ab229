"""Each door of docs/integrations.md does what its page says: the Python of the page is run as a reader would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_docs import SOFTMAX
from tests.pages import ROOT, Block, Page

PAGE = Page(ROOT / "docs" / "integrations.md")
PYTHON = [block for block in PAGE.blocks if block.language == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "softmax.py").write_text(SOFTMAX)
    return folder


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line {block.line}")
def test_the_python_of_the_page_runs(block: Block, place: Path) -> None:
    text = "\n".join(block.lines)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=place, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
