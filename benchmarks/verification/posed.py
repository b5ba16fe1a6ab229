# ruff: noqa: E501 - candidates and tables are texts
"""What operators of libraries are for: a problem for each, since their checkouts have none in a form of ours.

A line is `module.function(arguments) | the same in torch | inputs`, with one letter an input: see `_INPUTS`. What has a
random answer, an answer of another size each time, or none but a constant is in no line.
"""

from __future__ import annotations

import re
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
TRITONBENCH = """
add_example.add_wrapper(x, y) | x + y | V V
add_value.puzzle1(x) | x + 10 | V
bmm_optimized.bmm(x, y) | torch.bmm(x, y) | HA HA
chunk_cumsum_kernel.chunk_global_cumsum_scalar(x) | torch.cumsum(x, 2) | U3
chunk_cumsum_vector.chunk_global_cumsum_vector(x) | torch.cumsum(x, 2) | U4
cosine_compute.cos(x) | torch.cos(x) | V
cross_entropy1.cross_entropy_loss(x, y) | F.cross_entropy(x, y, reduction="none") | R O
cross_entropy_ops.cross_entropy_loss(x, y)[0] | F.cross_entropy(x, y, reduction="none") | R O
dequantize_rowwise.dequantize_rowwise(x, y) | (x.float() * y[:, None] / 127).half() | B8 PV
fast_ce_loss.fast_cross_entropy_loss(x, y) | F.cross_entropy(x.flatten(0, 1), y.flatten()) | L3 O2
fast_layernorm.Fast_Layernorm.apply(x, y, z, 1e-5) | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
fast_rms_layernorm.Fast_RMS_Layernorm.apply(x, y, 1e-5) | F.rms_norm(x, [1024], y, 1e-5) | R V
flash_attn.flash_attn_triton(x, y, z, causal=False, sm_scale=0.125) | F.scaled_dot_product_attention(x, y, z) | Q Q Q
flash_attn.flash_attn_triton(x, y, z, causal=True, sm_scale=0.125) | F.scaled_dot_product_attention(x, y, z, is_causal=True) | Q Q Q
attention_llama.triton_fa(x, y, z, 0.125, False, 0) | F.scaled_dot_product_attention(x, y, z) | Q Q Q
triton_attention._attention.apply(x, y, z, 0.125) | F.scaled_dot_product_attention(x, y, z, is_causal=True) | Q Q Q
fused_recurrent_hgrn.fused_recurrent_hgrn(x, y)[0] | GATED(x, y) | H4 GA4
geglu_tanh_triton.geglu_forward(x, y)[2] | F.gelu(x, approximate="tanh") * y | N128 N128
index_select_cat.index_select_cat_fwd(torch.empty_like(x[:512]), x, y) | x[y] | R J
kldiv_compute.kldivergence(x, y) | x * torch.log(x / y) | PV PV
kldiv_ops.kldiv_forward_triton(x, y, False, "none", 1e-10) | F.kl_div(x, y, reduction="none") | LP PR
kldiv_triton.kldiv_forward_triton(x, y, False, "none") | F.kl_div(x, y, reduction="none") | LP PR
layer_norm_liger.LigerLayerNormFunction.apply(x, y, z, 1e-5) | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
layer_norm_triton.LayerNorm.apply(x, (1024,), y, z, 1e-5) | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
layernorm_fwd_triton.layernorm_forward(x, y, 1e-5) | F.layer_norm(x, [128], None, None, 1e-5) * y | X3 W3
log_softmax.log_softmax(x, 1) | torch.log_softmax(x, 1) | R
logsumexp_fwd.logsumexp_fwd(x) | torch.logsumexp(x, -1) | R
matmul_leakyrelu.matmul(x, y, "leaky_relu") | F.leaky_relu(x @ y) | HS HT
matmul_persistent_triton.matmul_persistent(x, y) | x @ y | HS HT
matmul_triton1.matmul(x, y) | x @ y | X2 X2
matmul_triton2.triton_matmul(x, y) | x @ y | HS HT
matmul_triton_autotune.matmul(x, y) | x @ y | HS HT
matrix_vector_multip.mv(x, y) | x @ y | S V
max_reduction.max(x) | torch.max(x) | R
max_reduction.max_dim(x, 1)[0] | torch.max(x, 1)[0] | R
mean_reduction.mean_dim(x, [1]) | torch.mean(x, 1) | U
relu_strided_buffer.relu_forward_wrapper_rank_1(x, out0=torch.empty_like(x)) | torch.relu(x) | V
relu_triton_kernel.relu(x) | torch.relu(x) | V
reversed_cumsum.chunk_global_reversed_cumsum_vector(x) | torch.flip(torch.cumsum(torch.flip(x, [2]), 2), [2]) | U4
reversed_cumsum_scalar.chunk_global_reversed_cumsum_scalar(x) | torch.flip(torch.cumsum(torch.flip(x, [2]), 2), [2]) | U3
rms_norm_triton.rms_norm(x, (1024,), y, 1e-5) | F.rms_norm(x, [1024], y, 1e-5) | R V
rmsnorm_fused_llama.rmsnorm_forward(x, y, 1e-5) | F.rms_norm(x, [1024], y, 1e-5) | HR HV
rmsnorm_implementation.rmsnorm_wrapper(x, y) | F.rms_norm(x, [1024], y, 1e-6) | H3 HV
rmsnorm_triton.rmsnorm_triton_wrapper(x, y) | F.rms_norm(x, [1024], y, 1e-6) | H3 HV
sin_kernel.call_kernel(x) | torch.sin(x) | V
softmax_flaggems.softmax(x, 1) | torch.softmax(x, 1) | R
softmax_optimize.softmax(x) | torch.softmax(x, 1) | R
softmax_triton1.softmax(x) | torch.softmax(x, 1) | R
softmax_triton2.softmax(x) | torch.softmax(x, 1) | R
softmax_triton3.softmax(x) | torch.softmax(x, 1) | HR
triton_softmax.triton_softmax(x) | torch.softmax(x, 1) | R
square_matrix.square(x) | x * x | S
swiglu_triton.swiglu_forward(x, y)[2] | F.silu(x) * y | R R
triton_argmax.argmax(x, dim=1) | torch.argmax(x, 1) | R
triton_conv2d_fwd.conv2d_forward(x, y, 3, 3, 1, 1, 1, 1, 1, fp16=True) | F.conv2d(x.float(), y.float(), None, 1, 1) | HI HE
triton_linear_activation.linear_layer(x, y, z) | F.linear(x, y, z) | HS HT HV
triton_matmul.matmul(x, y) | x @ y | HS HT
triton_mul2.triton_mul2(x, BLOCK_SIZE=1024) | x * 2 | V
vector_addition.add(x, y) | x + y | V V
vector_addition_custom.custom_add(x, y) | x + y | V V
"""
FLA = """
modules/l2norm.l2norm(x) | x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) | R
modules/activations.sigmoid(x) | torch.sigmoid(x) | R
modules/activations.logsigmoid(x) | F.logsigmoid(x) | R
modules/activations.swish(x) | F.silu(x) | R
modules/activations.swiglu(x, y) | F.silu(x) * y | R R
modules/activations.sigmoidglu(x, y) | torch.sigmoid(x) * y | R R
modules/layernorm.layer_norm(x, y, z) | F.layer_norm(x, [1024], y, z, 1e-5) | R V V
modules/layernorm.rms_norm(x, y, None) | F.rms_norm(x, [1024], y, 1e-5) | R V
modules/layernorm.rms_norm(x, y, None, z) | F.rms_norm(x + z, [1024], y, 1e-5) | R V R
modules/fused_norm_gate.rms_norm_gated(x, y, z, None) | F.rms_norm(x, [1024], z, 1e-6) * F.silu(y) | R R V
modules/token_shift.token_shift(x) | torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x | A
modules/fused_cross_entropy.cross_entropy_loss(x, y)[0] | F.cross_entropy(x, y, reduction="none") | R O
ops/utils/cumsum.chunk_global_cumsum(x) | torch.cumsum(x, 1) | U4
ops/utils/cumsum.chunk_local_cumsum(x, 64) | torch.cumsum(x.unflatten(1, (-1, 64)), 2).flatten(1, 2) | U3
ops/utils/logsumexp.logsumexp_fwd(x) | torch.logsumexp(x, -1) | R
ops/utils/softmax.softmax_fwd(x) | torch.softmax(x, -1) | R
ops/utils/pooling.mean_pooling(x, 64) | x.unflatten(1, (-1, 64)).mean(2) | U4
ops/utils/matmul.matmul(x, y) | x @ y | HS HT
ops/hgrn/fused_recurrent.fused_recurrent_hgrn(x, y)[0] | HGRN(x, y) | A4 GA
ops/hgrn/chunk.chunk_hgrn(x, y)[0] | HGRN(x, y) | A4 GA
ops/linear_attn/fused_recurrent.fused_recurrent_linear_attn(x, y, z)[0] | LINEAR(x, y, z) | B4 B4 B4
ops/gla/fused_recurrent.fused_recurrent_gla(x, y, z, w)[0] | LINEAR(x, y, z, w) | B4 B4 B4 GB
ops/simple_gla/fused_recurrent.fused_recurrent_simple_gla(x, y, z, w)[0] | LINEAR(x, y, z, w[..., None]) | B4 B4 B4 GC
ops/retention/fused_recurrent.fused_recurrent_retention(x, y, z)[0] | RETENTION(x, y, z) | B4 B4 B4
ops/gla/chunk.chunk_gla(x, y, z, w)[0] | LINEAR(x.float(), y.float(), z.float(), w.float()).bfloat16() | HB HB HB GH
ops/simple_gla/chunk.chunk_simple_gla(x, y, z, w)[0] | LINEAR(x.float(), y.float(), z.float(), w[..., None]).bfloat16() | HB HB HB GD
ops/retention/chunk.chunk_retention(x, y, z)[0] | RETENTION(x.float(), y.float(), z.float()).bfloat16() | HB HB HB
ops/linear_attn/chunk.chunk_linear_attn(x, y, z, normalize=False)[0] | LINEAR(x.float(), y.float(), z.float()).bfloat16() | HB HB HB
ops/attn/parallel.parallel_attn(x, y, z) | F.scaled_dot_product_attention(x.transpose(1, 2), y.transpose(1, 2), z.transpose(1, 2), is_causal=True).transpose(1, 2) | HB HB HB
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
    "HA": "torch.randn(8, 256, 256).half()", "HS": "torch.randn(256, 1024).half()",
    "HT": "torch.randn(1024, 1024).half()", "HV": "torch.randn(1024).half()", "HR": "torch.randn(1024, 1024).half()",
    "H3": "torch.randn(4, 64, 1024).half()", "HI": "torch.randn(8, 32, 32, 32).half()",
    "HE": "torch.randn(16, 32, 3, 3).half()", "HB": "torch.randn(2, 256, 4, 64).bfloat16()",
    "GH": "F.logsigmoid(torch.randn(2, 256, 4, 64)).bfloat16()",
    "U3": "torch.rand(4, 512, 1024)", "U4": "torch.rand(2, 256, 64, 32)", "PV": "torch.rand(1024) + 0.5",
    "B8": "torch.randint(-127, 127, (1024, 1024), dtype=torch.int8)", "L3": "torch.randn(4, 128, 1024)",
    "O2": "torch.randint(0, 1024, (4, 128))", "X2": "torch.randn(64, 64)", "X3": "torch.randn(64, 8, 128)",
    "W3": "torch.randn(8, 128)", "H4": "torch.randn(2, 4, 64, 128)", "GA4": "torch.rand(2, 4, 64, 128)",
    "N128": "torch.randn(512, 128)",
    "A4": "torch.randn(4, 128, 256)", "GA": "F.logsigmoid(torch.randn(4, 128, 256))",
    "B4": "torch.randn(2, 64, 4, 64)", "GB": "F.logsigmoid(torch.randn(2, 64, 4, 64))",
    "GC": "F.logsigmoid(torch.randn(2, 64, 4))", "GD": "F.logsigmoid(torch.randn(2, 256, 4))",
    "LP": "torch.log_softmax(torch.randn(512, 1024), -1)", "PR": "torch.softmax(torch.randn(512, 1024), -1)",
}  # fmt: skip
_WIDE_ONLY = {
    "sin_kernel.call_kernel", "softmax_optimize.softmax", "ops/utils/logsumexp.logsumexp_fwd",
    "ops/utils/softmax.softmax_fwd", "matmul_triton1.matmul", "logsumexp_fwd.logsumexp_fwd", "relu_triton_kernel.relu",
}  # fmt: skip
"""Two functions that take no half precision, and those whose answer is fp32 whatever they are given."""
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
_GATED = """
def GATED(x, g):
    state, states = torch.zeros_like(x[..., 0, :]), []
    for place in range(x.shape[-2]):
        state = g[..., place, :] * state + x[..., place, :]
        states.append(state)
    return torch.stack(states, -2)
