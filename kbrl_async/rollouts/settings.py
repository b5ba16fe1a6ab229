"""What can be set of rollouts: what is asked and paid, which problems come, turns, and alarms. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kbrl_async.doors import Door
from kbrl_async.ranges import AtLeastOne, Count, Fraction, NonNegative, Positive

AlarmAction = Literal["warn", "pause_admission", "lower_staleness", "stop"]

_REWARDS = "kbrl_async.rollouts.rewards"
ADVANTAGES = Door(
    "advantages",
    {
        "leave_one_out": f"{_REWARDS}.advantages:leave_one_out",
        "mean": f"{_REWARDS}.advantages:group_mean",
        "mean_std": f"{_REWARDS}.advantages:group_mean_std",
        "running_mean": f"{_REWARDS}.advantages:group_mean",
        "none": f"{_REWARDS}.advantages:none",
        "best_of_n": f"{_REWARDS}.advantages:best_of_n",
        "reward_weight": f"{_REWARDS}.advantages:reward_weight",
    },
)
"""Baselines: `(rewards) -> advantages`, of the samples of one prompt and turn. `running_mean` is the buffer's: the
problem's past rewards, and the group's own mean where there are none yet."""
REWARD_PRESETS = Door(
    "reward_presets",
    {
        "auto": f"{_REWARDS}.presets:AUTO",
        "stage1": f"{_REWARDS}.presets:STAGE1",
        "stage2": f"{_REWARDS}.presets:STAGE2",
        "stage3": f"{_REWARDS}.presets:STAGE3",
        "kevin": f"{_REWARDS}.presets:KEVIN",
        "kevin_offset": f"{_REWARDS}.presets:KEVIN_OFFSET",
        "hierarchical": f"{_REWARDS}.presets:HIERARCHICAL",
        "hierarchical_raw": f"{_REWARDS}.presets:HIERARCHICAL_RAW",
        "correct": f"{_REWARDS}.presets:CORRECT",
        "best_of_n": f"{_REWARDS}.presets:BEST_OF_N",
        "plan_code": f"{_REWARDS}.presets:PLAN_CODE",
        "funnel": f"{_REWARDS}.presets:FUNNEL",
        "fork": f"{_REWARDS}.presets:FORK",
    },
)
"""Presets: a `Preset`, or three of them, one for each stage of the curriculum."""
REWARD_PARTS = Door(
    "reward_parts",
    {
        "format": f"{_REWARDS}.parts:has_format",
        "static": f"{_REWARDS}.parts:is_clean",
        "compile": f"{_REWARDS}.parts:is_built",
        "valid": f"{_REWARDS}.parts:is_built",
        "correctness": f"{_REWARDS}.parts:correctness",
        "correct": f"{_REWARDS}.parts:is_correct",
        "speed": f"{_REWARDS}.parts:speed",
        "speedup": f"{_REWARDS}.parts:speedup",
        "speedup_gain": f"{_REWARDS}.parts:speedup_gain",
        "speed_above_1": f"{_REWARDS}.parts:speed_above_1",
        "coverage": f"{_REWARDS}.parts:coverage",
        "length": f"{_REWARDS}.parts:length",
        "thinking": f"{_REWARDS}.parts:has_thought",
    },
)
"""Parts: `(record) -> float`, of a record that is scorable and no cheat."""
AdvantageName = Annotated[str, Meta(extra={"door": ADVANTAGES})]
RewardPresetName = Annotated[str, Meta(extra={"door": REWARD_PRESETS})]
RewardPartName = Annotated[str, Meta(extra={"door": REWARD_PARTS})]


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of the policy."""

    option: Literal["auto", "compact", "zero_shot", "one_shot", "few_shot", "raicl", "custom"] = "auto"
    """compact: bare problem; zero_shot: the contract; one_shot, few_shot: + examples; raicl: retrieved; custom: own."""
    file: str | None = None
    """prompt.option=custom: TOML file with the templates, see kbrl_async/rollouts/prompts/custom.py."""
    hardware: bool = True
    """Tell the model what machine kernels run on (not in compact prompts)."""
    chat_template: Literal["auto", "on", "off"] = "auto"
    """Put prompts into the chat template of the model's tokenizer; auto: where it has one, but not compact prompts."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Ask a model that can think first to do so, or not to; auto: as its chat template does by itself."""
    base: Literal["auto", "compact", "zero_shot"] = "auto"
    """prompt.option=raicl: what examples are added to; auto: compact for model_name=small, zero_shot for others."""
    index: str | None = None
    """prompt.option=raicl: folder of an index made by 'kbrl index build'."""
    embedder: str | None = None
    """prompt.option=raicl: embedder that the index may load; null: only lexical, recommended and installed ones."""
    examples: Annotated[int, Meta(ge=1, le=32)] = 3
    """prompt.option=raicl: most examples in one prompt; those that exceed the token budget are left out."""
    max_tokens: AtLeastOne | None = None
    """prompt.option=raicl: most tokens of a prompt; null: what the context leaves beside the answer's max_tokens."""
    live_examples: Count = 0
    """prompt.option=raicl: most verified kernels of this very run that join the index while it runs; 0: none."""


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy is paid for."""

    preset: RewardPresetName = "stage3"
    """Set of reward weights to start from, or auto: stage1 to stage3 by progress; weights below replace single ones."""
    format_weight: NonNegative | None = None
    """Pay for an answer from which a kernel could be extracted; null: the preset's."""
    compile_weight: NonNegative | None = None
    """Pay for a kernel that compiles; null: the preset's."""
    correctness_weight: NonNegative | None = None
    """Pay for the share of secret input sets that the kernel passes; null: the preset's."""
    speed_weight: NonNegative | None = None
    """Pay for the speedup over the reference, by the lower end of its confidence interval; null: the preset's."""
    observed_speedup: Positive | None = 1.0
    """Most speedup that is paid where a verdict is observed, not replayed; null: as much as was measured."""
    unproven: Fraction = 0.0
    """Share of a right kernel's reward, speed aside, for one of which nothing shows that it does the work."""
    coverage_weight: NonNegative | None = None
    """Pay for the share of a correct kernel's device time that its own code has, such as .5; null: the preset's."""
    above_1_weight: NonNegative | None = None
    """Pay for a proven speed above the reference's (part speed_above_1); null: the preset's."""
    least_coverage: Fraction = 0.0
    """Own share of the device time below which a kernel earns nothing but what a wrong one does (Dr. Kernel: .3)."""
    plan_part: RewardPartName | None = None
    """What tokens around the kernel (thoughts, comments) are paid by, on their own; null: the preset's."""
    plan_weight: Fraction | None = None
    """Weight of these tokens' advantages beside 1 of the kernel's; null: the preset's, 0: as all tokens."""

    @property
    def pays_plan(self) -> bool:
        """Tokens around the kernel earn a reward of their own."""
        if self.plan_weight == 0 or self.plan_part is not None:
            return self.plan_weight != 0
        found = REWARD_PRESETS.load(self.preset)
        return any(preset.plan_part for preset in (found if isinstance(found, tuple) else (found,)))

    @property
    def weights(self) -> dict[str, float]:
        """The weights that replace the preset's, by part."""
        parts = ("format", "compile", "correctness", "speed")
        given = {part: getattr(self, f"{part}_weight") for part in parts}
        given |= {"coverage": self.coverage_weight, "speed_above_1": self.above_1_weight}
        return {part: weight for part, weight in given.items() if weight is not None}


