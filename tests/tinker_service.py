"""Tinker's service, small, written from its client's own wire types: a policy of two logits, which learns.

::

    create_session ─▶ create_model ─▶ { save_weights_for_sampler ─▶ create_sampling_session ─▶ asample … }
                                      { forward_backward (protobuf) ─▶ optim_step } ─▶ retrieve_future

The policy's next token depends on the last one only: after anything it writes one of the two `ANSWERS` tokens, after
those it ends. What is trained is the logits, by importance sampling as the service documents it.
"""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

BYTES, END = 256, 258
ANSWERS = (256, 257)
"""Tokens that stand for a whole answer."""
VOCABULARY = 259


class Tokens:
    """A tokenizer of bytes and of whole answers."""

    eos_token_id, eos_token, bos_token_id, bos_token, name_or_path = END, "", None, None, "bytes"

    def __init__(self, answers: tuple[str, str]) -> None:
        self.answers = answers

    def encode(self, text: str, add_special_tokens: bool = False, **_: object) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, **_: object) -> str:
        whole = dict(zip(ANSWERS, self.answers, strict=True))
        return "".join(whole.get(int(i), "\n\nUser:" if int(i) == END else chr(int(i))) for i in np.atleast_1d(ids))

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in ids]


class Policy:
    def __init__(self) -> None:
        self.logits = torch.zeros(2, requires_grad=True)
        self.optimizer = torch.optim.Adam([self.logits])

    def log_probs(self, before: torch.Tensor) -> torch.Tensor:
        """[N] last tokens → [N, vocabulary]."""
        free = torch.full((VOCABULARY,), -30.0)
        free = torch.cat([free[: ANSWERS[0]], self.logits, free[ANSWERS[1] + 1 :]])
        ending = torch.full((VOCABULARY,), -30.0)
        ending[END] = 0.0
        is_end = (before >= ANSWERS[0]).unsqueeze(1)
        return torch.log_softmax(torch.where(is_end, ending, free), -1)


