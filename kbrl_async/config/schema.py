"""Every key of a run as one frozen tree of structs: its type, its range, its default, and a line on what it does.

Invariants
* A key is `name` or `section.name`, never deeper; names at the top are those that users of such tools know.
* The type of a field holds its range, so that one conversion checks both; what concerns two keys is in `checks`.
* The string under a field is its documentation: `kbrl config` prints it.
* Nothing here imports torch or touches the disk.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

AtLeastOne = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Cores = Literal["auto"] | list[Count]


RewardName = Literal["auto", "stage1", "stage2", "stage3", "kevin", "kevin_offset", "hierarchical", "funnel", "fork"]
PresetName = Literal[
    "grpo", "dr_grpo", "dapo", "rloo", "reinforce", "ppo", "gspo", "cispo", "dppo_tv", "decoupled", "a3po", "tis"
]
CorrectionName = Literal[
    "tis", "tis_sequence", "icepop", "sequence_mask", "geometric_mask", "k3_reject", "veto", "opsm", "m2po"
]


class DatasetBuilder(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the policy, and what it is paid for."""

    prompt_option: Literal["auto", "compact", "zero_shot", "raicl"] = "auto"
    """compact: bare problem; zero_shot: with the contract; auto: by the model; raicl: auto with retrieved examples."""
    rag_index_path: str | None = None
    """prompt_option=raicl: folder of an index made by 'kbrl index build'."""
    raicl_k: Annotated[int, Meta(ge=1, le=32)] = 3
    """prompt_option=raicl: most examples in one prompt; those that exceed the token budget are left out."""
    raicl_tokens: AtLeastOne | None = None
    """prompt_option=raicl: most tokens of a prompt; null: what the model's context leaves beside max_tokens."""
    raicl_live: Count = 0
    """prompt_option=raicl: most verified kernels of this very run that join the index while it runs; 0: none."""
    reward_preset: Literal[
        "auto", "stage1", "stage2", "stage3", "kevin", "kevin_offset", "hierarchical", "funnel", "fork"
    ] = "stage3"
    """Set of reward weights to start from, or auto: stage1 to stage3 by progress; weights below replace single ones."""
    reward_format_weight: NonNegative | None = None
    """Pay for an answer from which a kernel could be extracted; null: the preset's."""
    reward_compile_weight: NonNegative | None = None
    """Pay for a kernel that compiles; null: the preset's."""
    reward_correctness_weight: NonNegative | None = None
    """Pay for the share of secret input sets that the kernel passes; null: the preset's."""
    reward_speed_weight: NonNegative | None = None
    """Pay for the speedup over the reference, by the lower end of its confidence interval; null: the preset's."""

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights that replace the preset's, by part."""
        parts = ("format", "compile", "correctness", "speed")
        given = {part: getattr(self, f"reward_{part}_weight") for part in parts}
        return {part: weight for part, weight in given.items() if weight is not None}


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
    checkpoint_every: AtLeastOne = 1
    """Updates between two checkpoints."""
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
    """How the discounted scores of a turn and those after it become its return."""
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

    engine: Literal["transformers"] = "transformers"
    """The generation engine."""
    slots: AtLeastOne = 32
    """Sequences that one sampler generates at once."""
    threads: AtLeastOne | None = None
    """Threads of torch in a sampler; null: one per core it may use."""


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
    deadline_s: Positive = 2.0
    """Wall clock that one candidate may take in all; endless loops are killed after it."""
    shares_with: list[Literal["sampler", "learner"]] = msgspec.field(default_factory=list)
    """Processes on the same GPU (or cores): the bench asks them to stand still while it times. Empty: it is alone."""
    clocks: Literal["observe", "lock"] = "observe"
    """GPU clocks: observe records them, lock holds a sustainable one while the run lasts (needs the right to)."""
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
    allow_remote: bool = False
    """Allow addresses that other hosts can reach. Traffic is not encrypted or authenticated: trusted networks only."""
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
    max_seconds: Positive = 105.0
    """Wall clock of the training."""
    steps: AtLeastOne = 360
    """Optimizer steps, if the wall clock allows them."""
    hidden_size: AtLeastOne = 192
    """Width of the model."""
    layers: AtLeastOne = 4
    """Transformer layers."""
    heads: AtLeastOne = 4
    """Attention heads."""
    vocab_size: Annotated[int, Meta(ge=260)] = 2048
    """Entries of the tokenizer, which is made from the same corpus."""
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


class Tensorboard(msgspec.Struct, frozen=True, kw_only=True):
    """What is written for TensorBoard."""

    enabled: bool = True
    """Write event files under runs/NAME/tensorboard."""
    histograms_every: AtLeastOne = 5
    """Updates between two histograms of rewards, speedups and advantages."""
    per_level: bool = True
    """Also break rewards and rates down by problem level."""


