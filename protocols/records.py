"""The domain types: what travels through the pipeline and what every floor computes with.

`RolloutRequest`, `Generation`, `BuildReport` and `BenchReport` are the frames of a rollout's `Record` (see `rollout`);
`TrainBatch`, its `TrainGroup`s and `UpdateReport` those of a batch.

Invariants
* Structs are frozen, tagged and append-only: a new field has a default and stands last.
* Times are seconds (`*_s`, wall clock of one host) or epoch seconds (`*_at`); kernel times are milliseconds (`*_ms`).
"""

from __future__ import annotations

import enum

import msgspec


class Fault(enum.StrEnum):
    """How a candidate ended. The candidate's own faults are rewards; the last three are never scored (I4)."""

    OK = "ok"
    FORMAT_ERROR = "format_error"
    STATIC_VIOLATION = "static_violation"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    ILLEGAL_ACCESS = "illegal_access"
    INCORRECT = "incorrect"
    CHEATING = "cheating"
    UNPROVEN = "unproven"
    """Right, but nothing shows that its own kernels did the work, and nothing shows that they did not."""
    WORKER_LOST = "worker_lost"
    INFRA_ERROR = "infra_error"
    STALE = "stale"


INFRASTRUCTURE_FAULTS = frozenset({Fault.WORKER_LOST, Fault.INFRA_ERROR, Fault.STALE})
"""Faults that are ours: a rollout that ends so leaves its group, and never becomes a reward."""


class Purpose(enum.StrEnum):
    """Why a rollout exists. Only `TRAIN` rollouts are counted by I1 and enter batches."""

    TRAIN = "train"
    EVAL = "eval"


REPLAYED, OBSERVED = "replayed", "observed"
"""Two kinds of trust in a verdict: a trusted process did the candidate's recorded work again and judged that, or the
candidate's own process did it and was watched."""

SOLVER, VERIFIER, CORRECTOR = "solver", "verifier", "corrector"
"""What a turn is asked for: the first kernel, the verdict that one will get, a repaired one."""


class GroupOutcome(enum.StrEnum):
    """The one end of every admitted group (I1)."""

    TRAINED = "trained"
    FILTERED = "filtered"
    DROPPED_STALE = "dropped_stale"
    FAILED = "failed"


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    """One KernelBench-contract problem: `source` defines `Model`, `get_inputs()` and `get_init_inputs()`."""

    problem_id: str
    """`"L{level}/{number:02d}_{name}"`, unique in a suite."""
    level: int
    name: str
    source: str
    difficulty: float = 0.5
    """0 (easy) … 1 (hard)."""
    split: str = "train"
    """`"train"` or `"heldout"`."""
    flags: tuple[str, ...] = ()
    """What an audit holds against it, as `zeros` or `random`; empty: nothing, or never audited."""


class SamplingParams(msgspec.Struct, frozen=True, tag="sampling_params"):
    """How tokens are drawn. Training needs `top_p == 1`, so that log-probs are those of the sampling distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None


class Strictness(msgspec.Struct, frozen=True):
    """How closely a wrong kernel is looked at. A right one has always passed every set, as the bench wants it."""

    sets: int = 0
    """After so many secret input sets a kernel that has failed one is done with; 0: after all."""
    tolerance: float = 1.0
    """Factor on the tolerances with which a failed set counts as `near`."""


class RolloutRequest(msgspec.Struct, frozen=True, tag="rollout_request"):
    """Frame 0: one turn of one rollout, asked for by the aggregator."""

    rollout_id: str
    group_id: str
    problem: Problem
    prompt: str
    """The whole prompt text as the policy sees it."""
    backend: str
    sampling: SamplingParams
    purpose: Purpose = Purpose.TRAIN
    turn: int = 0
    admitted_version: int = 0
    admitted_at: float = 0.0
    role: str = SOLVER
    """What is asked for: a kernel (`solver`, `corrector`), or what will become of one (`verifier`)."""
    examples: tuple[str, ...] = ()
    """Names of the retrieved examples in the prompt, best first."""
    index_version: str = ""
    """Content of the index that they are from."""
    strictness: Strictness | None = None
    """None: every set, the bench's own tolerances."""
    timed: bool = True
    """False: not timed even where the bench times what is correct."""


