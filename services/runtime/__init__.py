"""The shell that all actors share: nanny, worker, producer, meters, addresses.

An actor is a `main(stop)` coroutine around a `Worker`, a `Producer` or both, run by `run_service`. The pure half of the
protocol lives in `protocols.session`; here are only sockets, timers and processes.
"""

from services.runtime.addresses import addresses
from services.runtime.meters import LoadMeter
from services.runtime.nanny import run_service
from services.runtime.producer import Producer
from services.runtime.worker import HandlerOutcome, Worker, WorkerOptions

__all__ = [
    "HandlerOutcome",
    "LoadMeter",
    "Producer",
    "Worker",
    "WorkerOptions",
    "addresses",
    "run_service",
]
