"""Along one dimension: reductions, scans, normalisations, the softmax family."""

from __future__ import annotations

from kbrl_async.kernels.generator.draft import HEADS, IMAGE, ROWS, SEQUENCE, ProblemDraft, Unfit
from kbrl_async.kernels.generator.operators.table import FULL, TABLES, VECTOR, operator

REDUCTIONS = {
    "sum": "torch.sum(x, dim={dim})",
    "mean": "torch.mean(x, dim={dim})",
    "max": "torch.amax(x, dim={dim})",
    "min": "torch.amin(x, dim={dim})",
    "logsumexp": "torch.logsumexp(x, dim={dim})",
    "std": "torch.std(x, dim={dim})",
    "var": "torch.var(x, dim={dim}, unbiased=False)",
    "l2": "torch.linalg.vector_norm(x, dim={dim})",
    "l1": "torch.sum(torch.abs(x), dim={dim})",
    "mean_square": "torch.mean(x * x, dim={dim})",
    "range": "torch.amax(x, dim={dim}) - torch.amin(x, dim={dim})",
    "mean_exp": "torch.mean(torch.exp(torch.clamp(x, max=4.0)), dim={dim})",
}
SCANS = {
    "cumsum": "torch.cumsum(x, dim={dim})",
    "reverse_cumsum": "torch.flip(torch.cumsum(torch.flip(x, dims=[{dim}]), dim={dim}), dims=[{dim}])",
    "cummax": "torch.cummax(x, dim={dim}).values",
    "logcumsumexp": "torch.logcumsumexp(x, dim={dim})",
    "running_mean": "torch.cumsum(x, dim={dim}) / torch.arange(1, x.shape[{dim}] + 1, device=x.device)",
}
SOFTMAX = {
    "softmax": "torch.softmax(x, dim=-1)",
    "log_softmax": "torch.log_softmax(x, dim=-1)",
    "softmin": "F.softmin(x, dim=-1)",
    "temperature_softmax": "torch.softmax(x / {factor}, dim=-1)",
    "softmax_gate": "x * torch.softmax(x, dim=-1)",
}
CENTRED = {
    "centre": "x - torch.mean(x, dim=-1, keepdim=True)",
    "divide_by_max": "x / (torch.amax(torch.abs(x), dim=-1, keepdim=True) + {slope})",
    "l2_normalise": "F.normalize(x, dim=-1)",
    "l1_normalise": "F.normalize(x, p=1.0, dim=-1)",
    "standardise": "(x - torch.mean(x, dim=-1, keepdim=True)) / (torch.std(x, dim=-1, keepdim=True) + {slope})",
    "subtract_max": "x - torch.amax(x, dim=-1, keepdim=True)",
}


def _expression(text: str, draft: ProblemDraft, dim: int = -1) -> str:
    slope, factor = draft.rng.choice(("0.1", "0.01", "0.05")), draft.rng.choice(("0.5", "1.5", "2.0"))
    return "x = " + text.format(dim=dim, slope=slope, factor=factor)


def _enter_reduction(name: str, text: str) -> None:
    @operator("reduction", FULL, cost=2.0, name=f"reduce_{name}")
    def write(draft: ProblemDraft) -> None:
        dim = draft.rng.choice((-1, -1, 1)) if len(draft.dims) > 2 else -1
        left = [size for number, size in enumerate(draft.dims) if number not in (dim, len(draft.dims) + dim)]
        draft.do(_expression(text, draft, dim), layout=VECTOR, dims=left)


def _enter_scan(name: str, text: str) -> None:
    @operator("scan", (ROWS, SEQUENCE), cost=3.0, name=name)
    def write(draft: ProblemDraft) -> None:
        draft.do(_expression(text, draft, draft.rng.choice((-1, 1)) if name != "running_mean" else -1))


def _enter_same(group: str, name: str, text: str, cost: float) -> None:
    @operator(group, TABLES, cost=cost, name=name)
    def write(draft: ProblemDraft) -> None:
        draft.do(_expression(text, draft))


