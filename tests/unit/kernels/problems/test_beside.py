"""What travels with a candidate: its own helpers, and nothing that every sandbox has."""

from __future__ import annotations

import subprocess
import sys
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


def test_helpers_of_a_candidate_are_gone_when_the_next_one_of_its_process_comes(tmp_path: Path) -> None:
    """In a process of its own, which keeps no bytecode, as in a sandbox. Libraries are looked at once."""
    code = f"""
import sys, types
from kbrl_async.kernels.problems import beside, model_contract as contract
asked = []
class Library(types.ModuleType):
    def __getattribute__(self, name):
        asked.append(name)
        return super().__getattribute__(name)
sys.modules["library"] = Library("library")
def answer(one):
    travels = beside.gathered(source(one))
    return contract.load("candidate", travels, folder={str(tmp_path / "scratch")!r}).ONE
def source(one):
    from pathlib import Path
    folder = Path({str(tmp_path)!r}, str(one))
    folder.mkdir()
    (folder / "mine.py").write_text(f"ONE = {{one}}\\n")
    (folder / "kernel.py").write_text("from mine import ONE\\n")
    return folder / "kernel.py"
print([answer(one) for one in (1, 2, 3)], asked.count("__file__"))
"""
    (tmp_path / "scratch").mkdir()
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[1,", "2,", "3]", "1"]
