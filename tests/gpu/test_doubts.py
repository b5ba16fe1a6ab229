"""As in training, where few doubts are decided by fresh processes: a second recorder's word, against the first's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kbrl_async.kernels.stages import spans
from kbrl_async.kernels.verify import Bench
from protocols.records import REPLAYED, BenchReport, Fault
from tests.gpu.bench_candidates import ADD, nvrtc

pytestmark = pytest.mark.gpu
Judge = Callable[..., BenchReport]
ODD = "        self.odd = nn.Parameter(torch.randn(100))\n        self.shift = shift\n"
WEIGHTED = ADD.replace("        self.shift = shift\n", ODD).replace("+ self.shift", "+ self.shift + 0 * self.odd.sum()")
"""400 bytes of weights: the rest of their block is nobody's."""
NEIGHBOURS = nvrtc("if (i < n) out[i] = x[i] * 2 + y[i] + between[i + n + 8];")


@pytest.fixture
def pieces(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Seconds and counts of what is judged."""
    monkeypatch.setattr(gpu_bench, "options", msgspec.structs.replace(gpu_bench.options, alone_share=0.0))
    found = dict[str, float]()
    token = spans.set(found)
    yield found
    spans.reset(token)


def test_a_wrong_candidate_is_written_down_twice_and_replayed_once(judge: Judge, pieces: dict[str, float]) -> None:
    candidate = nvrtc().replace("        self.shift = shift\n", ODD)
    for number in range(3):
        right = candidate + f"\n# {number}"
        assert judge(WEIGHTED, right, "cuda-nvrtc").verdict.fault is Fault.OK
    for number in range(3):
        pieces.clear()
        wrong = candidate.replace("x[i] * 2", f"x[i] * {number + 3}")
        verdict = judge(WEIGHTED, wrong, "cuda-nvrtc").verdict
        assert (verdict.fault, verdict.trust) == (Fault.INCORRECT, REPLAYED)
        assert "recorded by a second" in pieces
        again = {"judged by a second", "judged alone", "recorded otherwise", "recorded with other bytes that last"}
        assert not again & pieces.keys()
    assert "contexts made" not in pieces


def test_who_reads_its_neighbours_memory_is_replayed(judge: Judge, pieces: dict[str, float]) -> None:
    source = NEIGHBOURS.replace("float *out, int n", "float *out, const float *between, int n")
    source = source.replace("(x, y, out, n,", "(x, y, out, between, n,")
    source = source.replace("        out = ", "        between = x * 2\n        out = ")
    verdict = judge(ADD, source, "cuda-nvrtc").verdict
    assert (verdict.fault, verdict.trust) == (Fault.INCORRECT, REPLAYED), verdict.trust_reason
