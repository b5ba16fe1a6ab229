"""The sandbox of GPU children, as far as it shows without a GPU: what the driver needs first, what holds afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kbrl_async.kernels.sandbox import Limits, Zygote
from kbrl_async.kernels.sandbox.gpu import OPEN_SURFACE
from tests.unit.kernels.sandbox.hostile import Said
from tests.unit.kernels.sandbox.test_attacks import PATIENCE_S

_BEGIN = """
import socket, threading
from kbrl_async.kernels.sandbox import Isolation, gpu

def tried(call):
    try:
        call()
    except (PermissionError, MemoryError, RuntimeError) as error:
        return type(error).__name__
    return "done"

go, seen = threading.Event(), []
driver = threading.Thread(target=lambda: (go.wait(), seen.append(tried(socket.socket))))
driver.start()
before = tried(socket.socket)
isolation = gpu.finish(Isolation("full"))
go.set()
driver.join()
"""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote(("tests.unit.kernels.sandbox.hostile",), profile="gpu") as made:
        if made.missing and "seccomp" in made.missing:
            pytest.skip("this host has no seccomp")
        yield made


def run(zygote: Zygote, expression: str) -> str:
    code = f"{_BEGIN}\nsaid = {expression}\n"
    child = zygote.spawn("tests.unit.kernels.sandbox.hostile:run", code.encode(), (), Limits(memory_bytes=1 << 30))
    try:
        child.channel.settimeout(PATIENCE_S)
        child.channel.recv(1 << 16)
        return msgspec.msgpack.decode(child.channel.recv(1 << 16), type=Said).text
    finally:
        child.close()


def test_threads_of_the_driver_get_the_filter_that_was_loaded_after_their_birth(zygote: Zygote) -> None:
    assert run(zygote, "[before, *seen]") == "['done', 'PermissionError']"


def test_no_thread_can_be_started_once_untrusted_code_may_run(zygote: Zygote) -> None:
    assert run(zygote, "tried(threading.Thread(target=print).start)") == "RuntimeError"


def test_host_memory_is_limited_although_addresses_are_not(zygote: Zygote) -> None:
    assert run(zygote, "tried(lambda: bytearray(2 << 30))") == "MemoryError"
    assert run(zygote, "tried(lambda: __import__('mmap').mmap(-1, 2 << 30, flags=0x22, prot=1))") == "done"


def test_the_rest_of_the_host_stays_out_of_reach(zygote: Zygote) -> None:
    assert run(zygote, "tried(lambda: open('/etc/passwd'))") == "PermissionError"
    assert run(zygote, "tried(lambda: open('gpu.txt', 'w').write('its scratch folder'))") == "done"


def test_what_stays_open_is_named(zygote: Zygote) -> None:
    assert OPEN_SURFACE in run(zygote, "[isolation.level, isolation.missing]")
