"""Other builds of this package beside today's: the next one, whose messages and records carry a field more each."""

from __future__ import annotations

import ast
import os
import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
ADDED = "of_the_next_revision"


def next_protocols(folder: Path) -> Path:
    """A folder for the front of PYTHONPATH: today's protocols, with `ADDED` at the end of every struct on the wire."""
    shutil.copytree(REPOSITORY / "protocols", folder / "protocols", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("messages.py", "records.py"):
        path = folder / "protocols" / name
        path.write_text(_with_a_field_more(path.read_text()))
    return folder


def _with_a_field_more(source: str) -> str:
    lines = source.splitlines()
    structs = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and _is_struct(node)]
    for struct in reversed(structs):
        fields = [node for node in struct.body if not isinstance(node, ast.FunctionDef)]
        lines.insert(fields[-1].end_lineno or 0, f'    {ADDED}: str = "a word that older builds do not know"')
    return "\n".join(lines) + "\n"


def _is_struct(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base) == "msgspec.Struct" for base in node.bases)


def environment(build: Path | None) -> dict[str, str]:
    """Of a process that runs `build`; None: today's."""
    paths = [str(build)] if build else []
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KBRL_")}
    return {**kept, "PYTHONPATH": os.pathsep.join([*paths, str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
