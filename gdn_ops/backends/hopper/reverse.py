"""The recurrence backwards: the gradient of the state at every chunk's end, and of the values.

As in `forward`, a segment is a document or a part of one, and the state's gradient lives transposed, dS^T [V,K], in
float32 accumulators:

    du^T = do^T P + (dS^T k^T) * factor_1;   dv^T = du^T * factor_3 + du^T A;
    dS^T = factor_4 dS^T + (do^T * factor_2) q - (dv^T * factor_0) k

dS is stored (rounded) before a chunk's own contribution: the gradient of the state at the chunk's END. What `epilogue`
needs for dbeta, sum_v dv v, is taken here, where dv is still float32.

`begin_reverse` runs the documents' last segments and, in other programs of the same launch and without outputs, every
inner segment's dH, from zero; `reverse` then runs the others from the gradients at their cuts.

Where a backward goes through documents in parts, `reverse` runs on one part after the other, the last one first, and
hands dS on through memory: in float32, as it is in registers.

Grid: one program a segment and value head, longest segments first; two consumer warpgroups (halves of V), one producer
warp. On chip: dS^T in registers; tiles of q, k, v, do, A, P and factors, `STAGES` deep, in shared memory.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper import tma
from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.forward import load_run
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.tma import async_load, async_store, clear_rows, cleared, store_wait
from gdn_ops.shapes import CHUNK

# Letters: C chunk length (64), D head size (K = V = 128), M value rows of one warpgroup (64), H heads of one launch
# and of the scratch tensors, HV value heads, R = HV / HK.

# H200, 16/48 heads, 32768 tokens in five documents: 0.65 ms without v (prototype, 2026-11, triton 3.6). A third stage
# does not fit into shared memory.
_STAGES = 2
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24

NUM_VALUE_SUMS = 8
"""Partial sums of dv v a token: one a warp of the consumers, stored in rows 0..7 of `sums`."""

_C = gl.constexpr(64)
_D = gl.constexpr(128)
_M = gl.constexpr(64)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc,
    q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
    first, chunk0, num_chunks, runs, h, q_column, k_column, v_column, do_column,
    HV: gl.constexpr, OUTPUT: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch a run's tiles, last chunk first, as soon as both consumers have read what they replace."""
    BYTES: gl.constexpr = 3 * _C * _D * 2 + 2 * _C * _C * 2 + 4 * _C * 4
    for i in range(num_chunks):
        c = num_chunks - 1 - i
        stage = i % STAGES
        token = first + c * _C
        row = (chunk0 + c) * HV + h
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        if OUTPUT:
            mbarrier.expect(bar, BYTES + _C * _D * 2, pred=runs != 0)
            mbarrier.expect(bar, BYTES, pred=runs == 0)
        else:
            mbarrier.expect(bar, BYTES)
        async_load(k_desc, [token, k_column], bar, k_s.index(stage))
        async_load(scores_desc, [row * _C, 0], bar, scores_s.index(stage))
        async_load(do_desc, [token, do_column], bar, do_s.index(2 * stage))
        async_load(do_desc, [token, do_column + _M], bar, do_s.index(2 * stage + 1))
        async_load(factors_desc, [row * FACTORS, 0], bar, factors_s.index(stage))
        async_load(solve_desc, [row * _C, 0], bar, solve_s.index(stage))
        async_load(q_desc, [token, q_column], bar, q_s.index(stage))
        if OUTPUT:
            async_load(v_desc, [token, v_column], bar, v_s.index(2 * stage), pred=runs != 0)
            async_load(v_desc, [token, v_column + _M], bar, v_s.index(2 * stage + 1), pred=runs != 0)


