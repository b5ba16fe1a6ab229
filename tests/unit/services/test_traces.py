"""What torch's C++ side says where another process of a group dies: a line with the cause, or what somebody wants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from services.runtime.service import leave_out_traces

LEVEL = "TORCH_CPP_LOG_LEVEL"
LEFT = """
import sys
from services.runtime.service import leave_out_traces
leave_out_traces()
from torch.distributed import DistError, TCPStore
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = TCPStore("127.0.0.1", server.port, is_master=False)
del server
try:
    client.get("key")
except DistError as error:
    print("cause:", error, file=sys.stderr)
"""


@pytest.mark.parametrize(("wanted", "has_frames"), [(None, False), ("WARNING", True)])
def test_a_peer_that_has_gone_costs_a_line(wanted: str | None, has_frames: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != LEVEL}
    if wanted is not None:
        environment[LEVEL] = wanted
    done = subprocess.run(
        [sys.executable, "-c", LEFT], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert "cause: " in done.stderr
    assert ("frame #" in done.stderr) is has_frames
    assert has_frames or len(done.stderr.splitlines()) == 1


def test_what_somebody_has_set_stays() -> None:
    environment = {LEVEL: "INFO"}
    leave_out_traces(environment)
    assert environment == {LEVEL: "INFO"}
