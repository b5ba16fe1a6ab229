"""The sections of a configuration: each is a frozen struct, and each string under a field its documentation."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.config.ranges import AlarmAction, AtLeastOne, Cores, Count, Fraction, NonNegative, Positive, RewardName


class DatasetBuilder(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the policy, and what it is paid for."""

    prompt_option: Literal["auto", "compact", "zero_shot", "one_shot", "few_shot", "raicl", "custom"] = "auto"
    """compact: bare problem; zero_shot: the contract; one_shot, few_shot: + examples; raicl: retrieved; custom: own."""
    prompt_file: str | None = None
    """prompt_option=custom: TOML file with the templates, see kbrl_async/prompts/custom.py."""
    prompt_hardware: bool = True
    """Tell the model what machine kernels run on (not in compact prompts)."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Put prompts into the chat template of the model's tokenizer; auto: where it has one, but not compact prompts."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Ask a model that can think first to do so, or not to; auto: as its chat template does by itself."""
    rag_index_path: str | None = None
    """prompt_option=raicl: folder of an index made by 'kbrl index build'."""
    raicl_k: Annotated[int, Meta(ge=1, le=32)] = 3
    """prompt_option=raicl: most examples in one prompt; those that exceed the token budget are left out."""
    raicl_tokens: AtLeastOne | None = None
    """prompt_option=raicl: most tokens of a prompt; null: what the model's context leaves beside max_tokens."""
    raicl_live: Count = 0
    """prompt_option=raicl: most verified kernels of this very run that join the index while it runs; 0: none."""
    reward_preset: RewardName = "stage3"
    """Set of reward weights to start from, or auto: stage1 to stage3 by progress; weights below replace single ones."""
    reward_format_weight: NonNegative | None = None
    """Pay for an answer from which a kernel could be extracted; null: the preset's."""
    reward_compile_weight: NonNegative | None = None
    """Pay for a kernel that compiles; null: the preset's."""
    reward_correctness_weight: NonNegative | None = None
    """Pay for the share of secret input sets that the kernel passes; null: the preset's."""
    reward_speed_weight: NonNegative | None = None
    """Pay for the speedup over the reference, by the lower end of its confidence interval; null: the preset's."""
    reward_plan_part: Literal["speed", "speedup", "correctness", "correct", "compile", "thinking", "length"] | None = (
        None
    )
    """What tokens around the kernel (thoughts, comments) are paid by, on their own; null: the preset's."""
    reward_plan_weight: Fraction | None = None
    """Weight of these tokens' advantages beside 1 of the kernel's; null: the preset's, 0: as all tokens."""

    @property
    def pays_plan(self) -> bool:
        """Tokens around the kernel earn a reward of their own."""
        return self.reward_plan_weight != 0 and (self.reward_plan_part is not None or self.reward_preset == "plan_code")

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights that replace the preset's, by part."""
        parts = ("format", "compile", "correctness", "speed")
        given = {part: getattr(self, f"reward_{part}_weight") for part in parts}
        return {part: weight for part, weight in given.items() if weight is not None}


