"""A model by script behind OpenAI's chat protocol: wrong first, right once it was told so; with tools it asks `verify`.

`python scripted_model.py PORT` serves it, `ANSWERS` is the script.
"""

from __future__ import annotations

import json
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_FILE = '''import torch
from torch import nn
from kbrl_async.launch import c_kernel

SOURCE = r"""
#include <math.h>
void run(const float *x, float *y, long n) {{
    for (long i = 0; i < n; i++) y[i] = {value};
}}
"""


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = c_kernel(SOURCE, "run")

    def forward(self, x):
        y = torch.empty_like(x)
        self.kernel(x, y, x.numel())
        return y
'''
WRONG, RIGHT = (_FILE.format(value=value) for value in ("x[i]", "tanhf(x[i])"))
ANSWERS = [f"```python\n{text}```\n" for text in (WRONG, RIGHT)]
"""For L1/01_tanh."""


def message(messages: list[dict[str, Any]], tools: list[Any]) -> dict[str, Any]:
    """The next one of the conversation."""
    told = [m for m in messages if m["role"] in ("user", "tool")][1:]
    if tools and not told:
        text = str(messages[-1]["content"])
        found = re.search(r"L\d+/\w+", text)
        arguments = json.dumps({"problem_id": found[0] if found else "L1/01_tanh", "source": WRONG})
        name = next(tool["function"]["name"] for tool in tools if tool["function"]["name"].endswith("verify"))
        call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": ANSWERS[min(len(told), 1)]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = message(asked["messages"], asked.get("tools") or [])
        reason = "tool_calls" if said.get("tool_calls") else "stop"
        base = {"id": "1", "created": int(time.time()), "model": asked["model"]}
        if asked.get("stream"):
            delta = dict(said)
            if delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": 0, **delta["tool_calls"][0]}]
            chunks = [{"delta": delta, "finish_reason": None}, {"delta": {}, "finish_reason": reason}]
            lines = [{**base, "object": "chat.completion.chunk", "choices": [{"index": 0, **c}]} for c in chunks]
            body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
            self._send(body.encode(), "text/event-stream")
            return
        choice = {"index": 0, "message": said, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        whole = {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
        self._send(json.dumps(whole).encode(), "application/json")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
