"""Stage 5, parallel over (chunk, query/key head): gradients of q, k, g and beta.

With e = u / beta, rows i (output, residual) and columns j (the token that wrote), per value head:

    W_ij  = -(dv_i . e_j) 2^(G_i - G_j) r_k,i r_k,j        i > j
    D_ij  = scale (do_i . e_j) 2^(G_i - G_j) r_q,i r_k,j   i >= j
    left  = (-f_1 dv) S + (W beta) k                       k as the key that reads the state
    right = 2^(G_C - G) r_k * (e dS) + W^T k + D^T q       k as the key that writes, per unit of beta
    dq   += (f_3 do) S + (D beta) k
    dk   += left + beta * right
    b_j   = k_j . right_j                                  no division: right at beta = 0
    dbeta_j = (1 - w_j) b_j + w_j (dv_j . e_j) / beta_j    w = min(beta^2, 1), so no division here either
    dG_i  = q_i . dq_i + k_i . left_i - beta_i b_i
    dg_t  = sum_{i >= t in the chunk} dG_i + 2^(G_C) <S, dS> + sum_j beta_j k_j . (state part of right_j)

Both terms of dbeta are the gradient with respect to beta e, times e. b writes that gradient out as sums over later
tokens, which are short and damped unless keys are nearly parallel, where they add up what the rounding of each dv has
left; dv / beta, in the second one, is that gradient itself. A great beta goes with it, hence the weights.

The scalings r_q, r_k of the in-kernel L2 norm are inside W, D and f, so dq and dk above are already with respect to the
normalised vectors times r; what remains of the norm's backward, x <- x - r^2 (x . dx) x, is done once, after the sum
over the HV/HK value heads of the group. That sum is in float32 registers in head order, so it is deterministic.

do lies above dv and q above k in one tile of 2 C rows, so that eight warps split the rows; dq and left are accumulated
in one such tile, where the rows of do and dv are scaled before the product with S rather than after it: a second tile
for the product alone would not fit the registers. What a head adds to q . dq and k . left is then a difference.
Grid: NT * (heads / group) programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import Config, choose, dot_precision, is_amd, launch, padded
from gdn_ops.backends.triton.primitives import (
    CHUNK,
    FACTORS,
    INTERPRETED,
    dot,
    load_chunk,
    load_matrix,
    load_rows,
    opaque_zero,
    operand,
    sigmoid,
    softplus,
    tile_mask,
    trip_count,
    zero_rows,
)
from gdn_ops.shapes import Inputs, Options, Sizes

# H200, 16/48 heads of 128, 32768 tokens, one of two turns (ms, as (warps, stages, block of V)): (8, 3, 64) 1.318;
# (8, 4, 32) 1.319; (8, 1, 64) 1.387; (8, 3, 32) 1.403. Loading q and k before the loop over V: 1.635 to 1.766.
# Prefetching the next head's tiles into L2 cost 0.3. The former kernel (tiles of do S and dv S, three loops): 2.32.
# Two turns, on a slower machine: <S, dS> on tensor cores 2.709 instead of 2.781, then e dS as [C, K] and two roundings
# an instruction 2.708. Accumulators of do S and dv S unscaled (a fifth fewer instructions, more spills): 3.553.
_PIPELINED = Config(num_warps=8, num_stages=3, block_v=64)
"""Heads of 128 in 16 bits."""
_GRADIENTS = {
    (2, 128): Config(num_warps=8, num_stages=1, block_v=64),
    (2, 256): Config(num_warps=8, num_stages=1, block_v=64),
    (4, 128): Config(num_warps=8, num_stages=1, block_v=32),
    (4, 256): Config(num_warps=8, num_stages=1, block_v=16),
}
"""By operand bytes and padded K (128: up to 128)."""
_TENSOR_MEMORY = {
    (2, 128): Config(num_warps=16, num_stages=1, block_v=32),
    (2, 256): Config(num_warps=16, num_stages=1, block_v=32),
    (4, 128): Config(num_warps=16, num_stages=1, block_v=32),
    (4, 256): Config(num_warps=16, num_stages=1, block_v=16),
}
"""The same for capability 10, but for heads of at most 64 in 16 bits, which need no other numbers. With eight warps
Triton 3.6 needs 528 columns of tensor memory or more (float32, heads of 256: 2720). Sixteen warps take none: products
are those of Ampere, and 15 to 21 KB a thread are spilled in 16 bits (sm_80: 25). Compiled for sm_100, not run."""
_AMD = Config(num_warps=8, num_stages=1, block_v=16)
"""64 KB of shared memory; compiled for gfx942, not run."""

PARTIALS = tl.constexpr(6)
"""Rows of C sums per (chunk, value head): row sums of D and of W parts, column sums, written, dv . e, <S, dS>."""

_GATE_HEADS = 8
"""Value heads of a program that finishes dg and dbeta: in float32, a token's of that many lie in a sector of memory."""