class Demonstrations(msgspec.Struct, frozen=True, kw_only=True):
    """What method=sft learns from."""

    files: list[str] = msgspec.field(default_factory=list)
    """JSONL, JSON and Parquet files, folders of them, run folders; empty: right answers of the own corpus."""
    keep: AtLeastOne = 3
    """Run folders: best different verified answers of each problem that are taken."""
    examples: AtLeastOne = 4096
    """Without files: pairs of problem and right answer that the corpus holds."""


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch becomes a new policy version."""

    epochs: AtLeastOne = 2
    """Passes over each batch."""
    minibatches: AtLeastOne = 2
    """Optimizer steps per pass."""
    warmup_steps: Count = 8
    """Optimizer steps over which the learning rate rises to its full value."""
    clip_low: Fraction = 0.2
    """ppo, grpo, decoupled: the importance ratio is clipped below 1 − clip_low."""
    clip_high: NonNegative = 0.28
    """ppo, grpo, decoupled: the importance ratio is clipped above 1 + clip_high."""
    dual_clip: NonNegative = 0.0
    """ppo, grpo: bound of the loss for negative advantages, as a multiple of the advantage; 3 is usual, 0 is off."""
    normalise: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """Mean over all tokens of a minibatch, over sequences, or over sequences by a constant length (max_tokens)."""
    scale_advantages: bool = True
    """Divide a batch's advantages by their root mean square."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of the divergence from the policy that training started from, added to the loss."""
    kl_weight: NonNegative = 0.0
    """Weight of that divergence."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up; cosine falls to nothing at max_steps."""
    dppo_delta: Fraction = 0.2
    """dppo_tv: a token is dropped when its probability has moved the wrong way by more than this."""
    negative_scale: NonNegative = 0.3
    """Factor on negative advantages; below 1 keeps a small policy's entropy up."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 on a GPU, float32 on a CPU."""
    threads: AtLeastOne | None = None
    """Threads of torch in the learner; null: one per core it may use."""
    peak_tflops: Positive | None = None
    """Peak of the hardware that policy/mfu is a share of; null: that of a matrix product, measured at the start."""
    processes: AtLeastOne = 1
    """Ranks that share every update, one GPU each; the first one starts the others."""
    shard: bool = False
    """processes > 1: each rank holds its share of the frozen weights (FSDP2) instead of all; slower, plain kernels."""
    base_quantisation: Literal["none", "nf4", "int8"] = "none"
    """Of the frozen base under a LoRA adapter on a GPU (QLoRA); needs bitsandbytes, has plain kernels."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """How the model is computed; fused: LoRA on Llama and Qwen2 families; auto: fused on a GPU where it can be had."""
    share_prompts: bool = True
    """kernels=fused: compute the prompt of a group once, not once a sample."""
    memory_gb: NonNegative = 0.0
    """kernels=fused: most GPU memory to hold, in 10^9 bytes; the less, the more is computed twice. 0: 9/10 of it."""
    token_budget: Count = 0
    """Tokens of one microbatch; longer sequences stand alone. 0: 2048."""
    checkpoint_every: AtLeastOne = 1
    """Updates between two checkpoints; batches since the last one are on disk, and are trained again after a crash."""
    keep_checkpoints: AtLeastOne = 2
    """Newest checkpoints that stay on disk."""


class Curriculum(msgspec.Struct, frozen=True, kw_only=True):
    """Which problems come next, and when reward_preset=auto moves on."""

    kind: Literal["uniform", "levels", "learnable"] = "uniform"
    """All problems in turn; harder levels as easier ones are solved; or more of those solved half of the time."""
    window: AtLeastOne = 5
    """Batches whose mean rates a threshold is compared with."""
    compile_above: Fraction = 0.8
    """reward_preset=auto: stage1 becomes stage2 at this share of kernels that compile."""
    correct_above: Fraction = 0.5
    """reward_preset=auto: stage2 becomes stage3 at this share of correct kernels."""


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Refinement turns of a rollout (mode=multi_turn)."""

    returns: Literal["sum", "max"] = "sum"
    """How a turn's score and the discounted ones after it become its return. With stop=correct use max."""
    stop: Literal["never", "correct", "speedup", "plateau"] = "never"
    """When a rollout ends before max_turns: at its first correct kernel, at a speedup, or when it gets no better."""
    stop_speedup: Positive = 1.0
    """stop=speedup: the lower end of the speedup's interval at which a rollout ends."""
    patience: AtLeastOne = 2
    """stop=plateau: turns without a better score after which a rollout ends."""


class Agents(msgspec.Struct, frozen=True, kw_only=True):
    """Solver, verifier and corrector (mode=agents)."""

    adapters: bool = False
    """Give verifier and corrector LoRA adapters of their own; needs lora_rank."""


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
    """engine=vllm: share of the GPU's memory for weights and KV cache; the rest is for learner and bench."""
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


class CompileFarm(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are compiled."""

    slots: AtLeastOne | None = None
    """Compilations that one farm process runs at once; null: 1.1 × its cores, rounded up."""
    store_max_bytes: AtLeastOne = 512 * 2**20
    """Size limit of the artifact store; the least recently used artifacts go first."""
    deadline_s: Positive = 20.0
    """Wall clock that one candidate's compilation may take."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 19
    """Scheduling priority of the compiler; 19 is the lowest, so that it disturbs timing least."""
    march: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._+-]*$")] = "native"
    """gcc's name of the processors that C kernels are for; benches on older ones than the farms': such as x86-64-v3."""


class TimingBench(msgspec.Struct, frozen=True, kw_only=True):
    """How candidates are proven correct and timed."""

    core: Count | None = None
    """Core that timing is pinned to; null: the bench core of the CPU layout."""
    min_pairs: AtLeastOne = 8
    """Pairs of candidate and reference measured before sampling may stop."""
    max_pairs: AtLeastOne = 30
    """Pairs after which sampling stops however wide the interval still is."""
    cap_s: Positive = 0.1
    """Wall clock after which the timing of one candidate stops."""
    timed: bool = True
    """Time correct kernels; false: they are only proven correct, for rewards without a part for speed."""
    deadline_s: Positive = 2.0
    """Wall clock that one candidate may take in all; endless loops are killed after it."""
    shares_with: list[Literal["sampler", "learner", "timing_bench"]] = msgspec.field(default_factory=list)
    """Who is on the same GPU (or cores) and stands still while a bench times; timing_bench: benches take turns."""
    clocks: Literal["observe", "lock"] = "observe"
    """GPU clocks: observe records them, lock holds a sustainable one while the run lasts (needs the right to)."""
    baselines: list[Literal["compile", "compile-max-autotune"]] = msgspec.field(default_factory=list)
    """What correct kernels are compared with besides eager: the reference, compiled ahead by Inductor."""
    sanitize_share: Fraction = 0.0
    """Share of correct kernels that run under sanitizers too, a second each; above 0 every new best kernel does."""
    flush_bytes: Count = 0
    """Memory streamed through before each call so that caches are cold; 0: twice the core's L2."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where kernels run; auto: on a GPU where the backend has use for one. Bench 0 takes the first GPU, and so on."""


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


