"""Sums of products: linear layers, matrix products, convolutions, pooling, pieces of attention."""

from __future__ import annotations

from kbrl_async.kernels.generator.draft import HEADS, IMAGE, ROWS, SEQUENCE, ProblemDraft, Size, Unfit
from kbrl_async.kernels.generator.operators.table import TABLES, operator

MOST_POSITIONS = 4096
"""On a GPU: positions that one matrix mixes."""


def _linear(draft: ProblemDraft, out: Size, options: str = "") -> str:
    return draft.member("linear", f"nn.Linear({draft.last.text}, {out.text}{options})")


@operator("matmul", TABLES, cost=4.0)
def linear(draft: ProblemDraft) -> None:
    out = draft.size("hidden")
    draft.do(f"x = {_linear(draft, out)}(x)", dims=[*draft.dims[:-1], out])


@operator("matmul", TABLES, cost=4.0)
def linear_without_bias(draft: ProblemDraft) -> None:
    out = draft.size("hidden")
    draft.do(f"x = {_linear(draft, out, ', bias=False')}(x)", dims=[*draft.dims[:-1], out])


@operator("matmul", TABLES, cost=6.0)
def low_rank(draft: ProblemDraft) -> None:
    down = draft.member("down", f"nn.Linear({draft.last.text}, 16, bias=False)")
    up = draft.member("up", f"nn.Linear(16, {draft.last.text}, bias=False)")
    draft.do(f"x = x + {up}({down}(x))")


@operator("matmul", TABLES, cost=7.0)
def feed_forward(draft: ProblemDraft) -> None:
    hidden, act = draft.size("hidden"), draft.rng.choice(("F.gelu", "torch.relu", "F.silu"))
    up = draft.member("up", f"nn.Linear({draft.last.text}, {hidden.text})")
    down = draft.member("down", f"nn.Linear({hidden.text}, {draft.last.text})")
    draft.do(f"x = {down}({act}({up}(x)))")


@operator("matmul", TABLES, cost=8.0)
def gated_feed_forward(draft: ProblemDraft) -> None:
    hidden, act = draft.size("hidden"), draft.rng.choice(("F.gelu", "F.silu", "torch.sigmoid"))
    gate = draft.member("gate", f"nn.Linear({draft.last.text}, {hidden.text}, bias=False)")
    up = draft.member("up", f"nn.Linear({draft.last.text}, {hidden.text}, bias=False)")
    draft.do(f"x = {act}({gate}(x)) * {up}(x)", dims=[*draft.dims[:-1], hidden])


@operator("matmul", (ROWS,), cost=5.0)
def gram(draft: ProblemDraft) -> None:
    rows = draft.dims[0]
    draft.do("x = x @ x.T / x.shape[-1] ** 0.5", dims=[rows, Size(rows.text, rows.cpu, rows.gpu)])


@operator("matmul", (ROWS,), cost=4.0)
def matmul(draft: ProblemDraft) -> None:
    out = draft.size("hidden")
    other = draft.given("weight", f"torch.randn({draft.last.text}, {out.text}) / {draft.last.text} ** 0.5")
    draft.do(f"x = x @ {other}", dims=[draft.dims[0], out])


@operator("matmul", (SEQUENCE,), cost=5.0)
def batched_matmul(draft: ProblemDraft) -> None:
    batch, _, width = draft.dims
    out = draft.size("hidden")
    other = draft.given("weight", f"torch.randn({batch.text}, {width.text}, {out.text}) / {width.text} ** 0.5")
    draft.do(f"x = torch.bmm(x, {other})", dims=[*draft.dims[:-1], out])


@operator("matmul", (HEADS,), cost=6.0)
def head_projection(draft: ProblemDraft) -> None:
    """One matrix a head: a grouped product."""
    heads, dim = draft.dims[1], draft.last
    own = draft.member("mix", f"nn.Parameter(torch.randn({heads.text}, {dim.text}, {dim.text}) / {dim.text} ** 0.5)")
    draft.do(f"x = torch.einsum('bhld,hde->bhle', x, {own})")


