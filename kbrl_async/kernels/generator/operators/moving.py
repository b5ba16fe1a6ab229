"""What moves elements and computes little: gathers, scatters, layouts. And losses, which end a problem."""

from __future__ import annotations

from kbrl_async.kernels.generator.draft import HEADS, IMAGE, ROWS, SEQUENCE, ProblemDraft, Size
from kbrl_async.kernels.generator.operators.table import FULL, TABLES, VECTOR, operator


@operator("layout", (ROWS,), starts=False)
def transpose(draft: ProblemDraft) -> None:
    draft.do("x = x.T.contiguous()", dims=[draft.dims[1], draft.dims[0]])


@operator("layout", (SEQUENCE,), cost=1.5)
def split_heads(draft: ProblemDraft) -> None:
    batch, length, width = draft.dims
    heads = draft.rng.choice((2, 4))
    dim = width.over(heads)
    draft.do(
        f"x = x.view(x.shape[0], x.shape[1], {heads}, -1).transpose(1, 2)",
        layout=HEADS, dims=[batch, Size(str(heads), heads, heads), length, dim],
    )  # fmt: skip


@operator("layout", (HEADS,), cost=1.5, starts=False)
def merge_heads(draft: ProblemDraft) -> None:
    batch, heads, length, dim = draft.dims
    draft.do("x = x.transpose(1, 2).flatten(2)", layout=SEQUENCE, dims=[batch, length, heads.by(dim)])


@operator("layout", (IMAGE,), cost=1.5)
def to_sequence(draft: ProblemDraft) -> None:
    batch, channels, height, breadth = draft.dims
    dims = [batch, height.by(breadth), channels]
    draft.do("x = x.flatten(2).transpose(1, 2)", layout=SEQUENCE, dims=dims)


@operator("layout", (IMAGE,), cost=2.0)
def pixel_shuffle(draft: ProblemDraft) -> None:
    batch, channels, height, breadth = draft.dims
    draft.do("x = F.pixel_shuffle(x, 2)", dims=[batch, channels.over(4), height.times(2), breadth.times(2)])


@operator("layout", (IMAGE,), cost=2.0)
def channel_shuffle(draft: ProblemDraft) -> None:
    groups = draft.rng.choice((2, 4))
    draft.dims[1].over(groups)
    draft.do(f"x = F.channel_shuffle(x, {groups})")


@operator("layout", (IMAGE,), cost=2.0)
def upsample(draft: ProblemDraft) -> None:
    batch, channels, height, breadth = draft.dims
    draft.do(
        'x = F.interpolate(x, scale_factor=2.0, mode="nearest")',
        dims=[batch, channels, height.times(2), breadth.times(2)],
    )


@operator("layout", (IMAGE,), cost=2.0)
def reflect_pad(draft: ProblemDraft) -> None:
    batch, channels, height, breadth = draft.dims
    draft.do('x = F.pad(x, (1, 1, 1, 1), mode="reflect")', dims=[batch, channels, height.plus(2), breadth.plus(2)])


@operator("layout", (IMAGE,), cost=2.0)
def center_crop(draft: ProblemDraft) -> None:
    batch, channels, height, breadth = draft.dims
    draft.do("x = x[:, :, 2:-2, 2:-2].contiguous()", dims=[batch, channels, height.plus(-4), breadth.plus(-4)])


@operator("layout", TABLES, cost=1.5)
def roll(draft: ProblemDraft) -> None:
    draft.do(f"x = torch.roll(x, {draft.rng.choice((1, 3, 8))}, dims=-1)")


@operator("layout", TABLES, cost=1.5)
def flip(draft: ProblemDraft) -> None:
    draft.do("x = torch.flip(x, dims=[-1])")


@operator("layout", TABLES, cost=2.0)
def glu(draft: ProblemDraft) -> None:
    half = draft.last.over(2)
    form = draft.rng.choice(("a * torch.sigmoid(b)", "F.silu(a) * b", "F.gelu(a) * b", "torch.relu(a) * b"))
    draft.do("a, b = x.chunk(2, dim=-1)", f"x = {form}", dims=[*draft.dims[:-1], half])


@operator("layout", (ROWS, SEQUENCE), cost=2.0)
def concatenate(draft: ProblemDraft) -> None:
    other = draft.given("y", f"torch.randn({draft.shape()})")
    draft.do(f"x = torch.cat([x, {other}], dim=-1)", dims=[*draft.dims[:-1], draft.last.times(2)])


@operator("layout", (HEADS,), cost=2.0)
def swap_positions(draft: ProblemDraft) -> None:
    batch, heads, length, dim = draft.dims
    draft.do("x = x.transpose(-1, -2).contiguous()", dims=[batch, heads, dim, length])


@operator("layout", (SEQUENCE,), cost=2.0)
def shift_positions(draft: ProblemDraft) -> None:
    draft.do("x = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)")


@operator("layout", (SEQUENCE,), cost=2.0)
def every_second(draft: ProblemDraft) -> None:
    batch, length, width = draft.dims
    draft.do("x = x[:, ::2].contiguous()", dims=[batch, length.over(2), width])


