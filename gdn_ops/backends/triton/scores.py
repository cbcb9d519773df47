"""Stage 1, per (chunk, query/key head): norms, gates, per-token factors and the gated score matrix.

    G_i   = sum_{t <= i} g'_t * log2(e)                              gates    [NT, HV, C]
    r     = 1 / sqrt(sum x^2 + 1e-6) of q and of k                   norms    [B, T, 2, HK]
    P_ij  = scale * r_q,i * r_k,j * (q_i . k_j) * 2^(G_i - G_j) * beta_j, i >= j     scores [NT, HV, C, C]
    f     = (2^G r_k,  2^(G_C - G) r_k beta,  scale 2^G r_q,  beta,
             G - log2 r_k,  G + log2 r_q,  G + log2 r_k)             factors  [NT, HV, 7, C]

The matrix q k^T is computed once for the HV/HK value heads that share it; only the decay differs. The factors carry
the norms as row and column scalings, so no later stage rescales a tile of q or k. The first four are zero for tokens
past the end of a document, which is what keeps ragged tails out of the later stages; differences of the last three are
exponents of 2^(G_i - G_j) r_i r_j.

Grid: NT * HK programs. On chip: one tile of q and of k, the [C, C] product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import Config, dot_precision, launch, padded
from gdn_ops.backends.triton.primitives import (
    CHUNK,
    EPS,
    FACTORS,
    LOG2E,
    MIN_LOG2_DECAY,
    dot,
    load_chunk,
    load_rows,
    operand,
    sigmoid,
    softplus,
    zero_rows,
)
from gdn_ops.shapes import Inputs, Options, Sizes

# H200, 16/48 heads of 128, 32768 tokens: 0.144 ms with 2 warps (prototype), DRAM 62 % busy.
_SCORES = {2: Config(num_warps=2, num_stages=1), 4: Config(num_warps=4, num_stages=1)}
"""By operand bytes."""
_FACTORS = Config(num_warps=4, num_stages=1)
_FACTOR_HEADS = 8
"""Value heads of a program that makes the factor table from saved gates: in float32, a token's raw betas of that many
lie in a sector of memory."""


@triton.jit
def log2_decay(g_ptr, A_log_ptr, dt_bias_ptr, head, offs, mask, GATED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Log2 of the decay of each token of a chunk, from the raw gate; zero where masked."""
    g = tl.load(g_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        if HAS_BIAS:
            g += tl.load(dt_bias_ptr + head).to(tl.float32)
        g = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32)) * softplus(g)
    g = g * LOG2E
    g = tl.where(g < MIN_LOG2_DECAY, MIN_LOG2_DECAY, g)
    return tl.where(mask, g, 0.0)


