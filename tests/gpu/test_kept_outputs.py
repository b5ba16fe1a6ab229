"""One output buffer for several calls: a named style under `kept`, refused under `fresh`, and stale data under neither.

By a graph of the candidate's own (captured in the first call, replayed later) and by plain launches, replayed or
watched: who reads a value back is watched.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from kbrl_async.kernels.funnel import Builder
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.settings import Outputs
from kbrl_async.kernels.verify import Bench
from protocols.records import OBSERVED, REPLAYED, BenchReport, Candidate, Fault, Problem
from tests.gpu.bench_candidates import ADD, INLINE
from tests.gpu.test_own_graphs import body, captures, launch

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
_TAKEN, _REPLAY = "self.a.copy_(x); self.b.copy_(y)", "self.graph.replay()"
_BUFFER = "if not hasattr(self, 'c'): self.c, self.d, self.calls = torch.empty_like(x), torch.zeros_like(x), 0"
_PLAIN = launch("x, y")
_READS_BACK = "assert float(x.abs().max()) >= 0"
_IN_EXTENSION = INLINE.replace(
    "    auto out = torch::empty_like(x);", "    static torch::Tensor out = torch::empty_like(x);"
)
KEPT = {
    "a graph": (body(*captures(launch()), _TAKEN, _REPLAY, "return self.c"), "cuda-nvrtc", REPLAYED),
    "plain launches": (body(_BUFFER, _PLAIN, "return self.c"), "cuda-nvrtc", REPLAYED),
    "two buffers in turn": (
        body(_BUFFER, "self.c, self.d = self.d, self.c", _PLAIN, "return self.c"),
        "cuda-nvrtc",
        REPLAYED,
    ),
    "watched": (body(_READS_BACK, _BUFFER, _PLAIN, "return self.c"), "cuda-nvrtc", OBSERVED),
    "a watched graph": (
        body(*captures(launch()), _READS_BACK, _TAKEN, _REPLAY, "return self.c"),
        "cuda-nvrtc",
        OBSERVED,
    ),
}
STALE = {
    "a graph that never takes the inputs": body(*captures(launch()), _REPLAY, "return self.c"),
    "a graph that is replayed now and then": body(
        *captures(launch()),
        "self.calls = getattr(self, 'calls', 0) + 1",
        f"if self.calls < 4: {_TAKEN}; {_REPLAY}",
        "return self.c",
    ),
    "computed in the first calls": body(_BUFFER, "self.calls += 1", f"if self.calls < 4: {_PLAIN}", "return self.c"),
    "the former answer": body(_BUFFER, "self.c, self.d = self.d, self.c", _PLAIN, "return self.d"),
    "the former answer, after one that is right": body(
        _BUFFER,
        "self.calls += 1",
        "self.c, self.d = self.d, self.c",
        _PLAIN,
        "return self.d if self.calls % 2 else self.c",
    ),
    "known by its inputs' addresses": body(
        "known = self.__dict__.setdefault('known', {})",
        "key = x.data_ptr(), y.data_ptr()",
        "if key not in known:",
        "    known[key] = self.c = torch.empty_like(x)",
        f"    {_PLAIN}",
        "return known[key]",
    ),
}


@pytest.fixture
def judge_as(gpu_bench: Bench, open_builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Under the rules `open`, which leave it to the bench which outputs it takes."""

    def run(outputs: Outputs, source: str, backend: str = "cuda-nvrtc", timing: bool = False) -> BenchReport:
        options = msgspec.structs.replace(gpu_bench.options, outputs=outputs)
        monkeypatch.setattr(gpu_bench, "options", options)
        posed, candidate = Problem("L1/01_test", 1, "test", ADD), Candidate(source, backend)
        built = open_builder.build(candidate, posed)
        assert built.fault is Fault.OK, built
        return gpu_bench.evaluate(posed, candidate, artifact_paths(open_builder.store, built), timing=timing)

    return run


@pytest.mark.parametrize("style", KEPT)
def test_a_kept_buffer_is_a_style_where_kept_ones_are_taken(judge_as: Judge, style: str) -> None:
    source, backend, trust = KEPT[style]
    report = judge_as("kept", source, backend, timing=True)
    assert (report.verdict.fault, report.verdict.trust) == (Fault.OK, trust), report.verdict
    assert report.timing is not None


@pytest.mark.parametrize("style", KEPT)
def test_it_is_overwritten_where_fresh_ones_are_asked_for(judge_as: Judge, style: str) -> None:
    verdict = judge_as("fresh", *KEPT[style][:2]).verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "output_overwritten"), verdict


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("name", STALE)
def test_stale_data_is_wrong_where_kept_outputs_are_taken(judge_as: Judge, name: str, is_watched: bool) -> None:
    source = STALE[name]
    if is_watched:
        source = source.replace("def forward(self, x, y):\n", f"def forward(self, x, y):\n        {_READS_BACK}\n")
    verdict = judge_as("kept", source, timing=True).verdict  # whatever is timed is compared, too
    assert verdict.fault is Fault.INCORRECT, verdict
    assert not is_watched or verdict.trust == OBSERVED, verdict


def test_a_buffer_of_an_extension_is_no_different(judge_as: Judge) -> None:
    """A static variable of its own code holds it."""
    verdict = judge_as("kept", _IN_EXTENSION, "cuda").verdict
    assert verdict.fault is Fault.OK, verdict
    verdict = judge_as("fresh", _IN_EXTENSION, "cuda").verdict
    assert (verdict.fault, verdict.rule) == (Fault.INCORRECT, "output_overwritten"), verdict
