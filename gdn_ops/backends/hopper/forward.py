"""The recurrence over a segment's chunks, forward: outputs, or the states and updates that the backward needs.

The state lives TRANSPOSED, S^T [V,K], in the tensor cores' accumulators, in float32. Per chunk, every product has the
previous one's accumulator as its left operand (registers) and a TMA tile as its right one:

    r^T = S^T k^T;  y^T = v^T - r^T * factor_0;  u^T = y^T * factor_3 + y^T A^T;
    o^T = (S^T q^T) * factor_2 + u^T P^T;        S^T = factor_4 S^T + (u^T * factor_1) k

A's diagonal, the write strength, stays apart: it is by far A's largest part, and as an initial value of u's accumulator
neither it nor y is rounded. That takes a third off the rounding error of everything. Where keys are alike A has its
diagonal, and factor_3 is next to nothing: then u is made of the rounded y, whose rest cancels (`solve`).

So the serial chain has no shared-memory round trip, no exponential and no mask. Rows of S^T are independent: two
warpgroups own a half of V each, a producer warp feeds both.

A segment is a document, or a part of one that starts from the state at its cut (`segments.py`). `begin` runs the
documents' first segments and, in other programs of the same launch and without outputs, every inner segment's H, from
zero, and M, from the identity without values; `forward` then runs the others from the states at their cuts. There it
leaves its running state inside segments, if asked, so that the backward can compute states and updates again by one
program a stretch of a segment, from the same state and so to the same bits.

Grid: one program a segment or stretch and value head, longest first; inner segments have two in `begin`.
On chip: S^T in registers; tiles of q, k, v, A, P and factors, `STAGES` deep, in shared memory.
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
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.tma import async_load, async_store, clear_rows, cleared, store_wait
from gdn_ops.shapes import CHUNK

# Letters: C chunk length (64), D head size (K = V = 128), M value rows of one warpgroup (64), H heads of one launch,
# HS heads of the scratch tensors, HV value heads, R = HV / HK, NC most cuts, NL most states left.

# H200, 16/48 heads, 32768 tokens in five documents: 2 stages 0.414 ms, 3 stages 0.410 (outputs); the recompute's
# 2 stages 0.56, 3 stages 0.58 (prototype, 2026-11, triton 3.6).
_STAGES_OUTPUT = 3
_STAGES_STATES = 2
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24

_C = gl.constexpr(64)
_D = gl.constexpr(128)
_M = gl.constexpr(64)

# What a program computes for its segment.
_RUN = gl.constexpr(0)
_ADDITION = gl.constexpr(1)
_TRANSITION = gl.constexpr(2)


@gluon.jit
def load_run(run_ptr):
    """A row of `Chunks.segments` or the like: first token, end, first chunk, chunks, document, start, stop, slot."""
    return (
        gl.load(run_ptr), gl.load(run_ptr + 1), gl.load(run_ptr + 2), gl.load(run_ptr + 3),
        gl.load(run_ptr + 4), gl.load(run_ptr + 5), gl.load(run_ptr + 6), gl.load(run_ptr + 7),
    )  # fmt: skip


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc,
    q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
    first, first_value, chunk0, num_chunks, role, h, q_column, k_column, v_column,
    HV: gl.constexpr, OUTPUT: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetch a run's tiles, chunk by chunk, as soon as both consumers have read what they replace."""
    BYTES: gl.constexpr = 2 * _C * _D * 2 + _C * _C * 2 + 4 * _C * 4
    OUTPUT_BYTES: gl.constexpr = _C * _D * 2 + _C * _C * 2
    runs = role == _RUN
    for c in range(num_chunks):
        stage = c % STAGES
        token = first + c * _C
        row = (chunk0 + c) * HV + h
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
        if OUTPUT:
            mbarrier.expect(bar, BYTES + OUTPUT_BYTES, pred=runs)
            mbarrier.expect(bar, BYTES, pred=role != _RUN)
        else:
            mbarrier.expect(bar, BYTES)
        async_load(k_desc, [token, k_column], bar, k_s.index(stage))
        async_load(v_desc, [first_value + c * _C, v_column], bar, v_s.index(2 * stage))
        async_load(v_desc, [first_value + c * _C, v_column + _M], bar, v_s.index(2 * stage + 1))
        async_load(factors_desc, [row * FACTORS, 0], bar, factors_s.index(stage))
        async_load(solve_desc, [row * _C, 0], bar, solve_s.index(stage))
        if OUTPUT:
            async_load(q_desc, [token, q_column], bar, q_s.index(stage), pred=runs)
            async_load(scores_desc, [row * _C, 0], bar, scores_s.index(stage), pred=runs)


