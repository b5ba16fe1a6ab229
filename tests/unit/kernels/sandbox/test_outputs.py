"""What hostile tools leave behind: no link is followed, no FIFO waited for, and no more read than is wanted."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbrl_async.kernels.backends.building import ArtifactStore, context
from kbrl_async.kernels.backends.building.context import BuildContext, ToolRun
from kbrl_async.kernels.sandbox import BadOutput, is_over, read_output, remove_tree
from kbrl_async.kernels.settings import CompileFarm
from tests.unit.kernels.sandbox.test_attacks import processes_named


def test_an_ordinary_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"built")
    assert read_output(tmp_path, "out", 5) == b"built"


def traps(folder: Path) -> dict[str, str]:
    """Names of what is no ordinary file, and what is said of each."""
    secret = folder.parent / "secret"
    secret.write_text("of the host")
    (folder / "link").symlink_to(secret)
    os.link(secret, folder / "hard")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "fifo")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 1 << 40)
    (folder / "large").write_bytes(bytes(101))
    return {
        "link": "can't be opened",
        "dangling": "can't be opened",
        "missing": "can't be opened",
        "hard": "no ordinary file",
        "fifo": "no ordinary file",
        "sparse": "larger than 100",
        "large": "larger than 100",
        "../secret": "no plain file name",
        "..": "no plain file name",
    }


@pytest.mark.timeout(60)
def test_a_trap_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name, reason in traps(folder).items():
        with pytest.raises(BadOutput, match=reason):
            read_output(folder, name, 100)


def test_a_folder_is_full_by_bytes_or_by_entries_and_a_sparse_file_counts_what_it_takes(tmp_path: Path) -> None:
    os.truncate(os.open(tmp_path / "sparse", os.O_CREAT | os.O_RDWR), 1 << 40)
    assert not is_over(tmp_path, 1 << 20, 10)
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    assert is_over(tmp_path, 1 << 20, 10)
    assert not is_over(tmp_path, 1 << 30, 10)
    assert is_over(tmp_path, 1 << 30, 1)


def test_a_tree_of_a_thousand_levels_is_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("x")
    top = tmp_path / "deep"
    top.mkdir()
    (top / "link").symlink_to(kept)
    here = os.open(top, os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove_tree(top)
    assert not top.exists()
    assert kept.read_text() == "x"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BuildContext]:
    store = ArtifactStore(tmp_path_factory.mktemp("store"))
    made = BuildContext(store, CompileFarm(), memory_bytes=1 << 30, file_bytes=8 << 20)
    made.start()
    yield made
    made.close()


def compile_(workshop: BuildContext, source: str, deadline_s: float = 2.0) -> ToolRun:
    gcc = shutil.which("gcc")
    assert gcc is not None
    with workshop.folder() as folder:
        (folder / "k.c").write_text(source)
        return workshop.run([gcc, "-O1", "-shared", "-fPIC", "k.c", "-o", "k.so"], folder, deadline_s=deadline_s)


DOUBLE = "\n".join(f"#define M{i + 1} M{i} M{i}" for i in range(40))
BOMBS = {
    "an endless device": '#include "/dev/zero"\n',
    "the input of the compiler": '#include "/dev/stdin"\nint x = y;',
    "a secret of the host": '#include "/etc/passwd"\n',
    "a secret through the assembler": 'asm(".incbin \\"/etc/shadow\\"");\n',
    "itself": '#include "k.c"\n',
    "macros that double forty times": f"#define M0 x=x+1;\n{DOUBLE}\nint f(int x) {{ M40 return x; }}",
    "a gigabyte of zeros": "char a[1L << 30] = {1};\n",
    "four gigabytes from the assembler": 'asm(".fill 1 << 32, 1, 0");\n',
    "endless assembler": 'asm(".rept 1000000000\\n.long 1\\n.endr");\n',
    "nesting": "int f(int x) { return " + "(" * 200_000 + "x" + ")" * 200_000 + "; }",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_for_the_compiler_ends_in_time_and_the_next_one_compiles(workshop: BuildContext, bomb: str) -> None:
    run = compile_(workshop, BOMBS[bomb])
    assert run.status != 0
    assert "root:" not in run.output
    assert compile_(workshop, "int f(int x) { return x; }", deadline_s=60.0).status == 0


def test_a_bomb_is_none_of_the_hosts_faults_however_late_it_is_looked_at(
    workshop: BuildContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "is_over", lambda *_: bool(time.sleep(3.0)))
    with workshop.folder() as folder:
        assert workshop.run(["/bin/sh", "-c", "while :; do :; done"], folder, deadline_s=0.2).status is None


def test_a_tool_that_fills_its_folder_is_ended_before_its_deadline(workshop: BuildContext) -> None:
    script = "i=0; while true; do head -c 4000000 /dev/zero > f$i; i=$((i+1)); sleep 0.2; done"
    with workshop.folder() as folder:
        run = workshop.run(["/bin/sh", "-c", script], folder, deadline_s=3600.0)
        size = sum(path.stat().st_size for path in folder.iterdir())
    assert run.status is None
    assert size < 512 << 20


def test_a_tool_whose_words_are_a_link_is_not_listened_to(workshop: BuildContext) -> None:
    with workshop.folder() as folder:
        run = workshop.run(["/bin/sh", "-c", "rm output.txt; ln -s /etc/passwd output.txt"], folder)
    assert run.output == ""


def test_nothing_of_a_bomb_is_left(workshop: BuildContext) -> None:
    mark = f"8642.{os.getpid()}"
    script = f"(setsid sleep {mark} &) ; sleep {mark}"
    with workshop.folder() as folder:
        assert workshop.run(["/bin/sh", "-c", script], folder, deadline_s=1.0).status is None
    assert processes_named(mark) == []
    assert list((workshop.store.root / "work").iterdir()) == []
