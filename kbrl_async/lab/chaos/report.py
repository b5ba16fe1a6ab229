"""What came of it: `RUN/chaos.json`, and the same as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Group
from rich.table import Table

from kbrl_async.lab.chaos.checks import Check
from kbrl_async.lab.chaos.driver import Happened

FILE = "chaos.json"
BROKER_BACK_S = 3.0
"""A broker that was killed under load has to take the next result by then."""


class Report(msgspec.Struct, omit_defaults=True):
    """Written at the start with the plan alone, and again at the end."""

    run: str
    seed: int | None = None
    faults: list[Happened] = []
    starts: int = 1
    """How often the run was started; every fault that ends it costs one more."""
    checks: list[Check] = []
    took_s: float = 0.0
    ok: bool = False

    def conclude(self, checks: Sequence[Check], broker_back_s: float = BROKER_BACK_S) -> None:
        """`checks` of what is left, and those of the plan itself."""
        self.checks = [self._plan_check(), self._starts_check(), *checks, self._broker_check(broker_back_s)]
        self.ok = all(check.ok for check in self.checks)

    def by_kind(self) -> dict[str, int]:
        return dict(Counter(str(happened.fault.kind) for happened in self.faults if happened.done))

    def broker_back(self) -> list[float]:
        """Seconds from `kill -9` to the next result, for every death of the broker under load."""
        return [h.working_s for h in self.faults if h.working_s is not None and h.under_load]

    def _plan_check(self) -> Check:
        undone = [f"{h.fault.kind} of {h.fault.target}: {h.failed}" for h in self.faults if not h.done]
        shown = "; ".join(undone[:3]) + (f"; and {len(undone) - 3} more" if len(undone) > 3 else "")
        return Check("every fault of the plan was done", not undone, shown or f"{len(self.faults)} faults")

    def _starts_check(self) -> Check:
        """Nothing but a fault that is meant to may end a run; two that come together end it once."""
        meant = sum(happened.done and happened.fault.ends_run for happened in self.faults)
        says = f"started {self.starts} times, ended on purpose {meant} times"
        return Check("the run ended only where it was made to", self.starts <= 1 + meant, says)

    def _broker_check(self, limit_s: float) -> Check:
        """It answers within the limit whatever else is down, and takes a result by then where results came before."""
        answered = [h.answered_s for h in self.faults if h.answered_s is not None]
        if not answered:
            return Check("the broker comes back", True, "it was not killed")
        back = self.broker_back()
        working = (
            f"at work after {max(back):.2f} s at most, of {len(back)} times under load" if back else "never under load"
        )
        says = f"answers after {max(answered):.2f} s at most, of {len(answered)} times; {working}; limit {limit_s:g} s"
        return Check("the broker comes back", max(answered + back) <= limit_s, says)


def render(report: Report) -> Group:
    """For a terminal."""
    table = Table(title=f"chaos in {report.run}", title_justify="left")
    for name, justify in (("fault", "left"), ("done", "right"), ("not", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type] # rich names these
    done, total = report.by_kind(), Counter(str(happened.fault.kind) for happened in report.faults)
    for kind, count in sorted(total.items()):
        table.add_row(kind, str(done.get(kind, 0)), str(count - done.get(kind, 0) or ""))
    checks = Table(show_header=False, box=None)
    for check in report.checks:
        checks.add_row("[green]ok[/]" if check.ok else "[red]OFF[/]", check.name, check.says)
    return Group(table, checks)