class Candidate(msgspec.Struct, frozen=True, tag="candidate"):
    """A kernel as source: a Python file that defines `ModelNew`."""

    source: str
    backend: str


class Generation(msgspec.Struct, frozen=True, tag="generation"):
    """Frame 1: what the policy wrote. `logprobs[i]` belongs to `token_ids[i]` under the sampling distribution."""

    policy_version: int
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    """`"stop"` or `"length"`."""
    candidate: Candidate | None = None
    fault: Fault = Fault.OK
    """`FORMAT_ERROR` where no candidate could be extracted."""
    message: str = ""
    worker_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    code_start: int = 0
    """First token of the kernel in `token_ids`."""
    code_end: int = 0
    """First token behind it; 0 where nobody asked which they are, or there is none."""
    spans: tuple[tuple[int, int], ...] = ()
    """(version, tokens) in order, where weights changed in flight; `policy_version` is the oldest. Else empty."""


class StageReport(msgspec.Struct, frozen=True, tag="stage_report"):
    """One step of the funnel format → static → compile → small_inputs → full_inputs → timing, as it ended."""

    name: str
    fault: Fault
    seconds: float
    detail: str = ""


class BuildReport(msgspec.Struct, frozen=True, tag="build_report"):
    """Frame 2: static check and compilation. `artifacts` maps a unit's source hash to its content address."""

    fault: Fault
    artifacts: dict[str, str] = msgspec.field(default_factory=dict)
    message: str = ""
    """Cleaned compiler output, at most 800 characters, for the model."""
    hint: str = ""
    rule: str = ""
    """The static check that fired, for `STATIC_VIOLATION`."""
    cached: bool = False
    toolchain: str = ""
    isolation: str = "none"
    worker_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    stages: tuple[StageReport, ...] = ()
    """`static` and `compile`."""
    kernels: list[str] = msgspec.field(default_factory=list)
    """Names of the kernels that were compiled."""
    cpu: str = ""
    """Instruction sets that the build may use, as the kernel names them; a bench without one of them can't judge it."""
    rules: str = ""
    """`strict` or `open`: what the candidate might hold; empty in reports of before there were two."""
    remarks: tuple[str, ...] = ()
    """What the compiler says of the loops, where a profile was asked for."""


class WorkloadVerdict(msgspec.Struct, frozen=True):
    """Correctness on one of a problem's workloads."""

    name: str
    fault: Fault
    passed: int = 0
    total: int = 0
    message: str = ""
    trust: str = ""


class WorkloadTiming(msgspec.Struct, frozen=True):
    """The speedup on one of a problem's workloads, with its interval."""

    name: str
    weight: float
    """Its share in the problem's speedup."""
    n: int
    speedup: float
    lo: float
    hi: float
    candidate_ms: float
    reference_ms: float
    stopped: str = ""


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """Correctness, as computed by the trusted process (I5)."""

    fault: Fault
    passed: int = 0
    total: int = 0
    """Secret input sets passed and tried."""
    message: str = ""
    hint: str = ""
    rule: str = ""
    evidence: str = ""
    max_abs_error: float | None = None
    tolerance: float | None = None
    """Largest allowed |output − reference| at the worst element's position."""
    isolation: str = "none"
    """`"full"`, `"reduced"` or `"none"`; what is missing is in `isolation_missing`."""
    isolation_missing: list[str] = msgspec.field(default_factory=list)
    kernelbench: bool | None = None
    """What KernelBench's own comparison says of the nominal inputs; None where it never came to that."""
    tolerance_note: str = ""
    """How the tolerance was chosen, in words."""
    trust: str = ""
    """`REPLAYED` or `OBSERVED`; empty for what never came to the bench, and for verdicts of before there were two."""
    trust_reason: str = ""
    """Why it was not replayed."""
    near: int = 0
    """Of the sets that failed, those that pass with the wider tolerance that was asked for (`Strictness`)."""
    own_share: float | None = None
    """Share of the device time of a timed call that the candidate's own kernels have; None: not known."""
    rules: str = ""
    """`strict` or `open`, as in the build's report."""
    workloads: tuple[WorkloadVerdict, ...] = ()
    """Of a problem with several, each as far as it was looked at; `passed` and `total` are those of all together."""


