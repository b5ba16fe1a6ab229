# ruff: noqa: E501 - candidates and tables are texts
"""What operators of libraries are for: a problem for each, since their checkouts have none in a form of ours.

A line is `module.function(arguments) | the same in torch | inputs`, with one letter an input: see `_INPUTS`. What has a
random answer, an answer of another size each time, or none but a constant is in no line.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

FLAGGEMS = """
abs.abs(x) | torch.abs(x) | R
add.add(x, y) | x + y | R R
add.add(x, y, alpha=0.5) | torch.add(x, y, alpha=0.5) | R V
addcdiv.addcdiv(x, y, z, value=0.5) | torch.addcdiv(x, y, z, value=0.5) | R R P
addcmul.addcmul(x, y, z, value=0.5, out=None) | torch.addcmul(x, y, z, value=0.5) | R R R
addmm.addmm(x, y, z) | torch.addmm(x, y, z) | V S T
addmv.addmv(x, y, z) | torch.addmv(x, y, z) | W S V
addr.addr(x, y, z) | torch.addr(x, y, z) | S W V
all.all_dim(x, dim=1) | torch.all(x, dim=1) | M1
amax.amax(x, dim=[1]) | torch.amax(x, dim=1) | R
angle.angle(x) | torch.angle(x) | R
any.any_dim(x, dim=1) | torch.any(x, dim=1) | M0
argmax.argmax(x, dim=1) | torch.argmax(x, dim=1) | R
argmin.argmin(x, dim=1) | torch.argmin(x, dim=1) | R
atan.atan(x) | torch.atan(x) | R
attention.scaled_dot_product_attention(x, y, z) | F.scaled_dot_product_attention(x, y, z) | Q Q Q
avg_pool2d.avg_pool2d(x, 2, 2) | F.avg_pool2d(x, 2, 2) | I
batch_norm.batch_norm(x, y, z, torch.zeros_like(y), torch.ones_like(y), True, 0.1, 1e-5)[0] | F.batch_norm(x, None, None, y, z, True, 0.1, 1e-5) | I C C
bitwise_and.bitwise_and_tensor(x, y) | x & y | N N
bitwise_not.bitwise_not(x) | ~x | N
bitwise_or.bitwise_or_tensor(x, y) | x | y | N N
bmm.bmm(x, y) | torch.bmm(x, y) | A A
cat.cat([x, y], 1) | torch.cat([x, y], 1) | R R
celu.celu(x, 1.2) | F.celu(x, 1.2) | R
clamp.clamp(x, -0.5, 0.5) | torch.clamp(x, -0.5, 0.5) | R
clamp.clamp_min(x, 0.1) | torch.clamp_min(x, 0.1) | R
conv1d.conv1d(x, y, None, 1, 1) | F.conv1d(x, y, None, 1, 1) | A D
conv2d.conv2d(x, y, None, 1, 1) | F.conv2d(x, y, None, 1, 1) | I E
cos.cos(x) | torch.cos(x) | R
count_nonzero.count_nonzero(x, 1) | torch.count_nonzero(x, 1) | B
cummax.cummax(x, 1)[0] | torch.cummax(x, 1)[0] | R
cummin.cummin(x, 1)[0] | torch.cummin(x, 1)[0] | R
cumsum.cumsum(x, 1) | torch.cumsum(x, 1) | R
diag.diag(x) | torch.diag(x) | V
diag_embed.diag_embed(x) | torch.diag_embed(x) | X
div.true_divide(x, y) | x / y | R P
div.floor_divide(x, y) | torch.floor_divide(x, y) | N L
div.remainder(x, y) | torch.remainder(x, y) | N L
dot.dot(x, y) | torch.dot(x, y) | V V
elu.elu(x) | F.elu(x) | R
embedding.embedding(x, y) | F.embedding(y, x) | R J
eq.eq(x, y) | x == y | B B
erf.erf(x) | torch.erf(x) | R
exp.exp(x) | torch.exp(x) | R
exp2.exp2(x) | torch.exp2(x) | R
flip.flip(x, [1]) | torch.flip(x, [1]) | R
gather.gather(x, 1, y) | torch.gather(x, 1, y) | R G
ge.ge(x, y) | x >= y | R R
gelu.gelu(x) | F.gelu(x) | R
gelu.gelu(x, approximate="tanh") | F.gelu(x, approximate="tanh") | R
glu.glu(x, -1) | F.glu(x, -1) | R
groupnorm.group_norm(x, y, z, 8, 32, 1024, 4, 1e-5)[0] | F.group_norm(x, 4, y, z, 1e-5) | I C C
gt.gt(x, y) | x > y | R R
hstack.hstack([x, y]) | torch.hstack([x, y]) | R R
index_add.index_add(x, 0, y, z) | torch.index_add(x, 0, y, z) | R O R
index_select.index_select(x, 0, y) | torch.index_select(x, 0, y) | R J
isclose.isclose(x, y) | torch.isclose(x, y) | B B
kron.kron(x, y) | torch.kron(x, y) | X X
layernorm.layer_norm(x, [1024], y, z, 1e-5)[0] | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
le.le(x, y) | x <= y | R R
lerp.lerp_tensor(x, y, z) | torch.lerp(x, y, z) | R R U
log.log(x) | torch.log(x) | P
log_sigmoid.log_sigmoid(x) | F.logsigmoid(x) | R
log_softmax.log_softmax(x, 1) | F.log_softmax(x, 1) | R
logical_and.logical_and(x, y) | torch.logical_and(x, y) | M M
logical_not.logical_not(x) | torch.logical_not(x) | M
logical_or.logical_or(x, y) | torch.logical_or(x, y) | M M
logical_xor.logical_xor(x, y) | torch.logical_xor(x, y) | M M
lt.lt(x, y) | x < y | R R
masked_fill.masked_fill(x, y, 0.5) | x.masked_fill(y, 0.5) | R M
max.max_dim(x, 1)[0] | torch.max(x, 1)[0] | R
max.max(x) | torch.max(x) | R
max_pool2d_with_indices.max_pool2d_with_indices(x, 2, 2)[0] | F.max_pool2d(x, 2, 2) | I
maximum.maximum(x, y) | torch.maximum(x, y) | R R
mean.mean(x) | torch.mean(x) | U
mean.mean_dim(x, [1]) | torch.mean(x, 1) | U
min.min_dim(x, 1)[0] | torch.min(x, 1)[0] | R
minimum.minimum(x, y) | torch.minimum(x, y) | R R
mm.mm(x, y) | x @ y | S T
mse_loss.mse_loss(x, y) | F.mse_loss(x, y) | R R
mul.mul(x, y) | x * y | R R
mv.mv(x, y) | x @ y | S V
nan_to_num.nan_to_num(x, 0.0) | torch.nan_to_num(x, 0.0) | R
ne.ne(x, y) | x != y | B B
neg.neg(x) | -x | R
nllloss.nll_loss_forward(x, y)[0] | F.nll_loss(x, y) | R O
ones_like.ones_like(x) | torch.ones_like(x) | R
pad.pad(x, [1, 2], "constant", 0.5) | F.pad(x, [1, 2], "constant", 0.5) | R
polar.polar(x, y) | torch.polar(x, y) | P R
pow.pow_tensor_scalar(x, 2.5) | torch.pow(x, 2.5) | P
pow.pow_tensor_tensor(x, y) | torch.pow(x, y) | P R
prod.prod_dim(x, 1) | torch.prod(x, 1) | Y
reciprocal.reciprocal(x) | torch.reciprocal(x) | P
relu.relu(x) | torch.relu(x) | R
repeat.repeat(x, [2, 3]) | x.repeat(2, 3) | S
repeat_interleave.repeat_interleave_self_int(x, 3, 0) | torch.repeat_interleave(x, 3, 0) | S
rms_norm.rms_norm(x, [1024], y, 1e-5) | F.rms_norm(x, [1024], y, 1e-5) | R V
rsqrt.rsqrt(x) | torch.rsqrt(x) | P
scatter.scatter(x, 1, y, z) | torch.scatter(x, 1, y, z) | R H R
select_scatter.select_scatter(x, y, 0, 3) | torch.select_scatter(x, y, 0, 3) | R V
sigmoid.sigmoid(x) | torch.sigmoid(x) | R
silu.silu(x) | F.silu(x) | R
sin.sin(x) | torch.sin(x) | R
slice_scatter.slice_scatter(x, y, 1, 0, 2048, 2) | torch.slice_scatter(x, y, 1, 0, 2048, 2) | Z R
softmax.softmax(x, 1) | torch.softmax(x, 1) | R
softplus.softplus(x) | F.softplus(x) | R
sort.sort(x, 1)[0] | torch.sort(x, 1)[0] | R
sqrt.sqrt(x) | torch.sqrt(x) | P
stack.stack([x, y], 1) | torch.stack([x, y], 1) | R R
std.std(x, 1) | torch.std(x, 1) | R
sub.sub(x, y) | x - y | R R
sum.sum(x) | torch.sum(x) | U
sum.sum_dim(x, [1]) | torch.sum(x, 1) | R
tanh.tanh(x) | torch.tanh(x) | R
threshold.threshold(x, 0.2, 0.1) | F.threshold(x, 0.2, 0.1) | R
tile.tile(x, [2, 3]) | torch.tile(x, [2, 3]) | S
to.to_copy(x, dtype=torch.float16) | x.to(torch.float16) | R
topk.topk(x, 8)[0] | torch.topk(x, 8)[0] | R
trace.trace(x) | torch.trace(x) | R
triu.triu(x, 1) | torch.triu(x, 1) | R
upsample_nearest2d.upsample_nearest2d(x, [64, 64]) | F.interpolate(x, [64, 64]) | I
var_mean.var_mean(x, [1])[0] | torch.var(x, 1) | R
vdot.vdot(x, y) | torch.vdot(x, y) | V V
vector_norm.vector_norm(x, 2, [1]) | torch.linalg.vector_norm(x, 2, 1) | R
vstack.vstack([x, y]) | torch.vstack([x, y]) | R R
weightnorm.weight_norm_interface(x, y)[0] | torch._weight_norm(x, y) | R W1
where.where_self(x, y, z) | torch.where(x, y, z) | M R R
"""
LIGER = """
rms_norm.LigerRMSNormFunction.apply(x, y, 1e-6) | F.rms_norm(x, [1024], y, 1e-6) | R V
layer_norm.LigerLayerNormFunction.apply(x, y, z, 1e-5) | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
geglu.LigerGELUMulFunction.apply(x, y) | F.gelu(x, approximate="tanh") * y | R R
swiglu.LigerSiLUMulFunction.apply(x, y) | F.silu(x) * y | R R
softmax.LigerSoftmaxFunction.apply(x) | torch.softmax(x, -1) | R
sparsemax.LigerSparsemaxFunction.apply(x, -1) | SPARSEMAX(x) | S
relu_squared.LigerReLUSquaredFunction.apply(x) | torch.relu(x).square() | R
dyt.LigerDyTFunction.apply(x, y, z, w) | torch.tanh(x * y) * z + w | R A1 V V
fused_add_rms_norm.LigerFusedAddRMSNormFunction.apply(x, y, z, 1e-6)[0] | F.rms_norm(x + y, [1024], z, 1e-6) | R R V
group_norm.LigerGroupNormFunction.apply(x, y, z, 32, 4, 1e-5) | F.group_norm(x, 4, y, z, 1e-5) | I C C
cross_entropy.LigerCrossEntropyFunction.apply(x.clone(), y, None)[0] | F.cross_entropy(x, y) | R O
kl_div.LigerKLDivLossFunction.apply(x, y) | F.kl_div(x, y, reduction="batchmean") | LP PR
jsd.LigerJSDFunction.apply(x, y) | JSD(x, y) | LP LP
tvd.LigerTVDLossFunction.apply(x, y) | (x - y).abs().sum(-1).mean() / 2 | PR PR
"""
_INPUTS = {
    "R": "torch.randn(1024, 1024)", "S": "torch.randn(256, 1024)", "T": "torch.randn(1024, 1024)",
    "V": "torch.randn(1024)", "W": "torch.randn(256)", "W1": "torch.rand(1024, 1) + 0.5", "A1": "torch.rand(1) + 0.5",
    "P": "torch.rand(1024, 1024) + 0.5", "U": "torch.rand(1024, 1024)", "Y": "torch.rand(256, 32) + 0.5",
    "M0": "torch.rand(1024, 1024) > 0.999", "M1": "torch.rand(1024, 1024) > 0.001",
    "M": "torch.rand(1024, 1024) > 0.5", "B": "torch.randint(0, 3, (1024, 1024))",
    "N": "torch.randint(0, 1 << 20, (1024, 1024), dtype=torch.int32)",
    "K": "torch.randint(0, 8, (1024, 1024), dtype=torch.int32)",
    "L": "torch.randint(1, 99, (1024, 1024), dtype=torch.int32)",
    "J": "torch.randint(0, 1024, (512,))", "O": "torch.randint(0, 1024, (1024,))",
    "G": "torch.randint(0, 1024, (1024, 512))", "H": "torch.argsort(torch.rand(1024, 1024), 1)",
    "A": "torch.randn(8, 256, 256)", "D": "torch.randn(64, 256, 3)", "E": "torch.randn(16, 32, 3, 3)",
    "I": "torch.randn(8, 32, 32, 32)", "C": "torch.randn(32)", "X": "torch.randn(32, 48)", "Z": "torch.randn(1024, 2048)",
    "Q": "torch.randn(2, 4, 256, 64, dtype=torch.float16)",
    "LP": "torch.log_softmax(torch.randn(512, 1024), -1)", "PR": "torch.softmax(torch.randn(512, 1024), -1)",
}  # fmt: skip
_PROBLEM = """
import torch
import torch.nn as nn
import torch.nn.functional as F
{before}

