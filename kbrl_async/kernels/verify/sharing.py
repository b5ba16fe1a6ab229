"""One candidate's own process for all workloads of one module: forked, confined and built once.

It is attached to one workload's inputs after the other. What a workload leaves in it is what an earlier call leaves in
any process: sets are new, one is repeated, and a replay, its proof and a measurement have processes of their own. Who
is watched is proven in this one, its kernels off: the next workload has a new one then.
"""

from __future__ import annotations

from kbrl_async.kernels.verify.checks import Opens
from kbrl_async.kernels.verify.reference import Reference
from kbrl_async.kernels.verify.session import Judged, Submission


class Shared:
    """The processes of one candidate; they end with the block."""

    def __init__(self) -> None:
        self._kept: dict[int, Judged] = {}

    def __enter__(self) -> Shared:
        return self

    def __exit__(self, *_: object) -> None:
        while self._kept:
            self._kept.popitem()[1].close()

    def opens(self, reference: Reference, opens: Opens) -> Opens:
        """The same, but that a process of the module is taken where there is one and nobody asks alone."""

        def shared(code: Submission, is_alone: bool) -> Judged:
            if is_alone:
                return opens(code, is_alone)
            if reference.module_id not in self._kept:
                self._kept[reference.module_id] = opens(code, is_alone)
            return self._kept[reference.module_id]

        return shared

    def release(self, session: Judged, is_spent: bool) -> None:
        """Ends it, unless it is kept for the next workload and can serve it."""
        of_modules = [module for module, kept in self._kept.items() if kept is session]
        if of_modules and not is_spent:
            return
        for module in of_modules:
            del self._kept[module]
        session.close()
