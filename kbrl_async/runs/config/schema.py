"""Every key of a run as one frozen tree of structs: its type, its range, its default, and a line on what it does.

Invariants
* A key is `name` or `section.name`, never deeper; names at the top are those that users of such tools know.
* The type of a field holds its range, so that one conversion checks both; what concerns two keys is in `checks`.
* The string under a field is its documentation: `kbrl config` prints it.
* A section stands in the `settings` of the wing that uses it; this module composes them.
* Nothing here imports torch or touches the disk.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kbrl_async.evaluation.settings import Evaluation
from kbrl_async.kernels.settings import (
    HELDOUT_KIND,
    HELDOUT_SEED,
    HELDOUT_SHARE,
    BackendName,
    CompileFarm,
    SplitKind,
    TimingBench,
)
from kbrl_async.learning.settings import CorrectionName, Learner, LossName, Sft
from kbrl_async.ranges import AtLeastOne, Count, Fraction, NonNegative, Positive
from kbrl_async.rollouts.settings import AdvantageName, Agents, Alarms, BestOfN, Curriculum, Prompt, Reward, Turns
from kbrl_async.runs.settings import Archive, Broker, Cost, Cpu, Demonstrations, Metrics, Processes, Tensorboard
from kbrl_async.sampling.settings import DIRECT_ENGINES, Sampler
from kbrl_async.weights.settings import Weights

PresetName = Literal[
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce",
    "ppo",
    "gspo",
    "cispo",
    "dppo_tv",
    "decoupled",
    "a3po",
    "tis",
    "kevin",
]


def _all_levels() -> list[int]:
    return [1, 2, 3]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    model_name: str = "small"
    """The policy: small (made by the project on first use), a folder, or a name that transformers can load."""
    backend: BackendName = "c"
    """What kernels are written in: C or C++ on the CPU; CUDA by load_inline or by NVRTC, or Triton, on a GPU."""
    problems: str | None = None
    """Folder, task file, hub data set, kernelbench, generated:N, grammar:N or package.module:object; null: ours."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Number format of the problems' modules and inputs, as KernelBench means it."""
    level: Count | list[Count] = msgspec.field(default_factory=_all_levels)
    """Problem level or levels to train on."""
    heldout_share: Fraction = HELDOUT_SHARE
    """Share of each level that is held out where the problems' source marks none, as KernelBench; 0: none."""
    split: SplitKind = HELDOUT_KIND
    """How these are chosen: family, whole families of a level; kevin, single problems (180 and 20 of 200); none."""
    heldout_seed: Count = HELDOUT_SEED
    """Seed by which these are chosen; the run's own seed has no part in it, so that runs can be compared."""
    exclude_audited: bool = True
    """Do not train on problems whose audit says that a right verdict means little there: see 'kbrl problems list'."""
    exclude: list[str] = []
    """Nor on these: ids, and folders of runs or evaluations for what their answers never, or always, solved."""
    batch_size: AtLeastOne = 8
    """P: groups (one problem each) per update."""
    group_size: AtLeastOne = 8
    """G: rollouts per group, which share a baseline; 1 with advantage=running_mean or none."""
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
    max_minutes: Positive | None = 6.0
    """Minutes of training after which the run ends too, without making and evaluating the policy; null: no limit."""
    max_staleness: Count = 2
    """S: how many versions older than the policy a rollout may be when it is trained on; 0: synchronous."""
    hold_s: NonNegative | None = None
    """Longest wait of a batch for groups that would become too old; null: what 95 % of the run's rollouts take."""
    method: Literal["grpo", "reinforce", "best_of_n", "reward_weighted_sft", "sft"] = "grpo"
    """How a policy learns from its rollouts, or from demonstrations (sft); sets loss and baseline below your keys."""
    preset: PresetName | None = None
    """A named algorithm: sets the loss, the baseline and what belongs to them; keys that you set yourself win."""
    loss: LossName = "dppo_tv"
    """Policy loss with its off-policy correction."""
    corrections: list[CorrectionName] = msgspec.field(default_factory=list)
    """More corrections for stale samples, multiplied: tis and tis_sequence weigh (loss=reinforce only), others drop."""
    advantage: AdvantageName = "leave_one_out"
    """Baseline that is taken from a rollout's reward."""
    mode: Literal["single_turn", "multi_turn", "agents"] = "single_turn"
    """One answer per rollout; several with feedback between them; or solver, verifier and corrector taking turns."""
    max_turns: AtLeastOne = 4
    """Turns of a rollout in mode=multi_turn and mode=agents."""
    gamma: Fraction = 0.4
    """Discount of later turns' scores in mode=multi_turn."""
    eval_samples: Count = 12
    """Answers per held-out problem before and after training; 0: no evaluation."""
    eval_every: Count = 0
    """Updates between two evaluations of the held-out problems while training goes on; 0: before and after only."""
    eval_credit: AtLeastOne = 4
    """Rollouts of such an evaluation that are under way at once: a few, so that training has nearly all."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where sampler and learner compute; auto: the GPU where there is one."""
    placement: Literal["one_gpu", "two_gpus", "learner_apart", "split"] | None = None
    """Which GPU each process gets: one; the bench, or all but the learner, on a second; one each. null: as they see."""
    log_path: str = "runs"
    """Folder that holds the runs."""
    cache_path: str | None = None
    """Folder that keeps what several runs share, such as the small policy; null: kbrl-async in the user's cache."""
    policy_url: str | None = None
    """Where each policy version is uploaded to as well, as file:///…, s3://… or another URL that fsspec knows."""
    name: str | None = None
    """Name of the run, a folder in log_path; null: default, with the seed where it is not the default one."""
    rounds: list[str] = msgspec.field(default_factory=list)
    """Runs one after the other, each with settings of its own, such as fusion_rounds.yaml has them; empty: one run."""
    resume: str | None = None
    """Run to continue, by folder or by name in log_path, such as runs/default or latest."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important message that is logged."""
    prompt: Prompt = Prompt()
    reward: Reward = Reward()
    demonstrations: Demonstrations = Demonstrations()
    best_of_n: BestOfN = BestOfN()
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
    evaluation: Evaluation = Evaluation()
    archive: Archive = Archive()
    alarms: Alarms = Alarms()
    metrics: Metrics = Metrics()
    weights: Weights = Weights()
    cost: Cost = Cost()

    @property
    def prompt_option(self) -> str:
        """The prompt template, with `auto` and `raicl` resolved."""
        chosen = self.prompt.option
        if chosen == "custom":
            return f"custom:{self.prompt.file}"
        if chosen not in ("auto", "raicl"):
            return chosen
        if chosen == "raicl" and self.prompt.base != "auto":
            return self.prompt.base
        return "compact" if self.model_name == "small" else "zero_shot"

    @property
    def is_rehearsal(self) -> bool:
        """Answers are given and weights random: nothing of what it learns is kept."""
        return bool(self.sampler.forced)

    @property
    def sends_weights(self) -> bool:
        """`weights.transport` without `auto`: where learner and samplers have GPUs of their own, and all is trained."""
        can = not self.lora_rank and self.learner.engine == "torch" and self.sampler.engine in DIRECT_ENGINES
        auto = can and self.learner_is_apart and self.device != "cpu"
        return self.weights.transport == "direct" or (self.weights.transport == "auto" and auto)

    @property
    def learner_is_apart(self) -> bool:
        """No sampler is on the learner's GPUs, as the placement says."""
        return self.placement in ("learner_apart", "split")

    def learner_room(self, memory: float) -> float:
        """Bytes up to which the learner fills a GPU of `memory` bytes: `learner.memory_gb`, or what others leave it."""
        is_shared = self.placement == "one_gpu" and self.sampler.engine == "vllm"
        share = max(0.1, 0.9 - (self.sampler.memory_share + BENCHES_SHARE if is_shared else 0.0))
        return self.learner.memory_gb * 1e9 or share * memory

    @property
    def punishes_overlong(self) -> bool:
        """Answers near max_tokens lose reward."""
        return self.learner.truncated == "penalise"

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
BENCHES_SHARE = 0.15
"""Of the one GPU that a run has, for benches beside vLLM and the learner."""
