"""What can be set of sampling: its section, and the door of its engines. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.doors import Door
from kbrl_async.ranges import AtLeastOne, Count, NonNegative, Positive

ENGINES = Door(
    "engines",
    {
        "transformers": "kbrl_async.sampling.transformers.engine:start",
        "vllm": "kbrl_async.sampling.vllm.start:start",
        "openai": "kbrl_async.sampling.openai.engine:start",
        "tinker": "kbrl_async.sampling.tinker:start",
    },
)
"""`async (setup) -> engine`, see `engine`."""
DIRECT_ENGINES = frozenset({"transformers", "vllm"})
"""Of ours, those that take weights from the learner without a file (`weights.direct`)."""


WAIT_S = 300.0
"""Of an answer for its turn, at most."""


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """How kernels are generated."""

    engine: Annotated[str, Meta(extra={"door": ENGINES})] = "transformers"
    """What generates; vllm: in this process, for large models; openai: an endpoint (vLLM, SGLang, hosted); tinker."""
    slots: AtLeastOne = 32
    """Sequences that one sampler generates at once."""
    threads: AtLeastOne | None = None
    """Threads of torch in a sampler; null: one per core it may use."""
    base_url: str | None = None
    """engine=openai: address of the endpoint up to /v1; tinker: of the service, null: its public one."""
    api_key_env: str | None = None
    """openai, tinker: environment variable that holds the key, which is written nowhere; tinker: TINKER_API_KEY."""
    endpoint_style: Literal["chat", "completions"] = "chat"
    """engine=openai: send the prompt as a chat message, or as the bare text of a completion."""
    endpoint_deadline_s: Positive = 120.0
    """engine=openai: seconds that one answer may take, all tries together."""
    endpoint_retries: Count = 5
    """engine=openai: tries again after a 429, a 5xx, garbage or a lost connection, with exponential back-off."""
    requests_per_minute: Positive | None = None
    """engine=openai: most requests a minute of one sampler; null: as many as slots allow."""
    price_input: NonNegative = 0.0
    """engine=openai: price of a million prompt tokens, in any currency."""
    price_output: NonNegative = 0.0
    """engine=openai: price of a million answer tokens."""
    max_cost: Positive | None = None
    """engine=openai: what one sampler may spend, by these prices, before it stops; null: no limit."""
    update: Literal["auto", "adapter", "full"] = "auto"
    """engine=vllm: versions are adapters beside each other, or weights replaced in flight; auto: by lora_rank."""
    memory_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """engine=vllm: most of the GPU's memory for weights and KV cache; a small model takes less, others the rest."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """engine=vllm: number format; auto: bfloat16 on a GPU, float32 on a CPU."""
    tensor_parallel: AtLeastOne = 1
    """engine=vllm: GPUs that one copy of the model is split over."""
    data_parallel: AtLeastOne = 1
    """engine=vllm: copies of the model in one sampler, which share its slots."""
    prefix_caching: bool = True
    """engine=vllm: keep the keys and values of prompts that begin alike."""
    chunked_prefill: bool = True
    """engine=vllm: compute long prompts in pieces, between the steps of others."""
    deadline_s: Positive | None = None
    """vllm, tinker: seconds that one answer may take before it is tried again; null: by min_tokens_per_s."""
    min_tokens_per_s: Positive = 5.0
    """vllm, tinker: slowest honest answer; its deadline is 300 s and what its max_tokens take at this rate."""
    stop: list[str] = msgspec.field(default_factory=list)
    """vllm, tinker: tokens that end an answer beside the model's own, such as <|im_end|>."""
    keep_kv: bool = False
    """engine=vllm, update=full: answers in flight keep the old weights' KV; false: it is computed anew."""
    eager: bool = False
    """engine=vllm: no CUDA graphs; starts faster, runs slower."""
    compile: bool = True
    """engine=vllm: torch.compile beside CUDA graphs; false: graphs of decoding alone, which are there much sooner."""
    forced: str | None = None
    """transformers, vllm: file of answers that are given instead of drawn, for a rehearsal; null: none."""
    train_logprobs: bool = False
    """engine=openai: the endpoint returns token ids and log-probs of the sampling distribution; else no training."""

    @property
    def gpus(self) -> int:
        """Of one sampler."""
        return self.tensor_parallel * self.data_parallel

    def answer_deadline_s(self, max_tokens: int) -> float:
        """Of an answer of at most so many tokens, the wait for its turn included."""
        return self.deadline_s or WAIT_S + max_tokens / self.min_tokens_per_s
