"""pytest's rewriting of asserts before a test module is imported: `__pycache__` keeps it for whoever imports."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite as pytests  # it has no public way; what it is given and leaves is all we need


def rewrite(files: Iterable[Path], config: pytest.Config) -> None:
    """What lies there already stays."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[pytests.assertstate_key]
    for file in files:
        folder = pytests.get_cache_dir(file)
        cached = folder / f"{file.stem}{pytests.PYC_TAIL}"
        if not pytests.try_makedirs(folder) or pytests._read_pyc(file, cached) is not None:
            continue
        stat, code = pytests._rewrite_test(file, config)
        pytests._write_pyc(state, code, stat, cached)
