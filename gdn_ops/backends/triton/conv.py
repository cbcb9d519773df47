"""Depthwise causal convolution over fragments, from the packed row to the packed row; bound by memory.

    z_t = bias + sum_tap weight[:, P - tap] x_{t - tap},  y = silu(z) or z          P = width - 1, tap = 0 ... P
    dz  = dy silu'(z),  dx_t = sum_tap weight[:, P - tap] dz_{t + tap},  dweight[:, P - tap] = sum_t dz_t x_{t - tap}

A program walks over TOKENS consecutive tokens of BW channels with the last P rows of x (and, backward, the P rows of dx
that later tokens still add to) in registers, so each row is read once and written once; the P rows around a program's
tokens are read twice, from cache. Where all of these tokens are of one fragment, nothing but rows is looked at;
elsewhere a table of three integers a token says where fragments begin and end. Both walks round alike (every product
is an explicit fma), so a document has the same bits wherever it lies.

Tokens lie flat, [T,W]: x at any token stride, all else dense. dweight and dbias are summed in float32 in an order that
depends on the shape only: per program, then over programs. Grid: cdiv(T, TOKENS) * cdiv(W, BW) programs.
"""

# Registers of a walk are tuples that grow while they are built, which Python's types cannot say.
# mypy: disable-error-code="assignment, var-annotated"

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import TRITON_DTYPES, launch
from gdn_ops.backends.triton.primitives import INTERPRETED, trip_count


class WalkConfig(NamedTuple):
    """Tokens and channels of a program, tokens whose loads are issued together, and warps."""

    tokens: int
    block_w: int
    unroll: int
    num_warps: int


# H200, 2026-11-30, Triton 3.6, bfloat16 rows [32768, 10240] of one document: ms a call, against 0.320 for a copy of the
# row and 0.459 for a sum of two rows into a third, which read and write what forward and backward have to.
_FORWARD = {
    4: WalkConfig(tokens=128, block_w=512, unroll=8, num_warps=4),  # 0.348
    8: WalkConfig(tokens=256, block_w=512, unroll=4, num_warps=4),  # 0.455
}
_BACKWARD = {
    4: WalkConfig(tokens=256, block_w=256, unroll=8, num_warps=4),  # 0.604
    8: WalkConfig(tokens=256, block_w=256, unroll=4, num_warps=4),  # 1.049
}
"""By width, 4: up to 4 (timed at 4), 8: above (timed at 8)."""

_SUM_ROWS = 16
"""Programs' partial sums that are added side by side when dweight and dbias are summed up."""