TIMING_CONFIDENCE = 0.98
"""Of a speedup's interval, two-sided, at all looks together: a speedup that is not there is claimed in at most 1 %."""
CLEARLY_SLOWER, SPARED_SETS = 0.8, 3
"""Of a kernel whose speedup lies below the first, how much slower it is earns little, so that it may be found right
by so few secret sets (`timing_bench.check_s`)."""
DISTURBED = "disturbed"
"""Why sampling stopped where others had the core most of the time."""
WIDEST = 10.0
"""Of the ends of a speedup's interval, the upper over the lower: pairs that differ by more say nothing of a kernel."""


def says_nothing(lo: float | None, hi: float | None) -> bool:
    """Whether a speedup's interval is so wide that its median is no measurement: two pairs give ends up to 1e15."""
    return lo is not None and hi is not None and hi > WIDEST * lo


class Timing(msgspec.Struct, frozen=True, tag="timing"):
    """A speedup with its uncertainty (I7): median of paired ratios reference/candidate and its confidence interval."""

    n: int
    speedup: float
    lo: float
    hi: float
    candidate_ms: float
    reference_ms: float
    confidence: float = TIMING_CONFIDENCE
    method: str = ""
    stopped: str = ""
    """Why sampling stopped: `"resolved"`, `"decided"`, `"slower"` or `"faster"` (clearly, after at most four pairs),
    `"cap"`; `"disturbed"`: others had the core most of the time.
    """
    hardware: str = ""
    clock_mhz: float | None = None
    throttle: list[str] = msgspec.field(default_factory=list)
    load: float | None = None
    """Share of the pinned core that others used while timing (0 … 1)."""
    resolution: float = 0.0
    """Share by which the interval was widened on both sides: what the bench can't tell apart at this length."""
    rejected: int = 0
    """Pairs set aside because others disturbed them or the clock was low."""
    spent_s: float = 0.0
    """Exclusive time of the bench that this measurement took."""
    roofline: float | None = None
    """Shortest possible time by bytes and flops, over the candidate's: near 1 is as fast as this hardware can be."""
    baselines: dict[str, tuple[float, float, float]] = msgspec.field(default_factory=dict)
    """(speedup, lo, hi) over other baselines than eager, by name, measured in the same session."""
    ratios: tuple[float, ...] = ()
    """Of the pairs, until those of several workloads are combined; empty in what leaves a bench."""
    workloads: tuple[WorkloadTiming, ...] = ()
    """Of a problem with several, those that were timed: `speedup` is their weighted geometric mean, times are weighted
    means.
    """

    @property
    def is_faster(self) -> bool:
        """A speedup counts only when its whole interval lies above 1."""
        return self.lo > 1.0

    @property
    def is_disturbed(self) -> bool:
        """It can't be compared with other kernels' times: others had the core, or its pairs disagree."""
        return self.stopped == DISTURBED or says_nothing(self.lo, self.hi)

    @property
    def is_slower(self) -> bool:
        """The same below 1. Where others had the core most of the time, nothing is proven either way."""
        return self.hi < 1.0 and not self.is_disturbed

    @property
    def claim(self) -> str:
        """What the interval proves, in words."""
        if self.stopped == DISTURBED:
            return "nothing is proven, others had the core"
        return "proven faster" if self.is_faster else "proven slower" if self.is_slower else "not shown to be faster"


