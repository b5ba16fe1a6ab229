"""How long each step of the funnel took, and how it ended: a list of `StageReport` that grows by one at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from protocols.records import Fault, StageReport

_SHOWN_S = 0.005
spans: ContextVar[dict[str, float] | None] = ContextVar("spans", default=None)
"""Where seconds of parts are added up, for whoever asks what a candidate's time goes into."""

teller: ContextVar[Callable[[str], None] | None] = ContextVar("teller", default=None)
"""Who wants to hear what takes long, while it does."""


def tell(words: str) -> None:
    """To `teller`."""
    if (found := teller.get()) is not None:
        found(words)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """A piece of work whose seconds are wanted by `spans`."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        _spent(name, time.perf_counter() - begun)


def tally(name: str) -> None:
    """One more of what `spans` counts."""
    _spent(name, 1.0)


def _spent(name: str, seconds: float) -> None:
    if (found := spans.get()) is not None:
        found[name] = found.get(name, 0.0) + seconds


class StageClock:
    """Each stage begins where the one before it ended; what in it took how long stands in its detail::

    clock = StageClock()
    with clock.part("parsing"):
        tree = parse(candidate)
    clock.ends("static", check(tree).fault)     # detail: "parsing 0.12 s"
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._mark = now()
        self._parts: dict[str, float] = {}
        self._reports: list[StageReport] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the stage that goes on; one that comes again is added up."""
        begun = self._now()
        try:
            yield
        finally:
            seconds = self._now() - begun
            self._add(name, seconds)
            _spent(name, seconds)

    @contextlib.contextmanager
    def hears(self, names: Mapping[str, str]) -> Iterator[None]:
        """Spans in here of these names are parts of the stage that goes on, under the names that they stand for."""
        heard: dict[str, float] = {}
        token = spans.set(heard)
        try:
            yield
        finally:
            spans.reset(token)
            for name, seconds in heard.items():
                _spent(name, seconds)
                if name in names:
                    self._add(names[name], seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._parts[name] = self._parts.get(name, 0.0) + seconds

    def ends(self, name: str, fault: Fault = Fault.OK, detail: str = "") -> None:
        mark = self._now()
        parts = [f"{part} {seconds:.2f} s" for part, seconds in self._parts.items() if seconds >= _SHOWN_S]
        said = filter(None, [detail, *parts])
        self._reports.append(StageReport(name, fault, mark - self._mark, "; ".join(said)))
        self._mark = mark
        self._parts.clear()

    def add(self, other: StageClock) -> None:
        """Another clock's stages: those of a name that is here already are added up, and the first fault stays."""
        for report in other.reports:
            place = next((i for i, known in enumerate(self._reports) if known.name == report.name), None)
            if place is None:
                self._reports.append(report)
                continue
            known = self._reports[place]
            worse = known if known.fault is not Fault.OK else report
            seconds = known.seconds + report.seconds
            self._reports[place] = StageReport(known.name, worse.fault, seconds, worse.detail)
        self._mark = self._now()

    def has(self, name: str) -> bool:
        return any(report.name == name for report in self._reports)

    def forget(self, after: int) -> None:
        """All but the first `after` stages: what came then begins anew."""
        del self._reports[after:]

    @property
    def reports(self) -> tuple[StageReport, ...]:
        return tuple(self._reports)
