"""`AsyncVerifier`: the funnel for code that runs on an event loop, with several candidates at once.

::

    verify() ─▶ pool of threads ─▶ a Verifier each, warm, on a core of its own where there are several

Many candidates come here, as in a run: on a GPU doubts are settled as there (`ALONE_SHARE`), where a single `verify`
gives each candidate processes of its own. Over public problems on an H100 that was more than twice as fast.

Invariants
* A host's fault is tried once more with everything started anew, then raised; it never becomes a result (I4).
* A candidate that a cancelled caller no longer waits for is not begun; one that has begun goes on to its end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from kbrl_async.errors import InfraError, UserError
from kbrl_async.kernels.funnel.result import Result
from kbrl_async.kernels.funnel.verifier import Verifier, VerifyOptions, default_bench
from kbrl_async.kernels.verify.options import ALONE_SHARE

TRIES = 2


class AsyncVerifier:
    """`workers` candidates are verified at once, the others wait in order::

        async with AsyncVerifier(workers=2) as verifier:
            results = await asyncio.gather(*(verifier.verify("L1/13", text) for text in texts))

    :raises UserError: `workers` is below 1.
    """

    def __init__(self, workers: int = 1, device: str | None = None, options: VerifyOptions | None = None) -> None:
        if workers < 1:
            raise UserError(f"workers={workers} verify nothing", "Give 1 or more")
        self.workers = workers
        self._device, self._options = device, options or VerifyOptions()
        self._cores = itertools.cycle(cores_for(workers))
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._open: list[Verifier] = []
        self._pool: ThreadPoolExecutor | None = None

    async def __aenter__(self) -> AsyncVerifier:
        self.start()
        return self

    def start(self) -> None:
        """For who can't use `async with`, and calls `close` at last."""
        self._pool = ThreadPoolExecutor(self.workers, "verify")

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """What has begun goes on to its end; what waits is cancelled."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        while self._open:
            self._open.pop().close()

    async def verify(self, *args: Any, **kwargs: Any) -> Result:
        """See `Verifier.verify`, whose arguments these are.

        :raises InfraError: and `ProblemError`, `UserError`, `HostError`: see `verify`.
        """
        assert self._pool is not None, "an AsyncVerifier is used inside its async with block"
        call = functools.partial(self._verify, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _verify(self, *args: Any, **kwargs: Any) -> Result:
        verifier = self._verifier()
        return with_retry(functools.partial(verifier.verify, *args, **kwargs), verifier.restart)

    def _verifier(self) -> Verifier:
        """That of the calling thread, which starts it before its first candidate."""
        found: Verifier | None = getattr(self._mine, "verifier", None)
        if found is None:
            with self._lock:
                cores = self._options.cores or next(self._cores)
            bench = self._options.bench or msgspec.structs.replace(
                default_bench(cores, rules=self._options.farm.rules), alone_share=ALONE_SHARE
            )
            options = msgspec.structs.replace(self._options, cores=cores, bench=bench)
            found = Verifier(self._device, options).__enter__()
            self._open.append(found)
            self._mine.verifier = found
        return found


def with_retry(verify: Callable[[], Result], restart: Callable[[], object], tries: int = TRIES) -> Result:
    """`restart` is called behind each fault of the host but the last, which is raised."""
    for _ in range(tries - 1):
        try:
            return verify()
        except InfraError:
            restart()
    return verify()


def cores_for(workers: int) -> Sequence[tuple[int, ...]]:
    """One core each where there are several workers, so that timings do not share one by chance."""
    if workers <= 1:
        return [()] * workers
    cores = sorted(os.sched_getaffinity(0))
    return [(cores[-1 - i % len(cores)],) for i in range(workers)]