"""
_BEFORE = {
    "GATED": _GATED,
    "HGRN": f"{_GATED}\n\ndef HGRN(x, g):\n    return GATED(x, g.exp())\n",
    ").bfloat16": "\nTOLERANCES = {'bfloat16': (0.02, 0.1)}  # of what lies in between, which its kernels round, too\n",
    "LINEAR": """
def LINEAR(q, k, v, g=None):
    state, outputs = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :]), []
    for place in range(q.shape[1]):
        if g is not None:
            state = state * g[:, place, ..., None].exp()
        state = state + k[:, place, :, :, None] * v[:, place, :, None, :]
        outputs.append((q[:, place, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)
""",
    "RETENTION": """
def RETENTION(q, k, v):
    heads = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
    places = torch.arange(q.shape[1], device=q.device, dtype=q.dtype)
    apart = places[:, None] - places[None, :]
    decay = torch.exp(apart * torch.log(1 - torch.exp2(-5 - heads))[:, None, None]).masked_fill(apart < 0, 0)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 * decay
    return torch.einsum("bhqk,bkhd->bqhd", scores, v)
""",
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
    """Each line, in order, and once more in half precision where all its inputs are draws of `randn` and its author's
    kernel takes that. A function that stands there twice is numbered.
    """
    seen: dict[str, int] = {}
    for line in table.strip().splitlines():
        call, rest = (part.strip() for part in line.split("|", 1))
        answer, _, letters = (part.strip() for part in rest.rpartition("|"))
        module, _, call = call.partition(".")
        function = call.partition("(")[0].partition(".")[0]
        inputs = [_INPUTS[kind] for kind in letters.split()]
        seen[function] = seen.get(function, 0) + 1
        name = f"{module.replace('/', '-')}-{function}" + (f"-{seen[function]}" if seen[function] > 1 else "")
        yield _one(name, module, call, answer, inputs)
        if f"{module}.{function}" not in _WIDE_ONLY and all(
            re.fullmatch(r"torch\.randn\([\d, ]+\)", drawn) for drawn in inputs
        ):
            yield _one(f"{name}-half", module, call, answer, [f"{drawn}.half()" for drawn in inputs])


def _one(name: str, module: str, call: str, answer: str, inputs: list[str]) -> Posed:
    names = ", ".join("xyzw"[: len(inputs)])
    before = "".join(text for word, text in _BEFORE.items() if f"{word}(" in answer)
    problem = _PROBLEM.format(before=before, names=names, answer=answer, inputs=", ".join(inputs))
    return Posed(name, module.replace("/", "."), call.partition("(")[0].partition(".")[0], call, names, problem)
