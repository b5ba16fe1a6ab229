"""What travels with a candidate: its own helpers, and nothing that every sandbox has."""

from __future__ import annotations

from pathlib import Path

from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.problems import beside


def test_helpers_travel_and_our_own_package_beside_it_does_not(tmp_path: Path) -> None:
    """In a checkout of ours the package lies beside the candidate; its launchers name every backend there is."""
    (tmp_path / "kbrl_async").mkdir()
    (tmp_path / "kbrl_async" / "__init__.py").write_text("")
    (tmp_path / "kbrl_async" / "launch.py").write_text("from kbrl_async.launch import cuda_kernel, triton_kernel\n")
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "mine.py").write_text("ONE = 1\n")
    candidate = tmp_path / "kernel.py"
    candidate.write_text("import torch\nfrom kbrl_async.launch import c_kernel\nfrom mine import ONE\n")
    found = beside.gathered(candidate)
    assert beside.files_of(found) == {"mine.py": "ONE = 1\n"}
    assert guess_backend(found) == "c"
