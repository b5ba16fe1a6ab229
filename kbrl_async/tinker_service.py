"""The Tinker service as this project talks to it: one account by a key of the environment, its errors in our words.

::

    account = Account(base_url, "TINKER_API_KEY", deadline_s)       the library is imported here and nowhere else
    account.connect() ─▶ a session ─ futures ─▶ account.result(future, "what it is", tick) │ await account.answer(…)

Invariants
* The key is sent to the service only and stands in no message.
* Every wait has a deadline (I11): the library tries some failures again for hours.
* A key or account that is refused wants a person (ConfigError), and so does a refusal before anything has worked;
  all else may pass (InfraError).
* The library's telemetry is off unless TINKER_TELEMETRY says otherwise: it would send tracebacks of this program.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kbrl_async.errors import CheckpointError, ConfigError, InfraError, KbrlError, MissingTool, SessionLost
from kbrl_async.secret import secret, without
from kbrl_async.weights import FILES

KEY = "TINKER_API_KEY"
KIND = "tinker"
"""Of a policy version whose weights are there."""
RUN_WITH = "0.38"
"""Versions of the library that this was run with."""
LOOK_S = 0.25
CONNECT_S = 60.0
GOODBYE_S = 1.0
MAX_SAID = 300
REFUSED = frozenset({401, 403})
NO_CREDIT = 402
GONE = frozenset({404, 410})
PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 after which the same request may succeed."""


def library() -> Any:
    """The `tinker` package.

    :raises MissingTool: it is not installed, or does not load.
    """
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    try:
        import tinker
    except ImportError as error:
        cure = f"Install it: pip install 'kbrl-async[tinker]' (tinker {RUN_WITH})"
        raise MissingTool(f"engine=tinker needs the tinker library, which can't be loaded: {error}", cure) from error
    return tinker


