"""Under the rules `open`: own kernels in the styles that people write, each honest, and as a decoy beside the library.

Whatever launches them, they are what is judged, and a candidate that has them and lets torch do the work is refused.
All are built at once, before the first is judged: a build takes longer than a verdict.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import pytest

from kbrl_async.kernels.backends import guess_backend
from kbrl_async.kernels.backends.inline.toolchain import toolchain
from kbrl_async.kernels.funnel import Builder, Verifier, VerifyOptions
from kbrl_async.kernels.funnel.build import artifact_paths
from kbrl_async.kernels.funnel.verifier import under
from kbrl_async.kernels.verify import Bench
from protocols.records import OBSERVED, REPLAYED, BuildReport, Candidate, Fault, Problem, Verdict
from tests.gpu.open_candidates import OTHER_STYLES, TRITON_STYLES, OpenStyle
from tests.gpu.open_extensions import EXTENSION_STYLES

pytestmark = pytest.mark.gpu
STYLES = TRITON_STYLES | OTHER_STYLES | EXTENSION_STYLES
_BUILT_AT_ONCE = 8
Judge = Callable[[OpenStyle, str], Verdict]


def is_here(needs: str) -> bool:
    return bool(toolchain().cuda_library("cuda") if needs == "libcuda" else importlib.util.find_spec(needs))


def posed(style: OpenStyle) -> Problem:
    return Problem("L1/01_test", 1, "test", style.problem)


@pytest.fixture(scope="module")
def builds(open_builder: Builder) -> Iterator[dict[str, Future[BuildReport]]]:
    """By source."""
    here = [style for style in STYLES.values() if not style.needs or is_here(style.needs)]
    with ThreadPoolExecutor(_BUILT_AT_ONCE) as pool:
        yield {
            source: pool.submit(open_builder.build, Candidate(source, guess_backend(source)), posed(style))
            for style in here
            for source in (style.honest, style.decoy)
        }
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def judged(
    gpu_bench: Bench,
    open_builder: Builder,
    builds: dict[str, Future[BuildReport]],
    monkeypatch: pytest.MonkeyPatch,
) -> Judge:
    """With kept outputs, as `open` has them."""
    monkeypatch.setattr(gpu_bench, "options", msgspec.structs.replace(gpu_bench.options, outputs="kept"))

    def run(style: OpenStyle, source: str) -> Verdict:
        if source not in builds:
            pytest.skip(f"{style.needs} is not on this host")
        built = builds[source].result()
        assert built.fault is Fault.OK, built
        paths = artifact_paths(open_builder.store, built)
        candidate = Candidate(source, guess_backend(source))
        verdict = gpu_bench.evaluate(posed(style), candidate, paths, timing=False).verdict
        print(verdict.fault, verdict.rule, verdict.trust, verdict.own_share, verdict.trust_reason, verdict.evidence)
        return verdict

    return run


@pytest.mark.parametrize("name", STYLES)
def test_an_honest_kernel_passes_whatever_launches_it(judged: Judge, name: str) -> None:
    style = STYLES[name]
    verdict = judged(style, style.honest)
    if style.unproven or (not style.is_counted and verdict.fault is Fault.UNPROVEN):
        assert verdict.trust == OBSERVED, verdict
        # the former until its function gave tensors where it is left out: no GPU has run the latter yet
        assert (verdict.fault, verdict.rule) in ((Fault.UNPROVEN, "no_own_kernel"), (Fault.OK, "")), verdict
        assert style.unproven in verdict.trust_reason, verdict
        return
    assert verdict.fault is Fault.OK, verdict
    assert verdict.trust == (style.trust or verdict.trust), verdict
    assert verdict.trust == REPLAYED or verdict.trust_reason, verdict
    if verdict.trust == REPLAYED and style.is_alone:
        assert verdict.own_share == 1.0, verdict


@pytest.mark.parametrize("name", STYLES)
def test_its_twin_that_the_library_works_for_does_not(judged: Judge, name: str) -> None:
    style = STYLES[name]
    verdict = judged(style, style.decoy)
    if style.is_counted:
        assert (verdict.fault, verdict.rule) == (Fault.CHEATING, "decoy_kernel"), verdict
    else:
        assert verdict.fault in (Fault.CHEATING, Fault.UNPROVEN), verdict
        assert verdict.rule in ("decoy_kernel", "no_own_kernel"), verdict
    assert verdict.trust == (style.trust or verdict.trust), verdict


def test_a_verifier_takes_a_mixed_candidate_from_its_text_to_a_time() -> None:
    style = STYLES["beside Triton"]
    with Verifier("cuda:0", under(VerifyOptions(), "open")) as verifier:
        result = verifier.verify(posed(style), style.honest)
    assert result.ok, (result.verdict, result.stages)
    assert (result.verdict.rules, result.verdict.trust) == ("open", REPLAYED), result.verdict
    assert result.timing is not None
