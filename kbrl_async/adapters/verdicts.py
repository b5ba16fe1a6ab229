"""Rewards for whoever has an answer and a problem: from a service (`kbrl serve`), or from verifiers of this process.

::

    trainer's function ─▶ Rewards.of(answer, problem) ─┬─ server ─▶ POST /v1/verify, again until there is an answer
                                                      └─ none   ─▶ one AsyncVerifier of the process, started once

Invariants
* A fault of the host is waited out or raised as `InfraError`, never a number. A fault of the problem is `ProblemError`.
* A question is the same job however often it is asked, so whoever gives up and asks again finds the work done.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from kbrl_async.errors import InfraError, KbrlError, ProblemError, UserError
from kbrl_async.kernels.settings import Rules
from kbrl_async.rollouts.settings import Reward

if TYPE_CHECKING:
    from kbrl_async.kernels.funnel import AsyncVerifier

SERVER, KEY, PRESET, RULES = "KBRL_SERVER", "KBRL_SERVER_KEY", "KBRL_SERVER_PRESET", "KBRL_SERVER_RULES"
"""Variables: the service's address, the key that it knows us by, the reward's preset, and the rules."""
WAIT_S = 20.0
"""Of one request; longer work is asked for again."""
PAUSE_S = 0.5
DEADLINE_S = 600.0
log = logging.getLogger(__name__)
BUSY = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
"""Statuses after which the same question may be answered."""
_BY_NAME = ("server", "key", "preset", "timing", "backend", "deadline_s", "rules")
ReturnT = TypeVar("ReturnT")


class RewardOptions(msgspec.Struct, frozen=True):
    """How a trainer's rewards are found. What is empty is taken from the variables."""

    server: str = ""
    """Such as `http://127.0.0.1:8470`; empty, also in `KBRL_SERVER`: verified in this process."""
    key: str = ""
    preset: str = ""
    timing: bool = True
    backend: str = ""
    deadline_s: float = DEADLINE_S
    """After so long without an answer the host is at fault."""
    workers: int = 1
    """Candidates at once, where this process verifies."""
    device: str = "auto"
    rules: str = ""
    """`strict` or `open`, by which answers are judged. Empty, also in `KBRL_SERVER_RULES`: as the service does, and in
    this process `open`. A service that judges by others refuses.
    """

    @staticmethod
    def among(words: Mapping[str, Any], **defaults: Any) -> RewardOptions:
        """Those that a trainer gives by name, out of all that it gives a reward function."""
        return RewardOptions(**defaults | {name: words[name] for name in _BY_NAME if words.get(name) is not None})

    def resolved(self) -> RewardOptions:
        return msgspec.structs.replace(
            self,
            server=self.server or os.environ.get(SERVER, ""),
            key=self.key or os.environ.get(KEY, ""),
            preset=self.preset or os.environ.get(PRESET, "") or Reward().preset,
            rules=_known_rules(self.rules or os.environ.get(RULES, "")),
        )


def _known_rules(name: str) -> str:
    if name not in ("", *get_args(Rules)):
        raise UserError(f"there are no rules {name!r}", "Choose strict or open")
    return name


async def reward_of(answer: str, problem: str, options: RewardOptions | None = None) -> float:
    """What a model's answer to a problem is worth.

    :param problem: an id of the suite or of the service, or the reference's source (anything with a line break).
    :raises InfraError: the host failed, or gave no answer in time; no reward is known.
    :raises ProblemError: the problem fails; `UserError`: there is no such problem, preset or backend, or no right key.
    """
    options = (options or RewardOptions()).resolved()
    if options.server:
        return await _from_service(answer, problem, options)
    return await asyncio.wrap_future(_submit(reward_from_here(answer, problem, options)))


async def reward_or_none(answer: str, problem: str, options: RewardOptions | None = None) -> float | None:
    """The same for trainers that leave a sample out: None where the host failed, or this one problem.

    :raises UserError: and `HostError`: no sample would ever have a reward.
    """
    try:
        return await reward_of(answer, problem, options)
    except (InfraError, ProblemError) as error:
        log.warning("no reward: %s", error)
        return None