@operator("matmul", (SEQUENCE,), cost=6.0)
def mix_positions(draft: ProblemDraft) -> None:
    length = draft.dims[1]
    if length.gpu > MOST_POSITIONS:
        raise Unfit
    own = draft.member("mix", f"nn.Linear({length.text}, {length.text})")
    draft.do(f"x = {own}(x.transpose(1, 2)).transpose(1, 2)")


@operator("matmul", (ROWS,), cost=6.0, starts=False)
def bilinear(draft: ProblemDraft) -> None:
    other = draft.given("y", f"torch.randn({draft.shape()})")
    own = draft.member("form", f"nn.Linear({draft.last.text}, {draft.last.text}, bias=False)")
    draft.do(f"x = {own}(x) * {other}")


@operator("convolution", (IMAGE,), cost=6.0)
def conv2d(draft: ProblemDraft) -> None:
    out = draft.dims[1].times(draft.rng.choice((1, 2))) if draft.rng.random() < 0.5 else draft.dims[1]
    kernel = draft.rng.choice((1, 3, 5))
    options = f"{draft.dims[1].text}, {out.text}, {kernel}, padding={kernel // 2}"
    dims = [draft.dims[0], out, *draft.dims[2:]]
    draft.do(f"x = {draft.member('conv', f'nn.Conv2d({options})')}(x)", dims=dims)


@operator("convolution", (IMAGE,), cost=5.0)
def depthwise_conv2d(draft: ProblemDraft) -> None:
    channels, kernel = draft.dims[1].text, draft.rng.choice((3, 5, 7))
    options = f"{channels}, {channels}, {kernel}, padding={kernel // 2}, groups={channels}"
    draft.do(f"x = {draft.member('conv', f'nn.Conv2d({options})')}(x)")


@operator("convolution", (IMAGE,), cost=6.0)
def grouped_conv2d(draft: ProblemDraft) -> None:
    channels, groups = draft.dims[1], draft.rng.choice((2, 4))
    channels.over(groups)
    options = f"{channels.text}, {channels.text}, 3, padding=1, groups={groups}"
    draft.do(f"x = {draft.member('conv', f'nn.Conv2d({options})')}(x)")


@operator("convolution", (IMAGE,), cost=6.0)
def strided_conv2d(draft: ProblemDraft) -> None:
    channels = draft.dims[1].text
    dims = [*draft.dims[:2], draft.dims[2].over(2), draft.dims[3].over(2)]
    draft.do(f"x = {draft.member('conv', f'nn.Conv2d({channels}, {channels}, 4, stride=2, padding=1)')}(x)", dims=dims)


@operator("convolution", (IMAGE,), cost=7.0)
def transposed_conv2d(draft: ProblemDraft) -> None:
    channels = draft.dims[1].text
    dims = [*draft.dims[:2], draft.dims[2].times(2), draft.dims[3].times(2)]
    own = draft.member("conv", f"nn.ConvTranspose2d({channels}, {channels}, 4, stride=2, padding=1)")
    draft.do(f"x = {own}(x)", dims=dims)


@operator("convolution", (SEQUENCE,), cost=6.0)
def conv1d(draft: ProblemDraft) -> None:
    width, dilation = draft.last.text, draft.rng.choice((1, 1, 2))
    options = f"{width}, {width}, 3, padding={dilation}, dilation={dilation}"
    draft.do(f"x = {draft.member('conv', f'nn.Conv1d({options})')}(x.transpose(1, 2)).transpose(1, 2)")


@operator("convolution", (SEQUENCE,), cost=5.0)
def causal_conv1d(draft: ProblemDraft) -> None:
    width = draft.last.text
    own = draft.member("conv", f"nn.Conv1d({width}, {width}, 4, groups={width})")
    draft.do(f"x = {own}(F.pad(x.transpose(1, 2), (3, 0))).transpose(1, 2)")


POOLINGS = {
    "max_pool2d": "F.max_pool2d(x, 2)",
    "avg_pool2d": "F.avg_pool2d(x, 2)",
    "lp_pool2d": "F.lp_pool2d(x, 2.0, 2)",
}
SAME_SIZE = {
    "max_pool2d_same": "F.max_pool2d(x, 3, stride=1, padding=1)",
    "avg_pool2d_same": "F.avg_pool2d(x, 3, stride=1, padding=1)",
}


