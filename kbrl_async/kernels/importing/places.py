"""Which format a place has, and reading it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kbrl_async.errors import ProblemError
from kbrl_async.kernels.importing.formats import (
    flashinfer_trace,
    modules,
    multikernelbench,
    robust_kbench,
    rows,
    tritonbench,
)
from kbrl_async.kernels.importing.found import Found
from kbrl_async.kernels.importing.licences import license_of
from kbrl_async.kernels.problems.declared import declared
from kbrl_async.kernels.problems.sources import hub

FORMATS: dict[str, tuple[Callable[[Path], bool], Callable[[Path], Iterator[Found]]]] = {
    "robust-kbench": (robust_kbench.knows, robust_kbench.read),
    "flashinfer-trace": (flashinfer_trace.knows, flashinfer_trace.read),
    "multikernelbench": (multikernelbench.knows, multikernelbench.read),
    "tritonbench": (tritonbench.knows, tritonbench.read),
    "rows": (rows.knows, rows.read),
    "modules": (modules.knows, modules.read),
}
"""By name: whether a place looks like it, and its problems, one after the other. The first to know a place reads it."""


def read(place: str, form: str = "") -> tuple[str, Iterator[Found]]:
    """The format's name, and what is in the place: a folder, a file, a data set of the hub by its name or a short one.

    :raises ProblemError: there is no such place, or nothing knows it.
    """
    path = Path(place).expanduser()
    name = rows.HUB.get(place, place)
    if not path.exists() and hub.looks_like_name(name) and form in ("", "rows"):
        return "rows", rows.read_hub(name)
    if not path.exists():
        raise ProblemError(f"there is no {place}", "Clone or download the problem set, and name its folder or file")
    if form and form not in FORMATS:
        raise ProblemError(f"there is no format {form!r}", f"Choose among {', '.join(FORMATS)}")
    for name, (knows, reader) in FORMATS.items():
        if name == form or (not form and knows(path)):
            return name, reader(path) if name == "rows" else _licensed(reader(path), license_of(path))
    raise ProblemError(f"{place} holds no problems of a known format", f"Formats: {', '.join(FORMATS)}; see --help")


def _licensed(found: Iterator[Found], by: str) -> Iterator[Found]:
    """Rows of a file say theirs themselves; files of a checkout have the checkout's, or their own."""
    for one in found:
        own = one.license or _own(one.source)
        yield msgspec.structs.replace(one, license=own or by)


def _own(source: str) -> str:
    """What a problem file declares."""
    try:
        return declared(source).license
    except (ProblemError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
