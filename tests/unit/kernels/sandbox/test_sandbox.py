"""The sandbox by itself: layers, limits, death, and what it says when a layer is missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import site
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kbrl_async.errors import InfraError
from kbrl_async.kernels.sandbox import Access, Isolation, Limits, Zygote, client, layers, linux
from kbrl_async.kernels.sandbox.tool import ToolCommand
from tests.unit.kernels.sandbox.test_attacks import PATIENCE_S, processes_named

ENTRY = "kbrl_async.kernels.sandbox.tool:run"


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool") as made:
        yield made


def tool(
    zygote: Zygote, folder: object, script: str, limits: Limits | None = None, within_s: float = 60.0
) -> int | None:
    command = ToolCommand(["/bin/sh", "-c", script], str(folder), {"PATH": "/usr/bin:/bin"})
    access = Access(write=(str(folder),))
    child = zygote.spawn(ENTRY, msgspec.msgpack.encode(command), (), limits, access)
    try:
        return child.result(within_s)
    finally:
        child.close()


def test_a_tool_may_write_its_folder_and_nothing_else(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    folder, outside = os.path.join(tmp_path, "in"), os.path.join(tmp_path, "out")
    os.mkdir(folder)
    os.mkdir(outside, 0o777)
    assert tool(zygote, folder, "echo x > file && cat file") == 0
    assert tool(zygote, folder, f"echo x > {outside}/file") != 0
    assert os.listdir(outside) == []


def test_a_tool_that_takes_too_long_is_killed_with_its_children(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    mark = f"6420.{os.getpid()}"
    assert tool(zygote, tmp_path, f"sleep {mark} & sleep {mark}", within_s=1.0) is None
    assert processes_named(mark) == []


def test_a_file_has_a_largest_size(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    assert tool(zygote, tmp_path, "head -c 4000000 /dev/zero > big", Limits(file_bytes=1 << 20)) != 0
    assert os.path.getsize(os.path.join(tmp_path, "big")) <= 1 << 20


def test_the_environment_is_clean(zygote: Zygote, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    with Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool") as fresh:
        assert tool(fresh, tmp_path, '[ -z "$SECRET" ]') == 0


def test_closing_waits_for_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a verifier's next sandbox imports torch in another thread."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made, told = Zygote(("sleeper",), profile="tool"), list[str]()

    def start() -> None:
        try:
            made.start()
        except InfraError as error:
            told.append(str(error))

    starting = threading.Thread(target=start)
    starting.start()
    while made.pid is None:
        time.sleep(0.01)
    made.close()
    starting.join()
    assert len(told) == 1
    assert "timed out" not in told[0], "it has ended, nobody has waited until it should have started"
    assert made.pid is None


def test_a_child_dies_with_its_zygote(tmp_path: os.PathLike[str]) -> None:
    with Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool") as zygote:
        command = ToolCommand(["/bin/sh", "-c", "sleep 300"], str(tmp_path), {"PATH": "/usr/bin:/bin"})
        child = zygote.spawn(ENTRY, msgspec.msgpack.encode(command), (), None, Access(write=(str(tmp_path),)))
        child.channel.recv(1 << 16)
        zygote.close()
        assert child.has_ended(within_s=60.0)
        child.close()


def started(zygote: Zygote, folder: object, script: str) -> client.Child:
    command = ToolCommand(["/bin/sh", "-c", script], str(folder), {"PATH": "/usr/bin:/bin"})
    return zygote.spawn(ENTRY, msgspec.msgpack.encode(command), access=Access(write=(str(folder),)))


def test_closing_kills_one_that_has_no_group_of_its_own_yet(
    zygote: Zygote, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_group(pid: int, number: int) -> None:
        raise ProcessLookupError

    child = started(zygote, tmp_path, "sleep 3600")
    monkeypatch.setattr(os, "killpg", no_group)
    child.close()
    assert child.result(0.0) == -signal.SIGKILL


def test_the_zygote_is_asked_about_a_child_only_when_that_has_ended(
    zygote: Zygote, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a child that takes long to die would take the zygote and all other children along."""
    child, wait, states = started(zygote, tmp_path, "sleep 3600"), zygote.wait, list[str]()

    def asked(pid: int, generation: int) -> int | None:
        states.append(Path(f"/proc/{child.host_pid}/stat").read_text().rpartition(")")[2].split()[0])
        return wait(pid, generation)

    monkeypatch.setattr(zygote, "wait", asked)
    child.close()
    assert states == ["Z"]


