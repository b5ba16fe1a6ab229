"""The HTTP face: every path, what is refused and how, streams. Nothing is decided here.

Invariants
* A body is read up to its limit and no further; one that does not come within `BODY_S` is given up.
* Every refusal is one line with cause and cure, and a status that says who has to do something.
* Another web site in a browser on this host can reach nothing: bodies are JSON by their own word, and the name by
  which the service was called is its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kbrl_async.errors import DiskFull, HostError, UserError
from kbrl_async.kernels.problems.finding import choose
from kbrl_async.serving import dialects, openapi
from kbrl_async.serving.documents import Answer, Ask, Batch, Job, Problems, Refusal, Trouble, answer, preset_of
from kbrl_async.serving.fairness import RequestRates
from kbrl_async.serving.settings import Keys, Serve, is_loopback
from protocols.records import Problem
from services.verification.desk import Desk, Full
from services.verification.executors import check_backend

BODY_S = 30.0
KERNELGYM_WAIT_S = 25.0
"""Its client may have the result in the answer, or poll for it."""
NAMES = 4096
"""Names of problems that are remembered: one problem has several."""
BEAT_S = 15.0
"""A stream says at least this often that it is alive."""

TypeT = TypeVar("TypeT")
Handler = Callable[[Request, str], Awaitable[Response]]

OPERATIONS = (
    openapi.Operation("POST", "/v1/verify", "Verify one candidate", "verify", Ask, Answer, streams=True),
    openapi.Operation("POST", "/v1/batch", "Verify many candidates", "batch", Batch, list[Answer], streams=True),
    openapi.Operation("GET", "/v1/jobs/{id}", "How a job stands", "job", None, Answer, streams=True),
    openapi.Operation("GET", "/v1/problems", "Problems that can be named", "problems", None, Problems),
    openapi.Operation("GET", "/v1/health", "Whether it works, and how much waits", "health", None, dict[str, Any]),
    openapi.Operation("GET", "/v1/hardware", "Where kernels run", "hardware", None, dict[str, Any]),
    openapi.Operation(
        "POST", "/v1/remote_rm", "slime's remote reward: a number", "remote_rm", dialects.RemoteRm, float
    ),
    openapi.Operation(
        "POST", "/v1/openrlhf", "OpenRLHF's remote reward", "openrlhf", dialects.RewardQuery, dict[str, Any]
    ),
    openapi.Operation("POST", "/evaluate", "KernelGYM's evaluation", "evaluate", dialects.Evaluate, dict[str, Any]),
    openapi.Operation("GET", "/status/{id}", "KernelGYM's status", "status", None, dict[str, Any]),
    openapi.Operation("GET", "/results/{id}", "KernelGYM's result", "results", None, dict[str, Any]),
)
OPEN = ("/v1/health", "/health", "/openapi.json", "/docs", "/")
"""What needs no key."""


class HttpRefusal(Exception):  # noqa: N818
    """An answer that is no success."""

    def __init__(self, code: int, cause: str, cure: str = "", after_s: float | None = None) -> None:
        super().__init__(cause)
        self.code, self.trouble, self.after_s = code, Trouble(cause, cure), after_s

    def response(self) -> Response:
        headers = {} if self.after_s is None else {"Retry-After": str(max(1, round(self.after_s)))}
        return _json(Refusal(self.trouble), self.code, headers)


class Face:
    """The handlers; `app` is what a server runs."""

    def __init__(
        self,
        desk: Desk,
        settings: Serve,
        keys: Keys | None,
        problems: Callable[[], Sequence[Problem]],
        backends: dict[str, frozenset[str]],
        hardware: dict[str, Any],
    ) -> None:
        self._desk, self._settings, self._keys = desk, settings, keys
        self._known_problems, self._backends, self._known_hardware = problems, backends, hardware
        self._rates = RequestRates(settings.per_minute)
        self._found_names: set[str] = set()
        self._document = openapi.document(OPERATIONS)
        self.app = Starlette(routes=[*self._routes()])

    def _routes(self) -> list[Route]:
        found = [Route(o.path, self._guarded(getattr(self, f"_{o.handler}")), methods=[o.method]) for o in OPERATIONS]
        extra = (("/openapi.json", self._openapi), ("/docs", self._docs), ("/", self._docs), ("/health", self._health))
        return [*found, *(Route(path, self._guarded(handler), methods=["GET"]) for path, handler in extra)]

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                return await handler(request, self._client(request))
            except HttpRefusal as refused:
                return refused.response()
            except Full as full:
                return HttpRefusal(503, full.cause, full.cure, 2.0).response()
            except DiskFull as full:
                return HttpRefusal(507, full.cause, full.cure, 10.0).response()
            except UserError as error:
                return HttpRefusal(400, error.cause, error.cure).response()
            except HostError as error:
                return HttpRefusal(503, error.cause, error.cure, 10.0).response()
            except ClientDisconnect:
                return Response(status_code=499)

        return handle

    # ── who asks, and what ────────────────────────────────────────────────────────────────────────────────────

    def _client(self, request: Request) -> str:
        """:raises Refused: no key, one that is not known, or too many questions."""
        host = (request.headers.get("host") or "").rpartition(":")[0].strip("[]") or request.headers.get("host", "")
        if self._settings.is_loopback and not is_loopback(host):
            raise HttpRefusal(421, f"this service is not {host[:80]}", "Call it by 127.0.0.1 or localhost")
        peer = f"{request.client.host}:{request.client.port}" if request.client else "?"
        if self._keys is None:
            return str(request.headers.get("x-client", peer))[:100]
        name = self._keys.name(request.headers.get("authorization", ""))
        if not name and request.url.path not in OPEN:
            raise HttpRefusal(401, "no key that is known here", "Send the header 'Authorization: Bearer KEY'")
        return name or peer

    def _count(self, client: str, questions: int = 1) -> None:
        if wait_s := self._rates.wait_s(client, time.monotonic(), questions):
            cause = f"more than {self._settings.per_minute:g} questions a minute"
            raise HttpRefusal(429, cause, f"Ask again in {wait_s:.0f} s", wait_s)

    async def _body(self, request: Request, kind: type[TypeT]) -> TypeT:
        """:raises Refused: too large, too slow, no JSON, or not what is asked for."""
        if "json" not in request.headers.get("content-type", ""):
            raise HttpRefusal(415, "the body is not said to be JSON", "Send 'Content-Type: application/json'")
        most, parts, size = self._settings.max_body, list[bytes](), 0
        said = request.headers.get("content-length", "")
        if said.isdigit() and int(said) > most:
            raise HttpRefusal(413, f"a body of {said} bytes", f"{most} are taken at most")
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise HttpRefusal(413, f"a body of more than {most} bytes", "Send less at once")
                    parts.append(part)
        except TimeoutError:
            raise HttpRefusal(408, f"the body did not come within {BODY_S:.0f} s", "Send it again") from None
        try:
            return msgspec.json.decode(b"".join(parts), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HttpRefusal(400, f"the body is not what is asked for: {error}", "See /docs") from None

    def _checked(self, ask: Ask) -> Ask:
        """:raises Refused: the question has no sense; `UserError`: it names what there is not."""
        if bool(ask.problem) == bool(ask.reference):
            raise HttpRefusal(400, "a question has a problem or a reference, one of them", "See /docs")
        most = self._settings.max_candidate
        for name, text in (("candidate", ask.candidate), ("reference", ask.reference)):
            if len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most:
                raise HttpRefusal(413, f"a {name} of {len(text)} characters", f"{most} bytes are taken at most")
        check_backend(ask, self._backends)
        if ask.problem:
            self._check_problem(ask.problem)
        preset_of(ask)
        if (ours := self._settings.rules) != (ask.rules or ours):
            cure = f"Leave `rules` out, or start it with --rules {ask.rules}"
            raise HttpRefusal(400, f"this service judges by the rules {ours}, not {ask.rules}", cure)
        return msgspec.structs.replace(ask, rules=ours)  # so that a service of other rules has other answers

    def _check_problem(self, name: str) -> None:
        """Names that were found once are looked up no more."""
        if name in self._found_names:
            return
        try:
            choose(name, self._known_problems())
        except UserError as error:
            raise HttpRefusal(404, error.cause, error.cure) from None
        if len(self._found_names) < NAMES:
            self._found_names.add(name)

    # ── our own paths ─────────────────────────────────────────────────────────────────────────────────────────

    async def _verify(self, request: Request, client: str) -> Response:
        began = time.perf_counter()
        ask = self._checked(await self._body(request, Ask))
        self._count(client)
        job = self._desk.submit(client, ask)
        if _streams(request):
            return _stream(self._events(job, ask))
        accepted = time.perf_counter()
        await self._desk.wait(job, self._wait_s(ask.wait_s))
        waited_s = time.perf_counter() - accepted
        response = self._answered(job, ask)
        work_s = waited_s if job.outcome is None else min(waited_s, job.outcome.seconds)
        own_ms = 1000 * (time.perf_counter() - began - work_s)
        response.headers["Server-Timing"] = f"own;dur={own_ms:.3f}, work;dur={1000 * work_s:.3f}"
        return response

    def _answered(self, job: Job, ask: Ask) -> Response:
        """200 with a verdict; 202 while there is none; 422 and 503 where problem and host are to blame."""
        found = self._answer(job, ask)
        code = {"problem": 422, "host": 503}.get(found.fault_owner or "", 200 if found.status == "done" else 202)
        headers = {"Location": f"/v1/jobs/{job.id}"} | ({"Retry-After": "5"} if code == 503 else {})
        return _json(found, code, headers)

    def _answer(self, job: Job, ask: Ask) -> Answer:
        return answer(job, ask, self._desk.waiting if job.status == "queued" else None)

    async def _batch(self, request: Request, client: str) -> Response:
        batch = await self._body(request, Batch)
        asks = [self._checked(ask) for ask in batch.requests]
        self._count(client, len(asks))
        jobs = [self._desk.submit(client, ask) for ask in asks]
        if _streams(request):
            return _stream(self._each(jobs, asks))
        until = time.monotonic() + self._wait_s(batch.wait_s)
        for job in jobs:
            await self._desk.wait(job, until - time.monotonic())
        found = [self._answer(job, ask) for job, ask in zip(jobs, asks, strict=True)]
        return _json(found, 200 if all(one.status in ("done", "failed") for one in found) else 202)

    async def _job(self, request: Request, _client: str) -> Response:
        job = self._found(self._desk.find(request.path_params["id"]))
        ask = job.ask
        if preset := request.query_params.get("preset"):
            ask = self._checked(msgspec.structs.replace(ask, preset=preset))
        return _stream(self._events(job, ask)) if _streams(request) else _json(self._answer(job, ask))

    async def _problems(self, _request: Request, _client: str) -> Response:
        shown = ("problem_id", "level", "name", "split", "source", "flags")
        return _json(Problems([{name: getattr(p, name) for name in shown} for p in self._known_problems()]))

    async def _health(self, _request: Request, _client: str) -> Response:
        desk = self._desk
        found = {"waiting": desk.waiting, "running": desk.running, "done": desk.done, "lag_ms": desk.lag.percentiles()}
        return _json({"status": "full_disk" if desk.is_full else "ok", **found})

    async def _hardware(self, _request: Request, _client: str) -> Response:
        return _json(self._known_hardware)

    async def _openapi(self, _request: Request, _client: str) -> Response:
        return JSONResponse(self._document)

    async def _docs(self, _request: Request, _client: str) -> Response:
        return HTMLResponse(openapi.page(self._document))

    # ── other projects' paths ─────────────────────────────────────────────────────────────────────────────────

    async def _evaluate(self, request: Request, client: str) -> Response:
        body = await self._body(request, dialects.Evaluate)
        job = self._desk.submit(client, self._checked(body.ask()))
        self._desk.name(body.task_id, job)
        await self._desk.wait(job, min(KERNELGYM_WAIT_S, body.timeout))
        found = self._answer(job, job.ask)
        if found.fault_owner == "host":  # its client asks again after a 503, and would pay -1 for a task that failed
            raise HttpRefusal(503, found.error.cause if found.error else "the host failed", "Ask again", 5.0)
        return _json(dialects.evaluation(body.task_id, found))

    async def _status(self, request: Request, client: str) -> Response:
        """Where the host failed, its client would pay a penalty: it hears that the task waits, and it does, again."""
        task_id, job = request.path_params["id"], self._found(self._desk.named(request.path_params["id"]))
        if job.outcome is not None and job.outcome.owner == "host":
            job = self._desk.submit(client, job.ask)
        return _json(dialects.task_status(task_id, self._answer(job, job.ask)))

    async def _results(self, request: Request, _client: str) -> Response:
        task_id, job = request.path_params["id"], self._found(self._desk.named(request.path_params["id"]))
        return _json(dialects.evaluation(task_id, self._answer(job, job.ask)))

    async def _remote_rm(self, request: Request, client: str) -> Response:
        body = await self._body(request, dialects.RemoteRm)
        return _json((await self._rewards(client, [body.ask(self._settings.preset)]))[0])

    async def _openrlhf(self, request: Request, client: str) -> Response:
        body = await self._body(request, dialects.RewardQuery)
        try:
            asks = body.asks(self._settings.preset)
        except ValueError:
            raise HttpRefusal(400, "query, prompts and labels are not of one length", "Send one of each") from None
        rewards = await self._rewards(client, asks)
        return _json({"rewards": rewards, "scores": rewards, "extra_logs": {}})

    async def _rewards(self, client: str, asks: list[Ask]) -> list[float]:
        """:raises Refused: not all of them earn one yet, or ever: these trainers know no reward that is none."""
        self._count(client, len(asks))
        jobs = [self._desk.submit(client, self._checked(ask)) for ask in asks]
        until = time.monotonic() + self._settings.wait_s
        for job in jobs:
            await self._desk.wait(job, until - time.monotonic())
        found = [self._answer(job, ask) for job, ask in zip(jobs, asks, strict=True)]
        for one in found:
            if one.reward is None:
                cause = one.error.cause if one.error else "not verified yet"
                raise HttpRefusal(422 if one.fault_owner == "problem" else 503, cause, "Ask again", 2.0)
        return [one.reward for one in found if one.reward is not None]

    # ── streams ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _events(self, job: Job, ask: Ask) -> AsyncIterator[tuple[str, Answer]]:
        async for now in self._desk.follow(job):
            found = self._answer(now, ask)
            yield found.status, found

    async def _each(self, jobs: list[Job], asks: list[Ask]) -> AsyncIterator[tuple[str, Any]]:
        """Each of a batch as it ends, with its place."""

        async def ended(place: int) -> int:
            await self._desk.wait(jobs[place], float("inf"))
            return place

        for done in asyncio.as_completed([ended(place) for place in range(len(jobs))]):
            place = await done
            found = self._answer(jobs[place], asks[place])
            yield found.status, {"index": place, **msgspec.to_builtins(found)}

    def _wait_s(self, asked: float | None) -> float:
        return self._settings.wait_s if asked is None else asked

    def _found(self, job: Job | None) -> Job:
        if job is None:
            raise HttpRefusal(
                404, "there is no such job", f"The newest {self._settings.keep} that ended are remembered"
            )
        return job


def _streams(request: Request) -> bool:
    return "text/event-stream" in request.headers.get("accept", "")


def _stream(events: AsyncIterator[tuple[str, Any]]) -> Response:
    """Server-sent events; a comment now and then keeps what lies between awake."""

    async def lines() -> AsyncIterator[bytes]:
        upcoming = asyncio.ensure_future(anext(events, None))
        try:
            while True:
                done, _ = await asyncio.wait({upcoming}, timeout=BEAT_S)
                if not done:
                    yield b": alive\n\n"
                    continue
                if (event := upcoming.result()) is None:
                    return
                name, value = event
                yield b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
                upcoming = asyncio.ensure_future(anext(events, None))
        finally:
            upcoming.cancel()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _json(value: Any, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a character in a candidate's message
        content = json.dumps(msgspec.to_builtins(value)).encode()
    return Response(content, code, headers, "application/json")