_POSITION, _FRAGMENT, _REMAINING = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Rows of the token table [3,T]: position in the fragment (-1: past the last one), its number, tokens after this."""


def unsupported_reason(x: Tensor) -> str | None:
    """Why this backend cannot run a call on the row `x`, or None."""
    if x.dtype not in TRITON_DTYPES:
        return f"dtype {x.dtype} (supported: bfloat16, float16, float32)"
    if x.shape[0] >= 2**31:
        return f"T = {x.shape[0]} (supported: below 2**31)"
    if x.is_cuda:
        if torch.version.hip is None and torch.cuda.get_device_capability(x.device) < (8, 0):
            return "compute capability below 8.0"
        return None
    return None if INTERPRETED.value else f"device {x.device} (without TRITON_INTERPRET=1)"


# ---- where tokens are


@triton.jit
def _token_table_kernel(cu_ptr, token_ptr, num_fragments, num_steps, T, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0):
    wait_for_earlier(EARLY)
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # The number of boundaries at or before each token.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + (num_fragments + 1)
    for _ in tl.range(0, trip_count(num_steps)):
        open_ = low < high
        middle = (low + high) // 2
        before = tl.load(cu_ptr + middle, mask=open_, other=0).to(tl.int64) <= offs_t
        low = tl.where(open_ & before, middle + 1, low)
        high = tl.where(open_ & (before == 0), middle, high)
    fragment = low - 1
    valid = (fragment >= 0) & (fragment < num_fragments)
    fragment = tl.where(valid, fragment, 0)
    start = tl.load(cu_ptr + fragment).to(tl.int64)
    end = tl.load(cu_ptr + fragment + 1).to(tl.int64)
    # Clamped, so that boundaries that break the rules lead to wrong results but never out of memory.
    position = tl.where(valid & (start <= offs_t), tl.minimum(offs_t - start, offs_t), -1)
    remaining = tl.maximum(tl.minimum(end, T) - 1 - offs_t, 0)
    mask_t = offs_t < T
    token_ptr += offs_t
    tl.store(token_ptr + _POSITION * T, position.to(tl.int32), mask=mask_t)
    tl.store(token_ptr + _FRAGMENT * T, fragment, mask=mask_t)
    tl.store(token_ptr + _REMAINING * T, remaining.to(tl.int32), mask=mask_t)


def _token_table(cu_seqlens: Tensor, T: int) -> Tensor:
    table = torch.empty((3, T), dtype=torch.int32, device=cu_seqlens.device)
    F, block = cu_seqlens.shape[0] - 1, 256
    args = (cu_seqlens, table, F, (F + 1).bit_length(), T)
    launch(_token_table_kernel, triton.cdiv(T, block), args, dict(BLOCK=block), 4, 1)
    return table


# ---- one token


@triton.jit
def _if(condition, mask):
    """`mask` where a scalar condition holds, nothing elsewhere. By numbers: Triton 3.9's interpreter broadcasts a
    condition to something that is no mask."""
    return mask & (condition.to(tl.int32) + tl.zeros(mask.shape, tl.int32) != 0)


@triton.jit
def _load_token(token_ptr, t, T):
    """Position, fragment and remaining tokens; position -1 past the last token of all."""
    position = tl.load(token_ptr + _POSITION * T + t, mask=t < T, other=-1)
    fragment = tl.load(token_ptr + _FRAGMENT * T + t, mask=t < T, other=0).to(tl.int64)
    remaining = tl.load(token_ptr + _REMAINING * T + t, mask=t < T, other=0)
    return position, fragment, remaining


@triton.jit
def _is_interior(token_ptr, first, T, WIDTH: tl.constexpr, TOKENS: tl.constexpr, AHEAD: tl.constexpr):
    """Whether a program's tokens, WIDTH - 1 before them and AHEAD after them are all of one fragment."""
    last = first + TOKENS - 1 + AHEAD
    return tl.load(token_ptr + _POSITION * T + last, mask=last < T, other=-1) >= TOKENS - 1 + AHEAD + WIDTH - 1


