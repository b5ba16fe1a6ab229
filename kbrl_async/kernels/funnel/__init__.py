"""The whole way of one candidate: format → static → compile → small inputs → full inputs → timing.

The one composition of building and verifying, in two halves. A farm calls the first, a bench the second; `Verifier`
calls both in one process, for `kbrl verify`, `kbrl optimize`, notebooks, and run folders of KernelBench.

::

    text ─read─▶ Candidate ─Builder─▶ BuildReport ─Judge─▶ BenchReport ─▶ Result
      └─ format_error   └─ static_violation, compile_error   └─ every other fault: the stages after it do not run

Invariants
* The candidate's faults are results; the host's and the problem's are exceptions (`MissingTool`, `InfraError`,
  `ProblemError`), never results (I4).
* Nothing stays behind: no process, no file outside the store that was asked for, no setting of the calling process.
"""

from kbrl_async.kernels.funnel.build import Builder, artifact_paths
from kbrl_async.kernels.funnel.careful import Careful, bench
from kbrl_async.kernels.funnel.concurrent import AsyncVerifier
from kbrl_async.kernels.funnel.judge import Judge, SpotChecks
from kbrl_async.kernels.funnel.reading import Reading, read_candidate
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.funnel.verifier import Verifier, VerifyOptions, verify

__all__ = [
    "AsyncVerifier",
    "Builder",
    "Careful",
    "Judge",
    "Reading",
    "Result",
    "SpotChecks",
    "Verifier",
    "VerifyOptions",
    "artifact_paths",
    "bench",
    "read_candidate",
    "verify",
]
