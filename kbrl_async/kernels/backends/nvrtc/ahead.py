"""NVRTC in a confined child: it parses hostile text, and may be led into files, loops or its own bugs by it."""

from __future__ import annotations

import socket

import msgspec

from kbrl_async.kernels.backends.building import answers
from kbrl_async.kernels.backends.nvrtc import compiler as nvrtc
from kbrl_async.kernels.backends.nvrtc import launch as cuda
from kbrl_async.kernels.backends.nvrtc.build import Built, NvrtcOrder
from kbrl_async.kernels.sandbox import Isolation


def compile_nvrtc(channel: socket.socket, payload: bytes, fds: list[int], isolation: Isolation) -> None:
    """Entry of the confined child."""
    order = msgspec.msgpack.decode(payload, type=NvrtcOrder)
    answers.begin(channel, isolation, order.folder)
    try:
        compiled = nvrtc.compile_source(order.source, order.names, order.arch, order.options)
    except nvrtc.CompileError as error:
        answers.hand_in(channel, Built(error=str(error)[:32000] or "NVRTC failed without a word"), {})
    except (OSError, RuntimeError) as error:
        answers.hand_in(channel, Built(unusable=str(error)[:1000]), {})
    else:
        answers.hand_in(channel, Built(), cuda.to_bundle(compiled))
