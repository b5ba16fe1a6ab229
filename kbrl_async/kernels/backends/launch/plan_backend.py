"""Launch plans as candidates of any backend that compiles named functions of literal sources.

::

    PLAN = {…} ─ read, never executed ─▶ the same kernels in a ModelNew of ours ─▶ the backend's own check and build

A plan is recognised by its source, so nothing else of the system has to know of it; see `launch.plan`.
"""

from __future__ import annotations

from typing import ClassVar

from kbrl_async.kernels.backends.backend import Backend
from kbrl_async.kernels.backends.building.context import BuildContext
from kbrl_async.kernels.backends.launch import plan as plans
from protocols.records import BuildReport, Candidate, Fault, Problem

_HINT = (
    'PLAN is one literal dict with "inputs", "kernels", "steps", "outputs", and "buffers", "sizes", "init" if needed.'
)
_HEAD = "import torch.nn as nn\nfrom kbrl_async.launch import {launcher}\n\n"
_BODY = """
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
{kernels}

    def forward(self, *inputs):
        return inputs
"""


class TakesPlans(Backend):
    """A backend that takes modules and launch plans; `check_module` and `build_module` are for the former."""

    launcher: ClassVar[str]
    """The name that `kbrl_async.launch` has for it."""
    is_cuda: ClassVar[bool] = False

    def check_module(self, candidate: Candidate) -> BuildReport | None:
        raise NotImplementedError

    def build_module(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        raise NotImplementedError

    def check(self, candidate: Candidate) -> BuildReport | None:
        if not plans.is_plan(candidate.source):
            return self.check_module(candidate)
        try:
            plan = plans.read(candidate.source)
        except plans.PlanError as error:
            return BuildReport(Fault.FORMAT_ERROR, message=str(error)[:800], hint=_HINT, rule="plan")
        if not plan.kernels or not plan.steps:
            message, hint = "the plan launches nothing", "Give it kernels, and steps that launch them."
            return BuildReport(Fault.STATIC_VIOLATION, message=message, hint=hint, rule="no_kernel")
        if plan.is_cuda != self.is_cuda:
            message = f"backend {self.name!r} can't build these kernels: {'CUDA' if plan.is_cuda else 'C'} sources"
            return BuildReport(Fault.STATIC_VIOLATION, message=message, hint=_HINT, rule="plan")
        return self.check_module(self._as_module(plan))

    def build(self, candidate: Candidate, problem: Problem | None, context: BuildContext) -> BuildReport:
        if plans.is_plan(candidate.source):
            candidate = self._as_module(plans.read(candidate.source))
        return self.build_module(candidate, problem, context)

    def _as_module(self, plan: plans.Plan) -> Candidate:
        """A candidate whose kernels are the plan's: what the backend's own rules are then held against."""
        sources, lines = [], []
        for number, (name, kernel) in enumerate(plan.kernels.items()):
            sources.append(f"SOURCE_{number} = {kernel.source!r}\n")
            options = f", {list(kernel.options)!r}" if kernel.options and self.is_cuda else ""
            call = f"{self.launcher}(SOURCE_{number}, {kernel.name or name!r}{options})"
            lines.append(f"        self.kernel_{number} = {call}")
        head = _HEAD.format(launcher=self.launcher)
        return Candidate(head + "".join(sources) + _BODY.format(kernels="\n".join(lines)), self.name)
