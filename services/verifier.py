"""Verifier: all of a bench's work but the timing, on any GPU and at any time, so that benches only time what is right.

`python -m services.verifier`

::

    verify ─▶ [Bench in one thread, see `services.timing_bench`] ─▶ bench, with what was found | score

Where the run has none (`processes.verifier=0`) it stands by, without a GPU: a Procfile starts one for every run.
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event) -> None:
    from services.runtime.service import Service
    from services.timing_bench import __main__ as timing_bench

    service = Service.start("verifier")
    if service.config.processes.verifier:
        await timing_bench.main(stop, name="verifier")
        return
    service.log.info("nothing to verify: this run has no verifiers (processes.verifier=0), its benches do all")
    await stop.wait()


if __name__ == "__main__":
    run_service("verifier", main, choose_run)
