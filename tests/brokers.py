"""A broker that lives in the loop of a test, and workers beside it: they serve a block and are gone behind it.

async with serving(BrokerServer(beside(folder))) as broker, working(farm, bench):
    ...
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import zmq

from protocols import messages as msg
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import HandlerOutcome, Worker, addresses

PATIENCE_S = 120.0


async def until(condition: Callable[[], bool]) -> None:
    """The time limit is the caller's."""
    while not condition():
        await asyncio.sleep(0.01)


def beside(folder: Path, **more: Any) -> BrokerOptions:
    """A broker on the local sockets of this run."""
    found = addresses(folder)
    return BrokerOptions(str(folder), found.submit, found.work, **more)


@contextlib.asynccontextmanager
async def serving(broker: BrokerServer) -> AsyncIterator[BrokerServer]:
    """From when its ledger is read; an error that ends it is the test's."""
    running = asyncio.create_task(broker.run())
    try:
        await until(lambda: hasattr(broker, "ledger") or running.done())
        yield broker
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@contextlib.asynccontextmanager
async def working(*workers: Worker, may_fail: bool = False) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()
        await asyncio.gather(*tasks, return_exceptions=may_fail)


def endpoints(broker: BrokerServer) -> list[str]:
    """Where it really is, if its addresses left the port open: for producers, for workers, for viewers."""
    return [_endpoint(router.socket) for router in broker.bound]


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()


async def ends(_: msg.Task, __: list[bytes]) -> HandlerOutcome:
    """A handler behind which there is no stage."""
    return HandlerOutcome()


class Scene(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


Made = TypeVar("Made", bound=Scene)
Test = Callable[[Path], None]


def scenario_of(make: Callable[[Path], Made]) -> Callable[[Callable[[Made], Coroutine[Any, Any, None]]], Test]:
    """A decorator that runs an async test on a fresh scene, within `PATIENCE_S`."""

    def scenario(body: Callable[[Made], Coroutine[Any, Any, None]]) -> Test:
        def test(tmp_path: Path) -> None:
            async def play() -> None:
                scene = make(tmp_path)
                await scene.start()
                try:
                    async with asyncio.timeout(PATIENCE_S):
                        await body(scene)
                finally:
                    await scene.stop()

            asyncio.run(play())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return scenario