@gluon.jit
def consume(
    half: gl.constexpr, states_desc, updates_desc, o_desc, state_s, u_s,
    q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
    factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
    first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role, h, h_scratch,
    HV: gl.constexpr, HS: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr, HAS_CUTS: gl.constexpr,
    BEGINS: gl.constexpr, SUMMARY: gl.constexpr, LEAVES: gl.constexpr, HAS_INITIAL: gl.constexpr,
    HAS_FINAL: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half of V of a run; state_s [M,D] and u_s [M,C] are tiles of its own where STATES."""
    dtype: gl.constexpr = k_s.dtype
    L_MK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    L_MC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    OPERAND_MC: gl.constexpr = gl.DotOperandLayout(0, L_MC, 2)
    OPERAND_MK: gl.constexpr = gl.DotOperandLayout(0, L_MK, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = tma.TILE_16BIT
    zero_MC = gl.full([_M, _C], 0.0, gl.float32, L_MC)
    if OUTPUT:
        o_s = gl.allocate_shared_memory(dtype, [_C, _M], TILE)
    # The states in memory are [K,V]: element (value, key) of S^T lies at key * V + value.
    value = half * _M + gl.arange(0, _M, gl.SliceLayout(1, L_MK))
    key = gl.arange(0, _D, gl.SliceLayout(0, L_MK))
    state_at = (document.to(gl.int64) * HV + h) * (_D * _D)
    transposed_at = key[None, :] * _D + value[:, None]
    natural_at = value[:, None] * _D + key[None, :]
    everywhere = natural_at >= 0
    if SUMMARY:
        state_MK = gl.where((value[:, None] == key[None, :]) & (role == _TRANSITION), 1.0, 0.0)
    elif HAS_CUTS:
        cut_at = (start.to(gl.int64) * HV + h) * (_D * _D)
        state_MK = gl.load(cut_states_ptr + cut_at + natural_at, mask=everywhere & (start >= 0), other=0.0)
    else:
        state_MK = gl.full([_M, _D], 0.0, gl.float32, L_MK)
    if HAS_INITIAL and not SUMMARY:
        starts_here = everywhere & (start < 0) & (document >= 0)
        state_MK = gl.load(initial_ptr + state_at + transposed_at, mask=starts_here, other=state_MK)
    end_ptr = factors_ptr + (chunk0.to(gl.int64) * HV + h) * (FACTORS * _C) + 4 * _C
    decay = gl.load(end_ptr, mask=num_chunks > 0, other=0.0)
    if LEAVES:
        leave_at = leave_every
    for c in range(num_chunks):
        stage = c % STAGES
        token = first + c * _C
        row = ((slot0 + c) * HS + h_scratch) * _D + half * _M
        next_decay = gl.load(end_ptr + gl.minimum(c + 1, num_chunks - 1).to(gl.int64) * (HV * FACTORS * _C))
        if LEAVES:
            if c == leave_at:
                gl.store(cut_states_ptr + (left_row.to(gl.int64) * HV + h) * (_D * _D) + natural_at, state_MK)
                left_row += 1
                leave_at += leave_every
        rounded_MK = state_MK.to(dtype)
        operand_MK = gl.convert_layout(rounded_MK, OPERAND_MC)
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        k = k_s.index(stage)
        if token + _C > last:
            clear_rows(k, last - token, 4)
            clear_rows(v_s.index(2 * stage + half), last - token, 4)
            cleared()
        r_MC = warpgroup_mma(operand_MK, k.permute((1, 0)), zero_MC, use_acc=False, is_async=True)
        if OUTPUT:
            o_MC = warpgroup_mma(operand_MK, q_s.index(stage).permute((1, 0)), zero_MC, use_acc=False, is_async=True)
        if STATES:
            # All but the outputs' store, which is the latest.
            store_wait(1 if OUTPUT else 0)
            state_s.store(rounded_MK)
        v_MC = v_s.index(2 * stage + half).permute((1, 0)).load(L_MC).to(gl.float32)
        factors = factors_s.index(stage)
        read_C = factors.slice(0, 1).load(L_MC)
        write_C = factors.slice(1, 1).load(L_MC)
        if OUTPUT and STATES:
            # The state is no result of these products, but where its decay may come before this wait, ptxas puts one of
            # its own there, for all of them.
            r_MC, state_MK = warpgroup_mma_wait(1, deps=[r_MC, state_MK])
        elif OUTPUT:
            r_MC = warpgroup_mma_wait(1, deps=[r_MC])
        else:
            r_MC = warpgroup_mma_wait(0, deps=[r_MC])
        y_MC = v_MC - r_MC * read_C
        u_MC = warpgroup_mma(
            gl.convert_layout(y_MC.to(dtype), OPERAND_MC), solve_s.index(stage).permute((1, 0)),
            y_MC * factors.slice(3, 1).load(L_MC), is_async=True,
        )  # fmt: skip
        state_MK = state_MK * decay
        if OUTPUT:
            o_MC, u_MC = warpgroup_mma_wait(0, deps=[o_MC, u_MC])
        else:
            u_MC = warpgroup_mma_wait(0, deps=[u_MC])
        written_MC = gl.convert_layout((u_MC * write_C).to(dtype), OPERAND_MK)
        state_MK = warpgroup_mma(written_MC, k, state_MK, is_async=True)
        if OUTPUT:
            query_C = factors.slice(2, 1).load(L_MC)
            o_MC = warpgroup_mma(
                gl.convert_layout(u_MC.to(dtype), OPERAND_MC), scores_s.index(stage).permute((1, 0)), o_MC * query_C,
                is_async=True,
            )  # fmt: skip
            state_MK, o_MC = warpgroup_mma_wait(0, deps=[state_MK, o_MC])
        else:
            state_MK = warpgroup_mma_wait(0, deps=[state_MK])
        # By now every warp has used what it loaded: products that have been waited for are made of it. Triton puts a
        # barrier before an arrival.
        mbarrier.arrive(empty.index(stage), count=1)
        if STATES:
            u_s.store(u_MC.to(dtype))
            fence_async_shared()
            # The updates' store comes behind a barrier, for u_s, and so both come behind every warp's fence.
            async_store(updates_desc, [row, 0], u_s)
            async_store(states_desc, [row, 0], state_s)
        if OUTPUT:
            # All but this chunk's updates and states.
            store_wait(2 if STATES else 0)
            o_s.permute((1, 0)).store(o_MC.to(dtype))
            if token + _C <= last:
                fence_async_shared()
                async_store(o_desc, [token, h * _D + half * _M], o_s)
            else:
                offs_t = token + gl.arange(0, _C, gl.SliceLayout(1, ROWS))
                offs_v = h * _D + half * _M + gl.arange(0, _M, gl.SliceLayout(0, ROWS))
                at = o_ptr + offs_t.to(gl.int64)[:, None] * (HV * _D) + offs_v[None, :]
                gl.store(at, o_s.load(ROWS), mask=(offs_t < last)[:, None] & (offs_v >= 0)[None, :])
        decay = next_decay
    if BEGINS:
        cut_at = (stop.to(gl.int64) * HV + h) * (_D * _D) + natural_at
        gl.store(cut_states_ptr + cut_at, state_MK, mask=everywhere & (stop >= 0) & (role != _TRANSITION))
        if SUMMARY:
            gl.store(transitions_ptr + cut_at, state_MK, mask=everywhere & (stop >= 0) & (role == _TRANSITION))
    if HAS_FINAL and not SUMMARY:
        ends_here = everywhere & (document >= 0) & (stop < 0)
        gl.store(final_ptr + state_at + transposed_at, state_MK, mask=ends_here)
    store_wait(0)


@gluon.jit
def _consume(
    half: gl.constexpr, states_desc, updates_desc, o_desc, q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
    factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
    first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role, h, h_scratch,
    HV: gl.constexpr, HS: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr, HAS_CUTS: gl.constexpr,
    BEGINS: gl.constexpr, LEAVES: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    FACTORS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    state_s = k_s
    u_s = k_s
    if STATES:
        state_s = gl.allocate_shared_memory(k_s.dtype, [_M, _D], tma.TILE_16BIT)
        u_s = gl.allocate_shared_memory(k_s.dtype, [_M, _C], tma.TILE_16BIT)
    if role == _RUN:
        consume(
            half, states_desc, updates_desc, o_desc, state_s, u_s,
            q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
            factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
            first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role, h, h_scratch,
            HV, HS, OUTPUT, STATES, HAS_CUTS, BEGINS, False, LEAVES, HAS_INITIAL, HAS_FINAL, FACTORS, STAGES,
        )  # fmt: skip
    if BEGINS:
        if role != _RUN:
            consume(
                half, states_desc, updates_desc, o_desc, state_s, u_s,
                q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
                factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role,
                h, h_scratch,
                HV, HS, False, False, False, True, True, False, False, False, FACTORS, STAGES,
            )  # fmt: skip


@gluon.jit
def _forward_kernel(
    q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc, states_desc, updates_desc, o_desc,
    factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr, runs_ptr,
    q_stride_h, k_stride_h, v_stride_h, first_head, first_scratch_head, T, first_run, num_first,
    left_row, end_row, leave_every, parts,
    R: gl.constexpr, HV: gl.constexpr, H: gl.constexpr, HS: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
    HAS_CUTS: gl.constexpr, BEGINS: gl.constexpr, LEAVES: gl.constexpr, IN_PARTS: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, FACTORS: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = tma.TILE_16BIT
    local = gl.program_id(0) % H
    run = first_run + gl.program_id(0) // H
    role = run * 0 + _RUN
    if BEGINS:
        # First segments come first, one program a head; H and M of the others follow.
        beyond = gl.maximum(run - num_first, 0)
        role = gl.where(run < num_first, _RUN, _ADDITION + beyond % 2)
        run = gl.minimum(run, num_first + beyond // 2)
    run_ptr = runs_ptr + run * 8
    h = first_head + local
    h_scratch = first_scratch_head + local
    k_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _D], TILE)
    v_s = gl.allocate_shared_memory(dtype, [2 * STAGES, _C, _M], TILE)
    solve_s = gl.allocate_shared_memory(dtype, [STAGES, _C, _C], TILE)
    factors_s = gl.allocate_shared_memory(gl.float32, [STAGES, 4, _C], tma.TILE_FLOAT32)
    q_s = gl.allocate_shared_memory(dtype, [STAGES if OUTPUT else 1, _C, _D if OUTPUT else _M], TILE)
    scores_s = gl.allocate_shared_memory(dtype, [STAGES if OUTPUT else 1, _C, _C], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    wait_for_earlier(EARLY)
    first, last, chunk0, num_chunks, document, start, stop, slot0 = load_run(run_ptr)
    if LEAVES:
        if IN_PARTS:
            # At every end of a document's part but the last one, as in the chunk table.
            left_row = document * (parts - 1)
            leave_every = (num_chunks + parts - 1) // parts
        else:
            # The state before chunk x of the call is row x // leave_every - 1 of those left, as in the chunk table.
            # Where documents overlap it must not lie past the last one.
            last_row = end_row - (gl.maximum(num_chunks, 1) - 1) // leave_every
            left_row = gl.minimum(left_row + chunk0 // leave_every, last_row)
    first_value = first
    if BEGINS:
        # A document's last segment hands on nothing.
        num_chunks = gl.where((role == _RUN) | (stop >= 0), num_chunks, 0)
        # Rows past the last token read as zeros.
        first_value = gl.where(role == _TRANSITION, T, first)
    gl.warp_specialize(
        [
            (_consume, (
                0, states_desc, updates_desc, o_desc, q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
                factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role,
                h, h_scratch,
                HV, HS, OUTPUT, STATES, HAS_CUTS, BEGINS, LEAVES, HAS_INITIAL, HAS_FINAL, FACTORS, STAGES,
            )),
            (_consume, (
                1, states_desc, updates_desc, o_desc, q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
                factors_ptr, o_ptr, initial_ptr, final_ptr, cut_states_ptr, transitions_ptr,
                first, last, chunk0, slot0, num_chunks, document, start, stop, left_row, leave_every, role,
                h, h_scratch,
                HV, HS, OUTPUT, STATES, HAS_CUTS, BEGINS, LEAVES, HAS_INITIAL, HAS_FINAL, FACTORS, STAGES,
            )),
            (produce, (
                q_desc, k_desc, v_desc, solve_desc, scores_desc, factors_desc,
                q_s, k_s, v_s, solve_s, scores_s, factors_s, full, empty,
                first, first_value, chunk0, num_chunks, role, h,
                (h // R) * q_stride_h, (h // R) * k_stride_h, h * v_stride_h, HV, OUTPUT, FACTORS, STAGES,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, runs: Tensor,
    *, initial_state: Tensor | None, first_run: int = 0, cut_states: Tensor | None = None, num_cuts: int = 0,
    leave_every: int = 0, parts: int = 1, o: Tensor | None = None, final_state: Tensor | None = None,
    states: Tensor | None = None, updates: Tensor | None = None, heads: range | None = None,
) -> None:  # fmt: skip
    """Run the recurrence; q, k, v [T,H,D] at any addressable strides (q is read for o only).

    runs int32 [X,8]: `Chunks.segments`, `Chunks.stretches` or a part's, of which those from first_run on are run; their
    cuts are rows of cut_states [NC+NL,HV,V,K]. Fills what is given: o [T,HV,V] and final_state [N,HV,K,V]; cut_states
    from row num_cuts = NC on, with the running states after every `leave_every` chunks of a segment (0: with none) or,
    of documents in `parts`, at the end of each but the last; states [NT,HS,V,K] and updates [NT,HS,V,C], in the rows
    that runs say, whose heads are those of the range `heads` (all if left out).
    """
    HV = v.shape[1]
    _launch(
        q, k, v, solve, scores, factors, runs, first_run, runs.shape[0] - first_run, 0, initial_state, cut_states, None,
        num_cuts, leave_every, parts, o, final_state, states, updates, range(HV) if heads is None else heads,
    )  # fmt: skip


def begin(
    q: Tensor, k: Tensor, v: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, segments: Tensor,
    *, initial_state: Tensor | None, cut_states: Tensor, transitions: Tensor, o: Tensor | None = None,
    final_state: Tensor | None = None, states: Tensor | None = None, updates: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the recurrence as far as it needs no combination: on the documents' first segments, with the results of
    `forward`.

    segments int32 [N+NC,8], first segments first. Also fills row c of cut_states [NC+NL,HV,V,K] with the state or H,
    and of transitions [NC,HV,K,K] with M (transposed: it maps a state's rows; not where a first segment stops), of the
    segment that stops at cut c.
    """
    num_cuts = transitions.shape[0]
    num_first = segments.shape[0] - num_cuts
    _launch(
        q, k, v, solve, scores, factors, segments, 0, num_first + 2 * num_cuts, num_first, initial_state, cut_states,
        transitions, 0, 0, 1, o, final_state, states, updates, range(v.shape[1]),
    )  # fmt: skip


def _launch(
    q: Tensor, k: Tensor, v: Tensor, solve: Tensor, scores: Tensor, factors: Tensor, runs: Tensor, first_run: int,
    num_runs: int, num_first: int, initial_state: Tensor | None, cut_states: Tensor | None, transitions: Tensor | None,
    left_row: int, leave_every: int, parts: int, o: Tensor | None, final_state: Tensor | None, states: Tensor | None,
    updates: Tensor | None, heads: range,
) -> None:  # fmt: skip
    HV = v.shape[1]
    square = tma.rows(solve.view(-1, CHUNK), (CHUNK, CHUNK))
    if states is not None and updates is not None:
        states_desc = tma.rows(states.view(-1, states.shape[-1]), (64, states.shape[-1]))
        updates_desc = tma.rows(updates.view(-1, CHUNK), (64, CHUNK))
        HS = states.shape[1]
    else:
        states_desc, updates_desc, HS = square, square, HV
    stand_in = factors
    launch(
        _forward_kernel, (num_runs * len(heads),),
        tma.heads(q, (CHUNK, 128)), tma.heads(k, (CHUNK, 128)), tma.heads(v, (CHUNK, 64)), square,
        tma.rows(scores.view(-1, CHUNK), (CHUNK, CHUNK)), tma.rows(factors.view(-1, CHUNK), (4, CHUNK)),
        states_desc, updates_desc, square if o is None else tma.rows(o.view(o.shape[0], -1), (CHUNK, 64)),
        factors, k if o is None else o, stand_in if initial_state is None else initial_state,
        stand_in if final_state is None else final_state, stand_in if cut_states is None else cut_states,
        stand_in if transitions is None else transitions, runs,
        q.stride(1), k.stride(1), v.stride(1), heads.start, heads.start if HS == HV else 0, v.shape[0], first_run,
        num_first, left_row, 0 if cut_states is None else cut_states.shape[0], leave_every, parts,
        R=HV // k.shape[1], HV=HV, H=len(heads), HS=HS, OUTPUT=o is not None, STATES=states is not None,
        HAS_CUTS=cut_states is not None and transitions is None, BEGINS=transitions is not None,
        LEAVES=leave_every > 0 or parts > 1, IN_PARTS=parts > 1,
        HAS_INITIAL=initial_state is not None, HAS_FINAL=final_state is not None,
        FACTORS=factors.shape[2], STAGES=_STAGES_OUTPUT if states is None else _STAGES_STATES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
