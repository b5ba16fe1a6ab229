"""The OpenAI wire format: bodies of requests, what an answer says, what an HTTP status means. Pure.

Known dialects: OpenAI, vLLM (token ids by `return_token_ids`), SGLang, and hosted APIs that follow them. Token ids and
log-probs are asked for only where training was allowed; most endpoints return neither.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kbrl_async.errors import ConfigError, InfraError, KbrlError
from kbrl_async.sampling.settings import Sampler
from protocols.records import SamplingParams

Style = Literal["chat", "completions"]
ROUTES: dict[Style, str] = {"chat": "chat/completions", "completions": "completions"}
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Statuses after which the same request may succeed."""
MAX_MESSAGE = 300


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    output_tokens: int = 0


class Spending(msgspec.Struct, frozen=True):
    """What was asked for and paid since start."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0

    def plus(self, usage: Usage, settings: Sampler) -> Spending:
        """Prices are per million tokens."""
        cost = (usage.prompt_tokens * settings.price_input + usage.output_tokens * settings.price_output) / 1e6
        return msgspec.structs.replace(
            self,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
            cost=self.cost + cost,
        )


class EndpointAnswer(msgspec.Struct, frozen=True):
    """What one answer said."""

    text: str
    finish_reason: str
    usage: Usage
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


class Garbled(Exception):  # noqa: N818 - reads as what happened
    """A body that is no answer; worth another try."""


def request_body(
    model: str, prompt: str, params: SamplingParams, style: Style, limit_key: str = "max_tokens", proof: bool = False
) -> dict[str, Any]:
    """`proof` asks for token ids and log-probs; `limit_key` is how the endpoint calls the longest answer."""
    body: dict[str, Any] = {
        "model": model, limit_key: params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "stream": False,
    }  # fmt: skip
    if style == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if params.seed is not None:
        body["seed"] = params.seed
    if proof:
        body |= {"return_token_ids": True, "logprobs": True if style == "chat" else 1}
    return body


def canary_body(model: str, ids: list[int]) -> dict[str, Any]:
    """Asks a vLLM server for the log-probs of given tokens."""
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatToken(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_ChatToken] | None = None
    token_logprobs: list[float] | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[str, _ChatToken] | None] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_BODY = msgspec.json.Decoder(_Body)
_MODELS = msgspec.json.Decoder(_Models)


def read_answer(content: bytes) -> EndpointAnswer:
    """:raises Garbled: it is not JSON, or holds no choice."""
    body = _decoded(content)
    choice, usage = body.choices[0], body.usage or _Usage()
    logprobs = choice.logprobs or _Logprobs()
    values = [token.logprob for token in logprobs.content or []] or logprobs.token_logprobs or []
    text = choice.message.content if choice.message else choice.text
    return EndpointAnswer(
        text=text or "",
        finish_reason="length" if choice.finish_reason == "length" else "stop",
        usage=Usage(usage.prompt_tokens, usage.completion_tokens),
        prompt_ids=body.prompt_token_ids or choice.prompt_token_ids or [],
        token_ids=choice.token_ids or [],
        logprobs=values,
    )


def read_canary(content: bytes, ids: list[int]) -> list[float]:
    """log p(ids[i] | ids[:i]) for i ≥ 1 as the endpoint has them; empty where it does not say."""
    given = _decoded(content).choices[0].prompt_logprobs or []
    pairs = zip(ids[1:], given[1:], strict=False)
    return [entry[str(i)].logprob for i, entry in pairs if entry and str(i) in entry]


def _decoded(content: bytes) -> _Body:
    try:
        body = _BODY.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Garbled(f"an answer that is not the OpenAI format ({error})") from None
    if not body.choices:
        raise Garbled("an answer without choices")
    return body


def read_models(content: bytes) -> list[str]:
    """Names of the models served; empty where the endpoint does not list them."""
    try:
        return [model.id for model in _MODELS.decode(content).data]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []


def error_text(content: bytes) -> tuple[str, str]:
    """(message, code) of an error's body, in one line; the dialects differ in where they put it."""
    try:
        body = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _one_line(content.decode(errors="replace")), ""
    inner = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(inner, dict):
        return _one_line(str(inner)), ""
    message = inner.get("message") or inner.get("detail") or ""
    return _one_line(str(message)), str(inner.get("code") or inner.get("type") or "")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE]


def wants_other_limit(status: int, content: bytes) -> bool:
    """Newer models of some APIs refuse `max_tokens`."""
    return status == 400 and "max_completion_tokens" in error_text(content)[0]


def failure(status: int, content: bytes, model: str, where: str, key_env: str | None) -> KbrlError:
    """The error that a status stands for. InfraError: another try may succeed; all others want a person."""
    message, code = error_text(content)
    said = f": {message}" if message else ""
    if code == "insufficient_quota":
        return ConfigError(f"the account at {where} has no credit left{said}", "Add some, or use another endpoint")
    if status in TRANSIENT:
        return InfraError(f"{where} answered {status}{said}", "Lower sampler.slots or set sampler.requests_per_minute")
    if status in (401, 403):
        return ConfigError(f"{where} answered {status}, it refuses the key{said}", _key_cure(key_env))
    if status == 404:
        cure = "Set model_name to a model that it serves, and sampler.base_url up to /v1"
        return ConfigError(f"{where} answered 404 for model '{model}'{said}", cure)
    if 300 <= status < 400:
        return ConfigError(f"{where} answered {status}, a redirection", "Set sampler.base_url to where it leads")
    return ConfigError(f"{where} refuses the request with {status}{said}", "Change what it names")


def _key_cure(key_env: str | None) -> str:
    if key_env:
        return f"Put a valid key into the environment variable {key_env}"
    return "Name the environment variable that holds the key: sampler.api_key_env=NAME"