class Model(nn.Module):
    def forward(self, {names}):
        return {answer}

def get_inputs():
    return [{inputs}]

def get_init_inputs():
    return []
"""
_BEFORE = {
    "SPARSEMAX": """
def SPARSEMAX(x):
    z = torch.sort(x, -1, descending=True)[0]
    total = torch.cumsum(z, -1) - 1
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    count = (z * k > total).sum(-1, keepdim=True)
    return torch.clamp(x - total.gather(-1, count - 1) / count.to(x.dtype), min=0)
""",
    "JSD": """
def JSD(x, y):
    m = torch.log((x.exp() + y.exp()) / 2)
    return (F.kl_div(m, x, reduction="sum", log_target=True) + F.kl_div(m, y, reduction="sum", log_target=True)) / 2 / x.shape[0]
""",
}


class Posed(msgspec.Struct, frozen=True):
    """One function of a module, how it is called, and the problem that it is an answer to."""

    name: str
    module: str
    function: str
    call: str
    arguments: str
    problem: str


def posed(table: str) -> Iterator[Posed]:
    """Each line, in order; a function that stands there twice is numbered."""
    seen: dict[str, int] = {}
    for line in table.strip().splitlines():
        call, rest = (part.strip() for part in line.split("|", 1))
        answer, _, letters = (part.strip() for part in rest.rpartition("|"))
        module, _, call = call.partition(".")
        function = call.partition("(")[0].partition(".")[0]
        kinds = letters.split()
        names = ", ".join("xyzw"[: len(kinds)])
        seen[function] = seen.get(function, 0) + 1
        before = next((text for word, text in _BEFORE.items() if word in answer), "")
        inputs = ", ".join(_INPUTS[kind] for kind in kinds)
        problem = _PROBLEM.format(before=before, names=names, answer=answer, inputs=inputs)
        name = f"{module}-{function}" + (f"-{seen[function]}" if seen[function] > 1 else "")
        yield Posed(name, module, function, call, names, problem)
