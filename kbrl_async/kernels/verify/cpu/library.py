"""The operators of torch that a replay may do: a closed list, by torch's own tags and by name.

What they have in common: the result depends on the arguments alone, and nothing but tensors is touched.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from kbrl_async.kernels.verify.operators import MOVES

_TAGS = frozenset({torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction})
_NOT = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MORE = frozenset(
    [
        *("baddbmm", "addbmm", "addmv", "addr", "mv", "dot", "vdot", "linear", "matmul", "outer", "cross", "kron"),
        *("native_batch_norm", "native_group_norm", "batch_norm", "instance_norm"),
        *("mkldnn_convolution", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d", "im2col"),
        *("avg_pool3d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("upsample_nearest1d", "upsample_nearest3d", "upsample_bicubic2d", "upsample_linear1d"),
        *("upsample_trilinear3d",),
        *("_upsample_nearest_exact2d", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "grid_sampler_3d"),
        *("_scaled_dot_product_attention_math", "_thnn_fused_lstm_cell"),
        *("cumprod", "cummax", "cummin", "_cummax_helper", "_cummin_helper", "logcumsumexp", "kthvalue", "median"),
        *("nanmedian", "mode", "aminmax", "sort", "argsort", "searchsorted", "bucketize", "bincount", "histc"),
        *("tril", "triu", "tril_indices", "triu_indices", "diag", "diag_embed", "diagonal_copy", "trace", "eye"),
        *("roll", "rot90", "flip", "stack", "cat", "tile", "repeat", "repeat_interleave", "constant_pad_nd", "where"),
        *("masked_fill", "masked_fill_", "index_add", "index_copy", "index_fill", "take", "one_hot", "linspace"),
        *("_cdist_forward", "_euclidean_dist", "cosine_similarity", "pairwise_distance", "renorm", "norm", "glu"),
        *("nll_loss_forward", "nll_loss2d_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "multi_margin_loss"),
        *("multilabel_margin_loss_forward", "hinge_embedding_loss", "margin_ranking_loss", "log_sigmoid_forward"),
        *("softplus", "hardswish", "hardsigmoid", "hardswish_", "hardsigmoid_", "_prelu_kernel", "celu"),
        *("_safe_softmax", "_weight_norm_interface", "_fft_c2c", "_embedding_bag_forward_only", "isin", "std_mean"),
        *("affine_grid_generator", "nll_loss_backward", "nll_loss2d_backward"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "_addmm_activation", "linalg_cross", "complex", "polar"),
    ]
)
_BY_CHANCE_IF_ASKED = frozenset(["_scaled_dot_product_flash_attention_for_cpu"])
"""With a dropout that is nearly always 0; with another one nobody's results are right."""
_BARRED = frozenset(["set_", "resize_", "_local_scalar_dense", "item", "sym_size", "sym_stride", "sym_numel"])


@functools.cache
def operator(name: str) -> Any | None:
    """The overload that is called `aten::mm` or `aten::add.Tensor`; None where it is not on the list."""
    space, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if space != "aten" or base in _BARRED or not base.isidentifier():
        return None
    try:
        found = getattr(getattr(torch.ops.aten, base), overload or "default")
        tags = set(found.tags)
    except (AttributeError, RuntimeError):
        return None
    if base in _BY_CHANCE_IF_ASKED:
        return found
    if tags & _NOT or not (tags & _TAGS or base in _MORE or base in MOVES):
        return None
    return found


def writes(name: str, place: int, named: str = "") -> bool:
    """Whether the operator may write to this argument of its."""
    arguments = operator(name)._schema.arguments  # type: ignore[union-attr] # asked of those on the list only
    found = [one for one in arguments if one.name == named] if named else arguments[place : place + 1]
    return any(one.alias_info is not None and one.alias_info.is_write for one in found)
