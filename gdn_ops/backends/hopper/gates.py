"""Decay and write strength: the chunk-local cumulative decay, and the factors that every later stage multiplies by.

    G_i = sum over j <= i of g'_j * log2(e), inside the chunk, float32          (saved as `gates` [NT,HV,C])
    factors [NT,HV,6,C], float32:
        0  2^G_i / |k_i|                    what a key reads from the state at the chunk's start
        1  2^(G_end - G_i) / |k_i|          what a key writes into the state at the chunk's end
        2  scale * 2^G_i / |q_i|            what a query reads
        3  beta'_i                          what A as stored lacks of its diagonal; where it has that, for keys that are
                                            alike, what beta' has lost there by rounding (see `solve`)
        4  2^G_end, in its first number     how much of the state survives the chunk
        5  beta'_i                          (with norms: row 8)
    with norms 1 where `use_qk_l2norm` is off, and factors 0 for tokens past the document's end. With norms three more
    rows, [NT,HV,9,C], let `gradients` get a decay and both its norms from one exponential:
        5  G_i - log2 |k_i|                 6  G_i - log2 |q_i|                 7  G_i + log2 |k_i|

So the sequential kernels need no exponential, no mask and no normalised copy of q and k. The norms come from `solve`,
which needs row 3 itself: with them this stage runs before it, without norms, and again after it. Which chunks' keys are
alike `solve` finds; afterwards the first number of A says so.
Grid: one program a chunk and block of value heads.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import CHUNK, Options

# Letters: NT chunks, HV value heads, HK query/key heads, H value heads of one program, C chunk length, R = HV / HK.

NUM_FACTORS = 6
NUM_FACTORS_NORM = 9

_HEADS = 16
_LOG2_E = math.log2(math.e)
_LEAST_LOG2_DECAY = -256.0
"""One token's decay, in log2, is not taken below this: 2^-256 is 0 in float32 already, and larger numbers would cost
the cumulative sum its precision (minus infinity would make it NaN)."""


@triton.jit
def softplus(x):
    """log(1 + e^x), accurate for both signs of x."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def write_strength(raw, SIGMOID: tl.constexpr, DOUBLED: tl.constexpr):
    """beta' of a raw beta, float32."""
    beta = raw.to(tl.float32)
    if SIGMOID:
        beta = tl.sigmoid(beta)
    if DOUBLED:
        beta = 2.0 * beta
    return beta


@triton.jit
def kept_from_zero(beta, IS_HALF: tl.constexpr):
    """A beta whose inverse is finite; see `epilogue` for why 0 becomes a number too small to matter.

    The bound is the least power of two whose products stay representable in the operands' dtype.
    """
    least = 2.0**-14 if IS_HALF else 2.0**-64
    return tl.where(tl.abs(beta) < least, tl.where(beta < 0.0, -least, least), beta)


