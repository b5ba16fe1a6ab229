"""From settings to a running server: its socket, its executor, its face, and their end in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from kbrl_async.errors import AddressTaken, InfraError
from kbrl_async.kernels.funnel import AsyncVerifier, VerifyOptions
from kbrl_async.kernels.funnel.verifier import choose_device, has_device
from kbrl_async.kernels.timing.device import hardware_of
from kbrl_async.serving.documents import Ask, preset_of
from kbrl_async.serving.settings import Keys, Serve
from services.verification.app import Face
from services.verification.desk import Desk, Executor
from services.verification.executors import OverBroker, OwnVerifiers, ServedProblems, known_backends
from services.verification.lag import go_first

BACKLOG = 1024
SLOTS = 256
"""Scored jobs that may be on their way to us at once."""
GRACE_S = 2
SWITCH_S = 0.0005
"""For so long a thread that verifies may keep the interpreter from the event loop; Python's own 5 ms add up."""
KEEP_ALIVE_S = 75
"""A trainer is silent between its batches."""
log = structlog.get_logger()


def listen(settings: Serve) -> socket.socket:
    """:raises AddressTaken: somebody else has the port, or there is no such address here."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        cause = f"{settings.host}:{settings.port} can't be had: {error.strerror}"
        raise AddressTaken(cause, "Stop what listens there, or choose another --port") from None
    made.listen(BACKLOG)
    return made


async def executor_of(settings: Serve, stack: contextlib.AsyncExitStack) -> Executor:
    """Who does the work; it ends with the stack."""
    problems = ServedProblems(settings.problems, settings.device)
    if not settings.over_broker:
        options = VerifyOptions.by(settings.rules, timing=settings.timing)
        verifier = await stack.enter_async_context(AsyncVerifier(settings.workers, settings.device, options))
        return OwnVerifiers(verifier, problems, timing=settings.timing)
    return await _over_broker(problems, stack, timing=settings.timing)


async def _over_broker(problems: ServedProblems, stack: contextlib.AsyncExitStack, *, timing: bool) -> Executor:
    from protocols.messages import Stage
    from services.runtime.producer import Producer
    from services.runtime.service import Service
    from services.runtime.worker import Worker

    service = Service.start("verification")
    service.pin(service.layout.shared)
    producer = await stack.enter_async_context(Producer(service.addresses.submit, keys=service.keys))
    executor = OverBroker(producer, problems, service.config.timing_bench.device, timing=timing)
    address = service.addresses.work
    worker = Worker(address, service.worker_id, [Stage.SCORE], SLOTS, executor.handle, keys=service.keys)
    service.watch(worker.meter)
    leaving = asyncio.Event()
    working = asyncio.create_task(worker.run(leaving))

    async def leave() -> None:
        leaving.set()
        with contextlib.suppress(InfraError):
            await working

    working.add_done_callback(executor.lost)
    stack.push_async_callback(leave)
    return executor


def face_of(desk: Desk, settings: Serve) -> Face:
    problems = ServedProblems(settings.problems, settings.device)
    backends = dict(known_backends())

    keys = Keys.read(Path(settings.keys)) if settings.keys else None
    problems.listed()  # before the first question; so are presets, which installed packages are looked through for
    preset_of(Ask("", preset=settings.preset))
    return Face(desk, settings, keys, problems.listed, backends, _hardware(settings, backends))


def _hardware(settings: Serve, backends: dict[str, frozenset[str]]) -> dict[str, Any]:
    devices = sorted({choose_device(name, settings.device) for name in backends})
    by_name = {device: hardware_of(device) for device in devices if has_device(device)}
    return {"devices": by_name, "backends": {name: sorted(kinds) for name, kinds in backends.items()}}


async def serve(desk: Desk, settings: Serve, listening: socket.socket, stop: asyncio.Event) -> None:
    """Until `stop`. Raises what the desk raised."""
    config = uvicorn.Config(
        face_of(desk, settings).app,
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals are the nanny's
    gc.freeze()  # models, problems and libraries last: looked through at each collection, all questions wait for it
    sys.setswitchinterval(SWITCH_S)
    go_first()
    working = asyncio.create_task(desk.run())
    serving = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())
    host, port = listening.getsockname()[:2]
    log.info(f"ready at http://{f'[{host}]' if ':' in host else host}:{port}", waiting=desk.waiting)
    await asyncio.wait({working, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    stopping.cancel()
    await serving
    if working.done():
        working.result()
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
