"""The verifier over HTTP. `python -m services.verification`, with the folder of a service in `KBRL_RUN_DIR`.

::

    HTTP ─▶ Face ─▶ Desk ─▶ verifiers of this process, or compile ─▶ bench ─▶ score of the folder's broker
"""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service


async def main(stop: asyncio.Event) -> None:
    import contextlib
    import os
    from pathlib import Path

    from kbrl_async.runs.telemetry import logs
    from kbrl_async.serving import settings as serving
    from kbrl_async.serving.journal import FILE, JobJournal
    from services.verification.desk import Desk
    from services.verification.server import executor_of, listen, serve

    folder = Path(os.environ["KBRL_RUN_DIR"])
    settings = serving.check(serving.read(folder))
    logs.configure("verification", folder, "info")
    async with contextlib.AsyncExitStack() as stack:
        socket = stack.enter_context(listen(settings))
        journal = stack.enter_context(contextlib.closing(JobJournal(folder / FILE, settings.keep)))
        executor = await executor_of(settings, stack)
        await serve(Desk(executor, journal, settings), settings, socket, stop)


if __name__ == "__main__":
    run_service("verification", main)