@triton.jit
def _aligned_range(SIZE: tl.constexpr, zero):
    """tl.arange(0, SIZE) that the compiler cannot take out of a loop in which `zero` is made."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE) + zero, SIZE), SIZE)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """`operand` for a tile that is also read element by element, for which the compiler would round one at a time."""
    if DTYPE == tl.bfloat16 and PTX and not INTERPRETED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return operand(x, DTYPE)


@triton.jit
def _dot_transposed(a, b, acc, PRECISION: tl.constexpr):
    """acc + a^T @ b; in float32 and for heads above 128 as its transpose, which spills a quarter to a third less.

    Otherwise acc is in the layout that k and the output have, which takes fewer instructions.
    """
    if a.dtype == tl.float32 or b.shape[1] > 128:
        return tl.trans(dot(tl.trans(b), a, tl.trans(acc), PRECISION))
    else:
        return dot(tl.trans(a), b, acc, PRECISION)


@triton.jit
def _pair_pointers(first_ptr, first_stride_t, second_ptr, second_stride_t, offs_r, offs_d):
    """Pointers to the C token rows of one operand, then to those of another, as one [2 C, len(offs_d)] tile."""
    offs_t = offs_r % CHUNK
    first = first_ptr + offs_t[:, None] * first_stride_t + offs_d[None, :]
    second = second_ptr + offs_t[:, None] * second_stride_t + offs_d[None, :]
    return tl.where((offs_r < CHUNK)[:, None], first, second)


@triton.jit
def _gradients_kernel(
    do_ptr, q_ptr, k_ptr, chunk_ptr, norm_ptr, gate_ptr, factor_ptr, state_ptr, update_ptr, dstate_ptr, dv_ptr,
    dq_ptr, dk_ptr, partial_ptr, scale, T, first_head, state_first_head, state_heads,
    stride_ob, stride_ot, stride_oh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_dvb, stride_dvt, stride_dvg, stride_dvr, stride_dqb, stride_dqt, stride_dqg, stride_dqr,
    stride_dkb, stride_dkt, stride_dkg, stride_dkr,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VR: tl.constexpr, QR: tl.constexpr, KR: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
    PTX: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    R: tl.constexpr = HV // HK
    GROUPS: tl.constexpr = HEADS // R
    ROWS: tl.constexpr = 2 * CHUNK
    # <S, dS> as the trace of S dS^T: the tensor cores have time to spare, but unpacking 16-bit tiles to multiply them
    # element by element is on the warps' own. Blocks of fewer than 64 rows would not fill a tensor-core instruction.
    TRACE: tl.constexpr = BV >= 64 and DTYPE != tl.float32
    chunk = (tl.program_id(0) // GROUPS).to(tl.int64)
    head_k = first_head // R + (tl.program_id(0) % GROUPS).to(tl.int64)
    batch, start, length = load_chunk(chunk_ptr, chunk)
    if length < 0:
        dv_ptr += batch * stride_dvb + start * stride_dvt
        dq_ptr += batch * stride_dqb + start * stride_dqt + head_k // QR * stride_dqg + head_k % QR * stride_dqr
        dk_ptr += batch * stride_dkb + start * stride_dkt + head_k // KR * stride_dkg + head_k % KR * stride_dkr
        offs_k = tl.arange(0, BK)
        zero_rows(dq_ptr, stride_dqt, -length, offs_k, K)
        zero_rows(dk_ptr, stride_dkt, -length, offs_k, K)
        for r in tl.range(0, R):
            head = head_k * R + r
            for v0 in tl.range(0, V, BV):
                dv_row_ptr = dv_ptr + head // VR * stride_dvg + head % VR * stride_dvr
                zero_rows(dv_row_ptr, stride_dvt, -length, v0 + tl.arange(0, BV), V)
    if length > 0:
        sum_RK = tl.zeros([ROWS, BK], tl.float32)
        right_CK = tl.zeros([CHUNK, BK], tl.float32)
        # q . dq and k . (left part of dk) summed over the heads so far: what a head adds to it is the gate's gradient.
        product_r = tl.zeros([ROWS], tl.float32)
        for r in tl.range(0, R):
            # What does not change from head to head (q, k, masks, addresses) would be kept in registers across the
            # loop, where the accumulators need the room. A zero that the compiler cannot see through prevents that.
            zero = opaque_zero(chunk_ptr, PTX)
            one = 1.0 + zero.to(tl.float32)
            head = head_k * R + r + zero
            row = chunk * HV + head
            offs_t = _aligned_range(CHUNK, zero)
            offs_k = _aligned_range(BK, zero)
            offs_r = _aligned_range(ROWS, zero)
            of_key = offs_r >= CHUNK
            factors = factor_ptr + row * FACTORS * CHUNK
            f_r = tl.load(factors + tl.where(of_key, 0, 2 * CHUNK) + offs_r % CHUNK)
            f_r = tl.where(of_key, -f_r, f_r)
            state_row = chunk * state_heads + head - state_first_head
            state_head_ptr = state_ptr + state_row * V * K
            update_head_ptr = update_ptr + state_row * V * CHUNK
            dstate_head_ptr = dstate_ptr + (chunk * HEADS + head - first_head) * V * K
            at_batch = batch + zero
            at_start = start + zero
            do_head_ptr = do_ptr + at_batch * stride_ob + at_start * stride_ot + head * stride_oh
            dv_head_ptr = dv_ptr + at_batch * stride_dvb + at_start * stride_dvt
            dv_head_ptr += head // VR * stride_dvg + head % VR * stride_dvr
            q_head_ptr = q_ptr + at_batch * stride_qb + at_start * stride_qt + head // R * stride_qh
            k_head_ptr = k_ptr + at_batch * stride_kb + at_start * stride_kt + head // R * stride_kh

            # D above W: one product serves both.
            z_RC = tl.zeros([ROWS, CHUNK], tl.float32)
            part_CK = tl.zeros([CHUNK, BK], tl.float32)
            if TRACE:
                products = tl.zeros([BV, BV], tl.float32)
            else:
                products = tl.zeros([BV, BK // 8], tl.float32)
            for v0 in tl.range(0, V, BV, num_stages=STAGES):
                offs_v = v0 + _aligned_range(BV, zero)
                state_VK = load_matrix(state_head_ptr, offs_v, V, offs_k, K)
                dstate_VK = load_matrix(dstate_head_ptr, offs_v, V, offs_k, K)
                e_VC = load_matrix(update_head_ptr, offs_v, V, offs_t, CHUNK)
                out_ptrs = _pair_pointers(do_head_ptr, stride_ot, dv_head_ptr, stride_dvt, offs_r, offs_v)
                out_RV = tl.load(out_ptrs, mask=tile_mask(offs_r % CHUNK, length, offs_v, V), other=0.0)
                scaled_RV = operand(out_RV.to(tl.float32) * f_r[:, None], DTYPE)
                if TRACE:
                    products = dot(state_VK, tl.trans(dstate_VK), products, PRECISION)
                else:
                    product_VK = state_VK.to(tl.float32) * dstate_VK.to(tl.float32)
                    products += tl.sum(tl.reshape(product_VK, [BV, BK // 8, 8]), 2)
                sum_RK = dot(scaled_RV, state_VK, sum_RK, PRECISION)
                part_CK = _dot_transposed(e_VC, dstate_VK, part_CK, PRECISION)
                z_RC = dot(out_RV, e_VC, z_RC, PRECISION)
                # Triton 3.6 leaves products in flight at the loop's end whose tiles it then loads anew, where a tile is
                # also read by other instructions: wrong dq and dk. The last product's result is used here, which ends
                # all of them.
                z_RC = z_RC * one
            if TRACE:
                offs_v = _aligned_range(BV, zero)
                products = tl.where(offs_v[:, None] == offs_v[None, :], products, 0.0)
            state_product = tl.sum(products)
            # Needed only after q's and k's products, but loads do not move up over barriers: 2.57 ms, and 2.68 there.
            gate_r = tl.load(factors + tl.where(of_key, 6 * CHUNK, 5 * CHUNK) + offs_r % CHUNK)
            beta = tl.load(factors + 3 * CHUNK + offs_t)
            column = tl.load(factors + 4 * CHUNK + offs_t)
            total = tl.load(gate_ptr + row * CHUNK + CHUNK - 1)
            k_CK = load_rows(k_head_ptr, stride_kt, length, offs_k, K, zero)
            apart: tl.constexpr = NORM and DTYPE == tl.float32
            if apart:  # the table then has the norms' logarithms alone
                gate_t = tl.load(gate_ptr + row * CHUNK + offs_t)
                part_CK = part_CK * tl.exp2((total - gate_t) - column)[:, None]
            else:
                part_CK = part_CK * tl.exp2(total - column)[:, None]
            written = tl.sum(k_CK.to(tl.float32) * part_CK, 1)
            right_CK += part_CK * beta[:, None]

            qk_ptrs = _pair_pointers(q_head_ptr, stride_qt, k_head_ptr, stride_kt, offs_r, offs_k)
            qk_RK = tl.load(qk_ptrs, mask=tile_mask(offs_r % CHUNK, length, offs_k, K), other=0.0)
            state_part_r = tl.sum(qk_RK.to(tl.float32) * sum_RK, 1)
            # The gate's share of D and W is taken from float32 here. Row and column sums then cancel exactly for pairs
            # on one side of a gate; sums over dq and dk would leave their rounding, which drowns a strong gate.
            pair_RC = tl.dot(qk_RK, tl.trans(k_CK), input_precision=PRECISION)
            causal = offs_r[:, None] - tl.where(of_key, CHUNK + 1, 0)[:, None] >= offs_t[None, :]
            exponent_RC = gate_r[:, None] - column[None, :]
            if apart:
                gates_r = tl.load(gate_ptr + row * CHUNK + offs_r % CHUNK)
                exponent_RC += gates_r[:, None] - gate_t[None, :]
            decay_RC = tl.exp2(tl.where(causal, exponent_RC, float("-inf")))
            own_r = tl.sum(tl.where(offs_r[:, None] == offs_t[None, :] + CHUNK, z_RC, 0.0), 1)
            z_RC = z_RC * tl.where(of_key, -1.0, scale)[:, None] * decay_RC
            pair_z_RC = pair_RC * z_RC
            column_sums = tl.sum(pair_z_RC, 0)
            dgate_r = state_part_r - product_r + tl.sum(pair_z_RC * beta[None, :], 1)
            z_op_RC = _rounded(z_RC * beta[None, :], DTYPE, PTX)
            product_r = state_part_r + tl.sum(pair_RC * z_op_RC.to(tl.float32), 1)
            right_CK = _dot_transposed(z_op_RC, qk_RK, right_CK, PRECISION)
            sum_RK = dot(z_op_RC, k_CK, sum_RK, PRECISION)

            # Stores come last: the compiler reuses the tiles loaded above only while nothing is written in between.
            partials = partial_ptr + row * PARTIALS * CHUNK
            tl.store(partials + offs_r, dgate_r)
            tl.store(partials + 2 * CHUNK + offs_t, column_sums)
            tl.store(partials + 3 * CHUNK + offs_t, written)
            tl.store(partials + 3 * CHUNK + offs_r, own_r, mask=of_key)
            tl.store(partials + 5 * CHUNK, state_product)

        # Read anew, so that nothing of it lives across the loop.
        batch, start, length = load_chunk(chunk_ptr, chunk)
        q_ptr += batch * stride_qb + start * stride_qt + head_k * stride_qh
        k_ptr += batch * stride_kb + start * stride_kt + head_k * stride_kh
        norm_ptr += (batch * T + start) * 2 * HK + head_k
        dq_ptr += batch * stride_dqb + start * stride_dqt + head_k // QR * stride_dqg + head_k % QR * stride_dqr
        dk_ptr += batch * stride_dkb + start * stride_dkt + head_k // KR * stride_dkg + head_k % KR * stride_dkr
        offs_k = tl.arange(0, BK)
        offs_r = tl.arange(0, ROWS)
        mask = tile_mask(offs_r % CHUNK, length, offs_k, K)
        right_RK = tl.reshape(tl.permute(tl.join(tl.zeros_like(right_CK), right_CK), [2, 0, 1]), [ROWS, BK])
        sum_RK += right_RK
        if NORM:
            qk_ptrs = _pair_pointers(q_ptr, stride_qt, k_ptr, stride_kt, offs_r, offs_k)
            qk32_RK = tl.load(qk_ptrs, mask=mask, other=0.0).to(tl.float32)
            norm_ptrs = norm_ptr + offs_r % CHUNK * 2 * HK + tl.where(offs_r < CHUNK, 0, HK)
            norm_r = tl.load(norm_ptrs, mask=offs_r % CHUNK < length, other=0.0)
            sum_RK -= qk32_RK * (norm_r * norm_r * tl.sum(qk32_RK * sum_RK, 1))[:, None]
        dqk_ptrs = _pair_pointers(dq_ptr, stride_dqt, dk_ptr, stride_dkt, offs_r, offs_k)
        tl.store(dqk_ptrs, operand(sum_RK, DTYPE), mask=mask)


@triton.jit
def _gate_gradients_kernel(
    g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr, chunk_ptr, gate_ptr, factor_ptr, partial_ptr,
    dg_ptr, dbeta_ptr, dgate_sum_ptr, T,
    HV: tl.constexpr, BH: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SIGMOID: tl.constexpr,
    DOUBLE: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    BLOCKS: tl.constexpr = (HV + BH - 1) // BH
    chunk = (tl.program_id(0) // BLOCKS).to(tl.int64)
    heads = tl.program_id(0) % BLOCKS * BH + tl.arange(0, BH)
    mask_h = heads < HV
    batch, start, length = load_chunk(chunk_ptr, chunk)
    offs_t = tl.arange(0, CHUNK)
    offs_g = (batch * T + start + offs_t[None, :]) * HV + heads[:, None]
    if length < 0:
        nothing = tl.zeros([BH, CHUNK], tl.float32)
        mask = mask_h[:, None] & (offs_t < -length)[None, :]
        tl.store(dg_ptr + offs_g, nothing.to(dg_ptr.dtype.element_ty), mask=mask)
        tl.store(dbeta_ptr + offs_g, nothing.to(dbeta_ptr.dtype.element_ty), mask=mask)
    if length > 0:
        rows = chunk * HV + heads
        stored = mask_h[:, None] & tl.full([1, CHUNK], True, tl.int1)
        mask = stored & (offs_t < length)[None, :]
        total = tl.load(gate_ptr + rows * CHUNK + CHUNK - 1, mask=mask_h, other=0.0)
        beta = tl.load(factor_ptr + (rows * FACTORS + 3)[:, None] * CHUNK + offs_t, mask=stored, other=0.0)
        partials = partial_ptr + rows[:, None] * (PARTIALS * CHUNK) + offs_t
        of_rows = tl.load(partials, mask=stored, other=0.0) + tl.load(partials + CHUNK, mask=stored, other=0.0)
        written = tl.load(partials + 3 * CHUNK, mask=stored, other=0.0)
        of_columns = tl.load(partials + 2 * CHUNK, mask=stored, other=0.0) + written
        square = beta * beta
        dbeta = tl.where(square < 1.0, 1.0 - square, 0.0) * of_columns
        own = tl.load(partials + 4 * CHUNK, mask=stored, other=0.0)
        dbeta += own * (beta / tl.where(square > 1.0, square, 1.0))
        state_product = tl.load(partial_ptr + (rows * PARTIALS + 5) * CHUNK, mask=mask_h, other=0.0)
        dgate = tl.where(mask, of_rows - beta * of_columns, 0.0)
        of_chunk = tl.sum(written * beta, 1) + tl.exp2(total) * state_product
        dgate = tl.where(mask, tl.cumsum(dgate, 1, reverse=True) + of_chunk[:, None], 0.0)
        if GATED:
            raw = tl.load(g_ptr + offs_g, mask=mask, other=0.0).to(tl.float32)
            if HAS_BIAS:
                raw += tl.load(dt_bias_ptr + heads, mask=mask_h, other=0.0).to(tl.float32)[:, None]
            rate = -tl.exp(tl.load(A_log_ptr + heads, mask=mask_h, other=0.0).to(tl.float32))[:, None]
            # The rate alone may overflow where the sigmoid is zero; a decay that does has a gradient of zero.
            decay = rate * softplus(raw)
            sums = dgate_sum_ptr + rows * 2
            tl.store(sums, tl.sum(tl.where(dgate == 0.0, 0.0, dgate * decay), 1), mask=mask_h)
            dgate = tl.where(dgate == 0.0, 0.0, dgate * (rate * sigmoid(raw)))
            tl.store(sums + 1, tl.sum(dgate, 1), mask=mask_h)
        tl.store(dg_ptr + offs_g, operand(dgate, dg_ptr.dtype.element_ty), mask=mask)
        if SIGMOID:
            raw = tl.load(beta_ptr + offs_g, mask=mask, other=0.0).to(tl.float32)
            dbeta = dbeta * sigmoid(raw) * sigmoid(-raw)
        if DOUBLE:
            dbeta = dbeta * 2.0
        tl.store(dbeta_ptr + offs_g, operand(dbeta, dbeta_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_sums_kernel(
    chunk_ptr, dgate_sum_ptr, dA_log_ptr, ddt_bias_ptr, NT,
    HV: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
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
    partials: Tensor, first_head: int, num_heads: int,
) -> None:  # fmt: skip
    """Fill dq, dk and the partial sums for a range of value heads (whole groups); dv is read, and zeroed past the end.

    `states` and `updates` hold all heads or only the range.
    """
    q, k = inputs.q, inputs.k
    BK = padded(sizes.K)
    config = _GRADIENTS[q.element_size(), max(BK, 128)]
    small = config._replace(block_v=min(config.block_v, 32))
    if sizes.K == sizes.V == 128 and q.element_size() == 2:
        config = _PIPELINED
    fits = q.element_size() == 2 and BK <= 64
    config = choose(config, small, _AMD, None if fits else _TENSOR_MEMORY[q.element_size(), max(BK, 128)])
    state_heads = states.shape[1]
    launch(
        _gradients_kernel, sizes.num_chunks * (num_heads * sizes.HK // sizes.HV),
        (do, q, k, chunks, norms, gates, factors, states, updates, dstates, dv, dq, dk, partials,
         options.scale, sizes.T, first_head, 0 if state_heads == sizes.HV else first_head, state_heads,
         *do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *dv.stride()[:4], *dq.stride()[:4], *dk.stride()[:4]),
        dict(HK=sizes.HK, HV=sizes.HV, HEADS=num_heads, K=sizes.K, V=sizes.V, BK=BK,
             BV=min(config.block_v, padded(sizes.V)), VR=dv.shape[3], QR=dq.shape[3], KR=dk.shape[3],
             NORM=options.use_qk_l2norm, STAGES=config.num_stages, PTX=not is_amd(), PRECISION=dot_precision(q.dtype)),
        config.num_warps, config.num_stages,
    )  # fmt: skip


def gate_gradients(
    inputs: Inputs, options: Options, sizes: Sizes, chunks: Tensor, gates: Tensor, factors: Tensor,
    partials: Tensor, dg: Tensor, dbeta: Tensor, dgate_sums: Tensor | None,
) -> None:  # fmt: skip
    """Fill dg and dbeta from the partial sums, and each chunk's contribution to dA_log and ddt_bias."""
    launch(
        _gate_gradients_kernel, sizes.num_chunks * triton.cdiv(sizes.HV, _GATE_HEADS),
        (inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, chunks, gates, factors, partials, dg, dbeta, dgate_sums,
         sizes.T),
        dict(HV=sizes.HV, BH=_GATE_HEADS, GATED=inputs.A_log is not None, HAS_BIAS=inputs.dt_bias is not None,
             SIGMOID=options.use_beta_sigmoid, DOUBLE=options.allow_neg_eigval),
        num_warps=4, num_stages=1,
    )  # fmt: skip


def gate_sums(sizes: Sizes, chunks: Tensor, dgate_sums: Tensor, dA_log: Tensor, ddt_bias: Tensor | None) -> None:
    """Sum the chunks' contributions to dA_log and ddt_bias, in a fixed order."""
    launch(
        _gate_sums_kernel, sizes.HV, (chunks, dgate_sums, dA_log, ddt_bias, sizes.num_chunks),
        dict(HV=sizes.HV, BLOCK=256, HAS_BIAS=ddt_bias is not None), num_warps=4, num_stages=1,
    )  # fmt: skip
