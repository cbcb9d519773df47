"""Stage 3, sequential over the chunks of a document: states, updates and outputs.

    kS^T = S^T k^T                        [V, C]
    y^T  = v^T - kS^T * f_1               f_1 = 2^G r_k
    e^T  = y^T + y^T E^T                  E without its unit diagonal, or y^T E^T alone (solve.py)
    o^T  = (S^T q^T) * f_3 + e^T P^T      f_3 = scale 2^G r_q; P holds beta (scores.py)
    S^T <- 2^(G_C) S^T + (e^T * f_2) k    f_2 = 2^(G_C - G) r_k beta

The state is kept transposed, [V, K], in the accumulator of the tensor cores: every left operand above is the previous
accumulator, every right operand a tile as it lies in memory, so the chain from chunk to chunk never goes through shared
memory, and the columns of S^T [V, K] split into independent blocks of V.

Where a chunk's keys are nearly parallel E has its diagonal, so that all of e is made of the rounded y: sums of e over
the chunk, which become its outputs and state, cancel there, and what the rounding of y left with them. Otherwise y is
added unrounded, so that e has its full precision.

Two uses: the forward pass writes o (and, if they are saved, S and e); the backward pass writes S and e only.
Grid: documents * HV * (V / BV) programs.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.chunks import DOCUMENT_FIELDS
from gdn_ops.backends.triton.launch import Config, choose, dot_precision, has_tiles, launch, padded, uses_tma
from gdn_ops.backends.triton.primitives import (
    CHUNK,
    FACTORS,
    dot,
    load_columns,
    load_rows,
    operand,
    row_tiles,
    square_tiles,
    store_matrix,
    store_rows,
    trip_count,
)
from gdn_ops.shapes import Inputs, Sizes

# H200, 16/48 heads of 128, 32768 tokens in documents of 9000, 3001, 8192, 5575, 7000 (ms, this kernel as (warps,
# stages, block)). By TMA: (8, 3, 128) 0.564; (4, 2, 64) 0.599; (4, 3, 64) 0.614; (8, 2, 128) 0.703. By pointers:
# (4, 2, 64) 0.684; (8, 2, 128) 0.769; (8, 3, 128) 0.778; (8, 4, 128) 0.822; (4, 3, 64) 1.246 (one program an SM).
_TILED = Config(num_warps=8, num_stages=3, block_v=128)
"""Heads of 128 in 16 bits on Hopper. Operands that TMA cannot read are read by pointers with the same numbers, so that
both take the same steps."""
TMA_BYTES = 5 * 128
"""Scratch of a program's descriptors (q, k, v, solve, scores)."""
_FORWARD = {
    (2, 128): Config(num_warps=4, num_stages=2, block_v=64),
    (2, 256): Config(num_warps=8, num_stages=2, block_v=64),
    (4, 128): Config(num_warps=8, num_stages=1, block_v=16),
    (4, 256): Config(num_warps=8, num_stages=1, block_v=16),
}
"""By operand bytes and padded K (128: up to 128)."""
_AMD = Config(num_warps=4, num_stages=1, block_v=32)
"""64 KB of shared memory; compiled for gfx942, not run."""


