"""Hostile code in both profiles: what it tries is refused, what it starts dies with it, and the sandbox goes on."""

from __future__ import annotations

import contextlib
import os
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kbrl_async.kernels.sandbox import Access, Child, Limits, Zygote
from tests.unit.kernels.sandbox.hostile import Said

MODULE = "tests.unit.kernels.sandbox.hostile"
LIMITS = Limits(cpu_s=3, memory_bytes=256 << 20, file_bytes=1 << 20, scratch_bytes=1 << 20)
PATIENCE_S = 60.0
"""For what comes within milliseconds, unless others load the machine."""


@pytest.fixture(scope="module", params=["kernel", "tool"])
def zygote(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    with Zygote((MODULE,), profile=request.param) as made:
        yield made


@pytest.fixture(scope="module")
def tools() -> Iterator[Zygote]:
    """Of the profile in which processes may be started."""
    with Zygote((MODULE,), profile="tool") as made:
        yield made


@pytest.fixture(scope="module")
def kernels() -> Iterator[Zygote]:
    with Zygote((MODULE,), profile="kernel") as made:
        yield made


def start(zygote: Zygote, code: str, access: Access | None = None, limits: Limits = LIMITS) -> Child:
    child = zygote.spawn(f"{MODULE}:run", code.encode(), (), limits, access)
    if not child.receive(1 << 16, PATIENCE_S):
        child.close()
        pytest.fail("it has not confined itself")
    return child


def run(
    zygote: Zygote, code: str, access: Access | None = None, limits: Limits = LIMITS, within_s: float = PATIENCE_S
) -> str:
    """What the code said; `ended by …` where it died, `killed` where it took too long."""
    child = start(zygote, code, access, limits)
    try:
        message = child.receive(1 << 16, within_s)
        if message is None:
            return "killed"
        if message:
            return msgspec.msgpack.decode(message, type=Said).text
        return f"ended by {child.result(PATIENCE_S)}"
    finally:
        child.close()


def is_alive(zygote: Zygote) -> bool:
    return run(zygote, "said = 6 * 7") == "42"


REFUSED = ("Permission", "not permitted", "No such file", "Read-only", "Invalid argument")


@pytest.mark.parametrize(
    "attack",
    [
        "import socket; socket.create_connection(('127.0.0.1', 22), 1)",
        "import socket; socket.socket(socket.AF_UNIX).connect('\\0abstract')",
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "said = open('/etc/passwd').read()",
        "said = open('/etc/shadow').read()",
        "import os; said = os.listdir('/root')",
        "import os; said = os.listdir('/home')",
        "import os; said = os.listdir('/tmp')",
        "import os; said = os.listdir('/proc')",
        "said = open('/proc/1/environ', 'rb').read()",
        "said = open('/proc/self/environ', 'rb').read()",
        "said = open('/proc/self/mem', 'r+b').read(1)",
        "said = open('/proc/kallsyms').read()",
        "said = open('/sys/kernel/notes', 'rb').read()",
        "open('/tmp/mark', 'w')",
        "open('/dev/shm/mark', 'w')",
        "open('/usr/mark', 'w')",
        "import os; os.mkdir('/var/tmp/mark')",
        "import os; os.chmod('/tmp', 0o1777)",
        "import os; os.chown('/tmp', 0, 0)",
        "import os; os.utime('/tmp')",
        "import os; os.setxattr('/tmp', 'user.mark', b'x')",
        "import os; os.chroot('.')",
        "import os; os.setuid(12345)",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.ptrace(16, 2, 0, 0); "
        "raise OSError(ctypes.get_errno(), 'not permitted') if r < 0 else ValueError",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.mount(b'x', b'/usr', b'tmpfs', 0, 0); "
        "raise OSError(ctypes.get_errno(), 'not permitted') if r < 0 else ValueError",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); r = c.unshare(0x10000000); "
        "raise OSError(ctypes.get_errno(), 'not permitted') if r < 0 else ValueError",
    ],
)
def test_the_way_out_is_shut(zygote: Zygote, attack: str) -> None:
    said = run(zygote, attack)
    assert any(word in said for word in REFUSED), said


NEW_CALLS = {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469}


