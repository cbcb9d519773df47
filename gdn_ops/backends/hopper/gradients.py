"""Gradients of queries and keys, chunk by chunk, and the row sums that the gate's gradient is made of.

With W = -tril(dv u^T, -1) o Gamma and dP = scale * tril(do u^T) o Gamma (Gamma_ij = 2^(G_i - G_j)), per value head

    left  = -(dv S) * factor_0 + W k          what a key's reading of the past contributes to dk
    right =  (u dS^T) * factor_1 + W^T k + dP^T q   what a key's writing for the future contributes to dk
    dq    =  (do S) * factor_2 + dP k

summed over a query/key head's value heads in registers, and written once, where they belong in the gradient row. With
in-kernel norms the factors and tiles carry 1/|q| and 1/|k|, so the sums are already gradients of the normalised
vectors times 1/|x|, and the norm's derivative is one projection: dx <- dx - x (x . dx) / |x|^2.

Row sums (rows 8.. of `sums`), which `epilogue` turns into dg and dbeta: k . left, q . dq, k . right, k . right's state
part, dv . u (the diagonal that W leaves out), <S, dS>, and what the entries of dP below its diagonal lose by rounding.

Grid: persistent, one program a multiprocessor; an item is a chunk and a query/key head, a step one of its value heads.
One warpgroup takes dq, W, dP and <S, dS>, a second one dk, whose W and dP it gets from the first; a producer warp
fetches. The two never wait for each other but for W and dP, so that one's arithmetic hides the other's products.
On chip: dq, dk in registers; do, dv, u, decays, W, dP double-buffered; q, k, S, dS and, with dS, factors once, refilled
when both have read them.
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
from gdn_ops.backends.hopper.chunks import Part
from gdn_ops.backends.hopper.launch import launch, multiprocessors
from gdn_ops.backends.hopper.reverse import NUM_VALUE_SUMS
from gdn_ops.backends.hopper.tma import async_load, barrier, clear_rows, cleared, reinterpret
from gdn_ops.shapes import CHUNK

# Letters: C chunk length (64), D head size (K = V = 128), R value heads of a query/key head, H value heads of one
# launch, HK query/key heads of one launch, HS heads of states and updates, HV all value heads.

# 232448 bytes of shared memory hold what two warpgroups and the copies ahead of them need, and hardly a byte more.
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24

SUM_KEYS_LEFT = gl.constexpr(NUM_VALUE_SUMS)
SUM_QUERIES = gl.constexpr(NUM_VALUE_SUMS + 1)
SUM_KEYS_RIGHT = gl.constexpr(NUM_VALUE_SUMS + 2)
SUM_KEYS_STATE = gl.constexpr(NUM_VALUE_SUMS + 3)
SUM_UPDATES = gl.constexpr(NUM_VALUE_SUMS + 4)
SUM_STATES = gl.constexpr(NUM_VALUE_SUMS + 5)
SUM_REST = gl.constexpr(NUM_VALUE_SUMS + 6)
NUM_SUMS = NUM_VALUE_SUMS + 7
"""Rows of `sums` [NT,H,NUM_SUMS,C]; of row SUM_STATES, the first NUM_STATE_SUMS numbers are in use."""
NUM_STATE_SUMS = 16

_C = gl.constexpr(64)
_D = gl.constexpr(128)


@gluon.jit
def _locate(step, steps, pid, grid, HK: gl.constexpr, R: gl.constexpr):
    """Row of scratch, query/key head and value head (both counted from the launch's first) of a program's step."""
    step = gl.maximum(gl.minimum(step, steps - 1), 0)
    item = pid + (step // R) * grid
    return item // HK, item % HK, (item % HK) * R + step % R


@gluon.jit
def _word(slot, table_ptr, IN_PARTS: gl.constexpr):
    """The valid tokens of the chunk in a row of scratch or, in parts, these and its number in one."""
    return gl.load(table_ptr + slot * 4 + (3 if IN_PARTS else 1))


@gluon.jit
def _valid(word, IN_PARTS: gl.constexpr):
    return (word & 63) + 1 if IN_PARTS else word


@gluon.jit
def _chunk(slot, word, IN_PARTS: gl.constexpr):
    return word >> 6 if IN_PARTS else slot


@gluon.jit
def _row(row_s, layout: gl.constexpr):
    """A row of C numbers in shared memory."""
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return reinterpret(row_s, gl.float32, [_C], VECTOR).load(layout)


@gluon.jit
def _fetch_tokens(
    do_desc, dv_desc, updates_desc, decays_desc, do_s, dv_s, u_s, decays_s, buffer, full, token, slot, chunk, local,
    first_head, first_scratch_head, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
    HV: gl.constexpr, HS: gl.constexpr, FACTORS: gl.constexpr, HAS_NORMS: gl.constexpr,
):  # fmt: skip
    h = first_head + local
    bar = full.index(buffer)
    DECAYS: gl.constexpr = 3 if HAS_NORMS else 1
    mbarrier.expect(bar, 3 * _C * _D * 2 + DECAYS * _C * 4)
    dv_column = (h // dv_group) * dv_stride_g + (h % dv_group) * dv_stride_r
    async_load(dv_desc, [token, dv_column], bar, dv_s.index(buffer))
    async_load(updates_desc, [(slot * HS + first_scratch_head + local) * _D, 0], bar, u_s.index(buffer))
    async_load(do_desc, [token, h * do_stride_h], bar, do_s.index(buffer))
    # A row of `gates` or, with norms, three of `factors` from its row 5 on.
    for i in gl.static_range(DECAYS):
        row = (chunk * HV + h) * FACTORS + 5 + i if HAS_NORMS else chunk * HV + h
        async_load(decays_desc, [row, 0], bar, decays_s.index(buffer * DECAYS + i))


@gluon.jit
def _produce(
    q_desc, k_desc, do_desc, dv_desc, states_desc, dstates_desc, updates_desc, decays_desc, factors_desc,
    q_s, k_s, do_s, dv_s, u_s, decays_s, state_s, dstate_s, factors_s,
    tokens_full, tokens_empty, full, empty, table_ptr,
    q_stride_h, k_stride_h, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
    first_head, first_scratch_head, pid, grid, steps,
    HK: gl.constexpr, R: gl.constexpr, HV: gl.constexpr, HS: gl.constexpr,
    FACTORS: gl.constexpr, HAS_NORMS: gl.constexpr, IN_PARTS: gl.constexpr,
):  # fmt: skip
    slot, h_k, local = _locate(0, steps, pid, grid, HK, R)
    token = gl.load(table_ptr + slot * 4)
    slot1, h_k1, local1 = _locate(1, steps, pid, grid, HK, R)
    token1 = gl.load(table_ptr + slot1 * 4)
    chunk = _chunk(slot, _word(slot, table_ptr, IN_PARTS), IN_PARTS)
    chunk1 = _chunk(slot1, _word(slot1, table_ptr, IN_PARTS), IN_PARTS)
    if steps > 0:
        _fetch_tokens(
            do_desc, dv_desc, updates_desc, decays_desc, do_s, dv_s, u_s, decays_s, 0, tokens_full, token, slot, chunk,
            local, first_head, first_scratch_head, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
            HV, HS, FACTORS, HAS_NORMS,
        )  # fmt: skip
    for step in range(steps):
        slot, h_k, local = _locate(step, steps, pid, grid, HK, R)
        slot2, h_k2, local2 = _locate(step + 2, steps, pid, grid, HK, R)
        token2 = gl.load(table_ptr + slot2 * 4)
        chunk2 = _chunk(slot2, _word(slot2, table_ptr, IN_PARTS), IN_PARTS)
        mbarrier.wait(empty.index(0), (step & 1) ^ 1)
        mbarrier.expect(full.index(0), _D * _D * 2)
        async_load(states_desc, [(slot * HS + first_scratch_head + local) * _D, 0], full.index(0), state_s)
        mbarrier.wait(empty.index(1), (step & 1) ^ 1)
        mbarrier.expect(full.index(1), _D * _D * 2 + 3 * _C * 4)
        for i in gl.static_range(3):
            row = (chunk * HV + first_head + local) * FACTORS + i
            async_load(factors_desc, [row, 0], full.index(1), factors_s.index(i))
        async_load(dstates_desc, [(slot * (HK * R) + local) * _D, 0], full.index(1), dstate_s)
        if step + 1 < steps:
            slot1, h_k1, local1 = _locate(step + 1, steps, pid, grid, HK, R)
            buffer = (step + 1) % 2
            mbarrier.wait(tokens_empty.index(buffer), (((step + 1) // 2) & 1) ^ 1)
            _fetch_tokens(
                do_desc, dv_desc, updates_desc, decays_desc, do_s, dv_s, u_s, decays_s, (step + 1) % 2, tokens_full,
                token1, slot1, chunk1, local1, first_head, first_scratch_head,
                do_stride_h, dv_stride_g, dv_stride_r, dv_group, HV, HS, FACTORS, HAS_NORMS,
            )  # fmt: skip
        if step % R == 0:
            h = first_head // R + h_k
            mbarrier.wait(empty.index(2), ((step // R) & 1) ^ 1)
            mbarrier.expect(full.index(2), 2 * _C * _D * 2)
            async_load(k_desc, [token, h * k_stride_h], full.index(2), k_s)
            async_load(q_desc, [token, h * q_stride_h], full.index(2), q_s)
        token = token1
        token1 = token2
        chunk = chunk1
        chunk1 = chunk2


@gluon.jit
def _store_head(x_CK, x_ptr, token, valid, h, stride_t, stride_g, stride_r, group, dtype: gl.constexpr):
    """Write one head's rows of a gradient, 32 bytes at a time: four threads exchange what they hold of a row.

    As they lie in the accumulators it would be 16 bytes, half of what the L2 takes at once.
    """
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[_C, _D],
    )
    x_CK = gl.convert_layout(x_CK.to(dtype), WIDE)
    row = gl.arange(0, _C, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, _D, gl.SliceLayout(0, WIDE))
    at = x_ptr + (h // group).to(gl.int64) * stride_g + (h % group).to(gl.int64) * stride_r
    at = at + token.to(gl.int64) * stride_t
    mask = (row < valid)[:, None] & (column >= 0)[None, :]
    gl.store(at + (row.to(gl.int64) * stride_t)[:, None] + column[None, :], x_CK, mask=mask)


@gluon.jit
def _project(x_CK, tile, norm_ptr, valid):
    """Derivative of the norm: x - tile (x . tile) / |tile|^2, where `norm_ptr` [C] has 1 / |tile|."""
    row = gl.arange(0, _C, gl.SliceLayout(1, x_CK.type.layout))
    inverse = gl.load(norm_ptr, mask=row < valid, other=0.0)
    tile_CK = tile.load(x_CK.type.layout).to(gl.float32)
    return x_CK - tile_CK * (gl.sum(x_CK * tile_CK, 1) * inverse * inverse)[:, None]


@gluon.jit
def _release(bar):
    """Hand q and k back after `_project`, whose results have been stored.

    A barrier does not wait for values that its warps have asked for but not yet used, and the compiler moves uses
    behind it: the next tile, which comes by TMA, could arrive before the last loads of this one. Handed back before
    the store, dk was wrong in a few rows of one call in three (H200). What is stored has been used.
    """
    fence_async_shared()
    barrier()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _blocks(x_CC):
    """The blocks of 8 x 8 that a [C,C] accumulator's diagonal runs through or beside, as its threads hold them.

    Row 16 w + 8 h + i is warp w's; column 16 b + 8 h' + 2 j + e is in a register (b, h', e) of four of its threads, by
    j. For (h, h') = (0, 0), (1, 0), (0, 1) and (1, 1): [w,i,j,e,b / 2,b % 2]. Nothing is moved or computed.
    """
    x = gl.permute(gl.reshape(x_CC, [4, 2, 8, 2, 2, 2, 4, 2]), (0, 2, 6, 7, 3, 4, 1, 5))
    left, right = gl.split(x)
    x00, x10 = gl.split(left)
    x01, x11 = gl.split(right)
    return x00, x10, x01, x11


@gluon.jit
def _places(x):
    """Warp w, row i of its two blocks' eight, and thread j of the four that hold the row, as they index [w,i,j]."""
    layout: gl.constexpr = x.type.layout
    w = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    i = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return w, i, j


@gluon.jit
def _block(x, SHIFT: gl.constexpr = 0):
    """Of [w,i,j,e,b / 2,b % 2] the block b = w - SHIFT, in two parts [w,i,j] by e; where there is none, block 0."""
    even, odd = gl.split(x)
    b0, b2 = gl.split(even)
    b1, b3 = gl.split(odd)
    b0_even, b0_odd = gl.split(b0)
    b1_even, b1_odd = gl.split(b1)
    b2_even, b2_odd = gl.split(b2)
    b3_even, b3_odd = gl.split(b3)
    w, _, _ = _places(b0_even)
    w -= SHIFT
    x_even = gl.where(w < 2, gl.where(w < 1, b0_even, b1_even), gl.where(w < 3, b2_even, b3_even))
    x_odd = gl.where(w < 2, gl.where(w < 1, b0_odd, b1_odd), gl.where(w < 3, b2_odd, b3_odd))
    return x_even, x_odd


@gluon.jit
def _store_diagonal(x_CC, at):
    """Write the diagonal of a [C,C] accumulator: every element by the thread that has it."""
    x00, x10, x01, x11 = _blocks(x_CC)
    upper_even, upper_odd = _block(x00)
    lower_even, lower_odd = _block(x11)
    w, i, j = _places(upper_even)
    mine = (j == i // 2) & (w >= 0)
    at = at + w * 16 + i + j * 0
    gl.store(at, gl.where(i % 2 == 0, upper_even, upper_odd), mask=mine)
    gl.store(at + 8, gl.where(i % 2 == 0, lower_even, lower_odd), mask=mine)


@gluon.jit
def _store_rests(x_CC, at, dtype: gl.constexpr):
    """Write what the entries below the diagonal of a [C,C] accumulator lose when rounded to `dtype`; 0 for row 0."""
    x00, x10, x01, x11 = _blocks(x_CC)
    upper_even, upper_odd = _block(x00)
    lower_even, lower_odd = _block(x11)
    w, i, j = _places(upper_even)
    # A block's first row has its entry in the block to the left, in the last column.
    _, before_upper = _block(x01, 1)
    _, before_lower = _block(x10)
    upper = gl.where(i == 0, gl.where(w == 0, 0.0, before_upper), gl.where(i % 2 == 1, upper_even, upper_odd))
    lower = gl.where(i == 0, before_lower, gl.where(i % 2 == 1, lower_even, lower_odd))
    mine = (j == ((i + 7) % 8) // 2) & (w >= 0)
    at = at + w * 16 + i + j * 0
    gl.store(at, upper.to(dtype).to(gl.float32) - upper, mask=mine)
    gl.store(at + 8, lower.to(dtype).to(gl.float32) - lower, mask=mine)


@gluon.jit
def _queries(
    q_s, k_s, do_s, dv_s, u_s, decays_s, state_s, dstate_s, factors_s, w_s, p_s,
    tokens_full, tokens_empty, full, empty, pairs_full, pairs_empty,
    norms_ptr, sums_ptr, dq_ptr, table_ptr, scale, dq_stride_t, dq_stride_g, dq_stride_r, dq_group,
    first_head, pid, grid, steps,
    HK: gl.constexpr, R: gl.constexpr, HV: gl.constexpr, SUMS: gl.constexpr, HAS_NORMS: gl.constexpr,
    IN_PARTS: gl.constexpr,
):  # fmt: skip
    """W, dP, dq and <S, dS>."""
    dtype: gl.constexpr = k_s.dtype
    H: gl.constexpr = HK * R
    L_CK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    L_CC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row_K = gl.arange(0, _C, gl.SliceLayout(1, L_CK))
    ROW_C: gl.constexpr = gl.SliceLayout(1, L_CC)
    COL_C: gl.constexpr = gl.SliceLayout(0, L_CC)
    DECAYS: gl.constexpr = 3 if HAS_NORMS else 1
    row_C = gl.arange(0, _C, ROW_C)
    col_C = gl.arange(0, _C, COL_C)
    row_state = gl.arange(0, 8, gl.SliceLayout(1, ROWS))
    # For <S, dS> both tiles may be read in any one order: as they lie, no address differs by more than a constant.
    state_flat = reinterpret(state_s, dtype, [_D, _D], FLAT)
    dstate_flat = reinterpret(dstate_s, dtype, [_D, _D], FLAT)
    zero_CK = gl.full([_C, _D], 0.0, gl.float32, L_CK)
    zero_CC = gl.full([_C, _C], 0.0, gl.float32, L_CC)
    dq_CK = zero_CK
    slot, h_k, local = _locate(0, steps, pid, grid, HK, R)
    valid = _valid(_word(slot, table_ptr, IN_PARTS), IN_PARTS)
    for step in range(steps):
        buffer = step % 2
        phase = (step // 2) & 1
        slot, h_k, local = _locate(step, steps, pid, grid, HK, R)
        sums_at = sums_ptr + (slot.to(gl.int64) * H + local) * (SUMS * _C)
        # The next step's number is asked for here, or its latency would be seen.
        slot1, h_k1, local1 = _locate(step + 1, steps, pid, grid, HK, R)
        next_word = _word(slot1, table_ptr, IN_PARTS)
        do = do_s.index(buffer)
        dv = dv_s.index(buffer)
        u_T = u_s.index(buffer)
        mbarrier.wait(tokens_full.index(buffer), phase)
        if valid < _C:
            clear_rows(do, valid, 4)
            clear_rows(dv, valid, 4)
            cleared()
        w_CC = warpgroup_mma(dv, u_T, zero_CC, use_acc=False, is_async=True)
        p_CC = warpgroup_mma(do, u_T, zero_CC, use_acc=False, is_async=True)
        # With norms the tiles of k and q are raw: the norms of each pair go into W and dP, through the exponent.
        key_row = _row(decays_s.index(buffer * DECAYS), ROW_C)
        key_col = _row(decays_s.index(buffer * DECAYS + DECAYS - 1), COL_C)
        decay_CC = gl.exp2(key_row[:, None] - key_col[None, :])
        mbarrier.wait(pairs_empty.index(buffer), phase ^ 1)
        w_CC = warpgroup_mma_wait(1, deps=[w_CC])
        _store_diagonal(w_CC, sums_at + SUM_UPDATES * _C)
        w_CC *= gl.where(row_C[:, None] > col_C[None, :], decay_CC, 0.0)
        w_s.index(buffer).store(w_CC.to(dtype))
        if HAS_NORMS:
            query_row = _row(decays_s.index(buffer * DECAYS + 1), ROW_C)
            decay_CC = gl.exp2(query_row[:, None] - key_col[None, :])
        p_CC = warpgroup_mma_wait(0, deps=[p_CC])
        p_CC *= gl.where(row_C[:, None] >= col_C[None, :], decay_CC, 0.0) * -scale
        p_s.index(buffer).store(p_CC.to(dtype))
        _store_rests(p_CC, sums_at + SUM_REST * _C, dtype)
        fence_async_shared()
        barrier()
        mbarrier.arrive(pairs_full.index(buffer), count=1)
        mbarrier.wait(full.index(0), step & 1)
        query_CK = warpgroup_mma(do, state_s, zero_CK, use_acc=False, is_async=True)
        mbarrier.wait(full.index(1), step & 1)
        # In front of a barrier, behind which no load moves, and of the tiles' loads: those are used before dS is handed
        # back, and a warp's loads come in order.
        query_C = _row(factors_s.index(2), gl.SliceLayout(1, L_CK))
        barrier()
        product = gl.full([8, _D], 0.0, gl.float32, ROWS)
        for j in gl.static_range(_C // 8):
            x = state_flat.slice(j * 8, 8).load(ROWS).to(gl.float32)
            product += x * dstate_flat.slice(j * 8, 8).load(ROWS).to(gl.float32)
        gl.store(sums_at + SUM_STATES * _C + row_state, gl.sum(product, 1))
        query_CK = warpgroup_mma_wait(0, deps=[query_CK])
        query_CK = query_CK * (-query_C)[:, None]
        barrier()
        mbarrier.arrive(empty.index(0), count=1)
        mbarrier.arrive(empty.index(1), count=1)
        mbarrier.arrive(tokens_empty.index(buffer), count=1)
        mbarrier.wait(full.index(2), (step // R) & 1)
        if valid < _C:
            clear_rows(q_s, valid, 4)
            clear_rows(k_s, valid, 4)
            cleared()
        query_CK = warpgroup_mma(p_s.index(buffer), k_s, query_CK, is_async=True)
        q_CK = q_s.load(L_CK)
        query_CK = warpgroup_mma_wait(0, deps=[query_CK])
        gl.store(sums_at + SUM_QUERIES * _C + row_K, -gl.sum(query_CK * q_CK.to(gl.float32), 1))
        dq_CK -= query_CK
        if step % R == R - 1:
            token = gl.load(table_ptr + slot * 4)
            h = first_head // R + h_k
            if HAS_NORMS:
                norm_at = norms_ptr + token.to(gl.int64) * (2 * (HV // R)) + h + row_K * (2 * (HV // R))
                dq_CK = _project(dq_CK, q_s, norm_at, valid)
            else:
                barrier()
                mbarrier.arrive(empty.index(2), count=1)
            _store_head(dq_CK, dq_ptr, token, valid, h, dq_stride_t, dq_stride_g, dq_stride_r, dq_group, dtype)
            if HAS_NORMS:
                _release(empty.index(2))
            dq_CK = zero_CK
        valid = _valid(next_word, IN_PARTS)


@gluon.jit
def _keys(
    q_s, k_s, dv_s, u_s, state_s, dstate_s, factors_s, w_s, p_s,
    tokens_full, tokens_empty, full, empty, pairs_full, pairs_empty,
    norms_ptr, sums_ptr, dk_ptr, table_ptr, dk_stride_t, dk_stride_g, dk_stride_r, dk_group,
    first_head, pid, grid, steps,
    HK: gl.constexpr, R: gl.constexpr, HV: gl.constexpr, SUMS: gl.constexpr, HAS_NORMS: gl.constexpr,
    IN_PARTS: gl.constexpr,
):  # fmt: skip
    """dk and its parts' row sums, from W and dP of the other warpgroup, and half of <S, dS>."""
    dtype: gl.constexpr = k_s.dtype
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    row_state = gl.arange(0, 8, gl.SliceLayout(1, ROWS))
    state_flat = reinterpret(state_s, dtype, [_D, _D], FLAT)
    dstate_flat = reinterpret(dstate_s, dtype, [_D, _D], FLAT)
    H: gl.constexpr = HK * R
    L_CK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    row_K = gl.arange(0, _C, gl.SliceLayout(1, L_CK))
    zero_CK = gl.full([_C, _D], 0.0, gl.float32, L_CK)
    dk_CK = zero_CK
    slot, h_k, local = _locate(0, steps, pid, grid, HK, R)
    valid = _valid(_word(slot, table_ptr, IN_PARTS), IN_PARTS)
    for step in range(steps):
        buffer = step % 2
        phase = (step // 2) & 1
        slot, h_k, local = _locate(step, steps, pid, grid, HK, R)
        sums_at = sums_ptr + (slot.to(gl.int64) * H + local) * (SUMS * _C) + row_K
        states_at = sums_ptr + (slot.to(gl.int64) * H + local) * (SUMS * _C) + SUM_STATES * _C + 8 + row_state
        slot1, h_k1, local1 = _locate(step + 1, steps, pid, grid, HK, R)
        next_word = _word(slot1, table_ptr, IN_PARTS)
        dv = dv_s.index(buffer)
        w = w_s.index(buffer)
        p = p_s.index(buffer)
        mbarrier.wait(tokens_full.index(buffer), phase)
        if valid < _C:
            clear_rows(dv, valid, 4)
            cleared()
        mbarrier.wait(full.index(0), step & 1)
        left_CK = warpgroup_mma(dv, state_s, zero_CK, use_acc=False, is_async=True)
        mbarrier.wait(full.index(1), step & 1)
        # As in `_queries`.
        read_C = _row(factors_s.index(0), gl.SliceLayout(1, L_CK))
        write_C = _row(factors_s.index(1), gl.SliceLayout(1, L_CK))
        barrier()
        product = gl.full([8, _D], 0.0, gl.float32, ROWS)
        for j in gl.static_range(_C // 8, _D // 8):
            x = state_flat.slice(j * 8, 8).load(ROWS).to(gl.float32)
            product += x * dstate_flat.slice(j * 8, 8).load(ROWS).to(gl.float32)
        gl.store(states_at, gl.sum(product, 1))
        right_CK = warpgroup_mma(u_s.index(buffer).permute((1, 0)), dstate_s, zero_CK, use_acc=False, is_async=True)
        left_CK = warpgroup_mma_wait(1, deps=[left_CK])
        barrier()
        mbarrier.arrive(empty.index(0), count=1)
        left_CK = left_CK * read_C[:, None]
        mbarrier.wait(full.index(2), (step // R) & 1)
        if valid < _C:
            clear_rows(q_s, valid, 4)
            clear_rows(k_s, valid, 4)
            cleared()
        mbarrier.wait(pairs_full.index(buffer), phase)
        left_CK = warpgroup_mma(w, k_s, left_CK, is_async=True)
        right_CK = warpgroup_mma_wait(1, deps=[right_CK])
        barrier()
        mbarrier.arrive(empty.index(1), count=1)
        mbarrier.arrive(tokens_empty.index(buffer), count=1)
        right_CK = right_CK * (-write_C)[:, None]
        gl.store(sums_at + SUM_KEYS_STATE * _C, -gl.sum(right_CK * k_s.load(L_CK).to(gl.float32), 1))
        right_CK = warpgroup_mma(w.permute((1, 0)), k_s, right_CK, is_async=True)
        right_CK = warpgroup_mma(p.permute((1, 0)), q_s, right_CK, is_async=True)
        left_CK = warpgroup_mma_wait(2, deps=[left_CK])
        gl.store(sums_at + SUM_KEYS_LEFT * _C, -gl.sum(left_CK * k_s.load(L_CK).to(gl.float32), 1))
        dk_CK -= left_CK
        right_CK = warpgroup_mma_wait(0, deps=[right_CK])
        barrier()
        mbarrier.arrive(pairs_empty.index(buffer), count=1)
        gl.store(sums_at + SUM_KEYS_RIGHT * _C, -gl.sum(right_CK * k_s.load(L_CK).to(gl.float32), 1))
        dk_CK -= right_CK
        if step % R == R - 1:
            token = gl.load(table_ptr + slot * 4)
            h = first_head // R + h_k
            if HAS_NORMS:
                norm_at = norms_ptr + token.to(gl.int64) * (2 * (HV // R)) + HV // R + h + row_K * (2 * (HV // R))
                dk_CK = _project(dk_CK, k_s, norm_at, valid)
            else:
                barrier()
                mbarrier.arrive(empty.index(2), count=1)
            _store_head(dk_CK, dk_ptr, token, valid, h, dk_stride_t, dk_stride_g, dk_stride_r, dk_group, dtype)
            if HAS_NORMS:
                _release(empty.index(2))
            dk_CK = zero_CK
        valid = _valid(next_word, IN_PARTS)


@gluon.jit
def _gradients_kernel(
    q_desc, k_desc, do_desc, dv_desc, states_desc, dstates_desc, updates_desc, decays_desc, factors_desc,
    norms_ptr, sums_ptr, dq_ptr, dk_ptr, table_ptr, totals_ptr, scale,
    q_stride_h, k_stride_h, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
    dq_stride_t, dq_stride_g, dq_stride_r, dq_group, dk_stride_t, dk_stride_g, dk_stride_r, dk_group,
    first_head, first_scratch_head, grid,
    HK: gl.constexpr, R: gl.constexpr, HV: gl.constexpr, HS: gl.constexpr, SUMS: gl.constexpr,
    FACTORS: gl.constexpr, HAS_NORMS: gl.constexpr, IN_PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = tma.TILE_16BIT
    DECAYS: gl.constexpr = 3 if HAS_NORMS else 1
    pid = gl.program_id(0)
    q_s = gl.allocate_shared_memory(dtype, [_C, _D], TILE)
    k_s = gl.allocate_shared_memory(dtype, [_C, _D], TILE)
    do_s = gl.allocate_shared_memory(dtype, [2, _C, _D], TILE)
    dv_s = gl.allocate_shared_memory(dtype, [2, _C, _D], TILE)
    u_s = gl.allocate_shared_memory(dtype, [2, _D, _C], TILE)
    decays_s = gl.allocate_shared_memory(gl.float32, [2 * DECAYS, 1, _C], tma.TILE_FLOAT32)
    factors_s = gl.allocate_shared_memory(gl.float32, [3, 1, _C], tma.TILE_FLOAT32)
    state_s = gl.allocate_shared_memory(dtype, [_D, _D], TILE)
    dstate_s = gl.allocate_shared_memory(dtype, [_D, _D], TILE)
    w_s = gl.allocate_shared_memory(dtype, [2, _C, _C], TILE)
    p_s = gl.allocate_shared_memory(dtype, [2, _C, _C], TILE)
    # Full and empty: of the tokens' tiles (do, dv, u and decays), of W and dP, and of S (0), dS and factors (1), q and
    # k (2).
    tokens_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    tokens_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pairs_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    pairs_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(tokens_full.index(i), count=1)
        mbarrier.init(tokens_empty.index(i), count=2)
        mbarrier.init(pairs_full.index(i), count=1)
        mbarrier.init(pairs_empty.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    wait_for_earlier(EARLY)
    num_items = gl.load(totals_ptr) * HK
    # A program without an item (more programs than items) has no step.
    steps = gl.maximum(num_items - pid + grid - 1, 0) // grid * R
    gl.warp_specialize(
        [
            (_queries, (
                q_s, k_s, do_s, dv_s, u_s, decays_s, state_s, dstate_s, factors_s, w_s, p_s,
                tokens_full, tokens_empty, full, empty, pairs_full, pairs_empty,
                norms_ptr, sums_ptr, dq_ptr, table_ptr, scale,
                dq_stride_t, dq_stride_g, dq_stride_r, dq_group, first_head, pid, grid, steps,
                HK, R, HV, SUMS, HAS_NORMS, IN_PARTS,
            )),
            (_keys, (
                q_s, k_s, dv_s, u_s, state_s, dstate_s, factors_s, w_s, p_s,
                tokens_full, tokens_empty, full, empty, pairs_full, pairs_empty,
                norms_ptr, sums_ptr, dk_ptr, table_ptr,
                dk_stride_t, dk_stride_g, dk_stride_r, dk_group, first_head, pid, grid, steps,
                HK, R, HV, SUMS, HAS_NORMS, IN_PARTS,
            )),
            (_produce, (
                q_desc, k_desc, do_desc, dv_desc, states_desc, dstates_desc, updates_desc, decays_desc, factors_desc,
                q_s, k_s, do_s, dv_s, u_s, decays_s, state_s, dstate_s, factors_s,
                tokens_full, tokens_empty, full, empty, table_ptr,
                q_stride_h, k_stride_h, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
                first_head, first_scratch_head, pid, grid, steps, HK, R, HV, HS, FACTORS, HAS_NORMS, IN_PARTS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def gradients(
    q: Tensor, k: Tensor, do: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, updates: Tensor, gates: Tensor,
    factors: Tensor, norms: Tensor | None, part: Part, scale: float,
    *, dq: Tensor, dk: Tensor, sums: Tensor, heads: range,
) -> None:  # fmt: skip
    """Fill dq, dk [T,G,R,K] for a part's chunks and a range of value heads, and rows 8.. of sums [NS,H,NUM_SUMS,C].

    states [NS,HS,V,K] and updates [NS,HS,V,C] hold all value heads or those of the range; dstates [NS,H,V,K]; dv
    [T,G,R,V] as `reverse` wrote it.
    """
    HV = gates.shape[1]
    R = HV // k.shape[1]
    HS = states.shape[1]
    columns = (dv.shape[1] - 1) * dv.stride(1) + (dv.shape[2] - 1) * dv.stride(2) + dv.shape[3]
    dv_rows = dv.as_strided((dv.shape[0], columns), (dv.stride(0), 1))
    items = part.table.shape[0] * (len(heads) // R)
    grid = min(multiprocessors(), items)
    launch(
        _gradients_kernel, (grid,),
        tma.heads(q, (CHUNK, 128)), tma.heads(k, (CHUNK, 128)), tma.heads(do, (CHUNK, 128)),
        tma.rows(dv_rows, (CHUNK, 128)), tma.rows(states.view(-1, states.shape[-1]), (128, 128)),
        tma.rows(dstates.view(-1, dstates.shape[-1]), (128, 128)), tma.rows(updates.view(-1, CHUNK), (128, CHUNK)),
        tma.rows((gates if norms is None else factors).view(-1, CHUNK), (1, CHUNK)),
        tma.rows(factors.view(-1, CHUNK), (1, CHUNK)), factors if norms is None else norms, sums, dq, dk, part.table,
        part.used, scale,
        q.stride(1), k.stride(1), do.stride(1), dv.stride(1), dv.stride(2), dv.shape[2],
        *(dq.stride()[:3]), dq.shape[2], *(dk.stride()[:3]), dk.shape[2],
        heads.start, heads.start if HS == HV else 0, grid,
        HK=len(heads) // R, R=R, HV=HV, HS=HS, SUMS=NUM_SUMS, FACTORS=factors.shape[2],
        HAS_NORMS=norms is not None, IN_PARTS=not part.has_all,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
