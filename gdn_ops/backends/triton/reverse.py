"""Stage 4, sequential and backwards over the chunks of a document: gradients of the state and of v.

    d_e^T = do^T P + (dS^T k^T) * f_2     gradient of the update e = E y; P and f_2 hold beta
    dv^T  = d_e^T + d_e^T E               E without its unit diagonal, or d_e^T E alone: as with y in forward.py
    dS^T <- 2^(G_C) dS^T + (do^T * f_3) q - (dv^T * f_1) k

dS^T [V, K] stays in the accumulator, as the state does in forward.py, and is written at each chunk's end (before the
chunk's own step). dv goes straight to its target, which may be columns of a packed row; stage 5 reads it back there.

The backward pass also needs the states and updates of the forward recurrence. Unless they were saved, programs of the
same launch recompute them: the two recurrences do not depend on each other, so side by side they fill the chip when
there are few heads, and even out over the SMs when there are many. Grid: 1 or 2 times documents * heads * (V / BV).
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.chunks import DOCUMENT_FIELDS
from gdn_ops.backends.triton.forward import forward_document
from gdn_ops.backends.triton.launch import Config, choose, dot_precision, has_tiles, launch, padded, uses_tma
from gdn_ops.backends.triton.primitives import (
    CHUNK,
    FACTORS,
    dot,
    load_rows,
    operand,
    row_tiles,
    square_tiles,
    store_matrix,
    store_rows,
    trip_count,
)
from gdn_ops.shapes import Inputs, Sizes

# H200, 16/48 heads of 128, 32768 tokens in documents of 9000, 3001, 8192, 5575, 7000 (ms, both recurrences, two turns,
# as (warps, stages, block)). By TMA: (8, 3, 128) 1.29, with states and state gradients stored by TMA too 1.46; the
# latter as (4, 3, 64) 1.65, (8, 2, 128) 1.68, (4, 2, 64) 2.06. By pointers: (8, 3, 128) 1.52; (8, 2, 128) 1.75;
# (4, 2, 64) 1.85; (4, 1, 64) 2.44; (4, 3, 64) 2.52.
_REVERSE = {
    (2, 128): Config(num_warps=8, num_stages=3, block_v=128),
    (2, 256): Config(num_warps=8, num_stages=2, block_v=64),
    (4, 128): Config(num_warps=8, num_stages=1, block_v=16),
    (4, 256): Config(num_warps=8, num_stages=1, block_v=16),
}
"""By operand bytes and padded K (128: up to 128)."""
_TENSOR_MEMORY = {
    (2, 128): Config(num_warps=4, num_stages=2, block_v=64),
    (2, 256): Config(num_warps=8, num_stages=2, block_v=32),
    (4, 128): Config(num_warps=8, num_stages=1, block_v=16),
    (4, 256): Config(num_warps=8, num_stages=1, block_v=16),
}
"""The same for capability 10. Triton 3.6 needs 544 columns of tensor memory for heads of 128 in blocks of 128, and 576
for heads of 256 in blocks of 64. Blocks below 64 take no tensor memory. Compiled for sm_100, not run."""
_AMD = Config(num_warps=4, num_stages=1, block_v=32)
"""64 KB of shared memory; compiled for gfx942, not run."""
TMA_BYTES = (5 * 128, 8 * 128)
"""Scratch of a program's descriptors (q, k, do, solve, scores; and k, v, solve of the forward recurrence), without and
with recomputation."""


@triton.jit
def _reverse_document(
    program, do_ptr, q_ptr, k_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
    dfinal_ptr, dinitial_ptr, dstate_ptr, dv_ptr, first_head,
    stride_ob, stride_ot, stride_oh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vg, stride_vr,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VR: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_DINITIAL: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run one (document, value head, block of V); heads are first_head .. first_head + HEADS - 1 of HV."""
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    offs_v = (program % NV) * BV + tl.arange(0, BV)
    local_head = (program // NV % HEADS).to(tl.int64)
    head = first_head + local_head
    document_ptr += program // (NV * HEADS) * DOCUMENT_FIELDS
    head_k = head // (HV // HK)
    document = tl.load(document_ptr).to(tl.int64)
    batch = tl.load(document_ptr + 1).to(tl.int64)
    first = tl.load(document_ptr + 2)
    end = tl.load(document_ptr + 3)
    first_chunk = tl.load(document_ptr + 4).to(tl.int64)
    num_chunks = (end - first + CHUNK - 1) // CHUNK

    offs_t = tl.arange(0, CHUNK)
    offs_k = tl.arange(0, BK)
    mask_vk = (offs_v < V)[:, None] & (offs_k < K)[None, :]
    square = offs_t[:, None] * CHUNK + offs_t[None, :]
    state_kv = (document * HV + head) * K * V + offs_v[:, None] + offs_k[None, :] * V
    do_ptr += batch * stride_ob + head * stride_oh
    q_ptr += batch * stride_qb + head_k * stride_qh
    k_ptr += batch * stride_kb + head_k * stride_kh
    dv_ptr += batch * stride_vb + head // VR * stride_vg + head % VR * stride_vr

    if TMA:
        num_tokens = tl.maximum(end - first, 1)
        q_tiles = row_tiles(q_ptr, stride_qt, first, num_tokens, K, BK)
        k_tiles = row_tiles(k_ptr, stride_kt, first, num_tokens, K, BK)
        do_tiles = row_tiles(do_ptr, stride_ot, first, num_tokens, V, BV)
        solve_tiles = square_tiles(solve_ptr, first_chunk, num_chunks, head, HV)
        score_tiles = square_tiles(score_ptr, first_chunk, num_chunks, head, HV)
    dstate_VK = tl.zeros([BV, BK], tl.float32)
    if HAS_DFINAL:
        dstate_VK += tl.load(dfinal_ptr + state_kv, mask=mask_vk, other=0.0).to(tl.float32)
    diagonal_ptr = solve_ptr + ((first_chunk + num_chunks - 1) * HV + head) * CHUNK * CHUNK
    diagonal = tl.load(diagonal_ptr, mask=num_chunks > 0, other=0.0)
    for step in tl.range(0, trip_count(num_chunks), num_stages=STAGES):
        c = num_chunks - 1 - step
        start = (first + c * CHUNK).to(tl.int64)
        length = end - first - c * CHUNK
        row = (first_chunk + c) * HV + head
        if TMA:
            k_CK = k_tiles.load([c * CHUNK, 0])
            q_CK = q_tiles.load([c * CHUNK, 0])
            do_CV = do_tiles.load([c * CHUNK, program % NV * BV])
            solve_CC = solve_tiles.load([c * HV * CHUNK, 0])
            score_CC = score_tiles.load([c * HV * CHUNK, 0])
        else:
            k_CK = load_rows(k_ptr + start * stride_kt, stride_kt, length, offs_k, K)
            q_CK = load_rows(q_ptr + start * stride_qt, stride_qt, length, offs_k, K)
            do_CV = load_rows(do_ptr + start * stride_ot, stride_ot, length, offs_v, V)
            solve_CC = tl.load(solve_ptr + row * CHUNK * CHUNK + square)
            score_CC = tl.load(score_ptr + row * CHUNK * CHUNK + square)
        factors = factor_ptr + row * FACTORS * CHUNK + offs_t
        f_1 = tl.load(factors)
        f_2 = tl.load(factors + CHUNK)
        f_3 = tl.load(factors + 2 * CHUNK)
        total = tl.load(gate_ptr + row * CHUNK + CHUNK - 1)

        dstate_op_VK = operand(dstate_VK, DTYPE)
        dstate_row_ptr = dstate_ptr + ((first_chunk + c) * HEADS + local_head) * V * K
        store_matrix(dstate_row_ptr, offs_v, V, offs_k, K, dstate_op_VK)
        do_VC = tl.trans(do_CV)
        de_VC = tl.dot(dstate_op_VK, tl.trans(k_CK), input_precision=PRECISION) * f_2[None, :]
        de_VC = dot(do_VC, score_CC, de_VC, PRECISION)
        dv_VC = dot(operand(de_VC, DTYPE), solve_CC, de_VC * (1.0 - diagonal.to(tl.float32)), PRECISION)
        diagonal_ptr -= HV * CHUNK * CHUNK
        diagonal = tl.load(diagonal_ptr, mask=c > 0, other=0.0)
        dstate_VK = dstate_VK * tl.exp2(total)
        dstate_VK = dot(operand(do_VC.to(tl.float32) * f_3[None, :], DTYPE), q_CK, dstate_VK, PRECISION)
        dstate_VK = dot(operand(dv_VC * -f_1[None, :], DTYPE), k_CK, dstate_VK, PRECISION)
        store_rows(dv_ptr + start * stride_vt, stride_vt, length, offs_v, V, tl.trans(dv_VC))
    if HAS_DINITIAL:
        tl.store(dinitial_ptr + state_kv, dstate_VK.to(dinitial_ptr.dtype.element_ty), mask=mask_vk)


@triton.jit
def _reverse_kernel(
    do_ptr, q_ptr, k_ptr, v_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
    initial_ptr, dfinal_ptr, dinitial_ptr, dstate_ptr, dv_ptr, state_ptr, update_ptr,
    T, first_head,
    stride_ob, stride_ot, stride_oh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_dvb, stride_dvt, stride_dvg, stride_dvr,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, VR: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_DFINAL: tl.constexpr,
    HAS_DINITIAL: tl.constexpr, RECOMPUTE: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    # In launch order: a document's state gradients, of all heads, which take longer; then its states; then the next, a
    # shorter document. What takes longest starts first, so that little is left to run alone at the end.
    program = tl.program_id(0)
    reverse = program >= 0
    if RECOMPUTE:
        PROGRAMS: tl.constexpr = HEADS * ((V + BV - 1) // BV)
        reverse = program % (2 * PROGRAMS) < PROGRAMS
        program = program // (2 * PROGRAMS) * PROGRAMS + program % PROGRAMS
    if reverse:
        _reverse_document(
            program, do_ptr, q_ptr, k_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
            dfinal_ptr, dinitial_ptr, dstate_ptr, dv_ptr, first_head,
            stride_ob, stride_ot, stride_oh, stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
            stride_dvb, stride_dvt, stride_dvg, stride_dvr,
            HK, HV, HEADS, K, V, BK, BV, VR, HAS_DFINAL, HAS_DINITIAL, STAGES, TMA, PRECISION,
        )  # fmt: skip
    elif RECOMPUTE:
        forward_document(
            program, q_ptr, k_ptr, v_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
            initial_ptr, None, None, state_ptr, update_ptr, T, first_head, first_head, HEADS,
            stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
            HK, HV, HEADS, K, V, BK, BV, HAS_INITIAL, False, False, True, STAGES, TMA, PRECISION,
        )  # fmt: skip


def reverse(
    do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, sizes: Sizes, documents: Tensor, gates: Tensor,
    factors: Tensor, inverse: Tensor, score_matrix: Tensor, dinitial: Tensor | None, dstates: Tensor, dv: Tensor,
    states: Tensor | None, updates: Tensor | None, first_head: int, num_heads: int,
) -> None:  # fmt: skip
    """Fill dstates, dv and dinitial for a range of value heads; with `states`, recompute states and updates too."""
    q, k, v = inputs.q, inputs.k, inputs.v
    BK = padded(sizes.K)
    config = _REVERSE[q.element_size(), max(BK, 128)]
    tensor_memory = _TENSOR_MEMORY[q.element_size(), max(BK, 128)]
    # With two stages float32 heads of 256 take 165 KB, more than the 163 of compute capability 8.0, and those of 128
    # take 101 KB, more than the 99 of 8.6, 8.9 and 12.0; with one stage 64 and 32 KB.
    small = Config(num_warps=4, num_stages=2 if q.element_size() == 2 else 1, block_v=min(config.block_v, 64))
    config = choose(config, small, _AMD, tensor_memory)
    BV = min(config.block_v, padded(sizes.V))
    recompute = states is not None
    initial = inputs.initial_state
    programs = sizes.N * num_heads * triton.cdiv(sizes.V, BV)
    launch(
        _reverse_kernel, programs * (1 + recompute),
        (do, q, k, v, inverse, score_matrix, gates, factors, documents,
         initial, dfinal_state, dinitial, dstates, dv, states, updates,
         sizes.T, first_head, *do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dv.stride()[:4]),
        dict(HK=sizes.HK, HV=sizes.HV, HEADS=num_heads, K=sizes.K, V=sizes.V, BK=BK, BV=BV, VR=dv.shape[3],
             HAS_INITIAL=initial is not None, HAS_DFINAL=dfinal_state is not None, HAS_DINITIAL=dinitial is not None,
             RECOMPUTE=recompute, STAGES=config.num_stages,
             TMA=has_tiles(sizes, q) and uses_tma(sizes, q, k, v, do), PRECISION=dot_precision(q.dtype)),
        config.num_warps, config.num_stages,
    )  # fmt: skip
