"""Candidates that capture CUDA graphs of their own and replay them in forward, honest and hostile.

A replay is recorded node by node, so a graph is worth what its kernels and operators would be without it. Where forward
can't be recorded for another reason, a replay counts as the launches that it consists of.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.verify import Bench
from protocols.records import OBSERVED, REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.gpu.bench_candidates import ADD, INLINE, TRITON, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
_OUT, _LAUNCH = "out = torch.empty_like(x)", "self.kernel[(n + 255) // 256, 256](x, y, out, n, float(self.shift))"
_FORWARD = nvrtc()[nvrtc().index("        n = x.numel()") :]
_REPLAY = ("self.a.copy_(x); self.b.copy_(y)", "self.graph.replay()")
_READS_BACK = "assert float(x.abs().max()) >= 0"
"""Then it can't be recorded, and its process is watched."""


def launch(source: str = "self.a, self.b", to: str = "self.c") -> str:
    return f"self.kernel[2048, 256]({source}, {to}, 524288, float(self.shift))"


def body(*lines: str) -> str:
    """A candidate for `ADD` whose forward consists of these lines, with its kernel in `self.kernel`."""
    return nvrtc().replace(_FORWARD, "".join(f"        {line}\n" for line in lines))


def captures(
    *lines: str, graph: str = "graph", buffers: str = "x.clone(), y.clone(), torch.empty_like(x)"
) -> list[str]:
    """Once: these lines are run, and captured."""
    return [
        f"if not hasattr(self, '{graph}'):",
        f"    self.a, self.b, self.c = {buffers}",
        *(f"    {line}" for line in lines),
        "    torch.cuda.synchronize()",
        f"    self.{graph} = torch.cuda.CUDAGraph()",
        f"    with torch.cuda.graph(self.{graph}):",
        *(f"        {line}" for line in lines),
    ]


PLAIN = body(*captures(launch()), *_REPLAY, "return self.c.clone()")
IN_CONSTRUCTOR = (
    body(*_REPLAY, "return self.c.clone()")
    .replace(
        "        self.kernel = ",
        "        self.a, self.b, self.c = (torch.zeros(1024, 512, device='cuda') for _ in range(3))\n"
        "        self.kernel = ",
    )
    .replace(
        "\n    def forward",
        f"        {launch()}\n        torch.cuda.synchronize()\n        self.graph = torch.cuda.CUDAGraph()\n"
        f"        with torch.cuda.graph(self.graph):\n            {launch()}\n\n    def forward",
    )
)
FOR_EACH_ADDRESS = body(
    "self.__dict__.setdefault('kept', {})",
    "key = (x.data_ptr(), y.data_ptr())",
    "if key not in self.kept:",
    "    c = torch.empty_like(x)",
    f"    {launch('x, y', 'c')}",
    "    graph = torch.cuda.CUDAGraph()",
    "    with torch.cuda.graph(graph):",
    f"        {launch('x, y', 'c')}",
    "    self.kept[key] = graph, c",
    "graph, c = self.kept[key]",
    "graph.replay()",
    "return c.clone()",
)
MEMORY_OF_ITS_POOL = body(
    # what is freed while it is captured is written in each replay: nobody else may get it
    "if not hasattr(self, 'graph'): self.side = torch.cuda.Stream()",
    *captures("t = self.a * 1.0", launch("t, self.b"), "del t"),
    "    with torch.cuda.stream(self.side):",
    "        self.zeros = torch.zeros_like(x), torch.zeros_like(x)",
    "    torch.cuda.synchronize()",
    *_REPLAY,
    "return self.c + self.zeros[0] + self.zeros[1]",
).replace("torch.cuda.graph(self.graph)", "torch.cuda.graph(self.graph, stream=self.side)")
TWO_GRAPHS = body(
    *captures("self.a.mul_(1.0)", graph="first"),
    *captures(launch(), graph="second", buffers="self.a, self.b, self.c"),
    "self.a.copy_(x); self.b.copy_(y)",
    "self.first.replay(); self.second.replay()",
    "return self.c.clone()",
)
A_SIDE_STREAM = body(
    *captures(launch()),
    "    self.side = torch.cuda.Stream()",
    "self.side.wait_stream(torch.cuda.current_stream())",
    "with torch.cuda.stream(self.side):",
    *(f"    {line}" for line in _REPLAY),
    "torch.cuda.current_stream().wait_stream(self.side)",
    "return self.c.clone()",
)
CALLABLE = body(
    "if not hasattr(self, 'graphed'):",
    "    def run(x, y):",
    "        c = torch.empty_like(x)",
    f"        {launch('x, y', 'c')}",
    "        return c",
    "    self.graphed = torch.cuda.make_graphed_callables(run, (x.clone(), y.clone()))",
    "return self.graphed(x, y).clone()",
)
_TRITON_LAUNCH = "shifted[(triton.cdiv(x.numel(), 1024),)](self.a, self.b, self.c, x.numel(), self.shift, BLOCK=1024)"
_TRITON_FORWARD = TRITON[TRITON.index("        out = torch.empty_like(x)") :]
IN_TRITON = TRITON.replace(
    _TRITON_FORWARD,
    "".join(f"        {line}\n" for line in [*captures(_TRITON_LAUNCH), *_REPLAY, "return self.c.clone()"]),
)
_CALL = "        return module.shifted_cuda(x, y, self.shift)\n"
IN_EXTENSION = (
    INLINE.replace("#include <torch/extension.h>", "#include <torch/extension.h>\n#include <ATen/cuda/CUDAContext.h>")
    .replace(", 256>>>", ", 256, 0, at::cuda::getCurrentCUDAStream()>>>")
    .replace(
        _CALL,
        "".join(
            f"        {line}\n"
            for line in [
                *captures("self.c = module.shifted_cuda(self.a, self.b, self.shift)"),
                *_REPLAY,
                "return self.c.clone()",
            ]
        ),
    )
)
HONEST = {
    "captured at the first call": (PLAIN, "cuda-nvrtc"),
    "captured in the constructor": (IN_CONSTRUCTOR, "cuda-nvrtc"),
    "one for each address": (FOR_EACH_ADDRESS, "cuda-nvrtc"),
    "memory of its pool": (MEMORY_OF_ITS_POOL, "cuda-nvrtc"),
    "two of them": (TWO_GRAPHS, "cuda-nvrtc"),
    "on a side stream": (A_SIDE_STREAM, "cuda-nvrtc"),
    "made by make_graphed_callables": (CALLABLE, "cuda-nvrtc"),
    "of a Triton kernel": (IN_TRITON, "triton"),
    "of an extension": (IN_EXTENSION, "cuda"),
}


