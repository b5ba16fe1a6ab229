"""The field's words: no class, function, field or setting of ours has a name that the re-cut gave up for another."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("kbrl_async", "services", "protocols", "benchmarks", "examples")
INSTEAD = {
    "Campaign": "RunState",
    "GroupBook": "RolloutBuffer",
    "Conductor": "RolloutManager",
    "Dialogues": "Trajectories",
    "Board": "MetricsWriter, or the output that it writes to",
    "Futility": "FailureGuard",
    "Lessons": "SftDataset",
    "Depot": "ArtifactExchange",
    "Cohort": "RunningBatch",
    "Team": "ProcessGroup",
    "Spread": "ShardedModel",
    "Workshop": "BuildContext",
    "tripwire": "static check",
    "tripwires": "static checks",
    "dataset_builder": "prompt, reward",
    "max_lag": "max_staleness",
    "window_lag": "max_staleness",
}
"""By the name that was ours, the field's. A file's lines that are followed as they grow are a `Tail` again, which is
the field's own word."""
VERBS = {"said": "encode, format", "heard": "decode, receive", "told": "log, format", "shown": "format"}
"""Of functions; an attribute of such a name is something else."""


def given_up(source: str) -> dict[str, str]:
    """By names of classes, functions and the fields of classes that were given up, those in their place."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                known = INSTEAD
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                known = {**INSTEAD, **VERBS}
            case _:
                continue
        if name.lstrip("_") in known:
            found[name] = known[name.lstrip("_")]
    return found


def test_what_is_defined_has_the_fields_name() -> None:
    paths = [path for top in OURS for path in sorted((ROOT / top).rglob("*.py"))]
    assert len(paths) > 700
    found = {str(path.relative_to(ROOT)): names for path in paths if (names := given_up(path.read_text()))}
    assert found == {}


def test_a_name_that_was_given_up_is_found() -> None:
    source = """
class Board:
    max_lag: int = 1
    told: int = 2
    def _told(self): ...
    async def tell(self): said = shown(1)
"""
    assert set(given_up(source)) == {"Board", "max_lag", "_told"}
