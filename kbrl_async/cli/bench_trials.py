"""Measurements of `kbrl bench --aa` in a file, one JSON line each, so that a long table can be made in parts.

A table of a thousand measurements takes longer than some machines are lent for. With `--trials FILE` each one is kept
as it ends; the next call counts what is there and goes on. Files of several equal GPUs may be concatenated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from kbrl_async.errors import UserError
from kbrl_async.kernels.timing.resolution import Trial

Kind = Literal["aa", "ab"]


class Line(msgspec.Struct, frozen=True):
    hardware: str
    kind: Kind
    case: str
    trial: Trial


class Trials:
    """What has been measured on `hardware`, by kind and case; kept in `path` where there is one.

    Measuring is over `minutes` after this was made: `is_over`. Raises `UserError` for a file of other hardware or one
    that holds no trials; a last line that was cut off is measured again.
    """

    def __init__(self, hardware: str, path: Path | None = None, minutes: float | None = None) -> None:
        self._hardware, self._path = hardware, path
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._found: dict[Kind, dict[str, list[Trial]]] = {"aa": {}, "ab": {}}
        kept = list(_lines(path)) if path is not None and path.exists() else []
        for line in kept:
            if line.hardware != hardware:
                raise UserError(f"{path} holds measurements of {line.hardware}", f"Give another file for {hardware}")
            self._found[line.kind].setdefault(line.case, []).append(line.trial)
        if path is not None and kept:
            path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def of(self, kind: Kind) -> dict[str, list[Trial]]:
        return {case: list(trials) for case, trials in self._found[kind].items()}

    def count(self, kind: Kind, case: str) -> int:
        return len(self._found[kind].get(case, ()))

    def add(self, kind: Kind, case: str, trial: Trial) -> None:
        self._found[kind].setdefault(case, []).append(trial)
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(Line(self._hardware, kind, case, trial)) + b"\n")


def _lines(path: Path) -> Iterator[Line]:
    rows = path.read_bytes().split(b"\n")
    for number, row in enumerate(rows, 1):
        try:
            if row:
                yield msgspec.json.decode(row, type=Line)
        except msgspec.MsgspecError as error:
            if number == len(rows):  # without its newline: the writer was killed
                return
            cause = f"{path}:{number} is no measurement: {error}"
            raise UserError(cause, "Give a file that --trials wrote, or a new one") from None
