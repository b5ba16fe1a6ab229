"""How an endpoint is asked, and what that has cost: the settings of `OpenAIEngine` and its account."""

from __future__ import annotations

from typing import Protocol

import msgspec

from kbrl_async.sampling.openai.endpoint import Prices, Style, Usage
from kbrl_async.sampling.openai.pacing import Backoff


class OpenAIOptions(msgspec.Struct, frozen=True):
    base_url: str
    model: str
    style: Style = "chat"
    api_key_env: str | None = None
    slots: int = 32
    """Requests at once."""
    requests_per_minute: float | None = None
    deadline_s: float = 120.0
    """For one completion, all tries together."""
    backoff: Backoff = Backoff()
    prices: Prices = Prices()
    max_cost: float | None = None
    """In the unit of the prices. Reached, nothing more is asked for; what is in flight is still paid."""
    train_logprobs: bool = False


class EndpointSettings(Protocol):
    """The keys `sampler.*` that concern an endpoint, as `config.Sampler` has them."""

    @property
    def base_url(self) -> str | None: ...
    @property
    def api_key_env(self) -> str | None: ...
    @property
    def endpoint_style(self) -> Style: ...
    @property
    def endpoint_deadline_s(self) -> float: ...
    @property
    def endpoint_retries(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def requests_per_minute(self) -> float | None: ...
    @property
    def price_input(self) -> float: ...
    @property
    def price_output(self) -> float: ...
    @property
    def max_cost(self) -> float | None: ...
    @property
    def train_logprobs(self) -> bool: ...


def options_of(settings: EndpointSettings, model: str) -> OpenAIOptions:
    """The options that a configuration stands for."""
    return OpenAIOptions(
        base_url=settings.base_url or "",
        model=model,
        style=settings.endpoint_style,
        api_key_env=settings.api_key_env,
        slots=settings.slots,
        requests_per_minute=settings.requests_per_minute,
        deadline_s=settings.endpoint_deadline_s,
        backoff=Backoff(retries=settings.endpoint_retries),
        prices=Prices(settings.price_input, settings.price_output),
        max_cost=settings.max_cost,
        train_logprobs=settings.train_logprobs,
    )


class Spending(msgspec.Struct, frozen=True):
    """What was asked for and paid since start."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0

    def plus(self, usage: Usage, cost: float) -> Spending:
        return msgspec.structs.replace(
            self,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            output_tokens=self.output_tokens + usage.output_tokens,
            cost=self.cost + cost,
        )
