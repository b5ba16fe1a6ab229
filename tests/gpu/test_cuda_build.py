"""Extensions built the fast way run on the device as their references say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.verification.cuda_candidates import CUDA
from benchmarks.verification.extensions import executed
from kbrl_async.kernels.backends import backend
from kbrl_async.kernels.backends.building import ArtifactStore
from kbrl_async.kernels.funnel import Builder, artifact_paths
from kbrl_async.kernels.settings import CompileFarm
from protocols.records import Fault

pytestmark = pytest.mark.gpu
FAST = [case for case in CUDA if case.compiles and case.name != "full_headers_needed"]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    missing = backend("cuda").missing()
    if missing:
        pytest.skip(missing)
    options = CompileFarm(deadline_s=60.0, arch="sm_90")
    with Builder(ArtifactStore(tmp_path_factory.mktemp("store")), options) as made:
        yield made


def test_every_candidate_of_the_corpus_computes_what_its_reference_does(builder: Builder) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda case: builder.build(case.candidate, case.problem), FAST))
    failed = [
        (case.name, report.message) for case, report in zip(FAST, reports, strict=True) if report.fault is not Fault.OK
    ]
    assert failed == []
    built = {case.name: artifact_paths(builder.store, report) for case, report in zip(FAST, reports, strict=True)}
    assert executed(built) == {}


def test_a_built_candidate_says_that_it_was_built_fast(builder: Builder) -> None:
    report = builder.build(FAST[0].candidate)
    assert report.toolchain.endswith(" sm_90 fast")
    assert report.kernels == ["add"]