@gluon.jit
def consume(
    half: gl.constexpr, dstates_desc, dv_desc, dstate_s, dv_s,
    q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
    factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
    first, last, chunk0, slot0, num_chunks, document, start, stop, h, local, dv_stride_t, dv_column,
    HV: gl.constexpr, H: gl.constexpr, SUMS: gl.constexpr, HAS_CUTS: gl.constexpr, OUTPUT: gl.constexpr,
    BEGINS: gl.constexpr, HANDS_ON: gl.constexpr, HAS_DFINAL: gl.constexpr, HAS_DINITIAL: gl.constexpr,
    FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half of V of a run; dstate_s [M,D] and dv_s [C,M] are tiles of its own where OUTPUT."""
    dtype: gl.constexpr = k_s.dtype
    L_MK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    L_MC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OPERAND_MC: gl.constexpr = gl.DotOperandLayout(0, L_MC, 2)
    OPERAND_MK: gl.constexpr = gl.DotOperandLayout(0, L_MK, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # [warp, row, token] with a thread's rows in its registers: the accumulators' layout, whose rows lie across lanes,
    # with rows and tokens exchanged. Adding up rows after that exchange takes a third of the shuffles.
    L_WRC: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 8, 64],
    )
    zero_MC = gl.full([_M, _C], 0.0, gl.float32, L_MC)
    value = half * _M + gl.arange(0, _M, gl.SliceLayout(1, L_MK))
    key = gl.arange(0, _D, gl.SliceLayout(0, L_MK))
    state_at = (document.to(gl.int64) * HV + h) * (_D * _D)
    transposed_at = key[None, :] * _D + value[:, None]
    natural_at = value[:, None] * _D + key[None, :]
    everywhere = natural_at >= 0
    if HANDS_ON:
        # Branches, not masks: with masks the addresses stay in registers from here to the store at the end.
        dstate_MK = gl.full([_M, _D], 0.0, gl.float32, L_MK)
        source_ptr = cut_states_ptr
        if HAS_DFINAL:
            if stop < 0:
                source_ptr = dfinal_ptr
            if document >= 0:
                dstate_MK = gl.load(source_ptr + state_at + transposed_at)
        else:
            if stop >= 0:
                dstate_MK = gl.load(source_ptr + state_at + transposed_at)
    elif HAS_CUTS:
        cut_at = (stop.to(gl.int64) * HV + h) * (_D * _D)
        dstate_MK = gl.load(cut_states_ptr + cut_at + natural_at, mask=everywhere & (stop >= 0), other=0.0)
    else:
        dstate_MK = gl.full([_M, _D], 0.0, gl.float32, L_MK)
    if HAS_DFINAL and not HANDS_ON:
        ends_here = everywhere & (stop < 0) & (document >= 0)
        dstate_MK = gl.load(dfinal_ptr + state_at + transposed_at, mask=ends_here, other=dstate_MK)
    end_ptr = factors_ptr + (chunk0.to(gl.int64) * HV + h) * (FACTORS * _C) + 4 * _C
    decay = gl.load(end_ptr + (num_chunks - 1).to(gl.int64) * (HV * FACTORS * _C), mask=num_chunks > 0, other=0.0)
    for i in range(num_chunks):
        c = num_chunks - 1 - i
        stage = i % STAGES
        token = first + c * _C
        row = (slot0 + c) * H + local
        next_decay = gl.load(end_ptr + gl.maximum(c - 1, 0).to(gl.int64) * (HV * FACTORS * _C))
        rounded_MK = dstate_MK.to(dtype)
        operand_MK = gl.convert_layout(rounded_MK, OPERAND_MC)
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        k = k_s.index(stage)
        do_T = do_s.index(2 * stage + half).permute((1, 0))
        if token + _C > last:
            clear_rows(k, last - token, 4)
            clear_rows(q_s.index(stage), last - token, 4)
            clear_rows(do_s.index(2 * stage + half), last - token, 4)
            cleared()
        from_state_MC = warpgroup_mma(operand_MK, k.permute((1, 0)), zero_MC, use_acc=False, is_async=True)
        du_MC = warpgroup_mma(do_T, scores_s.index(stage), zero_MC, use_acc=False, is_async=True)
        if OUTPUT:
            store_wait(0)
            dstate_s.store(rounded_MK)
            fence_async_shared()
            async_store(dstates_desc, [row * _D + half * _M, 0], dstate_s)
        factors = factors_s.index(stage)
        write_C = factors.slice(1, 1).load(L_MC)
        query_C = factors.slice(2, 1).load(L_MC)
        from_o_MC = gl.convert_layout((do_T.load(L_MC).to(gl.float32) * query_C).to(dtype), OPERAND_MK)
        from_state_MC, du_MC = warpgroup_mma_wait(0, deps=[from_state_MC, du_MC])
        du_MC = du_MC + from_state_MC * write_C
        dv_MC = warpgroup_mma(
            gl.convert_layout(du_MC.to(dtype), OPERAND_MC), solve_s.index(stage),
            du_MC * factors.slice(3, 1).load(L_MC), is_async=True,
        )  # fmt: skip
        dstate_MK = dstate_MK * decay
        dstate_MK = warpgroup_mma(from_o_MC, q_s.index(stage), dstate_MK, is_async=True)
        read_C = factors.slice(0, 1).load(L_MC)
        dv_MC = warpgroup_mma_wait(1, deps=[dv_MC])
        from_v_MC = gl.convert_layout((dv_MC * (-read_C)).to(dtype), OPERAND_MK)
        dstate_MK = warpgroup_mma(from_v_MC, k, dstate_MK, is_async=True)
        if OUTPUT:
            store_wait(0)
            dv_s.permute((1, 0)).store(dv_MC.to(dtype))
            if token + _C <= last:
                fence_async_shared()
                async_store(dv_desc, [token, dv_column + half * _M], dv_s)
            else:
                offs_t = token + gl.arange(0, _C, gl.SliceLayout(1, ROWS))
                offs_v = dv_column + half * _M + gl.arange(0, _M, gl.SliceLayout(0, ROWS))
                at = dv_ptr + offs_t.to(gl.int64)[:, None] * dv_stride_t + offs_v[None, :]
                gl.store(at, dv_s.load(ROWS), mask=(offs_t < last)[:, None] & (offs_v >= 0)[None, :])
            # sum_v dv v: each warp adds up its own 16 rows; `epilogue` adds the eight warps' sums.
            v_MC = v_s.index(2 * stage + half).permute((1, 0)).load(L_MC).to(gl.float32)
            pairs_WRC = gl.sum(gl.reshape(dv_MC * v_MC, [4, 2, 8, _C]), 1)
            sum_WC = gl.sum(gl.convert_layout(pairs_WRC, L_WRC), 1)
            L_WC: gl.constexpr = sum_WC.type.layout
            warp = half * 4 + gl.arange(0, 4, gl.SliceLayout(1, L_WC))
            at_C = gl.arange(0, _C, gl.SliceLayout(0, L_WC))
            gl.store(sums_ptr + row.to(gl.int64) * (SUMS * _C) + warp[:, None] * _C + at_C[None, :], sum_WC)
        dstate_MK = warpgroup_mma_wait(0, deps=[dstate_MK])
        # By now every warp has used what it loaded: what it has stored, and products that have been waited for, are
        # made of it. Triton puts a barrier before an arrival.
        mbarrier.arrive(empty.index(stage), count=1)
        decay = next_decay
    if BEGINS:
        cut_at = (start.to(gl.int64) * HV + h) * (_D * _D) + natural_at
        gl.store(cut_states_ptr + cut_at, dstate_MK, mask=everywhere & (start >= 0))
    if HANDS_ON:
        target_ptr = cut_states_ptr
        if HAS_DINITIAL:
            if start < 0:
                target_ptr = dinitial_ptr
            if document >= 0:
                gl.store(target_ptr + state_at + transposed_at, dstate_MK)
        else:
            if start >= 0:
                gl.store(target_ptr + state_at + transposed_at, dstate_MK)
    elif HAS_DINITIAL:
        gl.store(dinitial_ptr + state_at + transposed_at, dstate_MK, mask=everywhere & (start < 0) & (document >= 0))
    store_wait(0)


@gluon.jit
def _consume(
    half: gl.constexpr, dstates_desc, dv_desc, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
    factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
    first, last, chunk0, slot0, num_chunks, document, start, stop, runs, h, local, dv_stride_t, dv_column,
    HV: gl.constexpr, H: gl.constexpr, SUMS: gl.constexpr, HAS_CUTS: gl.constexpr, OUTPUT: gl.constexpr,
    BEGINS: gl.constexpr, HANDS_ON: gl.constexpr, HAS_DFINAL: gl.constexpr, HAS_DINITIAL: gl.constexpr,
    FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dstate_s = k_s
    dv_s = k_s
    if OUTPUT:
        dstate_s = gl.allocate_shared_memory(k_s.dtype, [_M, _D], tma.TILE_16BIT)
        dv_s = gl.allocate_shared_memory(k_s.dtype, [_C, _M], tma.TILE_16BIT)
    if runs != 0:
        consume(
            half, dstates_desc, dv_desc, dstate_s, dv_s, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
            factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, h, local, dv_stride_t, dv_column,
            HV, H, SUMS, HAS_CUTS, OUTPUT, BEGINS, HANDS_ON, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
        )  # fmt: skip
    elif BEGINS:
        consume(
            half, dstates_desc, dv_desc, dstate_s, dv_s, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
            factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, h, local, dv_stride_t, dv_column,
            HV, H, SUMS, False, False, True, False, False, False, FACTORS, STAGES,
        )  # fmt: skip


@gluon.jit
def _reverse_kernel(
    q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc, dstates_desc, dv_desc,
    factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr, segments_ptr,
    q_stride_h, k_stride_h, v_stride_h, do_stride_h, dv_stride_t, dv_stride_g, dv_stride_r, dv_group, first_head,
    R: gl.constexpr, HV: gl.constexpr, H: gl.constexpr, SUMS: gl.constexpr, HAS_CUTS: gl.constexpr,
    OUTPUT: gl.constexpr, BEGINS: gl.constexpr, HANDS_ON: gl.constexpr, HAS_DFINAL: gl.constexpr,
    HAS_DINITIAL: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = tma.TILE_16BIT
    local = gl.program_id(0) % H
    segment_ptr = segments_ptr + gl.program_id(0) // H * 8
    h = first_head + local
    q_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _D], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _D], TILE)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES if OUTPUT else 1, _C, _M], TILE)
    do_s = gl.allocate_shared_memory(dtype, [2 * STAGES, _C, _M], TILE)
    solve_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _C], TILE)
    scores_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _C], TILE)
    factors_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4, _C], tma.TILE_FLOAT32)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    wait_for_earlier(EARLY)
    first, last, chunk0, num_chunks, document, start, stop, slot0 = load_run(segment_ptr)
    # Which programs compute what `reverse` returns; of the others some have no work, the rest hand on dH.
    runs = stop * 0 + 1
    if BEGINS:
        runs = gl.where(stop < 0, 1, 0)
        num_chunks = gl.where((stop < 0) | (start >= 0), num_chunks, 0)
    elif HAS_CUTS:
        runs = gl.where(stop >= 0, 1, 0)
        if OUTPUT:
            num_chunks = gl.where(stop >= 0, num_chunks, 0)
        else:
            num_chunks = gl.where((stop >= 0) & (start < 0), num_chunks, 0)
    dv_column = (h // dv_group) * dv_stride_g + (h % dv_group) * dv_stride_r
    gl.warp_specialize(
        [
            (_consume, (
                0, dstates_desc, dv_desc, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
                factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, runs, h, local, dv_stride_t, dv_column,
                HV, H, SUMS, HAS_CUTS, OUTPUT, BEGINS, HANDS_ON, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
            )),
            (_consume, (
                1, dstates_desc, dv_desc, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
                factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, cut_states_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, runs, h, local, dv_stride_t, dv_column,
                HV, H, SUMS, HAS_CUTS, OUTPUT, BEGINS, HANDS_ON, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
            )),
            (produce, (
                q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc,
                q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty, first, chunk0, num_chunks, runs, h,
                (h // R) * q_stride_h, (h // R) * k_stride_h, h * v_stride_h, h * do_stride_h,
                HV, OUTPUT, FACTORS, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def reverse(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, runs: Tensor,
    *, dstates: Tensor, dv: Tensor, sums: Tensor, dfinal_state: Tensor | None, d_initial_state: Tensor | None,
    heads: range, cut_dstates: Tensor | None = None, handed: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the recurrence backwards for a range of value heads.

    Runs on documents; or, after `begin_reverse` and from the states' gradients cut_dstates [NC,HV,V,K], on segments
    that stop at a cut; or on a part of each document, from the gradients `handed` [N,HV,K,V] of the part after it,
    which become those of its own start. Fills dstates [NS,H,V,K] (gradient of the state at each chunk's end) and rows
    0..7 of sums [NS,H,SUMS,C], both in the rows that runs say, dv [T,G,R,V] at any addressable strides and
    d_initial_state [N,HV,K,V].
    """
    _launch(
        q, k, v, do, solve, scores, factors, runs, dstates, dv, sums, dfinal_state, d_initial_state,
        cut_dstates if handed is None else handed, heads, begins=False, hands_on=handed is not None,
    )  # fmt: skip


def begin_reverse(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, chunks: Chunks,
    *, dfinal_state: Tensor | None, cut_dstates: Tensor, dstates: Tensor | None = None, dv: Tensor | None = None,
    sums: Tensor | None = None, d_initial_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the recurrence backwards as far as it needs no combination: on the documents' last segments, with the results
    of `reverse` as far as they are given (all or only d_initial_state).

    Also fills row c of cut_dstates [NC,HV,V,K] with the state's gradient or dH of the segment that starts at cut c.
    """
    _launch(
        q, k, v, do, solve, scores, factors, chunks.segments, dstates, dv, sums, dfinal_state, d_initial_state,
        cut_dstates, range(v.shape[1]), begins=True, hands_on=False,
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, runs: Tensor,
    dstates: Tensor | None, dv: Tensor | None, sums: Tensor | None, dfinal_state: Tensor | None,
    d_initial_state: Tensor | None, cut_dstates: Tensor | None, heads: range, *, begins: bool,
    hands_on: bool,
) -> None:  # fmt: skip
    HV = v.shape[1]
    square = tma.rows(solve.view(-1, CHUNK), (CHUNK, CHUNK))
    stand_in = factors
    if dstates is None or dv is None or sums is None:
        dstates_desc, dv_desc, dv_numbers, num_sums = square, square, (0, 0, 0, 1), 1
    else:
        columns = (dv.shape[1] - 1) * dv.stride(1) + (dv.shape[2] - 1) * dv.stride(2) + dv.shape[3]
        dv_desc = tma.rows(dv.as_strided((dv.shape[0], columns), (dv.stride(0), 1)), (CHUNK, 64))
        dstates_desc = tma.rows(dstates.view(-1, dstates.shape[-1]), (64, 128))
        dv_numbers, num_sums = (dv.stride(0), dv.stride(1), dv.stride(2), dv.shape[2]), sums.shape[2]
    launch(
        _reverse_kernel, (runs.shape[0] * len(heads),),
        tma.heads(q, (CHUNK, 128)), tma.heads(k, (CHUNK, 128)), tma.heads(v, (CHUNK, 64)), tma.heads(do, (CHUNK, 64)),
        square, tma.rows(scores.view(-1, CHUNK), (CHUNK, CHUNK)), tma.rows(factors.view(-1, CHUNK), (4, CHUNK)),
        dstates_desc, dv_desc,
        factors, stand_in if sums is None else sums, k if dv is None else dv,
        stand_in if dfinal_state is None else dfinal_state, stand_in if d_initial_state is None else d_initial_state,
        stand_in if cut_dstates is None else cut_dstates, runs,
        q.stride(1), k.stride(1), v.stride(1), do.stride(1), *dv_numbers, heads.start,
        R=HV // k.shape[1], HV=HV, H=len(heads), SUMS=num_sums,
        HAS_CUTS=cut_dstates is not None and not begins and not hands_on, OUTPUT=dstates is not None, BEGINS=begins,
        HANDS_ON=hands_on, HAS_DFINAL=dfinal_state is not None, HAS_DINITIAL=d_initial_state is not None,
        FACTORS=factors.shape[2], STAGES=_STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