@pytest.mark.parametrize("style", HONEST)
def test_a_graph_of_its_own_is_replayed_like_what_it_holds(judge: Judge, style: str) -> None:
    verdict = judge(ADD, *HONEST[style], timing=True).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, REPLAYED), verdict


def test_what_a_graph_does_is_timed(judge: Judge) -> None:
    """Twenty launches in a graph take longer than one."""
    once = judge(ADD, PLAIN, "cuda-nvrtc", timing=True)
    often = judge(ADD, body(*captures(*[launch()] * 20), *_REPLAY, "return self.c.clone()"), "cuda-nvrtc", timing=True)
    for report in (once, often):
        assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, REPLAYED), report.verdict
        assert report.timing is not None
    assert often.timing.speedup < 0.5 * once.timing.speedup  # type: ignore[union-attr]


_LIBRARY = "self.c.copy_(self.a * 2 + self.b + self.shift)"
HOSTILE = {
    "it never takes the inputs": (body(*captures(launch()), _REPLAY[1], "return self.c.clone()"), ""),
    "the first call's inputs are its inputs": (
        body(*captures(launch("x, y")), _REPLAY[1], "return self.c.clone()"),
        "",
    ),
    "replayed in the first calls only": (
        body(
            *captures(launch()),
            "self.calls = getattr(self, 'calls', 0) + 1",
            "if self.calls < 4: self.a.copy_(x); self.b.copy_(y); self.graph.replay()",
            "return self.c.clone()",
        ),
        "",
    ),
    "one output for all calls": (body(*captures(launch()), *_REPLAY, "return self.c"), "output_overwritten"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_graph_that_does_not_do_the_work_is_wrong(judge: Judge, name: str) -> None:
    source, rule = HOSTILE[name]
    verdict = judge(ADD, source, "cuda-nvrtc", timing=True).verdict
    assert verdict.fault is Fault.INCORRECT, verdict
    assert not rule or verdict.rule == rule, verdict


LIBRARY = {
    "nothing else": (body(*captures(_LIBRARY), *_REPLAY, "return self.c.clone()"), "no_own_kernel"),
    "behind a decoy": (
        body(*captures(launch(to="torch.empty_like(self.c)"), _LIBRARY), *_REPLAY, "return self.c.clone()"),
        "decoy_kernel",
    ),
}


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("name", LIBRARY)
def test_the_librarys_work_in_a_graph_is_the_librarys(judge: Judge, name: str, is_watched: bool) -> None:
    source, rule = LIBRARY[name]
    if is_watched:
        source = source.replace("        self.a.copy_(x)", f"        {_READS_BACK}\n        self.a.copy_(x)")
    verdict = judge(ADD, source, "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.rule) == (Fault.CHEATING, rule), verdict


@pytest.mark.parametrize("style", ["captured at the first call", "of a Triton kernel", "of an extension"])
def test_a_graph_is_proven_where_its_process_is_watched(judge: Judge, style: str) -> None:
    source, backend = HONEST[style]
    source = source.replace("        self.a.copy_(x)", f"        {_READS_BACK}\n        self.a.copy_(x)")
    verdict = judge(ADD, source, backend).verdict
    assert (verdict.fault, verdict.trust) == (Fault.OK, OBSERVED), verdict


REFUSED = {
    "it draws": (captures("self.a.add_(torch.rand_like(self.a) * 0)", launch()), "draws random numbers"),
    "captured anew in each call": (
        ["self.__dict__.pop('graph', None)", *captures(launch())],
        "captures a CUDA graph of its own in later calls",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_can_not_be_recorded_for_is_said(judge: Judge, name: str) -> None:
    lines, reason = REFUSED[name]
    verdict = judge(ADD, body(*lines, *_REPLAY, "return self.c.clone()"), "cuda-nvrtc").verdict
    assert verdict.fault is not Fault.CHEATING, verdict
    assert verdict.trust == OBSERVED, verdict
    assert reason in verdict.trust_reason, verdict
    again = judge(ADD, PLAIN, "cuda-nvrtc").verdict
    assert (again.fault, again.trust) == (Fault.OK, REPLAYED), "the next one is recorded as ever"


# After four replays, what is launched computes one element.
UPDATED = """
import ctypes
import torch

_cuda = ctypes.CDLL("libcuda.so.1")

class Less(torch.cuda.CUDAGraph):
    calls = 0

    def replay(self):
        self.calls += 1
        if self.calls == 4:
            info = (ctypes.c_uint64 * 8)()
            given = (ctypes.c_void_p(self.raw_cuda_graph_exec()), ctypes.c_void_p(self.less.raw_cuda_graph()), info)
            self.code = _cuda.cuGraphExecUpdate_v2(*given)
        super().replay()
"""


@pytest.fixture
def hosted(gpu_bench: Bench, gpu_builder: Builder) -> Judge:
    """A candidate with the kernel of `nvrtc()`, whatever static checks say of its host code."""

    def run(source: str) -> BenchReport:
        posed = Problem("L1/01_test", 1, "test", ADD)
        built = gpu_builder.build(Candidate(nvrtc(), "cuda-nvrtc"), posed)
        found = {key: gpu_builder.store.path(address) for key, address in built.artifacts.items()}
        paths = {key: path for key, path in found.items() if path is not None}
        return gpu_bench.evaluate(posed, Candidate(source, "cuda-nvrtc"), paths, timing=True)

    return run


def test_a_graph_that_is_updated_after_some_replays_gains_nothing(hosted: Judge) -> None:
    """What is recorded is the graph; what is launched in the recorder is of no account."""
    lines = [line.replace("torch.cuda.CUDAGraph()", "Less()") for line in captures(launch())]
    less = (
        "    self.graph.less = torch.cuda.CUDAGraph(keep_graph=True)",
        "    with torch.cuda.graph(self.graph.less):",
        f"        {launch().replace('524288', '1')}",
    )
    report = hosted(UPDATED + body(*lines, *less, *_REPLAY, "return self.c.clone()"))
    plain = hosted(PLAIN)
    assert (plain.verdict.fault, plain.verdict.trust) == (Fault.OK, REPLAYED), plain.verdict
    assert plain.timing is not None
    assert report.verdict.fault is not Fault.CHEATING, report.verdict
    assert report.timing is None or report.timing.speedup < 1.2 * plain.timing.speedup, report
