"""The Triton kernels behind `elementwise`: the same functions, for CUDA tensors. Mostly one program a token.

Kernels carry no annotations but `constexpr`: Triton compiles them. Row offsets are 64-bit: a chunk of logits or of
gate and up can be longer than 2³¹ elements.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: N803, N806 - capital suffixes give tensor shapes, capitals are Triton's compile-time constants
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kbrl_async.learning.fused.norms import HeadNorms


@triton.jit
def _rms_norm(x, weight, out, inverse, n, ld_out, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    value = tl.load(x + row * n + cols, mask, other=0.0)
    wide = value.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / n + eps)
    unit = (wide * r).to(value.dtype).to(tl.float32)
    tl.store(out + row * ld_out + cols, unit * tl.load(weight + cols, mask, other=0.0).to(tl.float32), mask)
    tl.store(inverse + row, r)


@triton.jit
def _rms_norm_backward(
    gradient,
    x,
    weight,
    inverse,
    residual,
    out,
    n,
    ld_gradient,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    r = tl.load(inverse + row)
    scaled = tl.load(gradient + row * ld_gradient + cols, mask, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + cols, mask, other=0.0).to(tl.float32)
    unit = tl.load(x + row * n + cols, mask, other=0.0).to(tl.float32) * r
    value = r * (scaled - unit * (tl.sum(scaled * unit, 0) / n))
    if RESIDUAL:
        value += tl.load(residual + row * n + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, value, mask)


@triton.jit
def _rms_norm_weight(gradient, x, inverse, out, rows, n, ld_gradient, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    total = tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    for row in range(first, tl.minimum(first + ROWS, rows)):
        value = tl.load(x + row * n + cols, mask, other=0.0).to(tl.float32) * tl.load(inverse + row)
        total += value * tl.load(gradient + row * ld_gradient + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * n + cols, total, mask)


@triton.jit
def _rotate(
    qkv,
    bias,
    cos,
    sin,
    q_weight,
    k_weight,
    q,
    k,
    v,
    heads,
    kv_heads,
    eps,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    width = (heads + 2 * kv_heads) * 2 * HALF
    turned = head < heads + kv_heads
    first = head * 2 * HALF + lane
    one = tl.load(qkv + row * width + first, turned, other=0.0).to(tl.float32)
    two = tl.load(qkv + row * width + first + HALF, turned, other=0.0).to(tl.float32)
    if BIAS:
        one = (one + tl.load(bias + first, turned, other=0.0).to(tl.float32)).to(qkv.dtype.element_ty).to(tl.float32)
        two += tl.load(bias + first + HALF, turned, other=0.0).to(tl.float32)
        two = two.to(qkv.dtype.element_ty).to(tl.float32)
    is_q = head < heads
    if NORMS:
        r = 1.0 / tl.sqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / (2 * HALF) + eps)
        one = (one * r[:, None]).to(qkv.dtype.element_ty).to(tl.float32)
        two = (two * r[:, None]).to(qkv.dtype.element_ty).to(tl.float32)
        low_weight = tl.where(is_q, tl.load(q_weight + lane), tl.load(k_weight + lane)).to(tl.float32)
        high_weight = tl.where(is_q, tl.load(q_weight + HALF + lane), tl.load(k_weight + HALF + lane)).to(tl.float32)
        one = (one * low_weight).to(qkv.dtype.element_ty).to(tl.float32)
        two = (two * high_weight).to(qkv.dtype.element_ty).to(tl.float32)
    c = tl.load(cos + row * 2 * HALF + lane).to(tl.float32)
    s = tl.load(sin + row * 2 * HALF + lane).to(tl.float32)
    low, high = one * c - two * s, two * c + one * s
    to_q = row * heads * 2 * HALF + first
    tl.store(q + to_q, low, is_q)
    tl.store(q + to_q + HALF, high, is_q)
    to_k = row * kv_heads * 2 * HALF + first - heads * 2 * HALF
    tl.store(k + to_k, low, turned & (head >= heads))
    tl.store(k + to_k + HALF, high, turned & (head >= heads))
    kv = tl.arange(0, KV)[:, None]
    plain = kv * 2 * HALF + lane
    behind = (heads + kv_heads) * 2 * HALF
    for part in tl.static_range(2):
        at = plain + part * HALF
        value = tl.load(qkv + row * width + behind + at, kv < kv_heads, other=0.0).to(tl.float32)
        if BIAS:
            value += tl.load(bias + behind + at, kv < kv_heads, other=0.0).to(tl.float32)
        tl.store(v + row * kv_heads * 2 * HALF + at, value, kv < kv_heads)


@triton.jit
def _unnormed(one, two, x, weight, eps, mask, lane, NORMS: tl.constexpr, HALF: tl.constexpr):
    """The gradient of a head norm's input at `x` (its first halves), of that of its output."""
    if NORMS:
        low = tl.load(x, mask, other=0.0).to(tl.float32)
        high = tl.load(x + HALF, mask, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low, high = low * r, high * r
        one = one * tl.load(weight + lane).to(tl.float32)
        two = two * tl.load(weight + HALF + lane).to(tl.float32)
        along = ((tl.sum(one * low, 1) + tl.sum(two * high, 1)) / (2 * HALF))[:, None]
        one, two = r * (one - low * along), r * (two - high * along)
    return one, two


@triton.jit
def _rotate_backward(
    dq,
    dk,
    dv,
    cos,
    sin,
    qkv,
    q_weight,
    k_weight,
    out,
    heads,
    kv_heads,
    dq_t,
    dq_h,
    dk_t,
    dk_h,
    dv_t,
    dv_h,
    eps,
    NORMS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    kv = tl.arange(0, KV)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    width = (heads + 2 * kv_heads) * 2 * HALF
    c = tl.load(cos + row * 2 * HALF + lane).to(tl.float32)
    s = tl.load(sin + row * 2 * HALF + lane).to(tl.float32)

    at = dq + row * dq_t + head * dq_h + lane
    one = tl.load(at, head < heads, other=0.0).to(tl.float32)
    two = tl.load(at + HALF, head < heads, other=0.0).to(tl.float32)
    to = row * width + head * 2 * HALF + lane
    one, two = one * c + two * s, two * c - one * s
    one, two = _unnormed(one, two, qkv + to, q_weight, eps, head < heads, lane, NORMS, HALF)
    tl.store(out + to, one, head < heads)
    tl.store(out + to + HALF, two, head < heads)

    at = dk + row * dk_t + kv * dk_h + lane
    one = tl.load(at, kv < kv_heads, other=0.0).to(tl.float32)
    two = tl.load(at + HALF, kv < kv_heads, other=0.0).to(tl.float32)
    to = row * width + (heads + kv) * 2 * HALF + lane
    one, two = one * c + two * s, two * c - one * s
    one, two = _unnormed(one, two, qkv + to, k_weight, eps, kv < kv_heads, lane, NORMS, HALF)
    tl.store(out + to, one, kv < kv_heads)
    tl.store(out + to + HALF, two, kv < kv_heads)

    at = dv + row * dv_t + kv * dv_h + lane
    to = out + row * width + (heads + kv_heads + kv) * 2 * HALF + lane
    tl.store(to, tl.load(at, kv < kv_heads, other=0.0), kv < kv_heads)
    tl.store(to + HALF, tl.load(at + HALF, kv < kv_heads, other=0.0), kv < kv_heads)


@triton.jit
def _swiglu(gate, up, out, n, ld, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    one = tl.load(gate + row * ld + cols, mask, other=0.0).to(tl.float32)
    two = tl.load(up + row * ld + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + row * n + cols, one / (1.0 + tl.exp(-one)) * two, mask)


@triton.jit
def _swiglu_backward(gradient, gate, up, n, ld, AGAIN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    one = tl.load(gate + row * ld + cols, mask, other=0.0).to(tl.float32)
    two = tl.load(up + row * ld + cols, mask, other=0.0).to(tl.float32)
    wide = tl.load(gradient + row * n + cols, mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-one))
    silu = one * sigmoid
    tl.store(gate + row * ld + cols, wide * two * (sigmoid * (1.0 + one * (1.0 - sigmoid))), mask)
    tl.store(up + row * ld + cols, wide * silu, mask)
    if AGAIN:
        tl.store(gradient + row * n + cols, silu * two, mask)


@triton.jit
def _softmax_scores(
    logits,
    target,
    chosen,
    entropy,
    n,
    per_temperature,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * n
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, n, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n
        value = tl.load(base + cols, mask, other=-float("inf")).to(tl.float32) * per_temperature
        higher = tl.maximum(top, tl.max(value, 0))
        share = tl.exp(value - higher)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(share, 0)
        weighted = weighted * shrink + tl.sum(tl.where(mask, share * value, 0.0), 0)
        top = higher
    log_sum = top + tl.log(total)
    wanted = tl.load(target + row)
    tl.store(chosen + row, tl.load(base + wanted).to(tl.float32) * per_temperature - log_sum)
    tl.store(entropy + row, log_sum - weighted / total)
    if GRADIENT:
        for start in range(0, n, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            mask = cols < n
            value = tl.load(base + cols, mask, other=-float("inf")).to(tl.float32) * per_temperature
            slope = tl.where(cols == wanted, 1.0, 0.0) - tl.exp(value - log_sum)
            tl.store(base + cols, slope * per_temperature, mask)


_COLUMNS = 2048
_VOCABULARY = 8192


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float, out_TH: torch.Tensor) -> torch.Tensor:
    x_TH, n = x_TH.contiguous(), x_TH.shape[1]
    inverse_T, block = torch.empty(len(x_TH), dtype=torch.float32, device=x_TH.device), triton.next_power_of_2(n)
    _rms_norm[(len(x_TH),)](
        x_TH, weight_H, out_TH, inverse_T, n, out_TH.stride(0), epsilon, BLOCK=block, num_warps=_warps(block)
    )
    return inverse_T


def rms_norm_backward(
    gradient_TH: torch.Tensor,
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    inverse_T: torch.Tensor,
    residual_TH: torch.Tensor | None,
) -> torch.Tensor:
    x_TH, n = x_TH.contiguous(), x_TH.shape[1]
    out_TH = torch.empty_like(x_TH)
    around = x_TH if residual_TH is None else residual_TH.contiguous()
    block = triton.next_power_of_2(n)
    _rms_norm_backward[(len(x_TH),)](
        gradient_TH,
        x_TH,
        weight_H,
        inverse_T,
        around,
        out_TH,
        n,
        gradient_TH.stride(0),
        RESIDUAL=residual_TH is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return out_TH


def rms_norm_weight(gradient_TH: torch.Tensor, x_TH: torch.Tensor, inverse_T: torch.Tensor) -> torch.Tensor:
    x_TH, (count, n) = x_TH.contiguous(), x_TH.shape
    rows, block = max(64, triton.cdiv(count, 512)), min(1024, triton.next_power_of_2(n))
    grid = (triton.cdiv(count, rows), triton.cdiv(n, block))
    parts = torch.empty(grid[0], n, dtype=torch.float32, device=x_TH.device)
    _rms_norm_weight[grid](
        gradient_TH, x_TH, inverse_T, parts, count, n, gradient_TH.stride(0), ROWS=rows, BLOCK=block, num_warps=4
    )
    return parts.sum(0)


def rotate(
    qkv_TO: torch.Tensor,
    bias_O: torch.Tensor | None,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    heads: int,
    kv_heads: int,
    norms: HeadNorms | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, depth = len(qkv_TO), cos_TD.shape[1]
    q_TND = qkv_TO.new_empty(count, heads, depth)
    k_TND, v_TND = qkv_TO.new_empty(count, kv_heads, depth), qkv_TO.new_empty(count, kv_heads, depth)
    _rotate[(count,)](
        qkv_TO.contiguous(),
        qkv_TO if bias_O is None else bias_O,
        cos_TD.contiguous(),
        sin_TD.contiguous(),
        qkv_TO if norms is None else norms.q_D,
        qkv_TO if norms is None else norms.k_D,
        q_TND,
        k_TND,
        v_TND,
        heads,
        kv_heads,
        0.0 if norms is None else norms.epsilon,
        BIAS=bias_O is not None,
        NORMS=norms is not None,
        HALF=depth // 2,
        HEADS=triton.next_power_of_2(heads + kv_heads),
        KV=triton.next_power_of_2(kv_heads),
        num_warps=4,
    )
    return q_TND, k_TND, v_TND


def _rows_whole(x_TND: torch.Tensor) -> torch.Tensor:
    return x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()


def rotate_backward(
    dq_TND: torch.Tensor,
    dk_TND: torch.Tensor,
    dv_TND: torch.Tensor,
    cos_TD: torch.Tensor,
    sin_TD: torch.Tensor,
    norms: HeadNorms | None,
    qkv_TO: torch.Tensor | None,
) -> torch.Tensor:
    dq_TND, dk_TND, dv_TND = map(_rows_whole, (dq_TND, dk_TND, dv_TND))
    (count, heads, depth), kv_heads = dq_TND.shape, dk_TND.shape[1]
    out_TO = dq_TND.new_empty(count, (heads + 2 * kv_heads) * depth)
    strides = [stride for part in (dq_TND, dk_TND, dv_TND) for stride in part.stride()[:2]]
    _rotate_backward[(count,)](
        dq_TND,
        dk_TND,
        dv_TND,
        cos_TD.contiguous(),
        sin_TD.contiguous(),
        out_TO if qkv_TO is None else qkv_TO,
        out_TO if norms is None else norms.q_D,
        out_TO if norms is None else norms.k_D,
        out_TO,
        heads,
        kv_heads,
        *strides,
        0.0 if norms is None else norms.epsilon,
        NORMS=norms is not None,
        HALF=depth // 2,
        HEADS=triton.next_power_of_2(heads),
        KV=triton.next_power_of_2(kv_heads),
        num_warps=4,
    )
    return out_TO


def swiglu(gate_TI: torch.Tensor, up_TI: torch.Tensor) -> torch.Tensor:
    count, n = gate_TI.shape
    assert gate_TI.stride() == up_TI.stride(), "one distance between rows for both"
    out_TI = gate_TI.new_empty(count, n)
    grid = (count, triton.cdiv(n, _COLUMNS))
    _swiglu[grid](gate_TI, up_TI, out_TI, n, gate_TI.stride(0), BLOCK=_COLUMNS, num_warps=4)
    return out_TI


def swiglu_backward(gradient_TI: torch.Tensor, gate_TI: torch.Tensor, up_TI: torch.Tensor, again: bool) -> None:
    assert gate_TI.stride() == up_TI.stride(), "one distance between rows for both"
    assert gradient_TI.is_contiguous(), "the product is written in its place"
    count, n = gate_TI.shape
    grid = (count, triton.cdiv(n, _COLUMNS))
    _swiglu_backward[grid](gradient_TI, gate_TI, up_TI, n, gate_TI.stride(0), AGAIN=again, BLOCK=_COLUMNS, num_warps=4)


def softmax_scores(
    logits_TV: torch.Tensor, target_T: torch.Tensor, temperature: float, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits_TV.is_contiguous(), "its gradient is written in its place"
    chosen_T, entropy_T = (torch.empty(len(logits_TV), device=logits_TV.device) for _ in range(2))
    _softmax_scores[(len(logits_TV),)](
        logits_TV,
        target_T,
        chosen_T,
        entropy_T,
        logits_TV.shape[1],
        1.0 / temperature,
        GRADIENT=with_gradient,
        BLOCK=_VOCABULARY,
        num_warps=16,
    )
    return chosen_T, entropy_T
