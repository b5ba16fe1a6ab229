"""Tinker's service, small, written from its client's own wire types: real models behind it, so that they learn.

::

    create_session ─▶ create_model │ load_weights ─▶ forward_backward (protobuf), optim_step, save_weights …
                   ─▶ create_sampling_session ─▶ asample                     ─▶ retrieve_future

What can go wrong is asked for at `/admin/faults` (`Service.break_`). Alone it serves the small policy:

    python -m tests.tinker_service --port 8490
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from tinker import types
from tinker.proto import tinker_public_pb2 as wire

from tests.tinker_models import ANSWERS, END, CausalLM, Drawn, Model, State, Tokens, TwoAnswers, Wanted

__all__ = ["ANSWERS", "END", "CausalLM", "Service", "Tokens", "start", "stop"]

WAIT_S = 10.0
MOST_AT_ONCE = 64


class Refused(Exception):  # noqa: N818
    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class Fault(NamedTuple):
    """What goes wrong: `kind` is an HTTP status, `garbage`, `slow`, `error` (a request that fails), `bad_tokens`,
    `stale` (the weights of the first version), `base`, or `lost` (all sessions are forgotten)."""

    name: str
    kind: str
    times: int = 1


class Trained:
    """One training model: its adapter, its optimizer, and the order of its requests."""

    def __init__(self, model: Model, rank: int, seed: int) -> None:
        self.model, self.rank, self.steps = model, rank, 0
        self.adapter = model.adapter(rank, seed)
        self.optimizer = torch.optim.AdamW(self.adapter.parameters, weight_decay=0.0)
        self.waiting: dict[int, Callable[[], None]] = {}
        self.next = 1

    def in_order(self, seq: int, job: Callable[[], None]) -> None:
        """Parts of one request come in any order."""
        self.waiting[seq] = job
        while self.next in self.waiting:
            self.waiting.pop(self.next)()
            self.next += 1


class Saved(NamedTuple):
    model: Model
    rank: int
    state: State
    optimizer: dict[str, Any]


class Service:
    """All that is kept. `updates` are what an adapter shows after each step (of two logits: the second's chance)."""

    def __init__(self, seed: int = 0, models: Sequence[Model] = (), keys: Sequence[str] = ()) -> None:
        given = models or [TwoAnswers(seed)]
        self.models = {model.name: model for model in given}
        self.keys = set(keys)
        self.sessions: set[str] = set()
        self.trained: dict[str, Trained] = {}
        self.saved: dict[str, Saved] = {}
        self.samplers: dict[str, tuple[Model, str | None]] = {}
        self.futures: dict[str, Future[Any]] = {}
        self.faults: list[Fault] = []
        self.updates: list[float] = []
        self.asked: list[str] = []
        self._numbers, self._lock = itertools.count(), threading.RLock()
        self._training = ThreadPoolExecutor(1)
        self._drawing: queue.Queue[tuple[str, Wanted, Future[Drawn]]] = queue.Queue()
        threading.Thread(target=self._draw, daemon=True).start()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, path: str, body: bytes, key: str) -> Any:
        route = path.partition("/api/v1/")[2].partition("?")[0]
        name = route.partition("/")[0] or "admin"
        with self._lock:
            self.asked.append(name)
        if self.keys and key not in self.keys and name != "admin":
            raise Refused(401, f"the key {key} is not known")
        fault = self._fault(name)
        if fault.isdigit():
            raise Refused(int(fault), "as was asked for")
        if fault == "slow":
            time.sleep(WAIT_S)
        if fault == "lost":
            self.lose_sessions()
        if name == "forward_backward":
            asked = wire.ForwardBackwardRequest.FromString(body)
            return self._trains(asked.model_id, asked.seq_id, lambda one: self._forward_backward(one, asked), fault)
        if "/" in route and name in ("samplers", "sessions", "training_runs"):
            return self._at(name, route.split("/")[1:])
        asked_ = json.loads(body or b"{}")
        handler: Any = getattr(self, name, None)
        if not callable(handler):
            return {}
        return handler(asked_, fault) if name in ("asample", "optim_step") else handler(asked_)

    def _at(self, name: str, route: list[str]) -> Any:
        """What is addressed by its path."""
        if name == "samplers":
            model, path = self.samplers_of(route[0])
            return {"sampler_id": route[0], "base_model": model.name, "model_path": path}
        if name == "sessions":
            self.sessions.discard(route[0])
            return {}
        run, _, place, kept = route
        if self.saved.pop(f"tinker://{run}/{place}/{kept}", None) is None:
            raise Refused(404, "nothing is saved there")
        return {}

    def admin(self, asked: dict[str, Any]) -> Any:
        """`{"name", "kind", "times"}`: a fault of the next requests of that name."""
        if asked:
            self.break_(**asked)
        return {"asked": {name: self.asked.count(name) for name in sorted(set(self.asked))}, "saved": len(self.saved)}

    def break_(self, name: str, kind: str, times: int = 1) -> None:
        with self._lock:
            self.faults.append(Fault(name, kind, times))

    def _fault(self, name: str) -> str:
        with self._lock:
            found = next((fault for fault in self.faults if fault.name == name), None)
            if found is None:
                return ""
            self.faults.remove(found)
            if found.times > 1:
                self.faults.insert(0, found._replace(times=found.times - 1))
            return found.kind

    def lose_sessions(self) -> None:
        with self._lock:
            self.sessions.clear()
            self.trained.clear()
            self.samplers.clear()

    def _later(self, future: Future[Any], **more: Any) -> dict[str, Any]:
        request_id = f"r{next(self._numbers)}"
        self.futures[request_id] = future
        return {"request_id": request_id, **more}

    def _now(self, value: Any, **more: Any) -> dict[str, Any]:
        done: Future[Any] = Future()
        done.set_result(value)
        return self._later(done, **more)

    def retrieve_future(self, asked: dict[str, Any]) -> Any:
        if asked["request_id"] not in self.futures:
            raise Refused(410, "no such request")
        try:
            return self.futures[asked["request_id"]].result(WAIT_S)
        except Late:
            return {"type": "try_again", "request_id": asked["request_id"], "queue_state": "active"}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "category": "server"}

    # ── sessions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def client(self, _: dict[str, Any]) -> Any:
        return {"sample_cancel_enabled": True}

    def telemetry(self, _: dict[str, Any]) -> Any:
        return {"status": "accepted"}

    def create_session(self, _: dict[str, Any]) -> Any:
        session = f"s{next(self._numbers)}"
        self.sessions.add(session)
        return {"type": "create_session", "session_id": session}

    def session_heartbeat(self, _: dict[str, Any]) -> Any:
        return {"type": "session_heartbeat"}

    def get_server_capabilities(self, _: dict[str, Any]) -> Any:
        known = [{"model_name": m.name, "max_context_length": m.context} for m in self.models.values()]
        return {"supported_models": known}

    def _check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise Refused(404, f"no session {session}")

    # ── training ─────────────────────────────────────────────────────────────────────────────────────────────────

    def create_model(self, asked: dict[str, Any]) -> Any:
        request = types.CreateModelRequest.model_validate(asked)
        self._check_session(request.session_id)
        if request.base_model not in self.models or request.lora_config is None:
            raise Refused(400, f"no model {request.base_model}")
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        rank, seed = request.lora_config.rank, request.lora_config.seed or 0
        self.trained[model_id] = Trained(self.models[request.base_model], rank, seed)
        return self._now({"model_id": model_id, "type": "create_model"})

    def load_weights(self, asked: dict[str, Any]) -> Any:
        """A new training model from a saved state."""
        request = types.LoadWeightsRequest.model_validate(asked)
        self._check_session(str(request.session_id))
        if request.path not in self.saved:
            raise Refused(404, f"nothing is saved as {request.path}")
        saved, model_id = self.saved[request.path], f"{request.session_id}:train:{request.model_seq_id}"
        made = self.trained[model_id] = Trained(saved.model, saved.rank, 0)
        made.adapter.load(saved.state)
        if request.optimizer:
            made.optimizer.load_state_dict(saved.optimizer)
        return self._now({"path": request.path, "model_id": model_id, "type": "load_weights"})

    def get_info(self, asked: dict[str, Any]) -> Any:
        one = self._of(asked["model_id"])
        data = {"arch": "lora", "model_name": one.model.name, "tokenizer_id": one.model.name}
        base = {"model_id": asked["model_id"], "is_lora": True, "lora_rank": one.rank, "model_name": one.model.name}
        return {"type": "get_info", "model_data": data, **base}

    def _of(self, model_id: str) -> Trained:
        self._check_session(model_id.partition(":")[0])
        if model_id not in self.trained:
            raise Refused(404, f"no training model {model_id}")
        return self.trained[model_id]

    def _trains(self, model_id: str, seq: int, work: Callable[[Trained], Any], fault: str = "") -> Any:
        """A promise of what `work` makes of the training model, in the order of its requests."""
        one, future = self._of(model_id), Future[Any]()

        def job() -> None:
            try:
                if fault == "error":
                    raise RuntimeError("a device was lost")
                future.set_result(b"\xff\xfegarbage" if fault == "garbage" else work(one))
            except Exception as error:
                future.set_exception(error)

        self._training.submit(one.in_order, seq, job)
        return self._later(future)

    def optim_step(self, asked: dict[str, Any], fault: str) -> Any:
        params = types.AdamParams.model_validate(asked["adam_params"])

        def step(one: Trained) -> Any:
            for group in one.optimizer.param_groups:
                group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2), "eps": params.eps}
            if params.grad_clip_norm > 0:
                torch.nn.utils.clip_grad_norm_(one.adapter.parameters, params.grad_clip_norm)
            one.optimizer.step()
            one.optimizer.zero_grad()
            one.steps += 1
            self.updates.append(one.adapter.shown())
            return {"metrics": {}}

        return self._trains(asked["model_id"], asked["seq_id"], step, fault)

    def _save(self, asked: dict[str, Any], place: str, answer: Callable[[str], Any]) -> Any:
        def save(one: Trained) -> Any:
            name = asked.get("path") or f"e{next(self._numbers)}"
            path = f"tinker://{asked['model_id']}/{place}/{name}"
            optimizer = json_free(one.optimizer.state_dict())
            self.saved[path] = Saved(one.model, one.rank, one.adapter.state(), optimizer)
            return answer(path)

        return self._trains(asked["model_id"], asked["seq_id"], save)

    def save_weights(self, asked: dict[str, Any]) -> Any:
        return self._save(asked, "weights", lambda path: {"path": path, "type": "save_weights"})

    def save_weights_for_sampler(self, asked: dict[str, Any]) -> Any:
        is_ephemeral = asked.get("sampling_session_seq_id") is not None and not asked.get("path")

        def answer(path: str) -> Any:
            if not is_ephemeral:
                return {"path": path, "type": "save_weights_for_sampler"}
            session = self._sampler(self.saved[path].model, path)
            return {"path": None, "sampling_session_id": session, "type": "save_weights_for_sampler"}

        return self._save(asked, "sampler_weights", answer)

    def _forward_backward(self, one: Trained, asked: wire.ForwardBackwardRequest) -> wire.ForwardBackwardOutput:
        constants = {name: value.number for name, value in asked.loss_fn_config_v2.items()}
        logps, loss = [], torch.zeros(())
        with torch.set_grad_enabled(not asked.forward_only):
            for datum in asked.data:
                before = np.concatenate([np.frombuffer(c.encoded_text.tokens, np.int32) for c in datum.model_input])
                given = {name: _array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
                logp = one.adapter.logprobs(before.tolist(), given["target_tokens"].tolist())
                loss = loss + loss_of(asked.loss_fn, logp, given, constants)
                logps.append(logp.detach().numpy().astype(np.float32))
        if not asked.forward_only:
            loss.backward()
        made = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        made.metrics["loss:sum"] = float(loss.detach())
        record = made.loss_fn_outputs.add()
        record.num_datums = len(logps)
        batched = record.fields["logprobs"]
        batched.data = b"".join(x.tobytes() for x in logps)
        batched.offsets = np.cumsum([0, *(x.nbytes for x in logps)]).astype(np.int64).tobytes()
        batched.dtype = wire.DTYPE_FLOAT32
        return made

    # ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _sampler(self, model: Model, path: str | None) -> str:
        session = f"sampling{next(self._numbers)}"
        self.samplers[session] = (model, path)
        return session

    def create_sampling_session(self, asked: dict[str, Any]) -> Any:
        self._check_session(asked["session_id"])
        path, base = asked.get("model_path"), asked.get("base_model")
        fault = self._fault("weights")
        if path is None:
            if base not in self.models:
                raise Refused(400, f"no model {base}")
            made = self._sampler(self.models[base], None)
        elif path not in self.saved:
            raise Refused(404, f"nothing is saved as {path}")
        else:
            first = next(p for p in self.saved if "/sampler_weights/" in p)
            served = {"base": None, "stale": first}.get(fault, path)
            made = self._sampler(self.saved[path].model, served)
        return {"type": "create_sampling_session", "sampling_session_id": made}

    def samplers_of(self, session: str) -> tuple[Model, str | None]:
        if session not in self.samplers:
            raise Refused(404, f"no sampling session {session}")
        return self.samplers[session]

    def asample(self, asked: dict[str, Any], fault: str) -> Any:
        session, params = asked["sampling_session_id"], asked["sampling_params"]
        model, path = self.samplers_of(session)
        prompt = [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]
        count, future = asked.get("num_samples", 1), Future[Any]()
        stop = params.get("stop")
        ends = frozenset(stop) if isinstance(stop, list) and all(isinstance(s, int) for s in stop) else frozenset({END})
        wanted = Wanted(prompt, params.get("max_tokens") or 16, params.get("temperature", 1.0), ends)
        drawn: list[Future[Drawn]] = [Future() for _ in range(count)]
        for one in drawn:
            self._drawing.put((session, wanted, one))

        def finish() -> None:
            try:
                found = [one.result() for one in drawn]
                scores = model.prompt_logprobs(self._state(path), prompt) if asked.get("prompt_logprobs") else None
                made = sample_response(found, scores, fault)
                future.set_result(b"\xff\xfegarbage" if fault == "garbage" else made)
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=finish, daemon=True).start()
        return self._later(future, sample_sequence_ids=[f"q{next(self._numbers)}" for _ in range(count)])

    def _state(self, path: str | None) -> State | None:
        return None if path is None else self.saved[path].state

    def _draw(self) -> None:
        """Answers that wait are drawn together, those of one set of weights at a time."""
        held: list[tuple[str, Wanted, Future[Drawn]]] = []
        while True:
            held.append(self._drawing.get() if not held else held.pop())
            while len(held) < MOST_AT_ONCE and not self._drawing.empty():
                held.append(self._drawing.get())
            session = held[0][0]
            mine = [one for one in held if one[0] == session]
            held = [one for one in held if one[0] != session]
            try:
                model, path = self.samplers_of(session)
                answers = model.draw(self._state(path), [wanted for _, wanted, _ in mine])
                for (_, _, future), answer in zip(mine, answers, strict=True):
                    future.set_result(answer)
            except Exception as error:
                for _, _, future in mine:
                    future.set_exception(error)