@pytest.mark.parametrize("number", NEW_CALLS.values(), ids=NEW_CALLS)
def test_calls_that_this_libseccomp_has_no_name_for_are_denied_by_number(kernels: Zygote, number: int) -> None:
    call = f"libc.syscall({number}, -1, 0, 0, 0, 0); said = errno.errorcode[ctypes.get_errno()]"
    said = run(kernels, f"import ctypes, errno; libc = ctypes.CDLL(None, use_errno=True); {call}")
    assert said == "EPERM"


def test_the_environment_holds_no_secret_of_the_host(zygote: Zygote) -> None:
    said = run(zygote, "import os; said = sorted(os.environ)")
    assert not any(word in said for word in ("KEY", "TOKEN", "SECRET", "PYTEST"))


def test_no_descriptor_of_the_trusted_side_is_open(zygote: Zygote) -> None:
    code = """
import os
def target(fd):
    try:
        return os.fstat(fd).st_mode
    except OSError:
        return None
said = sum(target(fd) is not None for fd in range(3, 60))
"""
    assert int(run(zygote, code)) <= 5, "its socket, and the zygote's own pid namespace"


@pytest.mark.parametrize("other", ["-1", "2", "3", "HOST"])
def test_nobody_else_can_be_signalled(tools: Zygote, other: str) -> None:
    victim = start(tools, "import time; time.sleep(300)")
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        number = str(victim.host_pid) if other == "HOST" else other
        assert "Error" in run(tools, f"import os; os.kill({number}, 9)")
        assert not victim.has_ended(0.05)
        assert bystander.poll() is None
    finally:
        victim.close()
        bystander.kill()
        bystander.wait()


def test_each_child_is_the_first_process_of_a_namespace_of_its_own(zygote: Zygote) -> None:
    assert run(zygote, "import os; said = (os.getpid(), os.getppid())") == "(1, 0)"