class BestOfN(msgspec.Struct, frozen=True, kw_only=True):
    """What advantage=best_of_n imitates."""

    keep: AtLeastOne = 3
    """Best samples of a group that are imitated."""
    above: float = 0.5
    """A sample is imitated only where its reward is above this."""


class Curriculum(msgspec.Struct, frozen=True, kw_only=True):
    """Which problems come next, and when reward.preset=auto moves on."""

    kind: Literal["uniform", "levels", "learnable"] = "uniform"
    """All problems in turn; harder levels as easier ones are solved; or more of those solved half of the time."""
    visits: Count = 0
    """kind=learnable: groups of a problem that is solved now and then, before new ones take its place; 0: no limit."""
    first_share: Fraction = 0.1
    """kind=levels: of the problems at a level or above it, the share that is above it, at first."""
    last_share: Fraction = 0.5
    """kind=levels: the same at last."""
    share_step: Fraction = 0.05
    """kind=levels: a step from first_share to last_share."""
    raise_above: Fraction = 0.4
    """kind=levels: a step is taken at this share of correct kernels."""
    strictness: Literal["full", "rising"] = "full"
    """rising: wrong kernels meet few secret input sets and wider tolerances at first; correct ones always all."""
    first_sets: AtLeastOne = 3
    """strictness=rising: sets after which a wrong kernel is done with; twice as many after a rise, all after two."""
    first_tolerance: Annotated[float, Meta(ge=1)] = 10.0
    """strictness=rising: factor on the tolerances for partial credit; its square root after a rise, 1 after two."""
    strict_above: Fraction = 0.3
    """strictness=rising: it rises at this share of correct kernels."""
    strict_after: Count = 10
    """strictness=rising: updates after which all sets and the bench's own tolerances hold in any case."""
    window: AtLeastOne = 5
    """Batches whose mean rates a threshold is compared with."""
    compile_above: Fraction = 0.8
    """reward.preset=auto: stage1 becomes stage2 at this share of kernels that compile."""
    correct_above: Fraction = 0.5
    """reward.preset=auto: stage2 becomes stage3 at this share of correct kernels."""


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
    single_share: Fraction = 0.0
    """Share of training groups whose rollouts end after their first turn."""
    profile: bool = False
    """Tell what limits a correct kernel, as kbrl profile does: one more build each. Compact prompts have no room."""


class Agents(msgspec.Struct, frozen=True, kw_only=True):
    """Solver, verifier and corrector (mode=agents)."""

    adapters: bool = False
    """Give verifier and corrector LoRA adapters of their own; needs lora_rank."""


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