def sample_response(found: Sequence[Drawn], scores: Sequence[float] | None, fault: str) -> wire.SampleResponse:
    made = wire.SampleResponse()
    for one in found:
        sequence = made.sequences.add()
        sequence.stop_reason = wire.STOP_REASON_STOP if one.is_ended else wire.STOP_REASON_LENGTH
        sequence.tokens = np.array(one.tokens, np.int32).tobytes()
        logprobs = one.logprobs[:-1] if fault == "bad_tokens" else one.logprobs
        sequence.logprobs = np.array(logprobs, np.float32).tobytes()
    if scores is not None:
        made.prompt_logprobs = np.array([np.nan, *scores], np.float32).tobytes()
    return made


def loss_of(
    name: str, logp: torch.Tensor, given: dict[str, np.ndarray[Any, Any]], constants: dict[str, float]
) -> torch.Tensor:
    """The losses as the service documents them: sums over tokens."""
    if name == "cross_entropy":
        return -(logp * torch.tensor(given["weights"])).sum()
    advantage, ratio = torch.tensor(given["advantages"]), (logp - torch.tensor(given["logprobs"])).exp()
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    assert name == "ppo", name
    low, high = constants.get("clip_low_threshold", 0.8), constants.get("clip_high_threshold", 1.2)
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()


