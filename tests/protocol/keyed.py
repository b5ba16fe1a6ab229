"""A broker on keyed TCP sockets, with one key per role for its own host, and one for a bench elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from pathlib import Path
from typing import Any

import zmq

from kbrl_async.keyring import Keyring, client_keys
from protocols import framing
from protocols import messages as msg
from protocols.auth import PeerLimits, Role
from protocols.ledger import LedgerOptions
from protocols.sockets import ClientKeys, Socket, connect_dealer
from services.broker.options import BrokerOptions
from services.broker.server import BrokerServer
from services.runtime import Worker
from tests.brokers import endpoints, scenario_of, until

ANY = "tcp://0.0.0.0:*"
NO_ANSWER_S = 0.4


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ring = Keyring(folder / "keys")
        for role in Role:
            self.ring.new(role, "local")
        self.guest = client_keys(self.ring.new(Role.BENCH, "host7"))
        self.broker = BrokerServer(
            BrokerOptions(
                str(folder), ANY, ANY, status_address=ANY, keys=str(folder / "keys"),
                # a bare dealer never beats: it is not to be suspected for that
                ledger=LedgerOptions(heartbeat_s=0.05, missed_beats=1000),
                limits=PeerLimits(messages_burst=200.0, messages_per_s=100.0),
            )
        )  # fmt: skip
        self.context: zmq.Context[Socket] = zmq.Context()
        self._dealers: list[Socket] = []

    async def start(self) -> None:
        self._task = asyncio.create_task(self.broker.run())
        await until(lambda: hasattr(self.broker, "ledger"))
        self.submit, self.work, self.status = endpoints(self.broker)

    async def stop(self) -> None:
        self.context.destroy(linger=0)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def worker(self, name: str, stage: str, keys: ClientKeys, handler: Any) -> Worker:
        return Worker(self.work, name, [stage], 1, handler, rng=random.Random(0), keys=keys)

    def dealer(self, keys: ClientKeys, address: str = "") -> Socket:
        self._dealers.append(connect_dealer(self.context, address or self.work, secrets.token_hex(8).encode(), keys))
        return self._dealers[-1]

    async def answer(self, dealer: Socket, message: msg.Message, payload: tuple[bytes, ...] = ()) -> str:
        """The kind of what comes back; the time limit is the scenario's. Where the broker has refused the connection
        already, libzmq has taken it away: to wait for another would be to wait for ever.
        """
        dealer.send_multipart(framing.encode(message, payload), zmq.DONTWAIT)
        await until(lambda: bool(dealer.poll(0)))
        return type(framing.decode(dealer.recv_multipart())[0]).__name__

    async def is_ignored(self, dealer: Socket, message: msg.Message, payload: tuple[bytes, ...] = ()) -> bool:
        """Whether nothing comes back within a while."""
        with contextlib.suppress(TimeoutError, zmq.Again):
            async with asyncio.timeout(NO_ANSWER_S):
                await self.answer(dealer, message, payload)
                return False
        return True


scenario = scenario_of(Site)
