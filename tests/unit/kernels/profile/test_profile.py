"""What a profile says of a kernel: measured where the host lets us, read from tools where it does not."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import msgspec
import pytest

from kbrl_async.kernels.backends.building import ArtifactStore, remarks
from kbrl_async.kernels.backends.building.context import BuildContext, ToolRun
from kbrl_async.kernels.funnel import Verifier
from kbrl_async.kernels.funnel.profiling import profile
from kbrl_async.kernels.problems import parse_problem
from kbrl_async.kernels.profile import KernelFacts, Profile, Roofline, counters, gpu, nsight, watched
from kbrl_async.kernels.profile.facts import CHARACTERS
from kbrl_async.kernels.settings import CompileFarm
from kbrl_async.kernels.timing.roofline import Peaks, ReferenceWork
from protocols.records import Candidate, Timing
from tests.candidates import affine, elementwise

TIMING = Timing(20, 0.5, 0.45, 0.55, 2.0, 1.0)
PEAKS = Peaks("a chip", 10.0, 100.0, 1 << 20, 50.0)

REMARKS = """\
/tmp/x/kernel.c:3:22: missed: couldn't vectorize loop
/tmp/x/kernel.c:3:22: missed: not vectorized: loop nest containing two or more consecutive inner loops
kernel.c:9:24: optimized: loop vectorized using 64 byte vectors
kernel.c:9:24: optimized: loop vectorized using 32 byte vectors
kernel.c:8:24: missed: couldn't vectorize loop
kernel.c:8:52: missed: not vectorized: no vectype for stmt: _13 = *_12;
 scalar_type: const float