def json_free(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state that later steps leave alone."""
    moments = {i: {k: v.clone() for k, v in one.items()} for i, one in state["state"].items()}
    return {"state": moments, "param_groups": [dict(group) for group in state["param_groups"]]}


def _array(tensor: wire.Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.dense, np.float32 if tensor.dtype == wire.DTYPE_FLOAT32 else np.int64).copy()


def start(service: Service, port: int = 0) -> ThreadingHTTPServer:
    """Serves in a thread, at a free port of this host."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "zstd":
                body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
            try:
                self._send(service.answer(self.path, body, self.headers.get("X-API-Key", "")))
            except Refused as refused:
                self._send({"detail": refused.message}, refused.status)

        do_POST = do_GET = do_DELETE = _serve  # noqa: N815

        def _send(self, answer: Any, status: int = 200) -> None:
            is_json = isinstance(answer, dict)
            data = json.dumps(answer).encode() if is_json else answer
            data = data if isinstance(data, bytes) else data.SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/json" if is_json else "application/x-protobuf")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients are killed on the way."""

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def stop(server: ThreadingHTTPServer) -> None:
    """Closes it, and what clients of this process left open, without their warnings."""
    server.shutdown()
    server.server_close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def main() -> None:
    """Serves the policy of `model_name=small`, which is made where there is none."""
    from kbrl_async.runs.config import load
    from kbrl_async.runs.origins import base_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8490)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("settings", nargs="*", help="of the run that will use it, such as cache_path=…")
    asked = parser.parse_args()
    folder = base_model(load(overrides=asked.settings), lambda what, _: print(what, file=sys.stderr))
    torch.set_num_threads(1)
    models = [CausalLM.of_folder(name, folder) for name in ("small", str(folder))]
    server = start(Service(models=models, keys=asked.key), asked.port)
    print(f"serves small and {folder} at http://127.0.0.1:{server.server_port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
