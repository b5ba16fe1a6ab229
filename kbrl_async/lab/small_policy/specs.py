"""The grammar of the project's suite: which family and which operations make up each problem.

The suite's files are the truth for everybody else; a test holds each file equal to what its spec renders. To add a
problem: one line here, then `python -m kbrl_async.lab.small_policy.specs` writes its file.
"""

from __future__ import annotations

import random
from pathlib import Path

from kbrl_async.kernels.problems.sources.folder import SUITE
from kbrl_async.kernels.problems.writing import render_problem
from kbrl_async.kernels.syntax.operations import operations
from kbrl_async.kernels.syntax.scope import Scope
from kbrl_async.lab.small_policy.author import CAREFUL, Author
from kbrl_async.lab.small_policy.families.blocks import Attention, Perceptron
from kbrl_async.lab.small_policy.families.elementwise import Elementwise
from kbrl_async.lab.small_policy.families.images import DepthwiseConv, Pooling
from kbrl_async.lab.small_policy.families.linear import Linear
from kbrl_async.lab.small_policy.families.rows import NORM_TORCH, REDUCE_TORCH, RowNorm, RowReduce
from kbrl_async.lab.small_policy.families.source import ProblemFamily
from kbrl_async.lab.small_policy.ops import OPS, ChainStep, chain

SPECS: dict[str, ProblemFamily] = {
    # level 1: single operations
    "L1/01_tanh": Elementwise(chain("tanh"), rows=160),
    "L1/02_softplus": Elementwise(chain("softplus"), rows=288),
    "L1/03_elu": Elementwise(chain("elu"), rows=320),
    "L1/04_selu": Elementwise(chain("selu"), rows=320),
    "L1/05_mish": Elementwise(chain("mish"), rows=96),
    "L1/06_log_sigmoid": Elementwise(chain("log_sigmoid"), rows=288),
    "L1/07_gelu_tanh": Elementwise(chain("gelu_tanh"), rows=256),
    "L1/08_sin": Elementwise(chain("sin"), rows=288),
    "L1/09_atan": Elementwise(chain("atan"), rows=160),
    "L1/10_sigmoid": Elementwise(chain("sigmoid"), rows=1024),
    "L1/11_silu": Elementwise(chain("silu"), rows=1024),
    "L1/12_gelu": Elementwise(chain("gelu"), rows=1024),
    "L1/13_softmax": RowNorm("softmax", rows=704),
    "L1/14_log_softmax": RowNorm("log_softmax", rows=704),
    "L1/15_layer_norm": RowNorm("layer_norm", rows=1024),
    "L1/16_rms_norm": RowNorm("rms_norm", rows=1024),
    "L1/17_logsumexp": RowReduce("logsumexp", rows=320),
    "L1/18_max": RowReduce("max", rows=512),
    "L1/19_std": RowReduce("std", rows=64),
    "L1/20_linear": Linear(),
    "L1/21_linear_without_bias": Linear(bias=False),
    "L1/22_max_pool": Pooling("max"),
    "L1/23_avg_pool": Pooling("avg"),
    "L1/24_depthwise_conv": DepthwiseConv(),
    # level 2: fusions
    "L2/01_scale_tanh_shift": Elementwise(chain("scale:0.5 tanh shift:1.0"), rows=160),
    "L2/02_add_softplus_scale": Elementwise(chain("softplus scale:2.0"), rows=256, second="add"),
    "L2/03_mul_sigmoid_elu": Elementwise(chain("sigmoid elu"), rows=544, second="mul"),
    "L2/04_elu_square": Elementwise(chain("elu square"), rows=320),
    "L2/05_gelu_tanh_scale_hardtanh": Elementwise(chain("gelu_tanh scale:1.5 hardtanh"), rows=224),
    "L2/06_shift_sigmoid_scale_tanh": Elementwise(chain("shift:0.1 sigmoid scale:2.0 tanh"), rows=160),
    "L2/07_abs_scale_softplus": Elementwise(chain("abs scale:0.25 softplus"), rows=256),
    "L2/08_scale_softmax": RowNorm("softmax", before=chain("scale:0.5"), rows=576),
    "L2/09_mask_softmax_scale": RowNorm("softmax", after=chain("scale:2.0"), residual=True, rows=448),
    "L2/10_residual_layer_norm": RowNorm("layer_norm", residual=True, rows=768),
    "L2/11_residual_rms_norm_silu": RowNorm("rms_norm", after=chain("silu"), residual=True, rows=512),
    "L2/12_gelu_layer_norm": RowNorm("layer_norm", before=chain("gelu"), rows=640),
    "L2/13_l2_norm_elu": RowNorm("l2_norm", after=chain("elu"), rows=288),
    "L2/14_softplus_sum": RowReduce("sum", before=chain("softplus"), rows=288),
    "L2/15_tanh_mean_scale": RowReduce("mean", before=chain("tanh"), after=chain("scale:2.0"), rows=160),
    "L2/16_scale_logsumexp_relu": RowReduce("logsumexp", before=chain("scale:0.5"), after=chain("relu"), rows=288),
    "L2/17_selu_max": RowReduce("max", before=chain("selu"), rows=256),
    "L2/18_linear_relu": Linear(chain("relu")),
    "L2/19_linear_gelu_scale": Linear(chain("gelu scale:0.5")),
    "L2/20_linear_sigmoid_residual": Linear(chain("sigmoid"), residual=True),
    "L2/21_conv_norm_relu": DepthwiseConv(chain("relu"), norm=True),
    "L2/22_conv_silu_scale": DepthwiseConv(chain("silu scale:0.5")),
    "L2/23_max_pool_tanh": Pooling("max", after=chain("tanh")),
    "L2/24_avg_pool_hardswish": Pooling("avg", after=chain("hardswish")),
    # level 3: blocks
    "L3/01_mlp_relu": Perceptron(chain("relu")),
    "L3/02_mlp_gelu_residual": Perceptron(chain("gelu"), residual=True),
    "L3/03_swiglu": Perceptron(chain("silu"), gated=True),
    "L3/04_attention": Attention(),
    "L3/05_causal_attention": Attention(causal=True),
    "L3/06_mlp_silu": Perceptron(chain("silu")),
    "L3/07_geglu": Perceptron(chain("gelu"), gated=True),
    "L3/08_mlp_tanh_residual": Perceptron(chain("tanh"), residual=True),
}

