"""robust-kbench: a folder a task, `func_forward.py` beside `config_forward.json`.

The configuration's parts are the arguments of `get_inputs` and of the constructor: `single_*` of the problem as it
stands, and each of `multi_*`, where there are any, a workload beside it, every part with its fellows of the same place.
A task with `func_backward.py` is a second problem: the same forward, with gradients asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kbrl_async.kernels.importing.found import Found, LeftOut, stem_of, with_arguments

FILE, CONFIG = "func_forward.py", "config_forward.json"
BACKWARD_FILE, BACKWARD_CONFIG = "func_backward.py", "config_backward.json"
PARTS = ("single_input_configs", "single_init_configs", "single_shared_configs")


def knows(place: Path) -> bool:
    return place.is_dir() and next(place.rglob(FILE), None) is not None


def read(place: Path) -> Iterator[Found]:
    for path in sorted(place.rglob(FILE)):
        title = next((p.stem for p in path.parent.glob("[0-9]*_*.py")), path.parent.name)
        yield _found(place, path, CONFIG, stem_of(title))
        if path.with_name(BACKWARD_FILE).is_file():
            yield _found(place, path, BACKWARD_CONFIG, stem_of(f"{title}_backward"), 'BACKWARD = "all"\n')


def _found(place: Path, path: Path, config: str, name: str, more: str = "") -> Found:
    origin, level = str(path.relative_to(place).parent), _level(path)
    try:
        first, *others = _configs(path.with_name(config))
        text = with_arguments(path.read_text(encoding="utf-8", errors="replace"), first, others)
        return Found(name, f"{text}\n\n{more}" if more else text, level, origin)
    except LeftOut as reason:
        return Found(name, "", level, origin, left_out=str(reason))


def _level(path: Path) -> int:
    return next((int(part[-1]) for part in path.parts if part.startswith("level_") and part[-1].isdigit()), 1)


def _configs(path: Path) -> list[dict[str, Any]]:
    """The first configuration of each single part, joined; then those of the parts with several."""
    if not path.is_file():
        return [{}]
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
        several = [parts.get(part.replace("single", "multi")) or [] for part in PARTS]
        rows = [[part[n % len(part)] for part in several if part] for n in range(max(map(len, several)))]
        singles = [(parts.get(part) or [{}])[0] for part in PARTS]
        return [{name: value for part in row for name, value in part.items()} for row in (singles, *rows)]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError):
        raise LeftOut(f"{CONFIG} is no configuration") from None
