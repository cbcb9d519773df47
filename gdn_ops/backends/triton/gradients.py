"""Stage 5, parallel over (chunk, query/key head): gradients of q, k, g and beta.

With e = u / beta, rows i (output, residual) and columns j (the token that wrote), per value head:

    W_ij  = -(dv_i . e_j) 2^(G_i - G_j) r_k,i r_k,j        i > j
    D_ij  = scale (do_i . e_j) 2^(G_i - G_j) r_q,i r_k,j   i >= j
    left  = -f_1 * (dv S) + (W beta) k                     k as the key that reads the state
    right = 2^(G_C - G) r_k * (e dS) + W^T k + D^T q       k as the key that writes, per unit of beta
    dq   += f_3 * (do S) + (D beta) k
    dk   += left + beta * right
    dbeta_j = k_j . right_j                                no division: right at beta = 0
    dG_i  = q_i . dq_i + k_i . left_i - beta_i dbeta_i
    dg_t  = sum_{i >= t in the chunk} dG_i + 2^(G_C) <S, dS> + sum_j beta_j k_j . (state part of right_j)

The scalings r_q, r_k of the in-kernel L2 norm are inside W, D and f, so dq and dk above are already with respect to the
normalised vectors times r; what remains of the norm's backward, x <- x - r^2 (x . dx) x, is done once, after the sum
over the HV/HK value heads of the group. That sum is in float32 registers in head order, so it is deterministic.

All [K, C] accumulators are transposed: with 128 rows they split over eight warps, where [C, K] tiles would be computed
twice. Grid: NT * (heads / group) programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.triton.launch import Config, dot_precision, launch, padded
from gdn_ops.backends.triton.primitives import (
    CHUNK,
    FACTORS,
    dot,
    load_chunk,
    load_rows,
    operand,
    sigmoid,
    softplus,
    store_rows,
    trip_count,
    zero_rows,
)
from gdn_ops.shapes import Inputs, Options, Sizes

_GRADIENTS = {
    (2, 128): Config(num_warps=8, num_stages=1, block_v=128),
    (2, 256): Config(num_warps=8, num_stages=1, block_v=64),
    (4, 128): Config(num_warps=8, num_stages=1, block_v=32),
    (4, 256): Config(num_warps=8, num_stages=1, block_v=16),
}
"""By operand bytes and padded K (128: up to 128)."""


@triton.jit
def _load_matrix(ptr, offs_v, offs_d, V: tl.constexpr, D: tl.constexpr):
    """A [len(offs_v), len(offs_d)] tile of a dense [V, D] matrix."""
    mask = (offs_v < V)[:, None] & (offs_d < D)[None, :]
    return tl.load(ptr + offs_v[:, None] * D + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _gradients_kernel(
    do_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, chunk_ptr,
    norm_ptr, gate_ptr, factor_ptr, state_ptr, update_ptr, dstate_ptr, dv_ptr,
    dq_ptr, dk_ptr, dg_ptr, dbeta_ptr, dgate_sum_ptr,
    scale, T, first_head, state_first_head, state_heads,
    stride_ob, stride_ot, stride_oh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_dvb, stride_dvt, stride_dvg, stride_dvr, stride_dqb, stride_dqt, stride_dqg, stride_dqr,
    stride_dkb, stride_dkt, stride_dkg, stride_dkr,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VR: tl.constexpr, QR: tl.constexpr, KR: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr, DOUBLE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    R: tl.constexpr = HV // HK
    GROUPS: tl.constexpr = HEADS // R
    chunk = (tl.program_id(0) // GROUPS).to(tl.int64)
    local_group = (tl.program_id(0) % GROUPS).to(tl.int64)
    head_k = first_head // R + local_group
    batch, start, length = load_chunk(chunk_ptr, chunk)
    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, BK)
    dq_ptr += batch * stride_dqb + start * stride_dqt + head_k // QR * stride_dqg + head_k % QR * stride_dqr
    dk_ptr += batch * stride_dkb + start * stride_dkt + head_k // KR * stride_dkg + head_k % KR * stride_dkr
    dv_ptr += batch * stride_dvb + start * stride_dvt
    offs_g = (batch * T + start) * HV + offs_t * HV
    if length < 0:
        zero_rows(dq_ptr, stride_dqt, -length, offs_k, K)
        zero_rows(dk_ptr, stride_dkt, -length, offs_k, K)
        mask_t = offs_t < -length
        zero = tl.zeros([CHUNK], tl.float32)
        for r in tl.range(0, R):
            head = head_k * R + r
            tl.store(dg_ptr + offs_g + head, zero.to(dg_ptr.dtype.element_ty), mask=mask_t)
            tl.store(dbeta_ptr + offs_g + head, zero.to(dbeta_ptr.dtype.element_ty), mask=mask_t)
            for v0 in tl.static_range(0, V, BV):
                dv_row_ptr = dv_ptr + head // VR * stride_dvg + head % VR * stride_dvr
                zero_rows(dv_row_ptr, stride_dvt, -length, v0 + tl.arange(0, BV), V)
    if length > 0:
        mask_t = offs_t < length
        do_ptr += batch * stride_ob + start * stride_ot
        q_ptr += batch * stride_qb + start * stride_qt + head_k * stride_qh
        k_ptr += batch * stride_kb + start * stride_kt + head_k * stride_kh
        q_CK = load_rows(q_ptr, stride_qt, length, offs_k, K)
        k_CK = load_rows(k_ptr, stride_kt, length, offs_k, K)
        if NORM:
            norm_row_ptr = norm_ptr + (batch * T + start) * 2 * HK + head_k + offs_t * 2 * HK
            norm_q = tl.load(norm_row_ptr, mask=mask_t, other=0.0)
            norm_k = tl.load(norm_row_ptr + HK, mask=mask_t, other=0.0)
        dq_KC = tl.zeros([BK, CHUNK], tl.float32)
        dk_KC = tl.zeros([BK, CHUNK], tl.float32)
        for r in tl.range(0, R, num_stages=STAGES):
            head = head_k * R + r
            row = chunk * HV + head
            gate = tl.load(gate_ptr + row * CHUNK + offs_t)
            total = tl.load(gate_ptr + row * CHUNK + CHUNK - 1)
            factors = factor_ptr + row * FACTORS * CHUNK + offs_t
            f_1 = tl.load(factors)
            f_3 = tl.load(factors + 2 * CHUNK)
            beta = tl.load(factors + 3 * CHUNK)
            f_right = tl.where(mask_t, tl.exp2(total - gate), 0.0)
            do_head_ptr = do_ptr + head * stride_oh
            dv_head_ptr = dv_ptr + head // VR * stride_dvg + head % VR * stride_dvr
            state_row = chunk * state_heads + head - state_first_head
            state_head_ptr = state_ptr + state_row * V * K
            update_head_ptr = update_ptr + state_row * V * CHUNK
            dstate_head_ptr = dstate_ptr + (chunk * HEADS + head - first_head) * V * K

            w_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
            d_CC = tl.zeros([CHUNK, CHUNK], tl.float32)
            left_KC = tl.zeros([BK, CHUNK], tl.float32)
            right_KC = tl.zeros([BK, CHUNK], tl.float32)
            dq_head_KC = tl.zeros([BK, CHUNK], tl.float32)
            state_product = 0.0
            for v0 in tl.static_range(0, V, BV):
                offs_v = v0 + tl.arange(0, BV)
                do_CV = load_rows(do_head_ptr, stride_ot, length, offs_v, V)
                dv_CV = load_rows(dv_head_ptr, stride_dvt, length, offs_v, V)
                e_VC = _load_matrix(update_head_ptr, offs_v, offs_t, V, CHUNK)
                state_VK = _load_matrix(state_head_ptr, offs_v, offs_k, V, K)
                dstate_VK = _load_matrix(dstate_head_ptr, offs_v, offs_k, V, K)
                w_CC = dot(dv_CV, e_VC, w_CC, PRECISION)
                d_CC = dot(do_CV, e_VC, d_CC, PRECISION)
                state_KV = tl.trans(state_VK)
                left_KC = dot(state_KV, tl.trans(dv_CV), left_KC, PRECISION)
                dq_head_KC = dot(state_KV, tl.trans(do_CV), dq_head_KC, PRECISION)
                right_KC = dot(tl.trans(dstate_VK), e_VC, right_KC, PRECISION)
                state_product += tl.sum(state_VK.to(tl.float32) * dstate_VK.to(tl.float32))

            lower = offs_t[:, None] > offs_t[None, :]
            causal = offs_t[:, None] >= offs_t[None, :]
            decay_CC = tl.exp2(tl.where(causal, gate[:, None] - gate[None, :], 0.0))
            if NORM:
                decay_CC = decay_CC * norm_k[None, :]
                w_CC = w_CC * norm_k[:, None]
                d_CC = d_CC * norm_q[:, None]
                f_right = f_right * norm_k
            w_CC = tl.where(lower, -w_CC * decay_CC, 0.0)
            d_CC = tl.where(causal, d_CC * decay_CC * scale, 0.0)
            k_KC = tl.trans(k_CK)
            q_KC = tl.trans(q_CK)

            left_KC = left_KC * -f_1[None, :]
            left_KC = dot(k_KC, tl.trans(operand(w_CC * beta[None, :], DTYPE)), left_KC, PRECISION)
            dq_head_KC = dq_head_KC * f_3[None, :]
            dq_head_KC = dot(k_KC, tl.trans(operand(d_CC * beta[None, :], DTYPE)), dq_head_KC, PRECISION)
            k32_KC = k_KC.to(tl.float32)
            dgate = tl.sum(k32_KC * left_KC + q_KC.to(tl.float32) * dq_head_KC, 0)
            dk_KC += left_KC
            dq_KC += dq_head_KC

            right_KC = right_KC * f_right[None, :]
            dtotal = tl.sum(tl.sum(k32_KC * right_KC, 0) * beta, 0) + tl.exp2(total) * state_product
            right_KC = dot(k_KC, operand(w_CC, DTYPE), right_KC, PRECISION)
            right_KC = dot(q_KC, operand(d_CC, DTYPE), right_KC, PRECISION)
            dbeta = tl.sum(k32_KC * right_KC, 0)
            dk_KC += right_KC * beta[None, :]

            dgate = tl.where(mask_t, dgate - beta * dbeta, 0.0)
            dgate = tl.cumsum(dgate, 0, reverse=True) + dtotal
            dgate = tl.where(mask_t, dgate, 0.0)
            if GATED:
                raw = tl.load(g_ptr + offs_g + head, mask=mask_t, other=0.0).to(tl.float32)
                if HAS_BIAS:
                    raw += tl.load(dt_bias_ptr + head).to(tl.float32)
                rate = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
                decay = rate * softplus(raw)
                sum_ptr = dgate_sum_ptr + row * 2
                tl.store(sum_ptr, tl.sum(dgate * decay, 0))
                dgate = dgate * rate * sigmoid(raw)
                tl.store(sum_ptr + 1, tl.sum(dgate, 0))
            tl.store(dg_ptr + offs_g + head, operand(dgate, dg_ptr.dtype.element_ty), mask=mask_t)
            if SIGMOID:
                raw = tl.load(beta_ptr + offs_g + head, mask=mask_t, other=0.0).to(tl.float32)
                opened = sigmoid(raw)
                dbeta = dbeta * opened * sigmoid(-raw)
            if DOUBLE:
                dbeta = dbeta * 2.0
            tl.store(dbeta_ptr + offs_g + head, operand(dbeta, dbeta_ptr.dtype.element_ty), mask=mask_t)
        if NORM:
            q32_KC = tl.trans(q_CK).to(tl.float32)
            k32_KC = tl.trans(k_CK).to(tl.float32)
            dq_KC -= q32_KC * (norm_q * norm_q * tl.sum(q32_KC * dq_KC, 0))[None, :]
            dk_KC -= k32_KC * (norm_k * norm_k * tl.sum(k32_KC * dk_KC, 0))[None, :]
        store_rows(dq_ptr, stride_dqt, length, offs_k, K, tl.trans(dq_KC))
        store_rows(dk_ptr, stride_dkt, length, offs_k, K, tl.trans(dk_KC))


@triton.jit
def _gate_sums_kernel(
    chunk_ptr, dgate_sum_ptr, dA_log_ptr, ddt_bias_ptr, NT,
    HV: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    dA_log = tl.zeros([BLOCK], tl.float32)
    ddt_bias = tl.zeros([BLOCK], tl.float32)
    for c0 in tl.range(0, trip_count(NT), BLOCK):
        chunk = (c0 + offs).to(tl.int64)
        used = tl.load(chunk_ptr + chunk * 3 + 2, mask=chunk < NT, other=0) > 0
        row_ptr = dgate_sum_ptr + (chunk * HV + head) * 2
        dA_log += tl.load(row_ptr, mask=used, other=0.0)
        ddt_bias += tl.load(row_ptr + 1, mask=used, other=0.0)
    tl.store(dA_log_ptr + head, tl.sum(dA_log, 0).to(dA_log_ptr.dtype.element_ty))
    if HAS_BIAS:
        tl.store(ddt_bias_ptr + head, tl.sum(ddt_bias, 0).to(ddt_bias_ptr.dtype.element_ty))


def gradients(
    do: Tensor, inputs: Inputs, options: Options, sizes: Sizes, chunks: Tensor, norms: Tensor, gates: Tensor,
    factors: Tensor, states: Tensor, updates: Tensor, dstates: Tensor, dv: Tensor, dq: Tensor, dk: Tensor,
    dg: Tensor, dbeta: Tensor, dgate_sums: Tensor | None, first_head: int, num_heads: int,
) -> None:  # fmt: skip
    """Fill dq, dk, dg, dbeta for a range of value heads (whole groups); dv is read, and zeroed past the end.

    `states` and `updates` hold all heads or only the range.
    """
    q, k = inputs.q, inputs.k
    BK = padded(sizes.K)
    config = _GRADIENTS[q.element_size(), max(BK, 128)]
    state_heads = states.shape[1]
    launch(
        _gradients_kernel, sizes.num_chunks * (num_heads * sizes.HK // sizes.HV),
        (do, q, k, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, chunks, norms, gates, factors, states, updates, dstates,
         dv, dq, dk, dg, dbeta, dgate_sums, options.scale, sizes.T, first_head,
         0 if state_heads == sizes.HV else first_head, state_heads,
         *do.stride()[:3], *q.stride()[:3], *k.stride()[:3],
         *dv.stride()[:4], *dq.stride()[:4], *dk.stride()[:4]),
        dict(HK=sizes.HK, HV=sizes.HV, HEADS=num_heads, K=sizes.K, V=sizes.V, BK=BK,
             BV=min(config.block_v, padded(sizes.V)), VR=dv.shape[3], QR=dq.shape[3], KR=dk.shape[3],
             NORM=options.use_qk_l2norm, GATED=inputs.A_log is not None, HAS_BIAS=inputs.dt_bias is not None,
             SIGMOID=options.use_beta_sigmoid, DOUBLE=options.allow_neg_eigval, STAGES=config.num_stages,
             PRECISION=dot_precision(q.dtype)),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def gate_sums(sizes: Sizes, chunks: Tensor, dgate_sums: Tensor, dA_log: Tensor, ddt_bias: Tensor | None) -> None:
    """Sum the chunks' contributions to dA_log and ddt_bias, in a fixed order."""
    launch(
        _gate_sums_kernel, sizes.HV, (chunks, dgate_sums, dA_log, ddt_bias, sizes.num_chunks),
        dict(HV=sizes.HV, BLOCK=256, HAS_BIAS=ddt_bias is not None), num_warps=4, num_stages=1,
    )  # fmt: skip
