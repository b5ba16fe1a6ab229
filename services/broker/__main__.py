"""`python -m services.broker`: the broker of a run."""

from __future__ import annotations

import asyncio

from services.runtime.nanny import run_service
from services.runtime.service import choose_run


async def main(stop: asyncio.Event) -> None:
    import os

    from msgspec.structs import replace

    from kbrl_async.runs.config import agreed, bound
    from protocols.checking import CheckOptions
    from protocols.limits import LedgerOptions
    from services.broker.descriptors import raise_descriptor_limit
    from services.broker.options import BrokerOptions
    from services.broker.server import BrokerServer
    from services.runtime.service import Service

    raise_descriptor_limit()
    service = Service.start("broker")
    service.pin(service.layout.shared)
    settings = service.config.broker
    ledger = LedgerOptions.of(settings.heartbeat_s, settings.leases)
    here = bound(service.addresses, os.environ)
    options = BrokerOptions(
        str(service.run_dir),
        here.submit,
        here.work,
        ledger=replace(
            ledger,
            checks=CheckOptions(settings.check_share),
            settings=agreed.encode(service.config),
            likely_first=bool(service.config.timing_bench.likely_first),
        ),
        keys=settings.keys or "",
        store_max_bytes=service.config.compile_farm.store_max_bytes,
        status_address=service.addresses.status,
    )
    service.log.info("ready", submit=options.submit_address, work=options.work_address)
    broker = BrokerServer(options)
    service.export(lambda: broker.load, lambda: broker.standing)
    await broker.run(stop)


if __name__ == "__main__":
    run_service("broker", main, choose_run)