class Service:
    """All that is kept. `updates` are the probabilities of the second answer after each step."""

    def __init__(self, seed: int = 0) -> None:
        self.policy, self.rng = Policy(), random.Random(seed)
        self.saved: dict[str, torch.Tensor] = {}
        self.sessions: dict[str, torch.Tensor] = {}
        self.futures: dict[str, Any] = {}
        self.updates: list[float] = []
        self.lock = threading.Lock()
        self.asked: list[str] = []

    def answer(self, path: str, body: bytes, kind: str) -> Any:
        name = path.rpartition("/api/v1/")[2]
        self.asked.append(name)
        if name == "forward_backward":
            return self.later(self.forward_backward(wire.ForwardBackwardRequest.FromString(body)))
        asked = json.loads(body or b"{}")
        handler = getattr(self, name, None)
        return {} if handler is None else handler(asked)

    def later(self, result: Any, **more: Any) -> dict[str, Any]:
        request_id = f"r{len(self.futures)}"
        self.futures[request_id] = result
        return {"request_id": request_id, **more}

    def retrieve_future(self, asked: dict[str, Any]) -> Any:
        return self.futures[asked["request_id"]]

    def telemetry(self, _: dict[str, Any]) -> Any:
        return {"status": "accepted"}

    def create_session(self, _: dict[str, Any]) -> Any:
        return {"type": "create_session", "session_id": "s"}

    def session_heartbeat(self, _: dict[str, Any]) -> Any:
        return {"type": "session_heartbeat"}

    def get_server_capabilities(self, _: dict[str, Any]) -> Any:
        return {"supported_models": [{"model_name": "bytes"}]}

    def create_model(self, asked: dict[str, Any]) -> Any:
        request = types.CreateModelRequest.model_validate(asked)
        return self.later({"model_id": f"{request.session_id}:train:0", "type": "create_model"})

    def get_info(self, asked: dict[str, Any]) -> Any:
        data = {"arch": "logits", "model_name": "bytes", "tokenizer_id": "bytes"}
        base = {"model_id": asked["model_id"], "is_lora": True, "lora_rank": 32, "model_name": "bytes"}
        return {"type": "get_info", "model_data": data, **base}

    def optim_step(self, asked: dict[str, Any]) -> Any:
        params = types.AdamParams.model_validate(asked["adam_params"])
        with self.lock:
            for group in self.policy.optimizer.param_groups:
                group["lr"] = params.learning_rate
            self.policy.optimizer.step()
            self.policy.optimizer.zero_grad()
            self.updates.append(float(torch.softmax(self.policy.logits.detach(), 0)[1]))
        return self.later({"metrics": {}})

    def save_weights(self, asked: dict[str, Any]) -> Any:
        path = f"tinker://s:train:0/weights/{asked.get('path') or len(self.saved)}"
        self.saved[path] = self.policy.logits.detach().clone()
        return self.later({"path": path, "type": "save_weights"})

    def save_weights_for_sampler(self, asked: dict[str, Any]) -> Any:
        path = f"tinker://s:train:0/sampler_weights/{asked.get('path') or len(self.saved)}"
        self.saved[path] = self.policy.logits.detach().clone()
        found: dict[str, Any] = {"path": path, "type": "save_weights_for_sampler"}
        if asked.get("sampling_session_seq_id") is not None and not asked.get("path"):
            session = self.create_sampling_session({"model_path": path})["sampling_session_id"]
            found = {"path": None, "sampling_session_id": session, "type": "save_weights_for_sampler"}
        return self.later(found)

    def create_sampling_session(self, asked: dict[str, Any]) -> Any:
        session = f"sampling{len(self.sessions)}"
        self.sessions[session] = self.saved.get(asked.get("model_path") or "", torch.zeros(2))
        return {"type": "create_sampling_session", "sampling_session_id": session}

    def get_sampler(self, _: dict[str, Any]) -> Any:
        return {"sampler_id": "s", "base_model": "bytes"}

    def asample(self, asked: dict[str, Any]) -> Any:
        logits = self.sessions.get(asked.get("sampling_session_id", ""), torch.zeros(2))
        logp = torch.log_softmax(logits, 0).tolist()
        made = wire.SampleResponse()
        for _ in range(asked.get("num_samples", 1)):
            chosen = int(self.rng.random() < np.exp(logp[1]))
            one = made.sequences.add()
            one.stop_reason = wire.STOP_REASON_STOP
            one.tokens = np.array([ANSWERS[chosen], END], np.int32).tobytes()
            one.logprobs = np.array([logp[chosen], 0.0], np.float32).tobytes()
        ids = [f"q{len(self.futures)}.{i}" for i in range(len(made.sequences))]
        return self.later(made, sample_sequence_ids=ids)

    def forward_backward(self, asked: wire.ForwardBackwardRequest) -> wire.ForwardBackwardOutput:
        logps, loss = [], torch.zeros(())
        with self.lock:
            for datum in asked.data:
                before = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input])
                given = {name: _array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
                targets = torch.tensor(given["target_tokens"].astype(np.int64))
                found = self.policy.log_probs(torch.tensor(before.astype(np.int64)))
                logp = found.gather(1, targets.unsqueeze(1)).squeeze(1)
                ratio = (logp - torch.tensor(given["logprobs"])).exp()
                loss = loss - (ratio * torch.tensor(given["advantages"])).sum()
                logps.append(logp.detach().numpy().astype(np.float32))
            if not asked.forward_only:
                loss.backward()
        made = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        made.metrics["loss:sum"] = float(loss)
        record = made.loss_fn_outputs.add()
        record.num_datums = len(logps)
        batched = record.fields["logprobs"]
        batched.data = b"".join(x.tobytes() for x in logps)
        batched.offsets = np.cumsum([0, *(x.nbytes for x in logps)]).astype(np.int64).tobytes()
        batched.dtype = wire.DTYPE_FLOAT32
        return made


def _array(tensor: wire.Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.dense, np.float32 if tensor.dtype == wire.DTYPE_FLOAT32 else np.int64).copy()


def start(service: Service) -> ThreadingHTTPServer:
    """Serves in a thread, at a free port of this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "zstd":
                body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
            self._send(service.answer(self.path, body, self.headers.get("Content-Type", "")))

        def do_GET(self) -> None:
            self._send(service.answer(self.path, b"", ""))

        def _send(self, answer: Any) -> None:
            is_json = isinstance(answer, dict)
            data = json.dumps(answer).encode() if is_json else answer.SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/json" if is_json else "application/x-protobuf")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