def test_a_child_that_can_not_be_killed_does_not_take_the_zygote_along(
    zygote: Zygote, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = started(zygote, tmp_path, "touch runs; exec sleep 3600")
    while not os.path.exists(os.path.join(tmp_path, "runs")):  # before, it would end by its socket's end
        time.sleep(0.01)
    pidfd, generation = os.pidfd_open(child.host_pid), zygote.generation
    with monkeypatch.context() as patch:
        patch.setattr(client, "DEATH_S", 0.01)
        patch.setattr(os, "killpg", lambda *_: None)
        patch.setattr(child, "signal", lambda number: None)
        assert child.ending(0.0) == "it shut its socket and lived on for 0 s"
    assert tool(zygote, tmp_path, "exit 3") == 3
    assert zygote.generation == generation
    with pytest.raises(InfraError, match="can't be killed"):
        child.result(0.0)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


@pytest.mark.parametrize(
    ("script", "words"),
    [("exit 3", "it ended with exit code 3"), ("sleep 3600", "it shut its socket and lived on for 0.2 s")],
)
def test_how_a_child_has_ended_is_told(zygote: Zygote, tmp_path: os.PathLike[str], script: str, words: str) -> None:
    assert started(zygote, tmp_path, script).ending(PATIENCE_S if "exit" in script else 0.2) == words


def test_a_signal_that_ended_a_child_is_told(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    child = started(zygote, tmp_path, "sleep 3600")
    child.signal(9)
    assert child.ending(PATIENCE_S) == "it was ended by signal 9 (SIGKILL)"


def test_pinned_children_stay_where_they_are(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    core = min(os.sched_getaffinity(0))
    assert tool(zygote, tmp_path, "[ $(nproc) = 1 ]", Limits(cores=(core,))) == 0


def test_a_missing_layer_is_named_and_lowers_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(flags: int) -> None:
        raise PermissionError(1, "refused")

    monkeypatch.setattr(linux, "unshare", refuse)
    missing = layers.enter_namespaces()
    assert "user namespace" in missing
    assert "network namespace" in missing
    assert layers.level(missing) == "reduced"
    assert layers.level([*missing, "landlock", "seccomp"]) == "none"
    assert layers.level([]) == "full"


def test_isolation_names_what_is_missing() -> None:
    assert Isolation("reduced", ("landlock",)).missing == ("landlock",)


def test_the_canary_sings_after_a_kill(zygote: Zygote, tmp_path: os.PathLike[str]) -> None:
    assert tool(zygote, tmp_path, "kill -9 $$; while true; do true; done", within_s=0.2) is None
    before = zygote.generation
    zygote.check()
    assert zygote.generation == before


def test_a_silent_canary_is_ours_to_blame_and_the_zygote_is_replaced(tmp_path: os.PathLike[str]) -> None:
    with Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool") as sick:
        sick.missing = ("something it did not lack at its start",)
        with pytest.raises(InfraError, match="does not work any more"):
            sick.check()
        assert tool(sick, tmp_path, "true") == 0
        sick.check()


def test_where_namespaces_are_refused_bubblewrap_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []

    def launch(zygote: Zygote) -> tuple[str, ...]:
        launched.append(zygote.is_enclosed)
        return () if zygote.is_enclosed else ("user namespace",)

    monkeypatch.setattr(Zygote, "launch", launch)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with Zygote(()) as zygote:
        assert (launched, zygote.isolation.level) == ([False, True], "full")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not on this host")
def test_inside_bubblewrap_everything_is_the_same(tmp_path: os.PathLike[str]) -> None:
    enclosed = Zygote(("kbrl_async.kernels.sandbox.tool",), profile="tool")
    enclosed.is_enclosed = True
    with enclosed:
        assert enclosed.isolation == Isolation("full")
        assert tool(enclosed, tmp_path, "[ $$ = 1 ] && echo x > file && ! chmod 755 /usr && ! cat /etc/passwd") == 0
        enclosed.check()


def test_libraries_that_a_pth_file_adds_may_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared := tmp_path / "other" / "site-packages").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(shared))
    assert str(shared) in client.interpreter_paths()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert str(tmp_path) not in client.interpreter_paths()


ASKS = """\
def main(channel, payload, fds, isolation):
    try:
        import some_library
    except ImportError:
        channel.send(b"missing")
    else:
        channel.send(some_library.__file__.encode())
"""


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for libraries, `some_library` the one that shows where all are; what a child says is on the path."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)  # a child is another user
        own = Path(made, "own")
        own.mkdir()
        (own / "asks.py").write_text(ASKS)
        monkeypatch.syspath_prepend(str(own))
        monkeypatch.setattr(client, "LIBRARIES", ("some_library",))
        yield Path(made)


def holding(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "some_library.py").touch()
    return folder


def seen_by_a_child() -> str:
    """Where it finds `some_library`."""
    with Zygote(("asks",), profile="tool") as zygote:
        child = zygote.spawn("asks:main", b"", (), None, Access())
        with contextlib.closing(child):
            child.channel.settimeout(30.0)
            return child.channel.recv(4096).decode()


@pytest.mark.parametrize("name", ["libraries", "site-packages"])
def test_libraries_that_pythonpath_alone_names_are_there_in_a_child(
    folders: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`, into whatever folder: no zygote started, and no message said why."""
    libraries = holding(folders / "target" / name)
    monkeypatch.syspath_prepend(str(libraries))
    assert seen_by_a_child() == str(libraries / "some_library.py")


def test_so_they_are_behind_site_packages_that_pythonpath_names_too(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = str(holding(folders / "target" / "site-packages"))
    monkeypatch.setattr(sys, "path", [*sys.path, libraries])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([sysconfig.get_path("purelib"), libraries]))
    assert seen_by_a_child() == os.path.join(libraries, "some_library.py")


def test_a_users_own_site_packages_are_there_in_a_child_whose_home_is_another(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries = str(holding(folders / "user" / "site-packages"))
    monkeypatch.setattr(sys, "path", [*sys.path, libraries])
    monkeypatch.setattr(site, "getusersitepackages", lambda: libraries)
    assert seen_by_a_child() == os.path.join(libraries, "some_library.py")


def test_what_a_pth_file_adds_is_not_put_before_site_packages(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child has it of that file, in its place: older libraries there would hide those of site-packages."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(holding(folders / "shared" / "site-packages"))])
    assert seen_by_a_child() == "missing", "no .pth file names it here"
