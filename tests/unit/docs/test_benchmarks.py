"""Every benchmark says what it takes, and those that pages name are there, with the options beside them."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks.harness import ROOT, Commands

PAGES = (*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("configs/*.yaml"))
QUESTIONS = sorted(
    path.stem for path in (ROOT / "benchmarks").iterdir() if path.stem not in ("harness", "__pycache__", "__init__")
)
SPOKEN = re.compile(r"(?:python|torchrun [^`\n]*?)\s+-m\s+benchmarks\.(\w+)([^`\n]*)")


def commands_of(question: str) -> Commands:
    place = f"benchmarks.{question}"
    if (ROOT / "benchmarks" / question).is_dir():
        place += ".__main__"
    found = importlib.import_module(place).commands
    assert isinstance(found, Commands)
    return found


def said() -> list[tuple[str, str, str]]:
    """(page, question, words after it) of every command that a page names."""
    found = []
    for page in PAGES:
        text = re.sub(r"(?<!`)\n(?=[^\n`]*`)", " ", page.read_text(encoding="utf-8"))  # a command may be broken in two
        found += [(page.name, *match.groups()) for match in SPOKEN.finditer(text)]
    return found


def help_of(commands: Commands, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        commands.main([*words, "--help"])
    assert ended.value.code == 0, words
    return capsys.readouterr().out


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_sub_command_answers_help(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = commands_of(question)
    assert commands.question == question
    shown = help_of(commands, [], capsys)
    assert shown.startswith(f"usage: python -m benchmarks.{question} ")
    assert "option_strings" not in shown, "a % of a docstring was filled in"
    for name in commands.functions:
        assert name in help_of(commands, [name], capsys)


@pytest.mark.parametrize(("page", "question", "words"), sorted(set(said())))
def test_what_a_page_names_is_there(page: str, question: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert question in QUESTIONS, page
    commands, (name, *rest) = commands_of(question), shlex.split(words, comments=True)
    assert name in commands.functions, f"{page}: benchmarks.{question} has no {name}"
    shown = help_of(commands, [name], capsys)
    for option in (word for word in rest if word.startswith("--")):
        assert option in shown, f"{page}: benchmarks.{question} {name} has no {option}"


def test_pages_name_benchmarks() -> None:
    assert {question for _, question, _ in said()} == set(QUESTIONS)


def test_no_page_names_a_benchmark_as_a_file() -> None:
    for page in PAGES:
        for path in re.findall(r"benchmarks/[\w/]+\.py", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


class TestTheHarness:
    def commands(self, found: list[object]) -> Commands:
        commands = Commands("nothing", "Words.")

        @commands
        def measure(
            *settings: str, sizes: tuple[int, ...] = (1, 2), fast: bool = False, place: Path | None = None
        ) -> dict[str, object]:
            """Measures."""
            found.append((settings, sizes, fast, place))
            return {"ok": fast, "third": 1 / 3, "place": place}

        return commands

    def test_options_are_the_functions_parameters(self) -> None:
        found: list[object] = []
        with pytest.raises(SystemExit) as ended:
            self.commands(found).main(["measure", "--sizes", "3,4", "--fast", "--place", "x", "a=1", "b=2"])
        assert found == [(("a=1", "b=2"), (3, 4), True, Path("x"))]
        assert ended.value.code == 0

    def test_the_last_line_is_the_result_and_what_is_not_ok_ends_with_1(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            self.commands([]).main(["measure"])
        assert ended.value.code == 1
        line = capsys.readouterr().out.splitlines()[-1]
        assert line.startswith(
            '{"benchmark": "nothing measure", "ok": false, "third": 0.33333, "place": null, "machine": {'
        )