def processes_named(mark: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in command and int(pid) != os.getpid():
            found.append(int(pid))
    return found


def test_daemonised_children_die_with_the_child_that_left_them(tools: Zygote) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', ['sleep', 'MARK'])
    os._exit(0)
os.wait()
time.sleep(0.1)
said = 'left one'
"""
    mark = f"7531.{os.getpid()}"
    child = start(tools, code.replace("MARK", mark))
    message = child.receive(1 << 16, PATIENCE_S)
    assert message
    assert msgspec.msgpack.decode(message, type=Said).text == "left one"
    child.close()
    assert processes_named(mark) == []


def test_a_fork_bomb_ends_at_its_limit_and_leaves_nothing(tools: Zygote) -> None:
    code = """
import os, time
started = 0
try:
    while started < 2000:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
        started += 1
except OSError:
    pass
said = started
"""
    assert 0 < int(run(tools, code)) < 400
    assert is_alive(tools)


def test_a_kernel_starts_neither_process_nor_thread(kernels: Zygote) -> None:
    assert "unavailable" in run(kernels, "import os; os.fork()")
    assert "can't start new thread" in run(kernels, "import threading; threading.Thread(target=print).start()")


@pytest.mark.parametrize(
    ("attack", "end"),
    [
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 22))", "MemoryError"),
        ("open('big', 'wb').write(bytes(8 << 20))", "OSError"),
        ("import os\nfor i in range(99):\n  open(f'f{i}', 'wb').write(bytes(64 << 10))", "No space left"),
        ("for i in range(9999): open(f'f{i}', 'w')", "No space left"),
        ("import os; os.truncate(os.open('sparse', os.O_CREAT | os.O_RDWR), 1 << 50)", "Error"),
        ("import os\nkept = [os.dup(1) for _ in range(9999)]", "Too many open files"),
        ("import sys; sys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()", ""),
        ("import os; os._exit(0)", "ended by 0"),
        ("import os; os._exit(7)", "ended by 7"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import ctypes; ctypes.string_at(1)", "ended by -11"),
        ("import ctypes; ctypes.CDLL(None).abort()", "ended by -"),
        ("while True: pass", "killed"),
        ("import time; time.sleep(60)", "killed"),
        ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass", "killed"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP); said = 'went on'", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL); said = 'went on'", ""),
        ("10 ** 10 ** 8", "killed"),
    ],
)
def test_bombs_loops_and_exits_end_by_themselves_or_by_the_clock(zygote: Zygote, attack: str, end: str) -> None:
    is_killed = end in ("", "killed")
    limits = msgspec.structs.replace(LIMITS, cpu_s=300) if is_killed else LIMITS  # by us, however late we are
    assert end in run(zygote, attack, limits=limits, within_s=0.4 if is_killed else PATIENCE_S)
    assert is_alive(zygote)


def test_a_loop_that_outlives_its_trusted_side_ends_by_its_cpu_limit(zygote: Zygote) -> None:
    said = run(zygote, "while True: pass", limits=msgspec.structs.replace(LIMITS, cpu_s=1))
    assert said == "ended by -9"


def test_one_childs_private_files_are_not_anothers(zygote: Zygote, tmp_path: Path) -> None:
    assert run(zygote, "open('mine', 'w').write('secret')") == "nothing"
    assert run(zygote, "import os; said = os.listdir('.')") == "[]"
    (tmp_path / "artifact").write_text("of another candidate")
    assert "Permission" in run(zygote, f"open({str(tmp_path / 'artifact')!r}).read()")


def test_its_own_artifact_can_be_read_and_neither_changed_nor_removed(zygote: Zygote, tmp_path: Path) -> None:
    artifact = tmp_path / "own.so"
    artifact.write_text("built")
    access = Access(read=(str(artifact),))
    assert run(zygote, f"said = open({str(artifact)!r}).read()", access) == "built"
    for attack in ("open(P, 'w')", "__import__('os').unlink(P)", "__import__('os').rename(P, P + 'x')"):
        assert "Error" in run(zygote, f"P = {str(artifact)!r}\n{attack}", access)
    assert artifact.read_text() == "built"


def test_a_zygote_that_was_killed_is_replaced(zygote: Zygote) -> None:
    assert zygote.pid is not None
    os.kill(zygote.pid, 9)
    os.waitid(os.P_PID, zygote.pid, os.WEXITED | os.WNOWAIT)
    assert zygote.pid is not None
    assert is_alive(zygote)


def test_what_confines_a_child_is_known_at_the_start_and_said_by_the_child(zygote: Zygote) -> None:
    zygote.start()
    child = zygote.spawn(f"{MODULE}:run", b"", (), LIMITS)
    try:
        first = child.receive(1 << 16, PATIENCE_S)
        assert first
        assert msgspec.msgpack.decode(first, type=Said).isolation == zygote.isolation
    finally:
        child.close()


AS_NOBODY = f"""
import os
from kbrl_async.kernels.sandbox import Zygote, client
made = client._environment
client._environment = lambda threads: dict(made(threads), PYTHONPATH=os.environ["PYTHONPATH"])
from tests.unit.kernels.sandbox.test_attacks import LIMITS, run
for profile in ("kernel", "tool"):
    with Zygote(({MODULE!r},), profile=profile) as zygote:
        said = run(zygote, "import os; said = (os.getpid(), os.getuid())")
        shut = run(zygote, "open('/etc/passwd').read()")
        bomb = run(zygote, "import os, time\\nfor i in range(999):\\n  if os.fork() == 0: time.sleep(99)")
        print(profile, zygote.isolation.level, said, shut.split(":")[0], bomb.split(":")[0])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_it_holds_as_much_for_a_user_without_privilege(run_as_nobody: Callable[[str], str]) -> None:
    lines = run_as_nobody(AS_NOBODY).splitlines()
    assert lines == [
        "kernel full (1, 65534) PermissionError BlockingIOError",
        "tool full (1, 65534) PermissionError BlockingIOError",
    ]


def interpreters() -> list[str]:
    """Ours, and the system's of the same version: ours may lie in a home that nobody else can enter."""
    return [sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"]


@pytest.fixture
def run_as_nobody() -> Callable[[str], str]:
    def run_it(script: str) -> str:
        path = os.pathsep.join([".", *site.getsitepackages()])
        for interpreter in interpreters():
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                return subprocess.run(
                    [interpreter, "-B", "-c", script],
                    user=65534,
                    group=65534,
                    extra_groups=[],
                    cwd=Path(__file__).parents[4],
                    env={"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": "/"},
                    capture_output=True,
                    text=True,
                    timeout=110,
                    check=True,
                ).stdout
        pytest.skip("no Python of this version can be run by another user")

    return run_it
