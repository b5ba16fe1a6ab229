"""Triton in a child: the bundle as its cache, and the interpreter even where triton was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.triton.cache import BundleCache, kernel_names

INTERPRETED = """
import sys, torch, triton, triton.language as tl
from kbrl_async.kernels.backends import backend
backend("triton").prepare({"triton:x": "no bundle is read"}, "cpu")
@triton.jit
def total(x, y, BLOCK: tl.constexpr):
    tl.store(y, tl.sum(tl.load(x + tl.arange(0, BLOCK)), axis=0))
x, y = torch.arange(8.0, device="cuda"), torch.zeros(1).cuda()
total[(1,)](x, y, BLOCK=8)
assert x.is_cuda and x.device.type == "cuda" and torch.cuda.is_available()
torch.cuda.synchronize()
print(y.item())
"""


def test_the_interpreter_works_though_triton_was_imported_for_compiling(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    script = tmp_path / "script.py"
    script.write_text(INTERPRETED)
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "28.0", done.stderr[-2000:]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BundleCache:
    monkeypatch.setattr(BundleCache, "files", {"KEY.f.json": b"{}", "KEY.f.cubin": b"code", "OTHER.g.json": b"{}"})
    monkeypatch.setattr(BundleCache, "folder", str(tmp_path))
    return BundleCache("KEY")


def test_files_of_the_bundle_are_found_by_key(cache: BundleCache) -> None:
    group = cache.get_group("f.json")
    assert group is not None
    assert {name: Path(path).read_bytes() for name, path in group.items()} == {"f.json": b"{}", "f.cubin": b"code"}


def test_a_kernel_without_its_machine_code_is_a_miss(cache: BundleCache) -> None:
    assert BundleCache("OTHER").get_group("g.json") is None
    assert cache.get_group("g.json") is None


def test_what_an_earlier_candidate_left_under_the_same_key_is_not_found(
    cache: BundleCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds of one kernel differ: their machine code names the folders of their sources."""
    cache.get_group("f.json")
    cache.put(b"new", "h.json")
    monkeypatch.setattr(BundleCache, "files", {"KEY.f.json": b"{}", "KEY.f.cubin": b"other code"})
    found = cache.get_group("f.json")
    assert found is not None
    assert Path(found["f.cubin"]).read_bytes() == b"other code"
    assert cache.get_group("h.json") is None


def test_only_what_the_bench_needs_is_kept_of_what_is_compiled(cache: BundleCache) -> None:
    for name in ("h.ttir", "h.ptx", "h.json", "h.cubin"):
        cache.put(b"new", name)
    assert {name for name in BundleCache.files if ".h." in name} == {"KEY.h.json", "KEY.h.cubin"}
    assert kernel_names(BundleCache.files) == ["f", "g", "h"]


def test_triton_is_interpreted_on_cpus_only() -> None:
    assert backend("triton").is_interpreted("cpu")
    assert not backend("triton").is_interpreted("cuda:0")
    assert not backend("c").is_interpreted("cpu")


@pytest.mark.parametrize("text", ["x.to(tl.bfloat16)", "dtype=torch.bfloat16", "tl.bf16"])
def test_bfloat16_is_refused_for_the_interpreter_as_nobodys_fault(text: str) -> None:
    with pytest.raises(InfraError, match="bfloat16"):
        backend("triton").refuse(text, "")
    backend("triton").refuse("tl.float16", "bf16x9 = 1")
