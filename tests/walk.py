"""README and tutorial walked as a newcomer does: a fresh clone, an empty home, every command in its order.

::

    python -m tests.walk [--place FOLDER] [PAGE …]      about 25 minutes on two cores; needs the package index

    pages ─▶ steps (commands, files to write, what stands in running text and tables) ─▶ one shell ─▶ log.txt, table

A step stumbles if it ends with a code that the page does not announce, says nothing, or shows a traceback. The exit
code is 1 if any does. `tests/e2e/test_docs.py` runs the same commands without the installation and the minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.pages import ROOT, Page

PAGES = ("README.md", "docs/tutorial.md")
SHORT = "max_steps=2 eval_samples=2"
ADDED: Mapping[str, str] = {
    "kbrl train level=1 seed=1 name=level-1": SHORT,
    "kbrl train seed=1 name=second": SHORT,
    "kbrl train name=again sft.max_seconds=3600": f"{SHORT} sft.steps=20 max_minutes=1",
    "kbrl train --processes compile_farm=2,timing_bench=2": "--dry-run",
    "kbrl train --config configs/gpu.yaml max_minutes=11": "--dry-run",
}
"""What would take long, or more cores than there are."""
INSTEAD: Mapping[str, str] = {
    "kbrl compare RUN RUN --output compared.html": "kbrl compare default level-1 --output compared.html",
    "kbrl bench": "kbrl bench --problem example_problem.py --candidate example_kernel.py",
    "runs/latest/": "ls runs/latest/",
    "configs/agents.yaml": "kbrl train --dry-run --config configs/agents.yaml",
}
"""What needs a name."""
SERVES = ("kbrl top", "kbrl logs -f", "tensorboard")
"""Ends with Ctrl-C: after ten seconds here."""
LEFT_OUT = ("make test", "make lint", "make docs", "kbrl optimize", "kbrl export", "problems=", "python -m tests")
"""Of running text: what CI runs, and what is only named and needs more words."""
ANNOUNCED = {
    "backend=triton": (0, 3),
    "configs/gpu.yaml": (3,),
    "placement=split": (3,),
    "kbrl optimize": (0, 1),
}
"""Exit codes of which the page says that its reader may see them: this host has no GPU, no kernel was proven faster."""
_SAYS_NOTHING = (". .venv/bin/activate", "kbrl logs --level error", "kbrl logs -f")
_RUNS = re.compile(r"(kbrl|make|python|tensorboard) [\w-]")
_SETTING = re.compile(r"(--config )?[\w./]+(=[\w/.-]+|\.yaml)$")
_LAST = "walked:"


class Step(NamedTuple):
    where: str
    text: str
    writes: str = ""
    """The file that the text goes into; empty: a command."""

    @property
    def shown(self) -> str:
        return self.writes or f"{INSTEAD.get(self.text, self.text)} {ADDED.get(self.text, '')}".strip()


class Done(NamedTuple):
    step: Step
    seconds: float
    code: int
    output: str

    @property
    def stumble(self) -> str:
        expected = next((codes for words, codes in ANNOUNCED.items() if words in self.step.text), (0,))
        if self.code not in expected and not (self.code in (0, 124, 130) and self.step.text.startswith(SERVES)):
            return f"exit code {self.code}"
        if "Traceback" in self.output:
            return "a traceback"
        return "" if self.output.strip() or self.step.text in _SAYS_NOTHING or self.step.writes else "says nothing"


def steps(page: Page) -> list[Step]:
    """In the order of the page; what an earlier line had is not done again."""
    found = {(c.line, c.text): Step(c.where, c.text) for c in page.commands}
    prose = dict(page.prose)
    for block in page.blocks:
        named = re.search(r"`(\S+\.py)`:\s*$", prose.get(block.line - 2, ""))
        if named and block.language == "python":
            text = "\n".join(block.lines)
            found[block.line, text] = Step(f"{page.name}:{block.line}", text, named[1])
    for line, text in page.code:
        if command := _of_running_text(text, in_table=prose[line].startswith("|")):
            found.setdefault((line, command), Step(f"{page.name}:{line}", command))
    ordered = [found[key] for key in sorted(found)]
    return [step for n, step in enumerate(ordered) if step.text not in {earlier.text for earlier in ordered[:n]}]


def _of_running_text(text: str, *, in_table: bool) -> str:
    if "…" in text or text.startswith(LEFT_OUT):
        return ""
    if text in INSTEAD or _RUNS.match(text):
        return text
    is_setting = in_table and _SETTING.match(text) and not re.search("[A-Z]{3}", text)
    return f"kbrl train --dry-run {text}" if is_setting else ""


class Shell:
    """One bash in a fresh clone: what a command leaves behind is there for the next."""

    def __init__(self, place: Path, settings: Sequence[str] = ()) -> None:
        """`settings`: of every command, as variables `KBRL_KEY=VALUE`."""
        self.clone = place / "kbrl-async"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        (place / "home").mkdir()
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("KBRL", "PYTHON", "XDG", "VIRTUAL"))}
        for setting in settings:
            name, _, value = setting.partition("=")
            kept[f"KBRL_{name.upper().replace('.', '__')}"] = value
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], cwd=self.clone, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env={**kept, "HOME": str(place / "home"), "BROWSER": "true"},
        )  # fmt: skip

    def do(self, step: Step) -> Done:
        began = time.monotonic()
        if step.writes:
            (self.clone / step.writes).write_text(step.text + "\n")
            return Done(step, 0.0, 0, "")
        command = f"timeout -s INT 10 {step.shown}" if step.shown.startswith(SERVES) else step.shown
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{command} < /dev/null\ncode=$?; echo; echo {_LAST} $code\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(_LAST):
                code = int(line.removeprefix(_LAST))
                return Done(step, time.monotonic() - began, code, "".join(lines))
            lines.append(line)
        raise SystemExit("the shell ended: " + "".join(lines[-20:]))


def walk(pages: list[str], place: Path, settings: Sequence[str] = ()) -> Iterator[Done]:
    shell = Shell(place, settings)
    done: set[str] = set()
    with (place / "log.txt").open("w") as log:
        for step in [step for name in pages for step in steps(Page(ROOT / name))]:
            if step.text in done:
                continue
            done.add(step.text)
            walked = shell.do(step)
            told = f"{walked.seconds:.1f} s, {walked.code}"
            log.write(f"\n$ {step.shown}   [{step.where}: {told}] {walked.stumble}\n{walked.output}")
            log.flush()
            print(f"{step.where:21} {told:>12}  {walked.stumble or 'fine':13} {step.shown}", flush=True)
            yield walked


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("--place", type=Path, help="an empty folder; default: a new one among the temporary files")
    words = "of every command, such as max_minutes=2 on a busy host"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=words)
    parser.add_argument("pages", nargs="*", default=list(PAGES))
    args = parser.parse_args()
    place = args.place or Path(tempfile.mkdtemp(prefix="walk-"))
    place.mkdir(exist_ok=True)
    stumbles = [walked for walked in walk(args.pages, place, args.set) if walked.stumble]
    print(f"{len(stumbles)} stumbles; what each command said: {place / 'log.txt'}")
    return 1 if stumbles else 0


if __name__ == "__main__":
    sys.exit(main())