@triton.jit
def _gates_kernel(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, norms_ptr, solve_ptr, gates_ptr, factors_ptr, table_ptr, scale,
    HV: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, H: tl.constexpr, FROM_GATES: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORMS: tl.constexpr,
    SIGMOID: tl.constexpr, DOUBLED: tl.constexpr, IS_HALF: tl.constexpr,
    LOG2_E: tl.constexpr, LEAST: tl.constexpr, FACTORS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    i_c = tl.program_id(0)
    first = tl.load(table_ptr + i_c * 4)
    valid = tl.load(table_ptr + i_c * 4 + 1)
    if valid > 0:
        offs_h = tl.program_id(1) * H + tl.arange(0, H)
        offs_c = tl.arange(0, C)
        mask_h = offs_h < HV
        mask = mask_h[:, None] & (offs_c < valid)[None, :]
        token = (first + offs_c).to(tl.int64)
        row = i_c.to(tl.int64) * HV + offs_h
        gates_at = gates_ptr + row[:, None] * C + offs_c[None, :]
        if FROM_GATES:
            gates_HC = tl.load(gates_at, mask=mask_h[:, None], other=0.0)
            corner_H = tl.load(solve_ptr + row * (C * C), mask=mask_h, other=0.0)
        else:
            raw_HC = tl.load(g_ptr + token[None, :] * HV + offs_h[:, None], mask=mask, other=0.0).to(tl.float32)
            if HAS_GATE:
                if HAS_BIAS:
                    raw_HC += tl.load(dt_bias_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)[:, None]
                # The rate e^A_log as its root, twice: the whole may overflow where the softplus is 0.
                root_H = tl.exp(0.5 * tl.load(A_log_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32))
                raw_HC = -root_H[:, None] * softplus(raw_HC) * root_H[:, None]
            log2_HC = tl.where(mask, tl.maximum(raw_HC * LOG2_E, LEAST), 0.0)
            gates_HC = tl.cumsum(log2_HC, 1)
            tl.store(gates_at, gates_HC, mask=mask_h[:, None])
        end_H = tl.sum(tl.where((offs_c == C - 1)[None, :], gates_HC, 0.0), 1)
        read_HC = tl.exp2(gates_HC)
        write_HC = tl.exp2(end_H[:, None] - gates_HC)
        query_HC = read_HC * scale
        if HAS_NORMS:
            norm_at = norms_ptr + token[None, :] * (2 * HK) + (offs_h // (HV // HK))[:, None]
            inv_q_HC = tl.load(norm_at, mask=mask, other=0.0)
            inv_k_HC = tl.load(norm_at + HK, mask=mask, other=0.0)
            read_HC *= inv_k_HC
            write_HC *= inv_k_HC
            query_HC *= inv_q_HC
            factors_at = factors_ptr + row[:, None] * (FACTORS * C) + offs_c[None, :]
            log2_k_HC = tl.where(mask, tl.log2(inv_k_HC), 0.0)
            log2_q_HC = tl.where(mask, tl.log2(inv_q_HC), 0.0)
            tl.store(factors_at + 5 * C, gates_HC + log2_k_HC, mask=mask_h[:, None])
            tl.store(factors_at + 6 * C, gates_HC + log2_q_HC, mask=mask_h[:, None])
            tl.store(factors_at + 7 * C, gates_HC - log2_k_HC, mask=mask_h[:, None])
        factors_at = factors_ptr + row[:, None] * (FACTORS * C) + offs_c[None, :]
        tl.store(factors_at, tl.where(mask, read_HC, 0.0), mask=mask_h[:, None])
        tl.store(factors_at + C, tl.where(mask, write_HC, 0.0), mask=mask_h[:, None])
        tl.store(factors_at + 2 * C, tl.where(mask, query_HC, 0.0), mask=mask_h[:, None])
        beta_HC = tl.load(beta_ptr + token[None, :] * HV + offs_h[:, None], mask=mask, other=0.0)
        beta_HC = kept_from_zero(write_strength(beta_HC, SIGMOID, DOUBLED), IS_HALF)
        tl.store(factors_at + (FACTORS - 1) * C, tl.where(mask, beta_HC, 0.0), mask=mask_h[:, None])
        if FROM_GATES:
            rounded_HC = beta_HC.to(solve_ptr.dtype.element_ty).to(tl.float32)
            beta_HC = tl.where(corner_H[:, None] != 0.0, beta_HC - rounded_HC, beta_HC)
        tl.store(factors_at + 3 * C, tl.where(mask, beta_HC, 0.0), mask=mask_h[:, None])
        tl.store(factors_ptr + row * (FACTORS * C) + 4 * C, tl.exp2(end_H), mask=mask_h)


def gates(
    g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, norms: Tensor | None, out: Tensor,
    factors: Tensor, chunks: Chunks, options: Options, num_qk_heads: int, *, solve: Tensor | None, is_half: bool,
) -> None:  # fmt: skip
    """Fill `factors` [NT,HV,6,C] (9 with norms) and, before `solve` [NT,HV,C,C] is there, `out` [NT,HV,C].

    g, beta [T,HV]; norms [T,2,HK]; is_half: whether the operands are float16.
    """
    NT, HV = out.shape[:2]
    launch(
        _gates_kernel, (NT, triton.cdiv(HV, _HEADS)),
        g, beta, A_log, dt_bias, norms, solve, out, factors, chunks.table, options.scale,
        HV=HV, HK=num_qk_heads, C=CHUNK, H=_HEADS, FROM_GATES=solve is not None,
        HAS_GATE=A_log is not None, HAS_BIAS=dt_bias is not None, HAS_NORMS=norms is not None,
        SIGMOID=options.use_beta_sigmoid, DOUBLED=options.allow_neg_eigval, IS_HALF=is_half,
        LOG2_E=_LOG2_E, LEAST=_LEAST_LOG2_DECAY, FACTORS=factors.shape[2], num_warps=4,
    )  # fmt: skip
