"""`python -m services.broker`: the broker of the run in `KBRL_RUN_DIR`."""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service


async def main(stop: asyncio.Event) -> None:
    from services.broker.options import BrokerOptions  # the nanny holds no socket
    from services.broker.server import Broker
    from services.runtime.addresses import addresses
    from services.runtime.options import load_run

    run_dir = load_run().run_dir
    found = addresses(run_dir)
    await Broker(BrokerOptions(run_dir, found.submit, found.work)).run(stop)


if __name__ == "__main__":
    run_service("broker", main)