@triton.jit
def _load_taps(weight_ptr, bias_ptr, offs_w, mask_w, WIDTH: tl.constexpr):
    """weights[tap], newest first, and the bias (zeros for none), float32."""
    weights = ()
    for tap in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + offs_w * WIDTH + (WIDTH - 1 - tap), mask=mask_w, other=0.0)
        weights = weights + (weight.to(tl.float32),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + offs_w, mask=mask_w, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(offs_w.shape, tl.float32)
    return weights, bias


@triton.jit
def _history_row(history_ptr, fragment, distance, there, offs_w, mask_w, W: tl.constexpr, WIDTH: tl.constexpr):
    """The row `distance` (1: nearest) before a fragment; zeros where not `there` or where there is no history."""
    if history_ptr is not None:
        at = history_ptr + (fragment * (WIDTH - 1) + (WIDTH - 1 - distance)) * W
        return tl.load(at + offs_w, mask=_if(there, mask_w), other=0.0).to(tl.float32)
    else:
        return tl.zeros(offs_w.shape, tl.float32)


@triton.jit
def _load_window(
    x_ptr, history_ptr, token_ptr, first, T, stride_xt, offs_w, mask_w, W: tl.constexpr, WIDTH: tl.constexpr,
    INTERIOR: tl.constexpr,
):  # fmt: skip
    """The rows before token `first`, nearest first."""
    window = ()
    if INTERIOR:
        for j in tl.static_range(1, WIDTH):
            window = window + (
                tl.load(x_ptr + (first - j) * stride_xt + offs_w, mask=mask_w, other=0.0).to(tl.float32),
            )
    else:
        position, fragment, _ = _load_token(token_ptr, first, T)
        for j in tl.static_range(1, WIDTH):
            own = position >= j
            row = tl.load(x_ptr + (first - j) * stride_xt + offs_w, mask=_if(own, mask_w), other=0.0).to(tl.float32)
            before = (position >= 0) & (position < j)
            row += _history_row(history_ptr, fragment, j - position, before, offs_w, mask_w, W, WIDTH)
            window = window + (row,)
    return window


@triton.jit
def _restart(window, history_ptr, position, fragment, offs_w, mask_w, W: tl.constexpr, WIDTH: tl.constexpr):
    """The window at a token: a fragment's first one sees its history, and none of the tokens before it."""
    out = ()
    for j in tl.static_range(1, WIDTH):
        row = _history_row(history_ptr, fragment, j, position == 0, offs_w, mask_w, W, WIDTH)
        out = out + (tl.where(position <= 0, row, window[j - 1]),)
    return out


@triton.jit
def _shift(window, row, WIDTH: tl.constexpr):
    out = (row,)
    for j in tl.static_range(WIDTH - 2):
        out = out + (window[j],)
    return out


@triton.jit
def _weighted_sum(row, window, weights, bias, WIDTH: tl.constexpr):
    z = tl.fma(weights[0], row, bias)
    for tap in tl.static_range(1, WIDTH):
        z = tl.fma(weights[tap], window[tap - 1], z)
    return z


@triton.jit
def _sum_gradient(dy, z, SILU: tl.constexpr):
    """dz of dy."""
    if SILU:
        s = 1.0 / (1.0 + tl.exp(-z))
        dy = dy * s * tl.fma(z, 1.0 - s, 1.0)
    return dy


# ---- forward


@triton.jit
def _forward_walk(
    x_ptr, weight_ptr, bias_ptr, history_ptr, token_ptr, y_ptr, first, T, stride_xt, offs_w, W: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, SILU: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    mask_w = offs_w < W
    weights, bias = _load_taps(weight_ptr, bias_ptr, offs_w, mask_w, WIDTH)
    window = _load_window(
        x_ptr, history_ptr, token_ptr, first, T, stride_xt, offs_w, mask_w, W, WIDTH, INTERIOR
    )  # fmt: skip
    for i in tl.range(0, TOKENS, UNROLL):
        # All loads before the first store: the compiler must not move them over it.
        rows = ()
        places = ()
        for u in tl.static_range(UNROLL):
            t = first + i + u
            if INTERIOR:
                mask = mask_w
            else:
                position, fragment, _ = _load_token(token_ptr, t, T)
                places = places + ((position, fragment),)
                mask = _if(position >= 0, mask_w)
            rows = rows + (tl.load(x_ptr + t * stride_xt + offs_w, mask=mask, other=0.0),)
        for u in tl.static_range(UNROLL):
            t = first + i + u
            row = rows[u].to(tl.float32)
            if INTERIOR:
                mask = mask_w
            else:
                window = _restart(window, history_ptr, places[u][0], places[u][1], offs_w, mask_w, W, WIDTH)
                mask = _if(t < T, mask_w)
            y = _weighted_sum(row, window, weights, bias, WIDTH)
            if SILU:
                y = y * (1.0 / (1.0 + tl.exp(-y)))
            if not INTERIOR:
                y = tl.where(places[u][0] >= 0, y, 0.0)
            tl.store(y_ptr + t * W + offs_w, y.to(y_ptr.dtype.element_ty), mask=mask)
            window = _shift(window, row, WIDTH)


@triton.jit
def _conv_fwd_kernel(
    x_ptr, weight_ptr, bias_ptr, history_ptr, token_ptr, y_ptr, T, stride_xt,
    W: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, BW: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    first = (tl.program_id(0) // tl.cdiv(W, BW)).to(tl.int64) * TOKENS
    offs_w = tl.program_id(0) % tl.cdiv(W, BW) * BW + tl.arange(0, BW)
    if _is_interior(token_ptr, first, T, WIDTH, TOKENS, 0):
        _forward_walk(
            x_ptr, weight_ptr, bias_ptr, history_ptr, token_ptr, y_ptr, first, T, stride_xt, offs_w,
            W, WIDTH, TOKENS, UNROLL, SILU, True,
        )  # fmt: skip
    else:
        _forward_walk(
            x_ptr, weight_ptr, bias_ptr, history_ptr, token_ptr, y_ptr, first, T, stride_xt, offs_w,
            W, WIDTH, TOKENS, UNROLL, SILU, False,
        )  # fmt: skip


# ---- backward


@triton.jit
def _spread(pending, weights, dz, start, position, WIDTH: tl.constexpr, INTERIOR: tl.constexpr):
    """Add a token's dz to dx of itself (from `start` on) and of the rows before it; newest first, WIDTH of them."""
    out = (tl.fma(weights[0], dz, start),)
    for tap in tl.static_range(1, WIDTH):
        more = tl.fma(weights[tap], dz, pending[tap - 1])
        if not INTERIOR:
            more = tl.where(position >= tap, more, pending[tap - 1])
        out = out + (more,)
    return out


@triton.jit
def _backward_walk(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, history_ptr, tail_ptr, token_ptr, dx_ptr, partial_ptr, first, T, stride_dyt,
    stride_xt, offs_w, W: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr,
    SILU: tl.constexpr, INTERIOR: tl.constexpr,
):  # fmt: skip
    mask_w = offs_w < W
    zero = tl.zeros(offs_w.shape, tl.float32)
    weights, bias = _load_taps(weight_ptr, bias_ptr, offs_w, mask_w, WIDTH)
    window = _load_window(
        x_ptr, history_ptr, token_ptr, first, T, stride_xt, offs_w, mask_w, W, WIDTH, INTERIOR
    )  # fmt: skip
    pending = ()
    dweights = (zero,)
    for _j in tl.static_range(WIDTH - 1):
        pending = pending + (zero,)
        dweights = dweights + (zero,)
    dbias = zero
    for i in tl.range(0, TOKENS, UNROLL):
        rows = ()
        grads = ()
        places = ()
        for u in tl.static_range(UNROLL):
            t = first + i + u
            if INTERIOR:
                mask = mask_w
            else:
                place = _load_token(token_ptr, t, T)
                places = places + (place,)
                mask = _if(place[0] >= 0, mask_w)
            rows = rows + (tl.load(x_ptr + t * stride_xt + offs_w, mask=mask, other=0.0),)
            grads = grads + (tl.load(dy_ptr + t * stride_dyt + offs_w, mask=mask, other=0.0),)
        for u in tl.static_range(UNROLL):
            t = first + i + u
            row = rows[u].to(tl.float32)
            start = zero
            position = 0
            if not INTERIOR:
                position, fragment, remaining = places[u]
                window = _restart(window, history_ptr, position, fragment, offs_w, mask_w, W, WIDTH)
                there = (position >= 0) & (remaining < WIDTH - 1)
                start = _history_row(tail_ptr, fragment, remaining + 1, there, offs_w, mask_w, W, WIDTH)
            z = _weighted_sum(row, window, weights, bias, WIDTH)
            dz = _sum_gradient(grads[u].to(tl.float32), z, SILU)
            if not INTERIOR:
                dz = tl.where(position >= 0, dz, 0.0)
            sums = (tl.fma(dz, row, dweights[0]),)
            for tap in tl.static_range(1, WIDTH):
                sums = sums + (tl.fma(dz, window[tap - 1], dweights[tap]),)
            dweights = sums
            dbias += dz
            spread = _spread(pending, weights, dz, start, position, WIDTH, INTERIOR)
            done = t - (WIDTH - 1)
            mask = _if((done >= first) & (done < T), mask_w)
            tl.store(dx_ptr + done * W + offs_w, spread[WIDTH - 1].to(dx_ptr.dtype.element_ty), mask=mask)
            pending = _shift(spread[1:], spread[0], WIDTH)
            window = _shift(window, row, WIDTH)
    # The tokens after these still add to the last rows; their dweight is their own program's.
    for u in tl.static_range(WIDTH - 1):
        t = first + TOKENS + u
        mask = mask_w
        position = 0
        fragment = first
        if not INTERIOR:
            position, fragment, _ = _load_token(token_ptr, t, T)
            mask = _if(position >= 0, mask_w)
        row = tl.load(x_ptr + t * stride_xt + offs_w, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy_ptr + t * stride_dyt + offs_w, mask=mask, other=0.0).to(tl.float32)
        if not INTERIOR:
            window = _restart(window, history_ptr, position, fragment, offs_w, mask_w, W, WIDTH)
        z = _weighted_sum(row, window, weights, bias, WIDTH)
        dz = _sum_gradient(grad, z, SILU)
        if not INTERIOR:
            dz = tl.where(position >= 0, dz, 0.0)
        spread = _spread(pending, weights, dz, zero, position, WIDTH, INTERIOR)
        done = t - (WIDTH - 1)
        mask = _if(done < T, mask_w)
        tl.store(dx_ptr + done * W + offs_w, spread[WIDTH - 1].to(dx_ptr.dtype.element_ty), mask=mask)
        pending = _shift(spread[1:], spread[0], WIDTH)
        window = _shift(window, row, WIDTH)
    partial_ptr += first // TOKENS * ((WIDTH + 1) * W) + offs_w
    for tap in tl.static_range(WIDTH):
        tl.store(partial_ptr + (WIDTH - 1 - tap) * W, dweights[tap], mask=mask_w)
    tl.store(partial_ptr + WIDTH * W, dbias, mask=mask_w)


@triton.jit
def _conv_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, history_ptr, tail_ptr, token_ptr, dx_ptr, partial_ptr, T, stride_dyt,
    stride_xt, W: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, BW: tl.constexpr,
    SILU: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    first = (tl.program_id(0) // tl.cdiv(W, BW)).to(tl.int64) * TOKENS
    offs_w = tl.program_id(0) % tl.cdiv(W, BW) * BW + tl.arange(0, BW)
    if _is_interior(token_ptr, first, T, WIDTH, TOKENS, WIDTH - 1):
        _backward_walk(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, history_ptr, tail_ptr, token_ptr, dx_ptr, partial_ptr, first, T,
            stride_dyt, stride_xt, offs_w, W, WIDTH, TOKENS, UNROLL, SILU, True,
        )  # fmt: skip
    else:
        _backward_walk(
            dy_ptr, x_ptr, weight_ptr, bias_ptr, history_ptr, tail_ptr, token_ptr, dx_ptr, partial_ptr, first, T,
            stride_dyt, stride_xt, offs_w, W, WIDTH, TOKENS, UNROLL, SILU, False,
        )  # fmt: skip


@triton.jit
def _sum_partials_kernel(
    partial_ptr, dweight_ptr, dbias_ptr, num_partials,
    W: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    """dweight [W,WIDTH] and dbias [W]: one row of the partial sums a program."""
    wait_for_earlier(EARLY)
    row = tl.program_id(0) // tl.cdiv(W, BW)
    offs_w = tl.program_id(0) % tl.cdiv(W, BW) * BW + tl.arange(0, BW)
    mask_w = offs_w < W
    partial_ptr += row * W + offs_w
    sum_RW = tl.zeros([ROWS, BW], tl.float32)
    for first in tl.range(0, trip_count(num_partials), ROWS):
        offs_r = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (offs_r < num_partials)[:, None] & mask_w[None, :]
        sum_RW += tl.load(partial_ptr[None, :] + offs_r[:, None] * ((WIDTH + 1) * W), mask=mask, other=0.0)
    total = tl.sum(sum_RW, axis=0)
    if row < WIDTH:
        tl.store(dweight_ptr + offs_w * WIDTH + row, total.to(dweight_ptr.dtype.element_ty), mask=mask_w)
    if dbias_ptr is not None:
        if row == WIDTH:
            tl.store(dbias_ptr + offs_w, total.to(dbias_ptr.dtype.element_ty), mask=mask_w)


@triton.jit
def _history_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, history_ptr, cu_ptr, fragment_ptr, dhistory_ptr, stride_dyt, stride_xt,
    W: tl.constexpr, WIDTH: tl.constexpr, BW: tl.constexpr, SILU: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    """Gradients of the rows before one fragment, from its first WIDTH - 1 tokens."""
    wait_for_earlier(EARLY)
    slot = (tl.program_id(0) // tl.cdiv(W, BW)).to(tl.int64)
    offs_w = tl.program_id(0) % tl.cdiv(W, BW) * BW + tl.arange(0, BW)
    mask_w = offs_w < W
    fragment = tl.load(fragment_ptr + slot).to(tl.int64)
    used = fragment >= 0
    start = tl.load(cu_ptr + fragment, mask=used, other=0).to(tl.int64)
    end = tl.load(cu_ptr + fragment + 1, mask=used, other=0).to(tl.int64)
    weights, bias = _load_taps(weight_ptr, bias_ptr, offs_w, mask_w, WIDTH)
    window = ()
    found = ()
    for j in tl.static_range(1, WIDTH):
        window = window + (_history_row(history_ptr, fragment, j, used, offs_w, mask_w, W, WIDTH),)
        found = found + (tl.zeros(offs_w.shape, tl.float32),)
    for position in tl.static_range(WIDTH - 1):
        there = start + position < end
        mask = _if(there, mask_w)
        row = tl.load(x_ptr + (start + position) * stride_xt + offs_w, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dy_ptr + (start + position) * stride_dyt + offs_w, mask=mask, other=0.0).to(tl.float32)
        dz = _sum_gradient(grad, _weighted_sum(row, window, weights, bias, WIDTH), SILU)
        more = ()
        for j in tl.static_range(1, WIDTH):
            # The row j before the fragment is read by this token at tap position + j.
            if position + j < WIDTH:
                more = more + (tl.where(there, tl.fma(weights[position + j], dz, found[j - 1]), found[j - 1]),)
            else:
                more = more + (found[j - 1],)
        found = more
        window = _shift(window, row, WIDTH)
    dhistory_ptr += slot * ((WIDTH - 1) * W) + offs_w
    for j in tl.static_range(1, WIDTH):
        tl.store(dhistory_ptr + (WIDTH - 1 - j) * W, found[j - 1], mask=mask_w)


# ---- launchers


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _given(x: Tensor) -> Tensor | None:
    return x if x.shape[0] else None


def _config(configs: dict[int, WalkConfig], weight: Tensor) -> WalkConfig:
    return configs[4 if weight.shape[1] <= 4 else 8]


def _walk_constants(x: Tensor, weight: Tensor, config: WalkConfig, silu: bool) -> dict[str, object]:
    return dict(
        W=x.shape[1], WIDTH=weight.shape[1], TOKENS=config.tokens, UNROLL=config.unroll, BW=config.block_w, SILU=silu
    )


def _programs(x: Tensor, config: WalkConfig) -> int:
    return triton.cdiv(x.shape[0], config.tokens) * triton.cdiv(x.shape[1], config.block_w)


def conv_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, silu: bool) -> Tensor:
    """y [T,W] in x's dtype; zeros for tokens past the last fragment. `history` [F,P,W], zero rows for none."""
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    config = _config(_FORWARD, weight)
    with _on_device(x):
        table = _token_table(cu_seqlens, x.shape[0])
        args = (x, weight, bias, _given(history), table, y, x.shape[0], x.stride(0))
        constants = _walk_constants(x, weight, config, silu)
        launch(_conv_fwd_kernel, _programs(x, config), args, constants, config.num_warps, 1)
    return y


def conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, tails: Tensor, cu_seqlens: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dx [T,W], dweight [W,width], dbias [W], each in its input's dtype.

    `tails` [F,P,W]: what later fragments' tokens add to each fragment's last rows, newest last; zero rows for none.
    """
    T, W = x.shape
    width = weight.shape[1]
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    dbias = None if bias is None else bias.new_empty(bias.shape)
    if x.numel() == 0:
        return dx, dweight.zero_(), None if dbias is None else dbias.zero_()
    config = _config(_BACKWARD, weight)
    num_partials = triton.cdiv(T, config.tokens)
    with _on_device(x):
        table = _token_table(cu_seqlens, T)
        partials = x.new_empty((num_partials, width + 1, W), dtype=torch.float32)
        args = (
            dy, x, weight, bias, _given(history), _given(tails), table, dx, partials, T, dy.stride(0), x.stride(0),
        )  # fmt: skip
        constants = _walk_constants(x, weight, config, silu)
        launch(_conv_bwd_kernel, _programs(x, config), args, constants, config.num_warps, 1)
        rows = width if dbias is None else width + 1
        launch(
            _sum_partials_kernel, rows * triton.cdiv(W, 128), (partials, dweight, dbias, num_partials),
            dict(W=W, WIDTH=width, ROWS=_SUM_ROWS, BW=128), 4, 1,
        )  # fmt: skip
    return dx, dweight, dbias


def conv_history_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor,
    fragments: Tensor, silu: bool,
) -> Tensor:  # fmt: skip
    """Gradients of the history rows of `fragments` [B] (-1: none, zeros): float32 [B,P,W], oldest first."""
    W, width = x.shape[1], weight.shape[1]
    dhistory = x.new_empty((fragments.shape[0], width - 1, W), dtype=torch.float32)
    if dhistory.numel() == 0:
        return dhistory
    with _on_device(x):
        args = (
            dy, x, weight, bias, _given(history), cu_seqlens, fragments, dhistory, dy.stride(0), x.stride(0),
        )  # fmt: skip
        launch(
            _history_bwd_kernel, fragments.shape[0] * triton.cdiv(W, 128), args,
            dict(W=W, WIDTH=width, BW=128, SILU=silu), 4, 1,
        )  # fmt: skip
    return dhistory
