"""A further kind of device is a further folder: what all kinds share in verifying asks a `Device`, and for no kind."""

from __future__ import annotations

import re

import pytest

from kbrl_async.kernels.verify import device
from kbrl_async.kernels.verify.device import device_of
from tests.pages import ROOT

ASKS = re.compile(r"""\bdevice\s*[!=]=\s*["']|\bdevice\.startswith\(""")


def test_what_is_shared_asks_for_no_kind_of_device() -> None:
    shared = sorted((ROOT / "kbrl_async/kernels/verify").glob("*.py"))
    assert len(shared) > 20
    assert [path.name for path in shared if ASKS.search(path.read_text())] == []


@pytest.mark.parametrize(
    "line", ['if self.device == "cpu":', "x = 1 if device != 'cuda' else 2", "device.startswith(k)"]
)
def test_who_asks_is_found(line: str) -> None:
    assert ASKS.search(line)


def test_compilers_of_a_gpu_need_more_than_those_of_a_processor() -> None:
    assert device_of("cpu").tools == device.Device.tools == "tool"
    assert device_of("cuda:0").tools == "gpu-tool"