def _all_levels() -> list[int]:
    return [1, 2, 3]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    model_name: str = "small"
    """The policy: small (made by the project on first use), a folder, or a name that transformers can load."""
    backend: Literal["c", "cpp", "cuda", "cuda-nvrtc", "triton"] = "c"
    """What kernels are written in: C or C++ on the CPU; CUDA by load_inline or by NVRTC, or Triton, on a GPU."""
    problems: str | None = None
    """Folder of problems in the KernelBench layout; null: the project's own suite."""
    level: Count | list[Count] = msgspec.field(default_factory=_all_levels)
    """Problem level or levels to train on."""
    exclude_audited: bool = True
    """Do not train on problems whose audit says that a right verdict means little there: see 'kbrl problems list'."""
    batch_size: AtLeastOne = 8
    """P: groups (one problem each) per update."""
    group_size: Annotated[int, Meta(ge=2)] = 8
    """G: rollouts per group, which share a baseline."""
    learning_rate: Positive = 2e-4
    """Learning rate of the policy after warm-up."""
    lora_rank: Count = 0
    """Rank of the LoRA adapter; 0: all weights are trained."""
    max_tokens: AtLeastOne = 256
    """Longest answer, in tokens."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs are those of this distribution."""
    seed: Count = 0
    """Seed of everything that is drawn, except the secret inputs of verification."""
    max_steps: AtLeastOne = 14
    """Updates after which the run ends."""
    max_minutes: Positive | None = 4.0
    """Minutes of training after which the run ends too, without making and evaluating the policy; null: no limit."""
    max_staleness: Count = 2
    """S: how many versions older than the policy a rollout may be when it is trained on; 0: synchronous."""
    method: Literal["grpo", "reinforce", "best_of_n", "reward_weighted_sft"] = "grpo"
    """How a policy learns from its rollouts; sets loss and baseline below keys that you set: see preset."""
    preset: PresetName | None = None
    """A named algorithm: sets the loss, the baseline and what belongs to them; keys that you set yourself win."""
    loss: Literal["dppo_tv", "ppo", "grpo", "decoupled", "a3po", "gspo", "tis", "cispo", "reinforce"] = "dppo_tv"
    """Policy loss with its off-policy correction."""
    corrections: list[CorrectionName] = msgspec.field(default_factory=list)
    """More corrections for stale samples, multiplied: tis and tis_sequence weigh (loss=reinforce only), others drop."""
    advantage: Literal["leave_one_out", "mean", "mean_std", "running_mean", "none", "best_of_n", "reward_weight"] = (
        "leave_one_out"
    )
    """Baseline that is taken from a rollout's reward."""
    mode: Literal["single_turn", "multi_turn", "agents"] = "single_turn"
    """One answer per rollout; several with feedback between them; or solver, verifier and corrector taking turns."""
    max_turns: AtLeastOne = 4
    """Turns of a rollout in mode=multi_turn and mode=agents."""
    gamma: Fraction = 0.4
    """Discount of later turns' scores in mode=multi_turn."""
    eval_samples: Count = 4
    """Answers per held-out problem before and after training; 0: no evaluation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where sampler and learner compute; auto: the GPU where there is one."""
    log_path: str = "runs"
    """Folder that holds the runs."""
    cache_path: str | None = None
    """Folder that keeps what several runs share, such as the small policy; null: kbrl-async in the user's cache."""
    name: str | None = None
    """Name of the run, a folder in log_path; null: default, with the seed where it is not the default one."""
    resume: str | None = None
    """Run folder to continue, such as runs/default."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important message that is logged."""
    dataset_builder: DatasetBuilder = DatasetBuilder()
    turns: Turns = Turns()
    agents: Agents = Agents()
    curriculum: Curriculum = Curriculum()
    learner: Learner = Learner()
    sampler: Sampler = Sampler()
    compile_farm: CompileFarm = CompileFarm()
    timing_bench: TimingBench = TimingBench()
    broker: Broker = Broker()
    sft: Sft = Sft()
    cpu: Cpu = Cpu()
    processes: Processes = Processes()
    tensorboard: Tensorboard = Tensorboard()

    @property
    def prompt_option(self) -> str:
        """The prompt template, with `auto` and `raicl` resolved."""
        if self.dataset_builder.prompt_option not in ("auto", "raicl"):
            return self.dataset_builder.prompt_option
        return "compact" if self.model_name == "small" else "zero_shot"

    @property
    def levels(self) -> tuple[int, ...]:
        """`level` as a sorted tuple without doubles."""
        return (self.level,) if isinstance(self.level, int) else tuple(sorted(set(self.level)))

    @property
    def run_name(self) -> str:
        """`name`, or the default name of this seed."""
        if self.name:
            return self.name
        return "default" if self.seed == DEFAULT_SEED else f"default-seed{self.seed}"


DEFAULT_SEED = 0
