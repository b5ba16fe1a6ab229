"""Every command of README and docs is run here, or, where that can't be, taken by the real parsers and checks.

::

    pages ─▶ commands ─┬─▶ reads or makes files: run, in a folder with a small finished run
                       └─▶ NOT_RUN (tests/commands.py): parsed, its settings resolved, its files looked for

A command that is neither in `NOT_RUN` nor one of `READING` fails: decide, and list it.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import tomllib
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kbrl_async import cli
from kbrl_async.cli import distill, optimize, shared
from kbrl_async.cli import eval as evaluate
from kbrl_async.errors import HostError, KbrlError
from kbrl_async.lab.optimize import engine
from kbrl_async.lab.optimize.targets import Given, read_target
from tests.commands import NOT_RUN, READING
from tests.pages import ROOT, Command, Page, pages
from tests.running import RunFolder
from tests.unit.lab.plan.test_observing import lines as steady_run

pytestmark = pytest.mark.timeout(1800)

PAGES = [page for page in pages() if page.commands]

SAID = {r"\bg\d{6}\b": "g000001", r"\bRUN\b": "default", r"\bNAME\b": "sampler"}
"""What a page says, and what the small run has."""

SOFTMAX = '''import torch
import torch.nn as nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
#include <math.h>
void softmax(const float *x, float *y, long rows, long n) {
  for (long r = 0; r < rows; r++) {
    const float *a = x + r * n;
    float *b = y + r * n, top = a[0], sum = 0;
    for (long i = 1; i < n; i++) top = fmaxf(top, a[i]);
    for (long i = 0; i < n; i++) sum += b[i] = expf(a[i] - top);
    for (long i = 0; i < n; i++) b[i] /= sum;
  }
}
"""