@triton.jit
def forward_document(
    program, q_ptr, k_ptr, v_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
    initial_ptr, final_ptr, o_ptr, state_ptr, update_ptr,
    T, first_head, state_first_head, state_heads,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    HK: tl.constexpr, HV: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, WRITE_O: tl.constexpr,
    WRITE_STATES: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run one (document, value head, block of V); heads are first_head .. first_head + HEADS - 1 of HV."""
    DTYPE: tl.constexpr = k_ptr.dtype.element_ty
    NV: tl.constexpr = (V + BV - 1) // BV
    offs_v = (program % NV) * BV + tl.arange(0, BV)
    head = (first_head + program // NV % HEADS).to(tl.int64)
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
    q_ptr += batch * stride_qb + head_k * stride_qh
    k_ptr += batch * stride_kb + head_k * stride_kh
    v_ptr += batch * stride_vb + head * stride_vh

    if TMA:
        num_tokens = tl.maximum(end - first, 1)
        k_tiles = row_tiles(k_ptr, stride_kt, first, num_tokens, K, BK)
        v_tiles = row_tiles(v_ptr, stride_vt, first, num_tokens, V, BV)
        solve_tiles = square_tiles(solve_ptr, first_chunk, num_chunks, head, HV)
        if WRITE_O:
            q_tiles = row_tiles(q_ptr, stride_qt, first, num_tokens, K, BK)
            score_tiles = square_tiles(score_ptr, first_chunk, num_chunks, head, HV)
    state_VK = tl.zeros([BV, BK], tl.float32)
    if HAS_INITIAL:
        state_VK += tl.load(initial_ptr + state_kv, mask=mask_vk, other=0.0).to(tl.float32)
    # The diagonal of a chunk's E as it is stored, 0 or 1, is its first element.
    diagonal_ptr = solve_ptr + (first_chunk * HV + head) * CHUNK * CHUNK
    diagonal = tl.load(diagonal_ptr, mask=num_chunks > 0, other=0.0)
    for c in tl.range(0, trip_count(num_chunks), num_stages=STAGES):
        start = (first + c * CHUNK).to(tl.int64)
        length = end - first - c * CHUNK
        row = (first_chunk + c) * HV + head
        if TMA:
            k_CK = k_tiles.load([c * CHUNK, 0])
            v_VC = tl.trans(v_tiles.load([c * CHUNK, program % NV * BV]))
            solve_CC = solve_tiles.load([c * HV * CHUNK, 0])
        else:
            k_CK = load_rows(k_ptr + start * stride_kt, stride_kt, length, offs_k, K)
            v_VC = load_columns(v_ptr + start * stride_vt, stride_vt, length, offs_v, V)
            solve_CC = tl.load(solve_ptr + row * CHUNK * CHUNK + square)
        factors = factor_ptr + row * FACTORS * CHUNK + offs_t
        f_1 = tl.load(factors)
        f_2 = tl.load(factors + CHUNK)
        total = tl.load(gate_ptr + row * CHUNK + CHUNK - 1)
        # The next chunk's, ahead: the compiler keeps no stages of a scalar, and e would wait for it.
        diagonal_ptr += HV * CHUNK * CHUNK
        next_diagonal = tl.load(diagonal_ptr, mask=c + 1 < num_chunks, other=0.0)

        state_op_VK = operand(state_VK, DTYPE)
        if WRITE_STATES:
            state_row = (first_chunk + c) * state_heads + head - state_first_head
            store_matrix(state_ptr + state_row * V * K, offs_v, V, offs_k, K, state_op_VK)
        y_VC = v_VC.to(tl.float32)
        y_VC -= tl.dot(state_op_VK, tl.trans(k_CK), input_precision=PRECISION) * f_1[None, :]
        e_VC = dot(operand(y_VC, DTYPE), tl.trans(solve_CC), y_VC * (1.0 - diagonal.to(tl.float32)), PRECISION)
        state_VK = dot(operand(e_VC * f_2[None, :], DTYPE), k_CK, state_VK * tl.exp2(total), PRECISION)
        if WRITE_STATES:
            store_matrix(update_ptr + state_row * V * CHUNK, offs_v, V, offs_t, CHUNK, e_VC)
        if WRITE_O:
            if TMA:
                q_CK = q_tiles.load([c * CHUNK, 0])
                score_CC = score_tiles.load([c * HV * CHUNK, 0])
            else:
                q_CK = load_rows(q_ptr + start * stride_qt, stride_qt, length, offs_k, K)
                score_CC = tl.load(score_ptr + row * CHUNK * CHUNK + square)
            f_3 = tl.load(factors + 2 * CHUNK)
            o_VC = tl.dot(state_op_VK, tl.trans(q_CK), input_precision=PRECISION) * f_3[None, :]
            o_VC = dot(operand(e_VC, DTYPE), tl.trans(score_CC), o_VC, PRECISION)
            o_row_ptr = o_ptr + ((batch * T + start) * HV + head) * V
            store_rows(o_row_ptr, HV * V, length, offs_v, V, tl.trans(o_VC))
        diagonal = next_diagonal
    if HAS_FINAL:
        tl.store(final_ptr + state_kv, state_VK, mask=mask_vk)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
    initial_ptr, final_ptr, o_ptr, state_ptr, update_ptr, T,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, WRITE_STATES: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    forward_document(
        tl.program_id(0), q_ptr, k_ptr, v_ptr, solve_ptr, score_ptr, gate_ptr, factor_ptr, document_ptr,
        initial_ptr, final_ptr, o_ptr, state_ptr, update_ptr, T, 0, 0, HV,
        stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
        HK, HV, HV, K, V, BK, BV, HAS_INITIAL, HAS_FINAL, True, WRITE_STATES, STAGES, TMA, PRECISION,
    )  # fmt: skip


def forward(
    inputs: Inputs, sizes: Sizes, documents: Tensor, gates: Tensor, factors: Tensor, inverse: Tensor,
    score_matrix: Tensor, o: Tensor, final_state: Tensor | None, states: Tensor | None, updates: Tensor | None,
) -> None:  # fmt: skip
    """Fill o, and what else is given of the final state, the states and the updates."""
    q, k, v = inputs.q, inputs.k, inputs.v
    BK = padded(sizes.K)
    tiled = has_tiles(sizes, q)
    config = _FORWARD[q.element_size(), max(BK, 128)]
    config = _TILED if tiled else choose(config, config, _AMD)
    BV = min(config.block_v, padded(sizes.V))
    initial = inputs.initial_state
    launch(
        _forward_kernel, sizes.N * sizes.HV * triton.cdiv(sizes.V, BV),
        (q, k, v, inverse, score_matrix, gates, factors, documents,
         initial, final_state, o, states, updates,
         sizes.T, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        dict(HK=sizes.HK, HV=sizes.HV, K=sizes.K, V=sizes.V, BK=BK, BV=BV, HAS_INITIAL=initial is not None,
             HAS_FINAL=final_state is not None, WRITE_STATES=states is not None, STAGES=config.num_stages,
             TMA=tiled and uses_tma(sizes, q, k, v), PRECISION=dot_precision(q.dtype)),
        config.num_warps, config.num_stages,
    )  # fmt: skip
