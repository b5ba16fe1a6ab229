"""Every Triton kernel of the learner against plain torch, in fp32, for a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from kbrl_async.learning.fused import elementwise as plain
from kbrl_async.learning.fused.norms import HeadNorms


def check() -> None:
    from kbrl_async.learning.fused import elementwise_triton as kernels

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, width = 5, 24

    def compare(name: str, *arguments: object) -> None:
        results = []
        for module in (plain, kernels):
            given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            out = getattr(module, name)(*given)
            made = list(out) if isinstance(out, tuple) else [out]
            results.append([*made, *(g for g in given if isinstance(g, torch.Tensor))])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text: f"{name}: {text}")

    x, weight = torch.randn(rows, width), torch.randn(width)
    apart = torch.randn(rows, width + 4)[:, :width]
    inverse = torch.rand(rows)
    compare("rms_norm", x, weight, 1e-6, torch.zeros(rows, width))
    compare("rms_norm_backward", apart, x, weight, inverse, None)
    compare("rms_norm_backward", apart, x, weight, inverse, torch.randn(rows, width))
    for heads, kv_heads, depth in ((4, 2, 8), (3, 1, 16)):
        angle = torch.randn(rows, depth // 2)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        outputs = (heads + 2 * kv_heads) * depth
        for bias in (None, torch.randn(outputs)):
            compare("rotate", torch.randn(rows, outputs), bias, cos, sin, heads, kv_heads, None)
        turned = [torch.randn(n, rows, depth).transpose(0, 1) for n in (heads, kv_heads, kv_heads)]
        norms, raw = HeadNorms(torch.randn(depth), torch.randn(depth), 1e-6), torch.randn(rows, outputs)
        compare("rotate", raw, torch.randn(outputs), cos, sin, heads, kv_heads, norms)
        compare("rotate_backward", *turned, cos, sin, None, None)
        compare("rotate_backward", *turned, cos, sin, norms, raw)
    compare("rms_norm_weight", apart, x, inverse)
    compare("swiglu", *torch.randn(rows, 74).chunk(2, -1))
    for again in (False, True):
        both = torch.randn(rows, 74)
        compare("swiglu_backward", torch.randn(rows, 37), *both.chunk(2, -1), again)
    for with_gradient in (False, True):
        compare("softmax_scores", 5 * torch.randn(rows, 101), torch.arange(rows), 0.7, with_gradient)