for _name, _text in REDUCTIONS.items():
    _enter_reduction(_name, _text)
for _name, _text in SCANS.items():
    _enter_scan(_name, _text)
for _name, _text in SOFTMAX.items():
    _enter_same("softmax", _name, _text, 3.0)
for _name, _text in CENTRED.items():
    _enter_same("normalisation", _name, _text, 2.5)


@operator("normalisation", TABLES, cost=2.5)
def min_max(draft: ProblemDraft) -> None:
    draft.do(
        "low, high = torch.aminmax(x, dim=-1, keepdim=True)",
        "x = (x - low) / (high - low + 0.01)",
    )


@operator("normalisation", TABLES, cost=3.0)
def layer_norm(draft: ProblemDraft) -> None:
    draft.do(f"x = {draft.member('norm', f'nn.LayerNorm({draft.last.text})')}(x)")


@operator("normalisation", TABLES, cost=3.0)
def rms_norm(draft: ProblemDraft) -> None:
    weight = draft.member("gain", f"nn.Parameter(torch.rand({draft.last.text}) + 0.5)")
    draft.do(f"x = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * {weight}")


@operator("normalisation", (IMAGE,), cost=3.0)
def group_norm(draft: ProblemDraft) -> None:
    groups = draft.rng.choice((2, 4, 8))
    channels = draft.dims[1]
    channels.over(groups)
    draft.do(f"x = {draft.member('norm', f'nn.GroupNorm({groups}, {channels.text})')}(x)")


@operator("normalisation", (IMAGE,), cost=3.0)
def instance_norm(draft: ProblemDraft) -> None:
    draft.do("x = F.instance_norm(x)")


@operator("normalisation", (IMAGE,), cost=2.0)
def batch_norm(draft: ProblemDraft) -> None:
    draft.do(f"x = {draft.member('norm', f'nn.BatchNorm2d({draft.dims[1].text})')}(x)")


@operator("normalisation", (IMAGE,), cost=3.0)
def channel_l2_normalise(draft: ProblemDraft) -> None:
    draft.do("x = F.normalize(x, dim=1)")


@operator("softmax", (HEADS,), cost=3.0)
def masked_softmax(draft: ProblemDraft) -> None:
    mask = draft.given("mask", f"torch.rand({draft.shape()}) > 0.2")
    draft.do(f"x = torch.softmax(x.masked_fill(~{mask}, -1e4), dim=-1)")


@operator("softmax", (SEQUENCE,), cost=3.0)
def softmax_over_length(draft: ProblemDraft) -> None:
    draft.do("x = torch.softmax(x, dim=1)")


@operator("softmax", (SEQUENCE,), cost=4.0)
def attention_pool(draft: ProblemDraft) -> None:
    own = draft.member("score", f"nn.Linear({draft.last.text}, 1)")
    draft.do(
        f"weight = torch.softmax({own}(x), dim=1)", "x = torch.sum(weight * x, dim=1)",
        layout=ROWS, dims=[draft.dims[0], draft.last],
    )  # fmt: skip


@operator("scan", (SEQUENCE,), cost=4.0)
def decayed_sum(draft: ProblemDraft) -> None:
    """An exponential moving sum, as a lower triangular matrix of decays."""
    if draft.dims[1].text != "length":
        raise Unfit
    rate = draft.rng.choice(("0.9", "0.8", "0.95"))
    draft.do(
        "step = torch.arange(x.shape[1], device=x.device)",
        "gap = step[:, None] - step[None, :]",
        f"decay = torch.where(gap >= 0, {rate} ** gap.clamp(min=0).float(), 0.0)",
        "x = torch.einsum('ts,bsd->btd', decay, x)",
    )


@operator("scan", (ROWS, SEQUENCE), cost=2.0)
def difference(draft: ProblemDraft) -> None:
    draft.do("x = torch.diff(x, dim=-1, prepend=x[..., :1] * 0.5)")