def run(work: Coroutine[Any, Any, ReturnT]) -> ReturnT:
    """For trainers that call plain functions, also from a thread with an event loop of its own."""
    return _submit(work).result()


# ── the process's own loop and verifier ─────────────────────────────────────────────────────────────────────────────

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process: a child that was forked has the dictionary, and not the thread."""


def _submit(work: Coroutine[Any, Any, ReturnT]) -> concurrent.futures.Future[ReturnT]:
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="kbrl-rewards", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, loop)


_verifiers: dict[tuple[int, int, str, str], AsyncVerifier] = {}


async def reward_from_here(answer: str, problem: str, options: RewardOptions) -> float:
    from kbrl_async.kernels.funnel import AsyncVerifier, VerifyOptions
    from kbrl_async.rollouts.rewards.results import reward

    rules: Rules = "strict" if options.rules == "strict" else "open"
    key = (os.getpid(), options.workers, options.device, rules)
    if key not in _verifiers:
        judging = VerifyOptions.by(rules)
        _verifiers[key] = await AsyncVerifier(options.workers, options.device, judging).__aenter__()
        atexit.register(_verifiers[key].close)
    verifier = _verifiers[key]
    asked = await asyncio.to_thread(_problem, problem)
    try:
        result = await asyncio.wait_for(
            verifier.verify(asked, answer, options.backend or None, response=True, timing=options.timing),
            options.deadline_s,
        )
    except TimeoutError:
        raise InfraError(f"no verdict within {options.deadline_s:.0f} s", "Raise deadline_s, or workers") from None
    return reward(result, options.preset, source=answer, response=answer)


@functools.lru_cache(maxsize=1024)
def _problem(problem: str) -> Any:
    """Ids and sources only: a data set's label opens no file."""
    from kbrl_async.kernels.problems import load_problems, parse_problem
    from kbrl_async.kernels.problems.finding import choose

    return parse_problem(problem, "L0/label") if "\n" in problem else choose(problem, load_problems())


# ── a service ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def _from_service(answer: str, problem: str, options: RewardOptions) -> float:
    import httpx

    named = {"reference": problem} if "\n" in problem else {"problem": problem}
    body = {"candidate": answer, "response": True, "preset": options.preset, "timing": options.timing, **named}
    body |= {"backend": options.backend, "wait_s": min(WAIT_S, options.deadline_s)}
    body |= {"rules": options.rules} if options.rules else {}
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    until, why, pause_s = time.monotonic() + options.deadline_s, "", PAUSE_S
    async with httpx.AsyncClient(base_url=options.server, headers=headers, timeout=WAIT_S + 30) as client:
        while not why or time.monotonic() < until:  # asked once at least: a client takes its time to begin
            try:
                answered = await client.post("/v1/verify", json=body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if answered.status_code not in BUSY and answered.status_code != 202:
                    return _reward_in(answered.status_code, answered.content, options)
                why = f"HTTP {answered.status_code}"
                if answered.status_code == 202:
                    continue
            await asyncio.sleep(min(pause_s, max(0.0, until - time.monotonic())))
            pause_s = min(2 * pause_s, 15.0)
    cause = f"{options.server} gave no verdict within {options.deadline_s:.0f} s: {why}"
    raise InfraError(cause, "See its log, and /v1/health")


def _reward_in(code: int, content: bytes, options: RewardOptions) -> float:
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        raise InfraError(f"{options.server} answered HTTP {code} with no JSON", "Is it a kbrl serve?") from None
    if code == 200:
        return float(found["reward"])
    trouble = found.get("error") or {}
    kind: type[KbrlError] = ProblemError if code == 422 else UserError
    if code == 413:
        return _worth_of_nothing(options)
    raise kind(trouble.get("cause", f"HTTP {code}"), trouble.get("cure", ""))


def _worth_of_nothing(options: RewardOptions) -> float:
    """An answer that no service takes for its length is the policy's own fault: no kernel is in it."""
    from kbrl_async.kernels.funnel.result import Result
    from kbrl_async.rollouts.rewards.results import reward
    from protocols.records import Fault, Verdict

    return reward(Result("", "", "", Verdict(Fault.FORMAT_ERROR), ()), options.preset)
