"""What each kind of process does, how many there are, on which cores, and where they meet."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.runs.config.ranges import AtLeastOne, Cores, Count, Fraction, NonNegative, Positive


class Sampler(msgspec.Struct, frozen=True, kw_only=True):
    """How kernels are generated."""

    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    """What generates; vllm: in this process, for large models; openai: an endpoint (vLLM, SGLang, hosted)."""
    slots: AtLeastOne = 32
    """Sequences that one sampler generates at once."""
    threads: AtLeastOne | None = None
    """Threads of torch in a sampler; null: one per core it may use."""
    base_url: str | None = None
    """engine=openai: address of the endpoint up to /v1, such as http://127.0.0.1:8000/v1."""
    api_key_env: str | None = None
    """engine=openai: name of the environment variable that holds the key; the key itself is written nowhere."""
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
    deadline_s: Positive = 600.0
    """engine=vllm: seconds that one answer may take; then it is given back and tried again."""
    stop: list[str] = msgspec.field(default_factory=list)
    """engine=vllm: tokens that end an answer beside the model's own, such as <|im_end|>."""
    keep_kv: bool = False
    """engine=vllm, update=full: answers in flight keep the old weights' KV; false: it is computed anew."""
    eager: bool = False
    """engine=vllm: no CUDA graphs; starts faster, runs slower."""
    train_logprobs: bool = False
    """engine=openai: the endpoint returns token ids and log-probs of the sampling distribution; else no training."""


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """Where the queues are reached, and how long a silent worker is believed."""

    submit: str | None = None
    """Address for producers, such as tcp://127.0.0.1:5755; null: a socket file of the run."""
    work: str | None = None
    """Address for workers, such as tcp://127.0.0.1:5756; null: a socket file of the run."""
    status: str | None = None
    """Address for viewers (kbrl top), who can change nothing; null: a socket file of the run."""
    allow_remote: bool = False
    """Allow addresses that other hosts can reach; needs broker.keys."""
    check_share: Fraction = 0.0
    """Share of candidates that a second farm and bench do too, of another key; who stands alone is quarantined."""
    keys: str | None = None
    """Folder of keys made by 'kbrl keys new': TCP traffic is encrypted, and only keys on its allow-list are let in."""
    heartbeat_s: Positive = 1.0
    """Seconds between two heartbeats of a worker; three missed ones make it suspect."""
    lease_generate_s: Positive = 60.0
    """Seconds after the last heartbeat until a generation is given to another worker."""
    lease_compile_s: Positive = 60.0
    """The same for a compilation."""
    lease_bench_s: Positive = 30.0
    """The same for verifying and timing."""
    lease_score_s: Positive = 30.0
    """The same for scoring."""
    lease_train_s: Positive = 120.0
    """The same for a batch at the learner."""
    lease_trained_s: Positive = 30.0
    """The same for closing a trained batch."""

    @property
    def leases(self) -> dict[str, float]:
        """Lease seconds by stage."""
        prefix, suffix = "lease_", "_s"
        names = [n for n in self.__struct_fields__ if n.startswith(prefix)]
        return {n.removeprefix(prefix).removesuffix(suffix): float(getattr(self, n)) for n in names}


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """Which cores each kind of process may use. See docs/design.md, 'CPU layout'."""

    sampler: Cores = "auto"
    """Cores of the samplers; auto: all but the bench's."""
    learner: Cores = "auto"
    """Cores of the learner; auto: all but the bench's."""
    bench: Cores = "auto"
    """Cores of the timing benches, one each; auto: the last ones."""
    compile: Cores = "auto"
    """Cores of the compile farm; auto: all but the first and the bench's, or the first where there is no other."""


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes of each kind `kbrl train` starts on this host."""

    sampler: AtLeastOne = 1
    """Samplers."""
    compile_farm: AtLeastOne = 1
    """Compile farms."""
    timing_bench: AtLeastOne = 1
    """Timing benches; each needs a core (or a GPU) of its own."""
