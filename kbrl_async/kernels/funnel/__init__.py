"""The whole way of one candidate in one process: format → static → compile → small inputs → full inputs → timing.

Joins the rooms `building` and `verifying` for whoever has no running services: `kbrl verify`, notebooks, and run
folders of KernelBench.

::

    text ─read─▶ Candidate ─Builder─▶ artifacts ─Bench─▶ verdict, timing ─▶ Result
      └─ format_error   └─ static_violation, compile_error   └─ every other fault: the stages after it do not run

Invariants
* The candidate's faults are results; the host's and the problem's are exceptions (`MissingTool`, `InfraError`,
  `ProblemError`), never results (I4).
* Nothing stays behind: no process, no file outside the store that was asked for, no setting of the calling process.
"""

from kbrl_async.kernels.funnel.reading import Reading, guess_backend, read_candidate
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.funnel.spot_checks import SpotChecks
from kbrl_async.kernels.funnel.verifier import Verifier, VerifyOptions, verify

__all__ = [
    "Reading",
    "Result",
    "SpotChecks",
    "Verifier",
    "VerifyOptions",
    "guess_backend",
    "read_candidate",
    "verify",
]
