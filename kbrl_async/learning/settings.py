"""What can be set of learning: its sections, the doors of its parts, what does not go together. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from kbrl_async.doors import Door
from kbrl_async.errors import ConfigError
from kbrl_async.ranges import AtLeastOne, Count, Fraction, NonNegative, Positive

LOSSES = Door(
    "losses",
    {
        "dppo_tv": "kbrl_async.learning.losses:dppo_tv",
        "ppo": "kbrl_async.learning.losses:ppo_clip",
        "grpo": "kbrl_async.learning.losses:ppo_clip",
        "decoupled": "kbrl_async.learning.losses:decoupled",
        "a3po": "kbrl_async.learning.losses:a3po",
        "gspo": "kbrl_async.learning.losses:gspo",
        "tis": "kbrl_async.learning.losses:tis",
        "cispo": "kbrl_async.learning.losses:cispo",
        "reinforce": "kbrl_async.learning.losses:reinforce",
        "importance_sampling": "kbrl_async.learning.losses:importance_sampling",
    },
)
"""`(tokens, learner settings) -> (loss [T], diagnostics)`, see `losses`."""
LEARNER_ENGINES = Door(
    "learner_engines",
    {
        "torch": "kbrl_async.learning.engine:start",
        "tinker": "kbrl_async.learning.tinker:start",
    },
)
"""`(setup) -> engine`, see `engine`."""
FUSED_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Models whose layers the fused kernels fit, see `fused.families`."""
AT_SERVICE = frozenset({"importance_sampling", "ppo", "grpo"})
"""Losses that Tinker computes itself where `learner.loss_at` says so."""
CLIPPED = frozenset({"ppo", "grpo", "decoupled", "a3po"})
"""Losses that clip by `clip_low`, `clip_high` and `dual_clip`."""
UNWEIGHTED = frozenset({"reinforce"})
"""Of ours, losses without an importance ratio against the behaviour policy: it may be weighed in by a correction."""
CORRECTIONS = Door(
    "corrections",
    {
        "tis": "kbrl_async.learning.corrections:tis",
        "tis_sequence": "kbrl_async.learning.corrections:tis_sequence",
        "icepop": "kbrl_async.learning.corrections:icepop",
        "sequence_mask": "kbrl_async.learning.corrections:sequence_mask",
        "geometric_mask": "kbrl_async.learning.corrections:geometric_mask",
        "k3_reject": "kbrl_async.learning.corrections:k3_reject",
        "veto": "kbrl_async.learning.corrections:veto",
        "opsm": "kbrl_async.learning.corrections:opsm",
        "m2po": "kbrl_async.learning.corrections:m2po",
        "clip_cov": "kbrl_async.learning.corrections:clip_cov",
    },
)
"""`ratios -> multiplier [T]`, see `corrections`."""
WEIGHTS = frozenset({"tis", "tis_sequence"})
"""Corrections that weigh by the importance ratio; the others of ours only drop."""
OF_SEQUENCES = frozenset({"gspo", "tis_sequence", "sequence_mask", "geometric_mask", "k3_reject", "veto", "opsm"})
"""Of ours, losses and corrections that need all tokens of a sequence at once."""
LossName = Annotated[str, Meta(extra={"door": LOSSES})]
CorrectionName = Annotated[str, Meta(extra={"door": CORRECTIONS})]