def _enter_pool(name: str, text: str, *, halves: bool) -> None:
    @operator("pooling", (IMAGE,), cost=3.0, name=name)
    def write(draft: ProblemDraft) -> None:
        dims = [*draft.dims[:2], draft.dims[2].over(2), draft.dims[3].over(2)] if halves else draft.dims
        draft.do(f"x = {text}", dims=dims)


for _name, _text in POOLINGS.items():
    _enter_pool(_name, _text, halves=True)
for _name, _text in SAME_SIZE.items():
    _enter_pool(_name, _text, halves=False)


@operator("pooling", (IMAGE,), cost=3.0)
def global_mean_pool(draft: ProblemDraft) -> None:
    draft.do("x = torch.mean(x, dim=(2, 3))", layout=ROWS, dims=draft.dims[:2])


@operator("pooling", (IMAGE,), cost=4.0)
def squeeze_excite(draft: ProblemDraft) -> None:
    channels = draft.dims[1].text
    own = draft.member("squeeze", f"nn.Linear({channels}, {channels})")
    draft.do(f"weight = torch.sigmoid({own}(torch.mean(x, dim=(2, 3))))", "x = x * weight[:, :, None, None]")


@operator("pooling", (SEQUENCE,), cost=3.0)
def mean_over_length(draft: ProblemDraft) -> None:
    draft.do("x = torch.mean(x, dim=1)", layout=ROWS, dims=[draft.dims[0], draft.last])


def _key_value(draft: ProblemDraft) -> tuple[str, str]:
    shape = draft.shape()
    return draft.given("k", f"torch.randn({shape})"), draft.given("v", f"torch.randn({shape})")


@operator("attention", (HEADS,), cost=9.0)
def attention(draft: ProblemDraft) -> None:
    k, v = _key_value(draft)
    draft.do(f"score = x @ {k}.transpose(-1, -2) / x.shape[-1] ** 0.5", f"x = torch.softmax(score, dim=-1) @ {v}")


@operator("attention", (HEADS,), cost=10.0)
def causal_attention(draft: ProblemDraft) -> None:
    k, v = _key_value(draft)
    draft.do(f"x = F.scaled_dot_product_attention(x, {k}, {v}, is_causal=True)")


@operator("attention", (HEADS,), cost=10.0)
def windowed_attention(draft: ProblemDraft) -> None:
    k, v = _key_value(draft)
    window = draft.rng.choice((8, 16, 32))
    draft.do(
        "step = torch.arange(x.shape[-2], device=x.device)",
        f"near = torch.abs(step[:, None] - step[None, :]) <= {window}",
        f"x = F.scaled_dot_product_attention(x, {k}, {v}, attn_mask=near)",
    )


@operator("attention", (HEADS,), cost=10.0)
def biased_attention(draft: ProblemDraft) -> None:
    """Scores fall with distance, each head at its own rate."""
    k, v = _key_value(draft)
    draft.do(
        "step = torch.arange(x.shape[-2], device=x.device)",
        "slope = 2.0 ** -(torch.arange(x.shape[1], device=x.device) + 1.0)",
        "gap = torch.abs(step[:, None] - step[None, :])",
        f"score = x @ {k}.transpose(-1, -2) / x.shape[-1] ** 0.5 - slope[:, None, None] * gap",
        f"x = torch.softmax(score, dim=-1) @ {v}",
    )


@operator("attention", (HEADS,), cost=8.0)
def linear_attention(draft: ProblemDraft) -> None:
    k, v = _key_value(draft)
    draft.do(
        f"q, k_map = F.elu(x) + 1.0, F.elu({k}) + 1.0",
        f"state = k_map.transpose(-1, -2) @ {v}",
        "x = (q @ state) / (q @ k_map.sum(dim=-2, keepdim=True).transpose(-1, -2))",
    )


@operator("attention", (HEADS,), cost=4.0)
def rotate(draft: ProblemDraft) -> None:
    """Rotary positions: halves of the features turn by an angle that grows with the position."""
    draft.last.over(2)
    draft.do(
        "half = x.shape[-1] // 2",
        "rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)",
        "angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rate[None, :]",
        "a, b = x[..., :half], x[..., half:]",
        "x = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)",
    )