HELDOUT = frozenset(
    {
        "L1/04_selu",
        "L1/11_silu",
        "L1/16_rms_norm",
        "L1/21_linear_without_bias",
        "L2/03_mul_sigmoid_elu",
        "L2/07_abs_scale_softplus",
        "L2/10_residual_layer_norm",
        "L2/15_tanh_mean_scale",
        "L2/19_linear_gelu_scale",
        "L2/24_avg_pool_hardswish",
        "L3/06_mlp_silu",
        "L3/07_geglu",
    }
)
"""Problems that no corpus, prompt example or update may ever contain."""


def split(problem_id: str) -> str:
    return "heldout" if problem_id in HELDOUT else "train"


def difficulty(spec: ProblemFamily) -> float:
    """0 … 1 by the length of the shortest correct answer: longer kernels have more places to go wrong."""
    lines = len(spec.answer(Author(random.Random(0), CAREFUL)).kernel)
    return round(min(1.0, max(0.0, (lines - 6) / 34)), 2)


def random_steps(rng: random.Random, most: int, least: int = 0) -> tuple[ChainStep, ...]:
    names = rng.sample(sorted(OPS), rng.randint(least, most))
    return tuple(ChainStep(name, rng.choice(OPS[name].constants) if OPS[name].constants else "") for name in names)


def random_spec(rng: random.Random) -> ProblemFamily:
    """A problem like the suite's, of any family; never with the operations of a held-out one, constants aside."""
    while True:
        spec = draw_spec(rng)
        if chain_of(spec) not in _HELDOUT_CHAINS:
            return spec


def chain_of(spec: ProblemFamily) -> tuple[str, ...]:
    """What the problem computes, without sizes, constants and names: by this the leak rules of retrieval go, too."""
    return operations(Scope(render_problem(spec.module())))


def draw_spec(rng: random.Random) -> ProblemFamily:
    rows = rng.choice((160, 256, 288, 320, 512))
    family = rng.choices(range(7), weights=(6, 5, 4, 4, 2, 2, 2))[0]
    if family == 0:
        return Elementwise(random_steps(rng, 4, 1), rows=rows, second=rng.choice(("", "", "add", "mul")))
    if family == 1:
        kind = rng.choice(sorted(NORM_TORCH))
        return RowNorm(kind, random_steps(rng, 2), random_steps(rng, 2), residual=rng.random() < 0.4, rows=rows)
    if family == 2:
        return RowReduce(rng.choice(sorted(REDUCE_TORCH)), random_steps(rng, 2), random_steps(rng, 1), rows=rows)
    if family == 3:
        return Linear(random_steps(rng, 2), bias=rng.random() < 0.7, residual=rng.random() < 0.3)
    if family == 4:
        return Pooling(rng.choice(("max", "avg")), random_steps(rng, 2))
    if family == 5:
        return DepthwiseConv(random_steps(rng, 2), norm=rng.random() < 0.5)
    if rng.random() < 0.3:
        return Attention(causal=rng.random() < 0.5)
    return Perceptron(random_steps(rng, 2, 1), gated=rng.random() < 0.4, residual=rng.random() < 0.4)


_HELDOUT_CHAINS = frozenset(chain_of(SPECS[name]) for name in HELDOUT)


def write_suite(folder: Path) -> None:
    """Writes one problem file per spec, `level{L}/{NN}_{name}.py`, and `index.toml` with difficulty and split."""
    index = [f'["{key}"]\ndifficulty = {difficulty(spec)}\nsplit = "{split(key)}"\n' for key, spec in SPECS.items()]
    (folder / "index.toml").write_text("\n".join(index))
    for problem_id, spec in SPECS.items():
        level, name = problem_id.split("/")
        path = folder / f"level{level[1:]}" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_problem(spec.module()))


if __name__ == "__main__":
    write_suite(SUITE)