@triton.jit
def write_strength(beta_ptr, offs, mask, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr):
    """The write strength of each token of a chunk, from the raw beta; zero where masked."""
    beta = tl.load(beta_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if SIGMOID:
        beta = sigmoid(beta)
    if DOUBLE:
        beta = beta * 2.0
    return tl.where(mask, beta, 0.0)


@triton.jit
def store_factors(ptrs, gate, total, norm_q, norm_k, beta, mask, stored, scale, APART: tl.constexpr):
    """Write factors of one value head [C], or of several [BH, C] (`stored`: which there are), at ptrs of their first.

    total: the gate at the chunk's end. APART: the norms' logarithms by themselves, without the gate, beside which they
    lose digits where it is large.
    """
    decay = tl.exp2(gate)
    tl.store(ptrs, tl.where(mask, decay * norm_k, 0.0), mask=stored)
    tl.store(ptrs + CHUNK, tl.where(mask, tl.exp2(total - gate) * norm_k * beta, 0.0), mask=stored)
    tl.store(ptrs + 2 * CHUNK, tl.where(mask, decay * norm_q * scale, 0.0), mask=stored)
    tl.store(ptrs + 3 * CHUNK, beta, mask=stored)
    log2_norm_q = tl.log2(tl.where(mask, norm_q, 1.0))
    log2_norm_k = tl.log2(tl.where(mask, norm_k, 1.0))
    with_norms = gate * 0.0 if APART else gate
    tl.store(ptrs + 4 * CHUNK, with_norms - log2_norm_k, mask=stored)
    tl.store(ptrs + 5 * CHUNK, with_norms + log2_norm_q, mask=stored)
    tl.store(ptrs + 6 * CHUNK, with_norms + log2_norm_k, mask=stored)


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, chunk_ptr,
    norm_ptr, gate_ptr, factor_ptr, score_ptr, o_ptr,
    scale, T,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr,
    ZERO_O: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    chunk = (tl.program_id(0) // HK).to(tl.int64)
    head_k = tl.program_id(0) % HK
    R: tl.constexpr = HV // HK
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    batch, start, length = load_chunk(chunk_ptr, chunk)
    offs_t = tl.arange(0, CHUNK)
    if ZERO_O:
        if length < 0:
            offs_v = tl.arange(0, BV)
            for r in tl.range(0, R):
                o_row_ptr = o_ptr + ((batch * T + start) * HV + head_k * R + r) * V
                zero_rows(o_row_ptr, HV * V, -length, offs_v, V)
    if length > 0:
        mask_t = offs_t < length
        q_ptr += batch * stride_qb + start * stride_qt + head_k.to(tl.int64) * stride_qh
        k_ptr += batch * stride_kb + start * stride_kt + head_k.to(tl.int64) * stride_kh
        qk_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
        norm_q = tl.zeros([CHUNK], tl.float32)
        norm_k = tl.zeros([CHUNK], tl.float32)
        for k0 in tl.static_range(0, K, BK):
            offs_k = k0 + tl.arange(0, BK)
            q_CK = load_rows(q_ptr, stride_qt, length, offs_k, K)
            k_CK = load_rows(k_ptr, stride_kt, length, offs_k, K)
            qk_CC = dot(q_CK, tl.trans(k_CK), qk_CC, PRECISION)
            if NORM:
                q32_CK = q_CK.to(tl.float32)
                k32_CK = k_CK.to(tl.float32)
                norm_q += tl.sum(q32_CK * q32_CK, 1)
                norm_k += tl.sum(k32_CK * k32_CK, 1)
        if NORM:
            norm_q = 1.0 / tl.sqrt_rn(norm_q + EPS)
            norm_k = 1.0 / tl.sqrt_rn(norm_k + EPS)
            row_ptr = norm_ptr + (batch * T + start) * 2 * HK + head_k + offs_t * 2 * HK
            tl.store(row_ptr, norm_q, mask=mask_t)
            tl.store(row_ptr + HK, norm_k, mask=mask_t)
        else:
            norm_q = tl.full([CHUNK], 1.0, tl.float32)
            norm_k = tl.full([CHUNK], 1.0, tl.float32)
        qk_CC = qk_CC * (norm_q * scale)[:, None] * norm_k[None, :]
        causal = (offs_t[:, None] >= offs_t[None, :]) & mask_t[:, None]
        offs_g = (batch * T + start) * HV + offs_t * HV
        for r in tl.range(0, R):
            head = (head_k * R + r).to(tl.int64)
            gate = log2_decay(g_ptr, A_log_ptr, dt_bias_ptr, head, offs_g + head, mask_t, GATED, HAS_BIAS)
            gate = tl.cumsum(gate, 0)
            beta = write_strength(beta_ptr, offs_g + head, mask_t, SIGMOID, DOUBLE)
            row = chunk * HV + head
            tl.store(gate_ptr + row * CHUNK + offs_t, gate)
            apart: tl.constexpr = NORM and DTYPE == tl.float32
            total = tl.sum(tl.where(offs_t == CHUNK - 1, gate, 0.0), 0)
            factors = factor_ptr + row * FACTORS * CHUNK + offs_t
            store_factors(factors, gate, total, norm_q, norm_k, beta, mask_t, None, scale, apart)
            decay_CC = tl.exp2(tl.where(causal, gate[:, None] - gate[None, :], 0.0))
            score_CC = tl.where(causal, qk_CC * decay_CC * beta[None, :], 0.0)
            score_row_ptr = score_ptr + row * CHUNK * CHUNK + offs_t[:, None] * CHUNK + offs_t[None, :]
            tl.store(score_row_ptr, operand(score_CC, DTYPE))


@triton.jit
def _factors_kernel(
    beta_ptr, chunk_ptr, norm_ptr, gate_ptr, factor_ptr, scale, T,
    HK: tl.constexpr, HV: tl.constexpr, BH: tl.constexpr, NORM: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr, APART: tl.constexpr, EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    BLOCKS: tl.constexpr = (HV + BH - 1) // BH
    chunk = (tl.program_id(0) // BLOCKS).to(tl.int64)
    heads = tl.program_id(0) % BLOCKS * BH + tl.arange(0, BH)
    batch, start, length = load_chunk(chunk_ptr, chunk)
    offs_t = tl.arange(0, CHUNK)
    if length > 0:
        stored = (heads < HV)[:, None] & tl.full([1, CHUNK], True, tl.int1)
        mask = stored & (offs_t < length)[None, :]
        if NORM:
            norm_ptrs = norm_ptr + (batch * T + start) * 2 * HK + (heads // (HV // HK))[:, None] + offs_t * 2 * HK
            norm_q = tl.load(norm_ptrs, mask=mask, other=0.0)
            norm_k = tl.load(norm_ptrs + HK, mask=mask, other=0.0)
        else:
            norm_q = tl.full([1, CHUNK], 1.0, tl.float32)
            norm_k = norm_q
        rows = chunk * HV + heads
        gate = tl.load(gate_ptr + rows[:, None] * CHUNK + offs_t, mask=stored, other=0.0)
        total = tl.load(gate_ptr + rows * CHUNK + CHUNK - 1, mask=heads < HV, other=0.0)[:, None]
        beta = write_strength(beta_ptr, (batch * T + start + offs_t) * HV + heads[:, None], mask, SIGMOID, DOUBLE)
        ptrs = factor_ptr + rows[:, None] * FACTORS * CHUNK + offs_t
        store_factors(ptrs, gate, total, norm_q, norm_k, beta, mask, stored, scale, APART)


def scores(
    inputs: Inputs, options: Options, sizes: Sizes, chunks: Tensor,
    norms: Tensor, gates: Tensor, factors: Tensor, score_matrix: Tensor, o: Tensor | None,
) -> None:  # fmt: skip
    """Fill norms, gates, factors and scores; with `o`, zero its rows past the last document."""
    q, k = inputs.q, inputs.k
    config = _SCORES[q.element_size()]
    BK = padded(sizes.K)
    if BK * q.element_size() > 256:  # a whole row spills 224 to 1580 bytes a thread, blocks of 64 at most 600
        BK = 64
    launch(
        _scores_kernel, sizes.num_chunks * sizes.HK,
        (q, k, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, chunks, norms, gates, factors, score_matrix, o,
         options.scale, sizes.T, *q.stride()[:3], *k.stride()[:3]),
        dict(HK=sizes.HK, HV=sizes.HV, K=sizes.K, V=sizes.V, BK=BK, BV=padded(sizes.V),
             NORM=options.use_qk_l2norm, GATED=inputs.A_log is not None, HAS_BIAS=inputs.dt_bias is not None,
             SIGMOID=options.use_beta_sigmoid, DOUBLE=options.allow_neg_eigval,
             ZERO_O=o is not None and inputs.cu_seqlens is not None, PRECISION=dot_precision(q.dtype)),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def factors_from_saved(
    inputs: Inputs, options: Options, sizes: Sizes, chunks: Tensor, norms: Tensor, gates: Tensor, factors: Tensor
) -> None:
    """Fill the factor table from saved norms and gates, to the bit as `scores` does."""
    launch(
        _factors_kernel, sizes.num_chunks * triton.cdiv(sizes.HV, _FACTOR_HEADS),
        (inputs.beta, chunks, norms, gates, factors, options.scale, sizes.T),
        dict(HK=sizes.HK, HV=sizes.HV, BH=_FACTOR_HEADS, NORM=options.use_qk_l2norm,
             SIGMOID=options.use_beta_sigmoid, DOUBLE=options.allow_neg_eigval,
             APART=options.use_qk_l2norm and inputs.q.dtype == torch.float32),
        _FACTORS.num_warps, _FACTORS.num_stages,
    )  # fmt: skip