/usr/include/math.h:40:1: optimized: loop vectorized using 16 byte vectors
"""


def test_remarks_name_each_loop_once_with_its_width_or_its_reason() -> None:
    assert [remark.text() for remark in remarks.read(REMARKS)] == [
        "line 3: not vectorised: loop nest containing two or more consecutive inner loops",
        "line 8: not vectorised: no vectype for stmt",
        "line 9: vectorised, 64 bytes at a time",
    ]
    assert remarks.lines(remarks.read(REMARKS))[-1].startswith("line 9")


def test_the_roofline_says_what_bounds_a_kernel() -> None:
    memory = Roofline.of(ReferenceWork(64 << 20, 64 << 20, flops=10), PEAKS)
    assert (memory.bound, memory.peak_gbs) == ("memory", 10.0)
    assert Roofline.of(ReferenceWork(1 << 10, 1 << 10, flops=10**10), PEAKS).bound == "arithmetic"
    assert Profile(TIMING, roofline=memory).share == pytest.approx(memory.floor_ms / 2.0)


def test_counters_count_what_a_process_does_and_leave_out_what_the_host_lacks() -> None:
    def touches() -> None:
        with mmap.mmap(-1, 8 << 20) as fresh:  # a heap may have kept pages of earlier tests
            for place in range(0, len(fresh), mmap.PAGESIZE):
                fresh[place] = 1

    found = counters.count(os.getpid(), touches)
    if "page_faults" not in found:
        pytest.skip("this host allows no perf events")
    assert found["page_faults"] > 100


def test_where_no_event_may_be_opened_nothing_is_called() -> None:
    def refused(kind: int, number: int, pid: int) -> int:
        raise PermissionError

    assert counters.count(1, pytest.fail, open_=refused) == {}


def test_hardware_counters_are_put_into_words() -> None:
    counted = {"cycles": 1e6, "instructions": 2.5e6, "cache_references": 1000.0, "cache_misses": 10.0}
    assert counters.text(counted) == ("2.5 M instructions, 2.50 a cycle; 10 of 1 k accesses to the last cache missed")


def test_a_text_fits_a_prompt_however_much_is_known() -> None:
    kernels = tuple(KernelFacts("k" * 300, 1.0, stalls={"a barrier": 2.0}) for _ in range(9))
    full = Profile(TIMING, remarks=("line 1: not vectorised",) * 99, kernels=kernels, where="w" * 900)
    assert len(full.text()) <= CHARACTERS
    assert full.text().startswith("time: 2 ms")


def test_a_correct_kernel_is_profiled_and_a_wrong_one_is_not() -> None:
    problem = parse_problem(affine(), "L1/01_double")
    with Verifier("cpu") as verifier:
        good = profile(verifier, problem, elementwise("2 * x[i] + 1"))
        wrong = profile(verifier, problem, elementwise("3 * x[i]"))
    assert wrong.profile is None
    assert good.profile is not None
    assert good.profile.roofline is not None
    assert good.profile.roofline.bound == "memory"
    assert any("vectorised" in line for line in good.profile.remarks)
    assert "own kernels" in good.profile.where


# ── a GPU's tools, by fakes: their tables as the tools print them ────────────────────────────────────────────────────

NCU = """==PROF== Connected to process 7
words of the candidate
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum",\
"gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread",\
"sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio"
"","","","nsecond","byte","%","register/thread","%","inst"
"0","7","softmax(const float *, float *)","12,800","4,194,304","61.5","32","48","7.25"
"1","7","softmax(const float *, float *)","12,200","4,194,304","61.5","32","48","7.25"
"2","7","copy(float *)","1000","nan","n/a","16","10","inf"
"""


def test_nsights_table_is_read_by_kernel_longest_first() -> None:
    softmax, copy = nsight.read(NCU)
    assert (softmax.name, softmax.us, softmax.calls, softmax.memory) == ("softmax", 25.0, 2, 0.615)
    assert softmax.stalls == {"device memory": 7.25}
    assert (copy.dram_bytes, copy.memory, copy.stalls) == (None, None, {})
    assert "occupancy 48%" in softmax.text()


NCU_2025 = """==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "cunn_SoftMaxForward" - 0: 0%....50%....100% - 9 passes
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"dram__bytes.sum","gpu__time_duration.sum","launch__registers_per_thread",\
"sm__throughput.avg.pct_of_peak_sustained_elapsed"
"","","","","","","","","","","","Mbyte","us","register/thread","%"
"0","4711","python3.11","127.0.0.1",\
"void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float>(float *, const float *, int)",\
"1","7","(1024, 1, 1)","(4096, 1, 1)","0","9.0","134.22","61.312","40","32.18"
"""
"""The columns of 2025.3, in units of its own choice: `--print-units base` asks for others."""


def test_the_newer_table_is_read_in_whatever_units_it_has() -> None:
    (kernel,) = nsight.read(NCU_2025)
    assert kernel.name == "at::native::cunn_SoftMaxForward<8, float, float>"
    assert (kernel.us, kernel.dram_bytes, kernel.compute) == pytest.approx((61.312, 134.22e6, 0.3218))


class FakeContext:
    """Answers as tools do: the first with `output`, a later one with a file that it leaves."""

    def __init__(self, folder: Path, output: str, left: bytes | None = None) -> None:
        self._folder, self._output, self._left = folder, output, left
        self.commands: list[list[str]] = []

    def folder(self) -> FakeContext:
        return self

    def __enter__(self) -> Path:
        return self._folder

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, command: list[str], folder: Path, **_: object) -> ToolRun:
        self.commands.append(command)
        if self._left is not None and "--timeline" in command:
            (folder / watched.TIMELINE_FILE).write_bytes(self._left)
        return ToolRun(0, self._output, "full", 1.0)


def profiled(context: FakeContext) -> tuple[tuple[KernelFacts, ...], str]:
    problem = parse_problem(affine(), "L1/01_double")
    return gpu.kernels(context, problem, Candidate("…", "cuda"), {}, "cuda:0")  # type: ignore[arg-type]


def test_nsight_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "program", lambda: "/opt/ncu")
    context = FakeContext(tmp_path, NCU)
    kernels, why = profiled(context)
    assert ([kernel.name for kernel in kernels], why, len(context.commands)) == (["softmax", "copy"], "", 1)


def test_a_timeline_stands_in_where_counters_are_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "program", lambda: "/opt/ncu")
    left = msgspec.json.encode([KernelFacts("soft\nmax", 5.0)])
    kernels, why = profiled(FakeContext(tmp_path, f"==ERROR== {nsight.FORBIDDEN}", left))
    assert [(kernel.name, kernel.us) for kernel in kernels] == [("softmax", 5.0)]
    assert "administrators" in why


@pytest.mark.parametrize("left", [None, b"[" * 60_000, b'{"a":1}', b"\xff\xfe", b'[{"name":1}]'])
def test_what_is_no_timeline_is_said_and_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes | None
) -> None:
    monkeypatch.setattr(nsight, "program", lambda: "")
    kernels, why = profiled(FakeContext(tmp_path, "", left))
    assert kernels == ()
    assert "no timeline either" in why


def test_why_there_is_neither_is_what_the_tools_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "program", lambda: "/opt/ncu")
    _, why = profiled(FakeContext(tmp_path, "==PROF== began\nno room\x1b[2J\n\n"))
    assert why.count("(no room[2J)") == 2


def test_nsight_reads_its_folder_and_what_its_script_looks_for(tmp_path: Path) -> None:
    script, behind = tmp_path / "bin" / "ncu", tmp_path / "nsight-compute-2025.3"
    behind.mkdir()
    script.parent.mkdir()
    script.touch()
    assert [str(script.parent), str(behind)] == nsight.folders(str(script))[:2]


def test_clocks_stay_as_they_are() -> None:
    words = nsight.command("ncu", "module", "task.json")
    assert words[words.index("--clock-control") + 1] == "none"


def test_a_timeline_is_made_in_a_confined_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "program", lambda: "")
    source = (
        "import torch\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.cos(x)\n"
    )
    problem = parse_problem(affine(), "L1/01_double")
    with contextlib.closing(BuildContext(ArtifactStore(tmp_path), CompileFarm())) as context:
        kernels, why = gpu.kernels(context, problem, Candidate(source, "c"), {}, "cpu")
    assert "aten::cos" in [kernel.name for kernel in kernels], why
