"""A candidate that takes its runner's place: from a call on, the bench talks to the candidate's own loop."""

from __future__ import annotations

import textwrap

SOURCE = '''
import os, socket, struct, sys, time
import msgspec
import torch
import torch.nn as nn

encode = msgspec.msgpack.encode
RUN, EMPTY, TRACE, MUTED, HELD = 1, 2, 16, 17, 18


def frame_with(name):
    """The nearest caller that has a local variable of this name."""
    frame = sys._getframe(1)
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame


class ModelNew(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.calls, self.kept = 0, []

    def forward(self, x):
        self.calls += 1
        self.y = x * 2 + self.shift
        self.kept = [*self.kept[-1:], self.y]
        if self.calls == {call}:
            self.serve()
        return self.y

    def serve(self):
        """Never returns: answers every order in the runner's place."""
        frame = frame_with("nonce")
        self.runner, self.channel = frame.f_locals["self"], frame.f_locals["self"].channel
        op, slot, nonce = (frame.f_locals[name] for name in ("op", "slot", "nonce"))
        while True:
            told = self.answer(op, slot, nonce)
            if told is not None:
                self.channel.send(told)
            data = self.channel.recv(1 << 20)
            if len(data) != 10:
                time.sleep(60)
            op, slot, nonce = struct.unpack("<BBQ", data)
            if op in (RUN, TRACE, MUTED):
                self.y = self.runner.slots[slot][0] * 2 + self.shift
                self.kept.append(self.y)

    def meta(self, **other):
        y = self.y
        told = dict(dtype="float32", shape=list(y.shape), strides=list(y.stride()), place=y.data_ptr(), kind="Tensor")
        return list((told | other).values())

    def done(self, nonce, tree=("T", 0), tensors=None, **more):
        tensors = [self.meta()] if tensors is None else tensors
        return encode(dict(type="done", nonce=nonce, tree=tree, tensors=tensors, **more))

    def raw_done(self, nonce, tree):
        """`tree` as bytes that no encoder would write."""
        return b"\\x84" + b"".join(map(encode, ("type", "done", "nonce", nonce, "tensors", [], "tree"))) + tree

    def answer(self, op, slot, nonce):
{answer}
'''


def candidate(answer: str, call: int = 3) -> str:
    """`answer` is the body of a function of `op`, `slot` and `nonce`: bytes to send, or None. It is asked from
    forward's call number `call` on.
    """
    return SOURCE.replace("{call}", str(call)).replace("{answer}", textwrap.indent(textwrap.dedent(answer), " " * 8))