class Account:
    """Who asks the service, and how long for."""

    def __init__(
        self,
        base_url: str | None,
        key_env: str | None,
        deadline_s: float,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """:raises ConfigError: the variable of the key is empty. MissingTool: there is no library."""
        self.tinker = library()
        self._key_env = key_env or KEY
        self._key = secret(self._key_env, "sampler.api_key_env", environment)
        self._base_url, self._deadline_s = base_url, deadline_s
        self._has_worked = False

    @property
    def where(self) -> str:
        """The service, in messages."""
        return f"Tinker at {self._base_url}" if self._base_url else "Tinker"

    def connect(self, tick: Callable[[], None] = lambda: None) -> Any:
        """A `ServiceClient` with a session of its own."""

        def session() -> Any:
            made = self.tinker.ServiceClient(base_url=self._base_url, api_key=self._key)
            made.holder.get_session_id()  # the session is made by the first that asks for it
            return made

        return self.result(in_thread(session), "a session", tick, min(CONNECT_S, self._deadline_s))

    def positions(self, model: str, tick: Callable[[], None] = lambda: None) -> int | None:
        """The longest context of `model`; None where the service does not say.

        :raises ConfigError: it does not serve that model.
        """

        def ask() -> Any:
            return self.tinker.RestClient(base_url=self._base_url, api_key=self._key).get_server_capabilities().result()

        deadline_s = min(CONNECT_S, self._deadline_s)
        served = self.result(in_thread(ask), "the list of models", tick, deadline_s).supported_models
        known: dict[str, int | None] = {one.model_name: one.max_context_length for one in served if one.model_name}
        if model not in known:
            cure = f"Set model_name to one of: {', '.join(sorted(known)[:8])}"
            raise ConfigError(f"{self.where} serves no model '{model}'", cure)
        return known[model]

    def end(self, session: Any) -> None:
        """Says goodbye to the service; nobody waits for it longer than a moment."""
        concurrent.futures.wait({in_thread(lambda: session.close("success").result())}, GOODBYE_S)

    def forget(self, path: str) -> Any:
        """Asks for the deletion of saved weights; nobody waits for it."""
        return in_thread(lambda: self._rest().delete_checkpoint_from_tinker_path(path).result())

    def _rest(self) -> Any:
        return self.tinker.RestClient(base_url=self._base_url, api_key=self._key)

    def result(self, future: Any, what: str, tick: Callable[[], None], deadline_s: float | None = None) -> Any:
        """What a future of the library gives; `tick` is called while it is waited for.

        :raises ConfigError: a person has to act.
        :raises InfraError: it failed, or did not come in time.
        """
        pending = as_future(future)
        until = time.monotonic() + (deadline_s or self._deadline_s)
        while not concurrent.futures.wait({pending}, LOOK_S).done:
            tick()
            if time.monotonic() > until:
                pending.cancel()
                raise self._late(what, deadline_s or self._deadline_s)
        return self._settled(pending, what)

    async def answer(self, future: Any, what: str, deadline_s: float | None = None) -> Any:
        """`result`, on an event loop; cancelling it has the service stop."""
        pending, deadline_s = as_future(future), deadline_s or self._deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.wrap_future(pending)
        except TimeoutError:
            if not pending.done():  # a loop that stood still hears of the deadline and of its answer at once
                raise self._late(what, deadline_s) from None
        except asyncio.CancelledError:
            if not pending.done():
                raise
        except Exception:  # noqa: S110 - `_settled` says it
            pass
        return self._settled(pending, what)

    def _settled(self, done: concurrent.futures.Future[Any], what: str) -> Any:
        try:
            value = done.result()
        except KbrlError:
            raise
        except (
            Exception,
            concurrent.futures.CancelledError,
        ) as error:  # supervisor: of many kinds, see `as_error`
            raise self.as_error(error, what) from error
        self._has_worked = True
        return value

    def _late(self, what: str, deadline_s: float) -> InfraError:
        cure = "Is the service up? Else raise sampler.deadline_s or learner.deadline_s"
        return InfraError(f"{self.where} gave no answer to {what} within {deadline_s:g} s", cure)

    def as_error(self, error: BaseException, what: str) -> KbrlError:
        """The library's error as one of ours."""
        inner = _status_error(error)
        status = getattr(inner, "status_code", None)
        text = without(self._key, " ".join(str(inner or error).split()))[:MAX_SAID]
        cause = f"{self.where}, asked for {what}: {text or type(error).__name__}"
        if status in REFUSED or "api_key" in text:
            return ConfigError(cause, f"Put a valid key into the environment variable {self._key_env}")
        if status == NO_CREDIT:
            return ConfigError(cause, "See to the account's billing, then continue the run")
        if status is not None and status < 500 and status not in PASSING and not self._has_worked:
            return ConfigError(cause, "Correct what is asked for: model_name, lora_rank, sampler.base_url")
        if status in GONE:
            return SessionLost(cause, "It is tried again in a new session")
        return InfraError(cause, "It is tried again")


def path_in(folder: Path) -> str:
    """Where the service holds the weights of a published version, or a checkpoint.

    :raises CheckpointError: the folder does not say.
    """
    try:
        path = json.loads((folder / FILES[KIND]).read_text())["path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} names no weights at Tinker: {error}", "Delete the folder") from error
    return str(path)


def write_path(folder: Path, path: str) -> None:
    """What `path_in` reads."""
    (folder / FILES[KIND]).write_text(json.dumps({"path": path}))


def as_future(future: Any) -> concurrent.futures.Future[Any]:
    """The plain future behind one of the library's."""
    found = future.future() if hasattr(future, "future") else future
    assert isinstance(found, concurrent.futures.Future)
    return found


def in_thread(call: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """What blocks, in a thread that the end of the process does not wait for."""
    made: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:  # supervisor: whoever waits gets it
            made.set_exception(error)
        else:
            made.set_result(value)

    made.set_running_or_notify_cancel()
    threading.Thread(target=run, name="tinker", daemon=True).start()
    return made


def _status_error(error: BaseException | None) -> BaseException | None:
    """The one in a chain of causes that has the HTTP status."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(getattr(error, "status_code", None), int):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
