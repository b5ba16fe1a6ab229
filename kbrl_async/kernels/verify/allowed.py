"""The operators of torch that a recording may ask a trusted process for: a closed list.

What is not on it: random numbers, whatever waits for the device or reads a value back, files, what changes a tensor's
own memory (`set_`, `resize_`), and gradients that write where indices say which nobody checks. Views are not on it
either, because they do no work: what a view gives is written down as the tensor it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kbrl_async.kernels.verify.operators import computes

NAMESPACE = "aten::"
_POINTWISE = """
abs absolute acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or
bitwise_xor bitwise_left_shift bitwise_right_shift ceil celu clamp clamp_max clamp_min clip conj_physical copysign cos
cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod
frac ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 isfinite isinf
isnan leaky_relu ldexp le lerp less less_equal lgamma log log10 log1p log2 log_sigmoid log_sigmoid_forward logaddexp
logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul multiply
nan_to_num ne neg negative not_equal polygamma positive pow prelu _prelu_kernel rad2deg reciprocal relu relu6 remainder
round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan
tanh threshold true_divide trunc where xlogy special_entr special_erfcx special_expit special_i0e special_i1
special_i1e special_log_ndtr special_ndtr special_xlog1py special_zeta
"""
_REDUCTIONS = """
all amax amin aminmax any argmax argmin count_nonzero cummax cummin cumprod cumsum _cummax_helper _cummin_helper dist
frobenius_norm linalg_norm linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmean nanmedian nansum
norm prod std std_mean sum trace var var_mean kthvalue topk sort argsort msort
"""
_PRODUCTS = """
addbmm addmm addmv addr baddbmm bmm dot vdot einsum linear matmul mm mv outer ger inner tensordot linalg_matmul
chain_matmul linalg_multi_dot cdist _cdist_forward _euclidean_dist bilinear _addmm_activation _scaled_mm _int_mm
"""
_LAYERS = """
convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu
cudnn_convolution_transpose conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
_conv_depthwise2d conv_depthwise3d slow_conv_transpose2d slow_conv_transpose3d slow_conv_dilated2d slow_conv_dilated3d
batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
_batch_norm_no_update _batch_norm_with_update native_group_norm group_norm native_layer_norm layer_norm instance_norm
rms_norm _fused_rms_norm softmax _softmax log_softmax _log_softmax _safe_softmax cosine_similarity
pairwise_distance renorm embedding _embedding_bag embedding_bag avg_pool1d avg_pool2d avg_pool3d
adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d max_pool1d
max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d fractional_max_pool2d max_unpool2d max_unpool3d im2col col2im pixel_shuffle pixel_unshuffle
channel_shuffle native_channel_shuffle upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa grid_sampler grid_sampler_2d grid_sampler_3d
affine_grid_generator constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
replication_pad2d replication_pad3d scaled_dot_product_attention _scaled_dot_product_flash_attention
_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math
_flash_attention_forward _efficient_attention_forward _cudnn_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm gru
lstm_cell gru_cell rnn_tanh rnn_relu mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward cross_entropy_loss kl_div
margin_ranking_loss hinge_embedding_loss triplet_margin_loss cosine_embedding_loss soft_margin_loss multi_margin_loss
poisson_nll_loss
"""
_GRADIENTS = """
elu_backward gelu_backward glu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
leaky_relu_backward log_sigmoid_backward logit_backward mish_backward _prelu_kernel_backward sigmoid_backward
silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward _softmax_backward_data
_log_softmax_backward_data native_batch_norm_backward cudnn_batch_norm_backward native_group_norm_backward
native_layer_norm_backward _fused_rms_norm_backward convolution_backward avg_pool2d_backward avg_pool3d_backward
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward _cdist_backward
upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward
upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward reflection_pad1d_backward
reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
replication_pad3d_backward mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
nll_loss_backward nll_loss2d_backward soft_margin_loss_backward linear_backward matmul_backward
"""
_PLACES = """
cat concat concatenate stack hstack vstack dstack gather scatter scatter_add scatter_reduce index index_select
_unsafe_index index_add index_copy index_fill index_put _unsafe_index_put _index_put_impl masked_scatter take
take_along_dim flip fliplr flipud roll rot90 repeat repeat_interleave tile tril triu tril_indices triu_indices diag
diag_embed diagonal_copy bincount bucketize searchsorted one_hot eye linspace logspace kron block_diag cross
linalg_cross diff meshgrid isin view_copy expand_copy permute_copy slice_copy select_copy split_copy
split_with_sizes_copy transpose_copy t_copy unfold_copy as_strided_copy slice_scatter select_scatter diagonal_scatter
as_strided_scatter
"""
_MOVES = """
clone copy copy_ _to_copy contiguous fill fill_ zero zero_ full full_like zeros zeros_like ones ones_like new_full
new_zeros new_ones arange scalar_tensor lift_fresh_copy _conj_physical _reshape_copy _foreach_copy_ _foreach_add
_foreach_add_ _foreach_mul _foreach_mul_ _foreach_zero_
"""
_TRANSFORMS = "_fft_r2c _fft_c2r _fft_c2c fft_fft fft_ifft fft_rfft fft_irfft complex view_as_real_copy polar"
ALLOWED = frozenset(
    " ".join((_POINTWISE, _REDUCTIONS, _PRODUCTS, _LAYERS, _GRADIENTS, _PLACES, _MOVES, _TRANSFORMS)).split()
)
"""By base name, with or without a trailing `_` for the form in place, whatever the overload."""


def base_of(name: str) -> str:
    """`aten::add_.Tensor` → `aten::add_`."""
    return name.partition(".")[0]


def is_allowed(name: str) -> bool:
    """Whether `aten::mm.out` may be asked for: it is on the list, and this torch has that overload."""
    base = base_of(name).removeprefix(NAMESPACE)
    on_list = base in ALLOWED or base.removesuffix("_") in ALLOWED
    return name.startswith(NAMESPACE) and on_list and found(name) is not None


@functools.cache
def found(name: str) -> Any:
    """torch's operator of that name, `aten::mm` being its default overload; None where there is none."""
    base, _, overload = name.removeprefix(NAMESPACE).partition(".")
    packet = getattr(torch.ops.aten, base, None)
    one = getattr(packet, overload or "default", None)
    return one if isinstance(one, torch._ops.OpOverload) else None


def does_work(name: str) -> bool:
    """Whether the library does arithmetic there, beyond filling and copying."""
    return computes(base_of(name))