class ModelNew(nn.Module):
    def __init__(self, *args):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "softmax")

    def forward(self, x):
        y = torch.empty_like(x)
        n = x.shape[-1]
        self.kernel(x, y, x.numel() // n, n)
        return y
'''
LAYERS = """import torch
import torch.nn as nn


def bias_gelu(x, bias):
    return torch.nn.functional.gelu(x + bias)


class GatedNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x) * torch.sigmoid(x)


def make_inputs():
    return [torch.randn(8, 1024)]
"""


def block(page: str, language: str) -> str:
    """What a page has its reader write."""
    (first, *_) = (found for found in Page(ROOT / "docs" / page).blocks if found.language == language)
    return "\n".join(first.lines) + "\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, interrupted_run: RunFolder) -> Path:
    """A folder as a reader would have it: a finished run under the names that pages use, and files of his own."""
    place = Path(tmp_path_factory.mktemp("reader"))
    of_process = ("sockets", "*.lock")
    shutil.copytree(interrupted_run.path, place / "runs" / "default", ignore=shutil.ignore_patterns(*of_process))
    path = RunFolder(place).path
    for name in ("first-try", "level-1", "one", "two", "three", "second"):
        left_out = shutil.ignore_patterns("artifacts", "checkpoints", "policies", *of_process)
        shutil.copytree(path, place / "runs" / name, ignore=left_out)
    # what one update of so small a policy may lack: a correct kernel, and seconds enough to be measured
    (path / "kernels").mkdir(exist_ok=True)
    (path / "kernels" / "L1_13_softmax.py").write_text(SOFTMAX)
    steady = b"".join(msgspec.json.encode(sample) + b"\n" for sample in steady_run())
    (path / "metrics" / "system.jsonl").write_bytes(steady)
    for name in ("configs", "deploy", "examples", "Procfile", "benchmarks"):
        (place / name).symlink_to(ROOT / name)
    _files_of_the_reader(place)
    return place


def _files_of_the_reader(place: Path) -> None:
    written = {
        "softmax.py": SOFTMAX,
        "layers.py": LAYERS,
        "my_module.py": block("tutorial.md", "python"),
        "my_problem.py": block("howto-problems.md", "python"),
        "mine.py": block("howto-reward.md", "python"),
        "my_problems/level1/01_scaled_relu.py": block("howto-problems.md", "python"),
        "my_problems/level1/02_shifted_relu.py": block("howto-problems.md", "python").replace("x * 2", "x"),
        "my_problems/index.toml": block("howto-problems.md", "toml"),
        "tasks.jsonl": block("howto-problems.md", "json"),
        "model.yaml": block("howto-model.md", "yaml"),
        "package/__init__.py": "",
        "package/layers.py": LAYERS,
    }
    for name, text in written.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


@pytest.fixture
def here(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(finished)
    monkeypatch.syspath_prepend(str(finished))
    monkeypatch.setattr(webbrowser, "open", lambda _uri: True)
    monkeypatch.setenv("COLUMNS", "200")
    newest(finished)
    yield finished
    for begun in (finished / "runs").glob("default-*"):  # by `kbrl prepare`: the next page would continue it
        shutil.rmtree(begun)


def newest(place: Path) -> None:
    """`kbrl prepare` has made another run the newest."""
    latest = place / "runs" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to("default")


DONE: set[str] = set()
"""Run by an earlier page: the same words do the same."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_page_works(page: Page, here: Path, capfd: pytest.CaptureFixture[str],
                                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    for command in page.commands:
        if command.text in DONE:
            continue
        DONE.add(command.text)
        if listed(command.text):
            check(command)
        else:
            execute(command, capfd, monkeypatch)
            newest(here)


def listed(text: str) -> str:
    """The entry of `NOT_RUN` that `text` is; empty where there is none."""
    for entries in NOT_RUN.values():
        for entry in entries:
            if text == entry or (entry.endswith("…") and text.startswith(entry.removesuffix("…"))):
                return entry
    return ""


def execute(command: Command, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text, _, reader = command.text.partition(" | ")
    for said, ours in SAID.items():
        text = re.sub(said, ours, text)
    program, *words = shlex.split(text)
    if program == "export":
        name, _, value = words[0].partition("=")
        monkeypatch.setenv(name, value)
        if name == "PYTHONPATH":
            monkeypatch.syspath_prepend(value)
        return
    assert program == "kbrl", f"{command.where}: {command.text!r} is not run here; list it in NOT_RUN with the reason"
    assert words[0] in READING or "--dry-run" in words, (
        f"{command.where}: {command.text!r} may take long; list it in NOT_RUN with the reason"
    )
    capfd.readouterr()
    code = cli.main(words)
    printed, complained = capfd.readouterr()
    # a page may show what this host can't run: a GPU, vLLM
    fine = (0, HostError.exit_code) if "--dry-run" in words else (0,)
    assert code in fine, f"{command.where}: {command.text!r} ended with {code}: {complained or printed}"
    assert printed or complained or words[0] == "logs", f"{command.where}: {command.text!r} says nothing"
    if reader:
        assert reader.startswith("jq "), f"{command.where}: what is {reader!r}?"
        assert all(json.loads(line) for line in printed.splitlines())


def check(command: Command) -> None:
    """What can be known without running it."""
    words = shlex.split(command.text, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    places = [
        n for n, word in enumerate(words) if word.split("/")[-1] == "kbrl" and words[max(0, n - 1)] not in ("-n", "-u")
    ]
    if places:
        _check_kbrl(
            command, list(itertools.takewhile(lambda word: word not in (";", "&&", "|"), words[places[-1] + 1 :]))
        )
    elif words[0] == "make":
        assert re.search(rf"^(\w+ )*{words[1]}( \w+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
    elif words[:2] == ["pip", "install"]:
        _check_extras(command, words[-1])
    elif words[0] == "honcho":
        _check_procfile(command, words)
    elif words[:2] == ["python", "-m"]:
        parts = Path(*words[2].split("."))
        roots = (ROOT, *(ROOT / "environments").iterdir())
        assert any((root / parts).is_dir() or (root / parts).with_suffix(".py").is_file() for root in roots), command
    _check_paths(command, words)


def _check_kbrl(command: Command, words: list[str]) -> None:
    words = [re.sub(r"^\$\w+$", "bench", word) for word in words]
    args = cli.parse(words)
    match args.command:
        case "eval":
            evaluate.resolve(args)
        case "optimize":
            engine.resolve(args.policy, args.version, args.config, args.overrides)
            read_target(args.target, Given(args.inputs, args.inputs_from, args.init), shapes="cpu")
        case _ if hasattr(args, "overrides"):
            shared.resolve(args)


def _check_extras(command: Command, package: str) -> None:
    named = re.fullmatch(r"(?:kbrl-async|\.|\./(environments/\w+))\[([\w,-]+)\]", package)
    assert named is not None, command
    table = tomllib.loads((ROOT / (named[1] or ".") / "pyproject.toml").read_text())
    extras = table["project"]["optional-dependencies"]
    assert set(named[2].split(",")) <= set(extras), f"{command.where}: pyproject.toml has no such extra: {package}"


def _check_procfile(command: Command, words: list[str]) -> None:
    names = set(re.findall(r"^(\w+):", (ROOT / "Procfile").read_text(), re.MULTILINE))
    counts = [part.partition("=")[0] for word in words if "=" in word for part in word.split(",")]
    assert set(counts) <= names, command


def _check_paths(command: Command, words: list[str]) -> None:
    """Files of the repository that a command names."""
    for word in words:
        path = word.rpartition("=")[2]
        ours = re.match(r"(deploy|configs|benchmarks|examples|scripts|kbrl_async|services)/", path)
        if ours and "benchmark_eval" not in path:
            assert (ROOT / path).exists(), f"{command.where}: there is no {path}"


def test_nothing_is_listed_that_no_page_says() -> None:
    said = {listed(command.text) for page in PAGES for command in page.commands}
    assert {entry for entries in NOT_RUN.values() for entry in entries} - said == set()


WRONG = (
    "kbrl eval default --heldouts",
    "kbrl train batchsize=3",
    "kbrl optimize nowhere.py",
    "make nothing",
    "pip install 'kbrl-async[nothing]'",
    "honcho start -c farm=2",
    "python -m benchmarks.nothing",
    "sbatch deploy/slurm/nothing.sbatch",
)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_run_but_wrong_is_found(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "default").mkdir(parents=True)
    with pytest.raises((AssertionError, KbrlError)):
        check(Command("x.md", 1, text))


def test_what_is_neither_run_nor_listed_is_found(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("kbrl train", "rm -rf runs", "kbrl verify --problem nothing --candidate nothing"):
        with pytest.raises(AssertionError):
            execute(Command("x.md", 1, text), capfd, monkeypatch)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_every_command_in_running_text_is_taken_by_the_parser(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    names = set(cli.COMMANDS)
    for line, text in page.code:
        if not re.match(r"kbrl [a-z]+( |$)", text):
            continue
        words = shlex.split(text)[1:]
        assert words[0] in names, f"{page.name}:{line}: there is no kbrl {words[0]}"
        if len(words) == 1 or "…" in text:
            continue
        for parts in _choices(words):
            _parsed(f"{page.name}:{line}", parts, capsys)


EPILOGS = {
    "kbrl": cli.EXAMPLES,
    "kbrl distill": distill.EXAMPLES,
    "kbrl eval": evaluate.EXAMPLES,
    "kbrl optimize": optimize.EXAMPLES,
}


@pytest.mark.parametrize("name", EPILOGS)
def test_every_example_of_the_help_is_taken_by_the_parser(name: str) -> None:
    examples = re.findall(r"^  kbrl (.+?)(?:  .*|)$", _CONTINUED.sub(" ", EPILOGS[name]), re.MULTILINE)
    assert len(examples) > 3
    for example in examples:
        assert cli.parse(shlex.split(example)).command, example


_CONTINUED = re.compile(r"[ ]*\\\n[ ]*")
"""An example of two lines."""


def _parsed(where: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cli.parse(words)
    except SystemExit:
        complaint = capsys.readouterr().err
        # a page may leave arguments out, not invent them
        assert "required" in complaint or "expected one argument" in complaint, f"{where}: {complaint}"


def _choices(words: list[str]) -> list[list[str]]:
    """`a|b` as one command each."""
    for n, word in enumerate(words):
        if "|" in word:
            return [[*words[:n], part, *words[n + 1 :]] for part in word.split("|")]
    return [words]