class Sft(msgspec.Struct, frozen=True, kw_only=True):
    """How the small policy is made on first use (model_name=small)."""

    examples: AtLeastOne = 24_000
    """Pairs of problem and answer that the corpus holds."""
    max_seconds: Positive = 300.0
    """Wall clock of the training, if the steps do not end it before."""
    steps: AtLeastOne = 300
    """Optimizer steps: under two minutes on two idle cores."""
    hidden_size: AtLeastOne = 192
    """Width of the model."""
    layers: AtLeastOne = 4
    """Transformer layers."""
    heads: AtLeastOne = 4
    """Attention heads."""
    vocab_size: Annotated[int, Meta(ge=260)] = 2048
    """Entries of the tokenizer, which is made from the same corpus."""
    context: AtLeastOne = 768
    """Positions of the model: the longest prompt and answer together, in tokens."""
    lr: Positive = 2e-3
    """Peak learning rate."""
    batch_tokens: AtLeastOne = 3072
    """Tokens per optimizer step."""
    turn_share: Fraction = 0.5
    """Several turns: share of the corpus that answers feedback to an earlier attempt, or predicts its verdict."""
    shot_share: Fraction = 0.5
    """prompt_option=raicl: share of the corpus whose prompts hold worked examples."""


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


class Alarms(msgspec.Struct, frozen=True, kw_only=True):
    """What is done when training goes wrong. Each acts on a mean over updates, and batches of an alarm are kept."""

    ess_below: Fraction = 0.3
    """Effective sample size of the importance ratios, as a share, below which there is an alarm; 0: never."""
    ess_action: AlarmAction = "warn"
    """warn: say so; pause_admission: open no group until those that are open ended; lower_staleness: by one; stop."""
    kl_above: NonNegative = 0.5
    """Divergence of sampler and learner on the same tokens above which there is an alarm; 0: never."""
    kl_action: AlarmAction = "warn"
    """What is done then, see ess_action."""
    entropy_below: NonNegative = 0.0
    """Mean entropy of the policy's tokens below which there is an alarm; 0: never."""
    entropy_action: AlarmAction = "warn"
    """What is done then, see ess_action."""
    nonfinite_action: AlarmAction = "stop"
    """What is done at a loss or gradient that is not finite; the weights stay as before, three in a row always stop."""
    window: AtLeastOne = 3
    """Updates whose mean is compared, before an alarm is raised, made worse or cleared."""
    margin: Fraction = 0.1
    """Share of a threshold by which the mean must be back on the right side before an alarm clears."""
    batches_max_bytes: Count = 256 * 2**20
    """Size limit of the batches kept in runs/NAME/batches, the oldest go first; 0: none are kept."""


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of every scored turn in runs/NAME/rollouts.sqlite, for inspect, replay and the report."""

    keep: Literal["all", "best", "none"] = "all"
    """Whole records of all turns, or of each problem's fastest kernels only (columns of all), or nothing."""
    max_bytes: Count = 4 * 2**30
    """Size limit of the stored records, compressed; the oldest go first and their columns stay. 0: no limit."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What 'kbrl eval' measures; a training run looks at none of it."""

    policy: str | None = None
    """What is evaluated, as 'kbrl eval' found it; null: this is no evaluation."""
    samples: AtLeastOne = 4
    """Answers per problem."""
    temperature: NonNegative | None = None
    """Sampling temperature; 0: greedy, null: that of training."""
    ids: list[str] = msgspec.field(default_factory=list)
    """Problems by id, such as L1/13_softmax or 1/13; empty: all of the levels."""
    split: Literal["all", "heldout", "train"] = "all"
    """Which of these problems: all, those that training never sees, or the others."""
    deadline_s: Positive = 900.0
    """Seconds that all samples of one problem may take together; what is missing then counts as wrong."""
    in_flight: AtLeastOne = 64
    """Samples under way at once."""
    tensorboard_log_dir: str | None = None
    """Folder of event files that the figures are added to; null: that of the evaluation itself."""
    tensorboard_step: Count | None = None
    """Step that the figures stand at; null: the policy's version."""


class Tensorboard(msgspec.Struct, frozen=True, kw_only=True):
    """What is written for TensorBoard."""

    enabled: bool = True
    """Write event files under runs/NAME/tensorboard."""
    histograms_every: AtLeastOne = 5
    """Updates between two histograms of rewards, speedups and advantages."""
    per_level: bool = True
    """Also break rewards and rates down by problem level."""
    log_dir: str | None = None
    """Folder that collects the event files of several runs, each in a folder of its name; null: runs/NAME."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """What monitoring systems may fetch or are sent: see docs/watching.md. All off by default."""

    prometheus_port: Annotated[int, Meta(ge=0, le=65000)] | None = None
    """First port: every process serves /metrics on one of its own from there on; 0: any free ones; null: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that these ports are bound to. Nothing is encrypted: other hosts only on a network that you trust."""
    otlp_endpoint: str | None = None
    """Traces of rollouts go here by OTLP over HTTP, such as http://127.0.0.1:4318/v1/traces; null: none are made."""