def check_combination(loss: str, corrections: Sequence[str]) -> None:
    """A ratio is weighed in once.

    :raises ConfigError: a loss that weighs by the importance ratio itself, or a second weight, beside a weight.
    """
    weights = [name for name in corrections if name in WEIGHTS]
    if not weights:
        return
    if loss in LOSSES.ours and loss not in UNWEIGHTED:
        masks = ", ".join(name for name in CORRECTIONS.ours if name not in WEIGHTS)
        cause = f"loss={loss} weighs by the importance ratio itself, and corrections={weights[0]} would do so again"
        raise ConfigError(cause, f"Take loss=reinforce with it, or one of the masks: {masks}")
    if len(weights) > 1:
        raise ConfigError("two corrections weigh by the importance ratio", f"Keep one of {', '.join(weights)}")


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch becomes a new policy version."""

    engine: Annotated[str, Meta(extra={"door": LEARNER_ENGINES})] = "torch"
    """What computes updates; torch: this host; tinker: the service, a LoRA adapter of a model that it serves."""
    loss_at: Literal["here", "service"] = "here"
    """engine=tinker: where `loss` is computed; here: any, with corrections; service: importance_sampling, ppo, grpo."""
    deadline_s: Positive = 1800.0
    """engine=tinker: seconds that one request of an update may take, tries again included."""
    epochs: AtLeastOne = 2
    """Passes over each batch; a model that is not small: 1."""
    minibatches: AtLeastOne = 2
    """Optimizer steps per pass; a model that is not small: 1."""
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
    """Divide a batch's advantages by their root mean square; a model that is not small: false."""
    truncated: Literal["negative", "mask", "penalise"] = "negative"
    """Answers cut at max_tokens: paid like others, not learned from, or up to 1 off from 4/5 of max_tokens on."""
    kl: Literal["none", "k1", "k2", "k3", "k1+", "k3+"] = "none"
    """Estimator of the divergence from the policy that training started from; k1+, k3+: its value, k2's gradient."""
    kl_weight: NonNegative = 0.0
    """Weight of that divergence."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate after warm-up; cosine falls to nothing at max_steps."""
    dppo_delta: Fraction = 0.2
    """dppo_tv: a token is dropped when its probability has moved the wrong way by more than this."""
    constants: list[str] = msgspec.field(default_factory=list)
    """Constants of the loss and the corrections, such as tis.cap=3 or icepop.low=0.4; their own stand beside each."""
    negative_scale: NonNegative = 0.3
    """Factor on negative advantages; below 1 keeps a small policy's entropy up. A model that is not small: 1."""
    grad_clip: Positive = 1.0
    """Largest norm of the gradient."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of the forward and backward pass; auto: bfloat16 on a GPU, float32 on a CPU."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """lora_rank=0: number format of weights, gradients and moments between passes; bfloat16: half the memory."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """adamw_8bit: moments of matrices in a byte each, a quarter of fp32; lora_rank=0 only, needs torchao."""
    threads: AtLeastOne | None = None
    """Threads of torch in the learner; null: one per core it may use."""
    peak_tflops: Positive | None = None
    """Peak of the hardware that policy/mfu is a share of; null: that of a matrix product, measured at the start."""
    processes: AtLeastOne = 1
    """Ranks that share every update, one GPU each; the first one starts the others."""
    shard: bool = False
    """processes > 1: each rank holds its share of weights, gradients and moments (FSDP2) instead of all."""
    offload: bool = False
    """shard: the shares are kept on the host, where the optimizer computes too: slower, and hardly any GPU memory."""
    base_quantisation: Literal["none", "nf4", "int8"] = "none"
    """Of the frozen base under a LoRA adapter on a GPU (QLoRA); needs bitsandbytes, has plain kernels."""
    kernels: Literal["auto", "plain", "fused"] = "auto"
    """How the model is computed; fused: Llama, Mistral, Qwen2 and Qwen3; auto: fused on a GPU where it can be had."""
    activation_checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """What the backward pass computes again; selective: each MLP; full: each layer; auto: what memory_gb asks for."""
    offload_activations: bool = False
    """Inputs of layers that are computed again wait in pinned memory of the host, not on the GPU."""
    context_parallel: AtLeastOne = 1
    """Ranks that share each sequence's tokens, for very long ones; learner.processes is a multiple of it."""
    share_prompts: bool = True
    """kernels=fused: compute the prompt of a group once, not once a sample."""
    memory_gb: NonNegative = 0.0
    """Most GPU memory to hold, in 10^9 bytes; less: more is computed twice. 0: 9/10 less vLLM's, benches'; CPU: all."""
    token_budget: Count = 0
    """Tokens of one microbatch; longer sequences stand alone. 0: 2048."""
    checkpoint_every: AtLeastOne = 1
    """Updates between two checkpoints, more where they take long; those since are made again after a crash."""
    keep_checkpoints: AtLeastOne = 2
    """Newest checkpoints that stay on disk; the last one is of the run's end."""

    @property
    def microbatch_tokens(self) -> int:
        """`token_budget`, resolved."""
        return self.token_budget or 2048


class UpdateSettings(Protocol):
    """The settings of a run by which a batch becomes a new policy version: `runs.config.Config` has them."""

    @property
    def loss(self) -> str: ...
    @property
    def corrections(self) -> Sequence[str]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def learner(self) -> Learner: ...


class Sft(msgspec.Struct, frozen=True, kw_only=True):
    """How the small policy is made on first use (model_name=small)."""

    examples: AtLeastOne = 24_000
    """Pairs of problem and answer that the corpus holds."""
    max_seconds: Positive = 1200.0
    """Wall clock of the training: ends it before `steps`, and changes nothing else."""
    steps: AtLeastOne = 750
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
    batch_tokens: AtLeastOne = 1024
    """Tokens per optimizer step."""
    turn_share: Fraction = 0.5
    """Several turns: share of the corpus that answers feedback to an earlier attempt, or predicts its verdict."""
    shot_share: Fraction = 0.5
    """prompt.option=raicl: share of the corpus whose prompts hold worked examples."""