class BenchReport(msgspec.Struct, frozen=True, tag="bench_report"):
    """Frame 3: verdict, and timing of a correct candidate."""

    verdict: Verdict
    timing: Timing | None = None
    worker_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    stages: tuple[StageReport, ...] = ()
    """`reference`, `small_inputs`, `full_inputs` and `timing`, as far as it came."""
    profile: str = ""
    """What limits a correct kernel, where that was asked for: advice for the next turn, and no part of a reward."""
    plan: str = ""
    """A digest of the steps of what was replayed, where that can be compared: a bench need not prove again what a
    verifier has proven of the same steps.
    """


class TrainSample(msgspec.Struct, frozen=True, tag="train_sample"):
    """One turn as the learner sees it. `logprobs` are the behaviour policy's, one per response token."""

    rollout_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    advantage: float
    reward: float
    policy_version: int
    turn: int = 0
    role: str = SOLVER
    code_start: int = 0
    """First token of the kernel; the tokens around the kernel are the plan's, where `plan_weight` is above 0."""
    code_end: int = 0
    """First token behind the kernel; 0 where it is not known."""
    plan_reward: float = 0.0
    plan_weight: float = 0.0
    """Weight of the plan tokens' advantage beside 1 of the kernel's; 0: all tokens share `advantage`."""
    plan_advantage: float = 0.0
    """Of the plan's tokens, its weight included."""
    reward_spread: float = 0.0
    """How much more it would have earned at the upper end of its speedup's interval."""
    source: str = ""
    """Digest of its kernel: equal ones in a group are one kernel, measured several times."""
    truncated: bool = False
    """Cut at max_tokens."""
    plan_spread: float = 0.0
    """How much more its plan would have earned there."""

    @property
    def has_plan(self) -> bool:
        """Some of its tokens are paid as a plan."""
        return self.plan_weight > 0 and self.code_end > self.code_start


class TrainGroup(msgspec.Struct, frozen=True, tag="train_group"):
    """The samples of one prompt that share a baseline."""

    group_id: str
    problem_id: str
    level: int
    samples: list[TrainSample]


class TrainBatch(msgspec.Struct, frozen=True, tag="train_batch"):
    """Frame 0 of a `train` task; `TrainGroup` frames follow. `index` is the policy version that it is trained on.

    Without groups it asks for no update: its answer says that the newest version and a checkpoint of it are on disk.
    """

    batch_id: str
    index: int
    temperature: float
    group_ids: list[str]


class UpdateReport(msgspec.Struct, frozen=True, tag="update_report"):
    """The frame that the learner appends to a `train` task."""

    batch_id: str
    policy_version: int
    """The version that this update made."""
    metrics: dict[str, float]
    started_at: float = 0.0
    finished_at: float = 0.0
    failure: str = ""
    """Why there was no update: the version is the one before, and so are the weights."""


class AdapterProof(msgspec.Struct, frozen=True):
    """What a further adapter of a version is checked by (I8)."""

    weights_sha256: str
    canary_logprobs: list[float]


class CanaryPrompt(msgspec.Struct, frozen=True):
    """A text whose log-probs prove a policy, and whose ids prove its tokenizer."""

    text: str
    ids: list[int]
    """The first tokens of the text."""
    logprobs: list[float]
    """Of `ids[1:]`, at temperature 1."""


class PolicyVersion(msgspec.Struct, frozen=True, tag="policy_version"):
    """The manifest beside a published policy. `canary_logprobs` prove which policy a sampler serves (I8)."""

    version: int
    parent: int | None
    step: int
    kind: str
    """`"full"`, `"lora"`, or `"tinker"`, whose weights that service holds."""
    weights_sha256: str
    canary_ids: list[int]
    canary_logprobs: list[float]
    base_model: str = ""
    created_at: float = 0.0
    adapters: dict[str, AdapterProof] = msgspec.field(default_factory=dict)
    """More LoRA adapters of this version, by role; each in a folder of its name."""
    canaries: tuple[CanaryPrompt, ...] = ()
    """Further canaries."""
    dtype: str = "fp32"
    """Number format that full weights were rounded to."""