@operator("gather", (ROWS,), cost=2.0)
def take_rows(draft: ProblemDraft) -> None:
    rows = draft.dims[0].text
    draft.do(f"x = x[{draft.given('order', f'torch.randint(0, {rows}, ({rows},))')}]")


@operator("gather", (ROWS,), cost=2.5)
def gather_columns(draft: ProblemDraft) -> None:
    index = draft.given("index", f"torch.randint(0, {draft.last.text}, ({draft.shape()}))")
    draft.do(f"x = torch.gather(x, 1, {index})")


@operator("gather", (ROWS, SEQUENCE), cost=2.5, starts=False)
def add_embedding(draft: ProblemDraft) -> None:
    entries = draft.size("entries")
    where = draft.shape(draft.dims[:-1])
    index = draft.given("token", f"torch.randint(0, {entries.text}, ({where},))")
    own = draft.member("table", f"nn.Embedding({entries.text}, {draft.last.text})")
    draft.do(f"x = x + {own}({index})")


@operator("gather", (ROWS,), cost=3.0)
def scatter_add_rows(draft: ProblemDraft) -> None:
    """Rows are summed by segment."""
    rows, classes = draft.dims[0], draft.size("classes")
    segment = draft.given("segment", f"torch.randint(0, {classes.text}, ({rows.text},))")
    own = draft.member("segments", classes.text)
    draft.do(
        f"total = x.new_zeros({own}, x.shape[1])", f"x = total.index_add(0, {segment}, x)", dims=[classes, draft.last]
    )


@operator("gather", (ROWS, HEADS), cost=4.0)
def top_values(draft: ProblemDraft) -> None:
    count = draft.rng.choice((4, 8, 16))
    draft.do(
        f"x = torch.topk(x, {count}, dim=-1).values",
        dims=[*draft.dims[:-1], Size(str(count), count, count)],
    )


@operator("gather", (ROWS,), cost=4.0)
def sort_rows(draft: ProblemDraft) -> None:
    draft.do("x = torch.sort(x, dim=-1).values")


@operator("gather", TABLES, cost=2.0)
def causal_mask(draft: ProblemDraft) -> None:
    fill = draft.rng.choice(("0.0", "-1.0"))
    draft.do(f"x = x.masked_fill(torch.ones_like(x, dtype=torch.bool).triu(1), {fill})")


LOSSES = {
    "mse_loss": "F.mse_loss(x, {y})",
    "l1_loss": "F.l1_loss(x, {y})",
    "huber_loss": "F.huber_loss(x, {y}, delta=0.5)",
    "smooth_l1_loss": "F.smooth_l1_loss(x, {y})",
    "soft_margin_loss": "F.soft_margin_loss(x, torch.sign({y}))",
    "hinge": "torch.mean(torch.clamp(1.0 - x * torch.sign({y}), min=0.0))",
    "log_cosh_loss": "torch.mean(F.softplus(2.0 * (x - {y})) - (x - {y}))",
}
ROW_LOSSES = {
    "cosine_similarity": "F.cosine_similarity(x, {y}, dim=-1)",
    "pairwise_distance": "torch.sqrt(torch.sum((x - {y}) * (x - {y}), dim=-1) + 1e-6)",
    "dot_rows": "torch.sum(x * {y}, dim=-1)",
}


def _enter_loss(name: str, text: str, *, by_row: bool) -> None:
    @operator("loss", TABLES if by_row else FULL, cost=3.0, name=name)
    def write(draft: ProblemDraft) -> None:
        other = draft.given("target", f"torch.randn({draft.shape()})")
        draft.do("x = " + text.format(y=other), layout=VECTOR, dims=draft.dims[:-1] if by_row else [])
        draft.is_ended = not by_row


for _name, _text in LOSSES.items():
    _enter_loss(_name, _text, by_row=False)
for _name, _text in ROW_LOSSES.items():
    _enter_loss(_name, _text, by_row=True)


@operator("loss", TABLES, cost=4.0)
def kl_rows(draft: ProblemDraft) -> None:
    target = draft.given("target", f"torch.randn({draft.shape()})")
    draft.do(
        f"wanted = torch.log_softmax({target}, dim=-1)",
        "x = torch.sum(wanted.exp() * (wanted - torch.log_softmax(x, dim=-1)), dim=-1)",
        layout=VECTOR,
        dims=draft.dims[:-1],
    )


@operator("loss", (ROWS,), cost=4.0)
def cross_entropy(draft: ProblemDraft) -> None:
    target = draft.given("target", f"torch.randint(0, {draft.last.text}, ({draft.dims[0].text},))")
    reduction, dims = draft.rng.choice((("mean", []), ("none", draft.dims[:1])))
    draft.do(f'x = F.cross_entropy(x, {target}, reduction="{reduction}")', layout=VECTOR, dims=dims)
    draft.is_ended = reduction == "mean"


@operator("loss", (ROWS,), cost=4.0)
def bce_with_logits(draft: ProblemDraft) -> None:
    target = draft.given("target", f"(torch.rand({draft.shape()}) > 0.5).float()")
    draft.do(f"x = F.binary_cross_entropy_with_logits(x, {target})", layout=VECTOR, dims=[])
    draft.is_ended = True
