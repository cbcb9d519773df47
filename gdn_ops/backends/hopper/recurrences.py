"""Both recurrences of a backward in one launch: states and updates again (`forward`), and dS and dv (`reverse`).

Neither reads what the other writes, and both are chains of unequal length that leave multiprocessors idle at a
launch's end. In one launch the end comes once, and the shorter programs of one fill what the longer ones of the other
leave. Every program does what the other two files say, bit for bit.

Where documents are cut, `begin_recurrences` so joins `begin_reverse` and the stretches' states, of which the first are
the long chains that use little of the memory's bandwidth.

Grid: one program a run, value head and direction, longest first (`Part.order`); `begin_recurrences` has all that goes
backwards first.
On chip: as in `reverse`; a program of `forward`'s uses tiles of k, v, A and factors, and the same ones for its stores.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper import tma
from gdn_ops.backends.hopper.chunks import Chunks, Part
from gdn_ops.backends.hopper.forward import consume as consume_forward
from gdn_ops.backends.hopper.forward import load_run
from gdn_ops.backends.hopper.forward import produce as produce_forward
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.reverse import consume as consume_reverse
from gdn_ops.backends.hopper.reverse import produce as produce_reverse
from gdn_ops.shapes import CHUNK

# Letters: C chunk length (64), D head size (K = V = 128), M value rows of one warpgroup (64), H heads of one launch
# and of the scratch tensors, HV value heads, R = HV / HK.

_STAGES = 2
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24

_C = gl.constexpr(64)
_D = gl.constexpr(128)
_M = gl.constexpr(64)


@gluon.jit
def _consume(
    half: gl.constexpr, states_desc, updates_desc, dstates_desc, dv_desc,
    q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
    factors_ptr, sums_ptr, dv_ptr, initial_ptr, left_ptr, dfinal_ptr, dinitial_ptr, handed_ptr,
    first, last, chunk0, slot0, num_chunks, document, start, stop, is_again, runs, h, local, dv_stride_t, dv_column,
    HV: gl.constexpr, H: gl.constexpr, SUMS: gl.constexpr, HAS_LEFT: gl.constexpr, BEGINS: gl.constexpr,
    HANDS_ON: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_DFINAL: gl.constexpr, HAS_DINITIAL: gl.constexpr,
    FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    state_s = gl.allocate_shared_memory(k_s.dtype, [_M, _D], tma.TILE_16BIT)
    vector_s = gl.allocate_shared_memory(k_s.dtype, [_C, _M], tma.TILE_16BIT)
    if is_again != 0:
        consume_forward(
            half, states_desc, updates_desc, updates_desc, state_s, vector_s, q_s, k_s, v_s, solve_s, scores_s,
            factors_s, full, empty,
            factors_ptr, factors_ptr, initial_ptr, factors_ptr, left_ptr, factors_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, 0, 0, 0, h, local,
            HV, H, False, True, HAS_LEFT, False, False, False, HAS_INITIAL, False, FACTORS, STAGES,
        )  # fmt: skip
    elif runs != 0:
        consume_reverse(
            half, dstates_desc, dv_desc, state_s, vector_s, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full,
            empty, factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, handed_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, h, local, dv_stride_t, dv_column,
            HV, H, SUMS, False, True, BEGINS, HANDS_ON, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
        )  # fmt: skip
    elif BEGINS:
        consume_reverse(
            half, dstates_desc, dv_desc, state_s, vector_s, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full,
            empty, factors_ptr, sums_ptr, dv_ptr, dfinal_ptr, dinitial_ptr, handed_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, h, local, dv_stride_t, dv_column,
            HV, H, SUMS, False, False, True, False, False, False, FACTORS, STAGES,
        )  # fmt: skip


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc,
    q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
    first, chunk0, num_chunks, is_again, runs, h, q_column, k_column, v_column, do_column,
    HV: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    if is_again != 0:
        produce_forward(
            q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc,
            q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
            first, first, chunk0, num_chunks, 0, h, q_column, k_column, v_column, HV, False, FACTORS, STAGES,
        )  # fmt: skip
    else:
        produce_reverse(
            q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc,
            q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty,
            first, chunk0, num_chunks, runs, h, q_column, k_column, v_column, do_column, HV, True, FACTORS, STAGES,
        )  # fmt: skip


@gluon.jit
def _recurrences_kernel(
    q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc, states_desc, updates_desc, dstates_desc,
    dv_desc, factors_ptr, sums_ptr, dv_ptr, initial_ptr, left_ptr, dfinal_ptr, dinitial_ptr, handed_ptr, runs_ptr,
    again_ptr, order_ptr, num_reversed, q_stride_h, k_stride_h, v_stride_h, do_stride_h, dv_stride_t, dv_stride_g,
    dv_stride_r, dv_group, first_head,
    R: gl.constexpr, HV: gl.constexpr, H: gl.constexpr, SUMS: gl.constexpr, HAS_LEFT: gl.constexpr,
    BEGINS: gl.constexpr, HANDS_ON: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_DFINAL: gl.constexpr,
    HAS_DINITIAL: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = tma.TILE_16BIT
    local = gl.program_id(0) % H
    h = first_head + local
    dv_column = (h // dv_group) * dv_stride_g + (h % dv_group) * dv_stride_r
    q_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _D], TILE)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _D], TILE)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES, _C, _M], TILE)
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
    place = gl.program_id(0) // H
    if BEGINS:
        is_again = gl.where(place < num_reversed, 0, 1)
        run_ptr = runs_ptr + place * 8
        if is_again != 0:
            run_ptr = again_ptr + (place - num_reversed) * 8
    else:
        which = gl.load(order_ptr + place)
        is_again = which % 2
        run_ptr = runs_ptr + which // 2 * 8
    first, last, chunk0, num_chunks, document, start, stop, slot0 = load_run(run_ptr)
    runs = is_again * 0 + 1
    if BEGINS:
        # As in `begin_reverse`: the documents' last segments, dH of the inner ones, and nothing of the others.
        runs = gl.where(stop < 0, 1, 0)
        num_chunks = gl.where((is_again != 0) | (stop < 0) | (start >= 0), num_chunks, 0)
    gl.warp_specialize(
        [
            (_consume, (
                0, states_desc, updates_desc, dstates_desc, dv_desc, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s,
                full, empty, factors_ptr, sums_ptr, dv_ptr, initial_ptr, left_ptr, dfinal_ptr, dinitial_ptr, handed_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, is_again, runs, h, local,
                dv_stride_t, dv_column,
                HV, H, SUMS, HAS_LEFT, BEGINS, HANDS_ON, HAS_INITIAL, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
            )),
            (_consume, (
                1, states_desc, updates_desc, dstates_desc, dv_desc, q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s,
                full, empty, factors_ptr, sums_ptr, dv_ptr, initial_ptr, left_ptr, dfinal_ptr, dinitial_ptr, handed_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, is_again, runs, h, local,
                dv_stride_t, dv_column,
                HV, H, SUMS, HAS_LEFT, BEGINS, HANDS_ON, HAS_INITIAL, HAS_DFINAL, HAS_DINITIAL, FACTORS, STAGES,
            )),
            (_produce, (
                q_desc, k_desc, v_desc, do_desc, solve_desc, scores_desc, factors_desc,
                q_s, k_s, v_s, do_s, solve_s, scores_s, factors_s, full, empty, first, chunk0, num_chunks, is_again,
                runs, h, (h // R) * q_stride_h, (h // R) * k_stride_h, h * v_stride_h, h * do_stride_h,
                HV, FACTORS, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def recurrences(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, part: Part,
    *, initial_state: Tensor | None, left: Tensor | None, states: Tensor, updates: Tensor, dstates: Tensor, dv: Tensor,
    sums: Tensor, dfinal_state: Tensor | None, d_initial_state: Tensor | None, handed: Tensor | None, heads: range,
) -> None:  # fmt: skip
    """Run `forward` for states and updates, and `reverse`, on a part of each document or on whole ones.

    left [NL,HV,V,K] and handed [N,HV,K,V]: where the parts of documents start, forwards and backwards; None for whole
    ones. states, updates, dstates and sums: for the heads of the range only.
    """
    _launch(
        q, k, v, do, solve, scores, factors, part.runs, part.runs, part.order, part.order.shape[0], initial_state, left,
        states, updates, dstates, dv, sums, dfinal_state, d_initial_state, handed, heads, begins=False,
    )  # fmt: skip


def begin_recurrences(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, chunks: Chunks,
    again: Tensor, *, initial_state: Tensor | None, left: Tensor | None, states: Tensor, updates: Tensor,
    dfinal_state: Tensor | None, cut_dstates: Tensor, dstates: Tensor, dv: Tensor, sums: Tensor,
    d_initial_state: Tensor | None,
) -> None:  # fmt: skip
    """Run `begin_reverse`, with all its results, and `forward` for states and updates on the runs `again`.

    again int32 [X,8]: `Chunks.stretches` or `Chunks.segments`; left [NC+NL,HV,V,K]: the states at cuts that they start
    from.
    """
    segments = chunks.segments
    _launch(
        q, k, v, do, solve, scores, factors, segments, again, segments, segments.shape[0] + again.shape[0],
        initial_state, left, states, updates, dstates, dv, sums, dfinal_state, d_initial_state, cut_dstates,
        range(v.shape[1]), begins=True,
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, runs: Tensor,
    again: Tensor, order: Tensor, num_runs: int, initial_state: Tensor | None, left: Tensor | None, states: Tensor,
    updates: Tensor, dstates: Tensor, dv: Tensor, sums: Tensor, dfinal_state: Tensor | None,
    d_initial_state: Tensor | None, handed: Tensor | None, heads: range, *, begins: bool,
) -> None:  # fmt: skip
    HV = v.shape[1]
    columns = (dv.shape[1] - 1) * dv.stride(1) + (dv.shape[2] - 1) * dv.stride(2) + dv.shape[3]
    launch(
        _recurrences_kernel, (num_runs * len(heads),),
        tma.heads(q, (CHUNK, 128)), tma.heads(k, (CHUNK, 128)), tma.heads(v, (CHUNK, 64)), tma.heads(do, (CHUNK, 64)),
        tma.rows(solve.view(-1, CHUNK), (CHUNK, CHUNK)), tma.rows(scores.view(-1, CHUNK), (CHUNK, CHUNK)),
        tma.rows(factors.view(-1, CHUNK), (4, CHUNK)), tma.rows(states.view(-1, states.shape[-1]), (64, 128)),
        tma.rows(updates.view(-1, CHUNK), (64, CHUNK)), tma.rows(dstates.view(-1, dstates.shape[-1]), (64, 128)),
        tma.rows(dv.as_strided((dv.shape[0], columns), (dv.stride(0), 1)), (CHUNK, 64)),
        factors, sums, dv, *(factors if x is None else x for x in (initial_state, left)),
        *(factors if x is None else x for x in (dfinal_state, d_initial_state, handed)), runs, again, order,
        runs.shape[0], q.stride(1), k.stride(1), v.stride(1), do.stride(1), *dv.stride()[:3], dv.shape[2], heads.start,
        R=HV // k.shape[1], HV=HV, H=len(heads), SUMS=sums.shape[2], HAS_LEFT=left is not None,
        BEGINS=begins, HANDS_ON=handed is not None and not begins, HAS_INITIAL=initial_state is not None,
        HAS_DFINAL=dfinal_state is not None, HAS_DINITIAL=d_initial_state is not None, FACTORS=factors.shape[2],
        STAGES=_STAGES, CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
