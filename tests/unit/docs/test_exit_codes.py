"""Exit codes: those that pages list are those that commands end with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kbrl_async import cli, errors
from kbrl_async.cli import launch, optimize, verify
from tests.pages import ROOT

LISTED = re.compile(r"(?:^|· |, |: )(\d+) (?=\w)")


def table(page: str) -> dict[int, str]:
    """Rows `| code | words |`."""
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / page).read_text(), re.MULTILINE)
    return {int(code): words for code, words in rows}


def sentence(text: str) -> set[int]:
    """Of the paragraph that begins with "Exit codes"."""
    (paragraph,) = (part for part in re.split(r"\n\s*\n", text) if "Exit codes:" in part)
    return {int(code) for code in LISTED.findall(" ".join(paragraph.partition("Exit codes:")[2].split()))}


CODES = table("docs/verify.md")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["verify", "--example", "c"]) == 0
    (tmp_path / "kernel.c").write_text("void f(float *x) {}\n")
    return tmp_path


def change(file: str, old: str, new: str) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))

    return changed


PROBLEM, KERNEL = "example_problem.py", "example_kernel.py"
WAYS: list[tuple[int, str, Callable[[Path], None], tuple[str, str]]] = [
    (0, "correct", lambda _: None, (PROBLEM, KERNEL)),
    (1, "the candidate's fault", change(KERNEL, "expf(-", "expf("), (PROBLEM, KERNEL)),
    (1, "the candidate's fault", change(KERNEL, "class ModelNew", "class Other"), (PROBLEM, KERNEL)),
    (2, "no such problem", lambda _: None, ("sofmax", KERNEL)),
    (2, "no such file", lambda _: None, (PROBLEM, "nowhere.py")),
    (2, "a kernel without the module", lambda _: None, (PROBLEM, "kernel.c")),
    (3, "the problem breaks its contract", change(PROBLEM, "def get_inputs", "def inputs"), (PROBLEM, KERNEL)),
    (3, "its own reference fails", change(PROBLEM, "torch.randn(512, 1024)", "None"), (PROBLEM, KERNEL)),
]


@pytest.mark.parametrize(("code", "words", "prepare", "names"), WAYS)
def test_kbrl_verify_ends_with_the_code_of_the_page(
    example: Path, code: int, words: str, prepare: Callable[[Path], None], names: tuple[str, str]
) -> None:
    assert words in CODES[code]
    prepare(example)
    assert cli.main(["verify", "--problem", names[0], "--candidate", names[1], "--no-timing"]) == code


def test_a_missing_tool_is_ours(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise errors.MissingTool("gcc is not installed")

    monkeypatch.setattr("kbrl_async.kernels.funnel.verify", missing)
    assert "a tool is missing" in CODES[3]
    assert cli.main(["verify", "--problem", PROBLEM, "--candidate", KERNEL]) == 3


def test_a_mistake_of_ours_is_one_line_and_a_file(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mistaken(*_: object, **__: object) -> None:
        raise ValueError("of two\nlines")

    monkeypatch.setattr("kbrl_async.kernels.funnel.verify", mistaken)
    monkeypatch.setattr("tempfile.tempdir", str(example))
    assert "a mistake of kbrl's" in CODES[3]
    assert cli.main(["verify", "--problem", PROBLEM, "--candidate", KERNEL]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    (traceback,) = example.glob("kbrl-error-*.txt")
    assert line == f"error: unexpected ValueError: of two lines. Please report it with {traceback}, its traceback"
    assert "in mistaken" in traceback.read_text()


def test_ctrl_c_has_its_code(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kbrl_async.kernels.funnel.verify", stopped)
    assert CODES[130] == "stopped by Ctrl-C"
    assert cli.main(["verify", "--problem", PROBLEM, "--candidate", KERNEL]) == 130


def test_no_code_is_listed_that_nothing_ends_with() -> None:
    assert set(CODES) == {code for code, *_ in WAYS} | {130}
    assert sentence(verify.__doc__ or "") == set(CODES)


def test_pages_and_commands_list_the_same_codes() -> None:
    assert sentence((ROOT / "docs" / "optimize.md").read_text()) == sentence(optimize.__doc__ or "")
    raised = {kind.exit_code for kind in (errors.UserError, errors.HostError, errors.RunError)}
    assert sentence((ROOT / "README.md").read_text()) == {0, *launch.INTERRUPTED} | raised
