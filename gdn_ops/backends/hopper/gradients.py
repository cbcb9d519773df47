"""Gradients of queries and keys, chunk by chunk, and the row sums that the gate's gradient is made of.

With W = -tril(dv u^T, -1) o Gamma and dP = scale * tril(do u^T) o Gamma (Gamma_ij = 2^(G_i - G_j)), per value head

    left  = -(dv S) * factor_0 + W k          what a key's reading of the past contributes to dk
    right =  (u dS^T) * factor_1 + W^T k + dP^T q   what a key's writing for the future contributes to dk
    dq    =  (do S) * factor_2 + dP k

summed over a query/key head's value heads in registers, and written once, where they belong in the gradient row. With
in-kernel norms the factors and tiles carry 1/|q| and 1/|k|, so the sums are already gradients of the normalised
vectors times 1/|x|, and the norm's derivative is one projection: dx <- dx - x (x . dx) / |x|^2.

Row sums (rows 8.. of `sums`), which `epilogue` turns into dg and dbeta: k . left, q . dq - k . right, k . right's state
part, and <S, dS>.

Grid: persistent, one program a multiprocessor; an item is a chunk and a query/key head. 8 warps, [4,2].
On chip: do, dv, u double-buffered; q, k, S, dS once, each refilled as soon as its last reader is done.
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

from gdn_ops.backends.hopper import tma
from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.launch import launch, multiprocessors
from gdn_ops.backends.hopper.reverse import NUM_VALUE_SUMS
from gdn_ops.backends.hopper.tma import async_load, clear_rows, cleared
from gdn_ops.shapes import CHUNK

# Letters: C chunk length (64), D head size (K = V = 128), R value heads of a query/key head, H value heads of one
# launch, HK query/key heads of one launch, HS heads of states and updates, HV all value heads.

# H200, 16/48 heads, 32768 tokens in five documents: 8 warps 1.31 ms, 16 warps 2.16 (spills) (prototype, 2026-11).
_NUM_WARPS = 8

SUM_KEYS_LEFT = gl.constexpr(NUM_VALUE_SUMS)
SUM_REST = gl.constexpr(NUM_VALUE_SUMS + 2)
SUM_KEYS_STATE = gl.constexpr(NUM_VALUE_SUMS + 4)
SUM_STATES = gl.constexpr(NUM_VALUE_SUMS + 6)
NUM_SUMS = NUM_VALUE_SUMS + 7
"""Rows of `sums` [NT,H,NUM_SUMS,C]; this kernel's three kinds of row sum come as two partial sums, one a half of K."""

_C = gl.constexpr(64)
_D = gl.constexpr(128)


@gluon.jit
def _item(it, pid, grid, num_items, table_ptr, HK: gl.constexpr, R: gl.constexpr):
    """Chunk, local query/key head, local value head, first token and valid tokens of step `it`."""
    item = gl.maximum(gl.minimum(pid + (it // R) * grid, num_items - 1), 0)
    chunk = item // HK
    h_k = item % HK
    return chunk, h_k, h_k * R + it % R, gl.load(table_ptr + chunk * 4), gl.load(table_ptr + chunk * 4 + 1)


@gluon.jit
def _fetch_tokens(
    do_desc, dv_desc, updates_desc, do_s, dv_s, u_s, bar, token, chunk, local, first_head, first_scratch_head,
    do_stride_h, dv_stride_g, dv_stride_r, dv_group, pred, HS: gl.constexpr,
):  # fmt: skip
    h = first_head + local
    mbarrier.expect(bar, 3 * _C * _D * 2, pred=pred)
    async_load(dv_desc, [token, (h // dv_group) * dv_stride_g + (h % dv_group) * dv_stride_r], bar, dv_s, pred=pred)
    async_load(updates_desc, [(chunk * HS + first_scratch_head + local) * _D, 0], bar, u_s, pred=pred)
    async_load(do_desc, [token, h * do_stride_h], bar, do_s, pred=pred)


@gluon.jit
def _store_row_sums(at_ptr, x_RK):
    """Store per-row sums of [C,D] as two partial sums, one a half of D: the halves are different warps'."""
    half_sums = gl.sum(gl.reshape(x_RK, [_C, 2, _D // 2]), 2)
    L: gl.constexpr = half_sums.type.layout
    row = gl.arange(0, _C, gl.SliceLayout(1, L))
    half = gl.arange(0, 2, gl.SliceLayout(0, L))
    gl.store(at_ptr + half[None, :] * _C + row[:, None], half_sums)


@gluon.jit
def _gradients_kernel(
    q_desc, k_desc, do_desc, dv_desc, states_desc, dstates_desc, updates_desc,
    gates_ptr, factors_ptr, norms_ptr, sums_ptr, dq_ptr, dk_ptr, table_ptr, totals_ptr, scale,
    q_stride_h, k_stride_h, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
    dq_stride_t, dq_stride_g, dq_stride_r, dq_group, dk_stride_t, dk_stride_g, dk_stride_r, dk_group,
    first_head, first_scratch_head, grid,
    HK: gl.constexpr, R: gl.constexpr, HV: gl.constexpr, HS: gl.constexpr, SUMS: gl.constexpr,
    FACTORS: gl.constexpr, HAS_NORMS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    TILE: gl.constexpr = tma.TILE_16BIT
    H: gl.constexpr = HK * R
    L_CK: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, NUM_WARPS // 4], instr_shape=[16, 512 // NUM_WARPS, 16]
    )
    L_CC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, NUM_WARPS // 4], instr_shape=[16, 256 // NUM_WARPS, 16]
    )
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [NUM_WARPS, 1], [1, 0])
    pid = gl.program_id(0)
    num_items = gl.load(totals_ptr) * HK
    q_s = gl.allocate_shared_memory(dtype, [_C, _D], TILE)
    k_s = gl.allocate_shared_memory(dtype, [_C, _D], TILE)
    do_s = gl.allocate_shared_memory(dtype, [2, _C, _D], TILE)
    dv_s = gl.allocate_shared_memory(dtype, [2, _C, _D], TILE)
    u_s = gl.allocate_shared_memory(dtype, [2, _D, _C], TILE)
    state_s = gl.allocate_shared_memory(dtype, [_D, _D], TILE)
    dstate_s = gl.allocate_shared_memory(dtype, [_D, _D], TILE)
    w_s = gl.allocate_shared_memory(dtype, [_C, _C], TILE)
    p_s = gl.allocate_shared_memory(dtype, [_C, _C], TILE)
    bars_tokens = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars_tokens.index(i), count=1)
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    bar_qk = bars.index(0)
    bar_state = bars.index(1)
    bar_dstate = bars.index(2)
    fence_async_shared()
    # A program without an item (more programs than items) runs no step and fetches nothing.
    steps = gl.maximum(num_items - pid + grid - 1, 0) // grid * R
    chunk, h_k, local, token, valid = _item(0, pid, grid, num_items, table_ptr, HK, R)
    chunk1, h_k1, local1, token1, valid1 = _item(1, pid, grid, num_items, table_ptr, HK, R)
    some = steps > 0
    _fetch_tokens(
        do_desc, dv_desc, updates_desc, do_s.index(0), dv_s.index(0), u_s.index(0), bars_tokens.index(0),
        token, chunk, local, first_head, first_scratch_head, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
        some, HS,
    )  # fmt: skip
    mbarrier.expect(bar_state, _D * _D * 2, pred=some)
    async_load(states_desc, [(chunk * HS + first_scratch_head + local) * _D, 0], bar_state, state_s, pred=some)
    mbarrier.expect(bar_qk, 2 * _C * _D * 2, pred=some)
    h_first = first_head // R
    async_load(k_desc, [token, (h_first + h_k) * k_stride_h], bar_qk, k_s, pred=some)
    async_load(q_desc, [token, (h_first + h_k) * q_stride_h], bar_qk, q_s, pred=some)
    mbarrier.expect(bar_dstate, _D * _D * 2, pred=some)
    async_load(dstates_desc, [(chunk * H + local) * _D, 0], bar_dstate, dstate_s, pred=some)
    _fetch_tokens(
        do_desc, dv_desc, updates_desc, do_s.index(1), dv_s.index(1), u_s.index(1), bars_tokens.index(1),
        token1, chunk1, local1, first_head, first_scratch_head, do_stride_h, dv_stride_g, dv_stride_r, dv_group,
        steps > 1, HS,
    )  # fmt: skip
    row_K = gl.arange(0, _C, gl.SliceLayout(1, L_CK))
    row_C = gl.arange(0, _C, gl.SliceLayout(1, L_CC))
    col_C = gl.arange(0, _C, gl.SliceLayout(0, L_CC))
    row_out = gl.arange(0, _C, gl.SliceLayout(1, ROWS))
    col_out = gl.arange(0, _D, gl.SliceLayout(0, ROWS))
    row_state = gl.arange(0, 32, gl.SliceLayout(1, ROWS))
    zero_CK = gl.full([_C, _D], 0.0, gl.float32, L_CK)
    zero_CC = gl.full([_C, _C], 0.0, gl.float32, L_CC)
    dq_CK = zero_CK
    dk_CK = zero_CK
    for it in range(steps):
        buffer = it % 2
        chunk, h_k, local, token, valid = _item(it, pid, grid, num_items, table_ptr, HK, R)
        at = chunk.to(gl.int64) * HV + first_head + local
        factors_at = factors_ptr + at * (FACTORS * _C)
        if HAS_NORMS:
            # The tiles of k and q are raw: the norms of each pair go into W and dP, through the exponent.
            key_row = gl.load(factors_at + 4 * _C + row_C)
            query_row = gl.load(factors_at + 5 * _C + row_C)
            key_col = gl.load(factors_at + 6 * _C + col_C)
        else:
            key_row = gl.load(gates_ptr + at * _C + row_C)
            key_col = gl.load(gates_ptr + at * _C + col_C)
        read_C = gl.load(factors_at + row_K)
        write_C = gl.load(factors_at + _C + row_K)
        query_C = gl.load(factors_at + 2 * _C + row_K)
        sums_at = sums_ptr + (chunk.to(gl.int64) * H + local) * (SUMS * _C)
        chunk1, h_k1, local1, token1, valid1 = _item(it + 1, pid, grid, num_items, table_ptr, HK, R)
        chunk2, h_k2, local2, token2, valid2 = _item(it + 2, pid, grid, num_items, table_ptr, HK, R)
        more = it + 1 < steps
        do = do_s.index(buffer)
        dv = dv_s.index(buffer)
        u_T = u_s.index(buffer)
        mbarrier.wait(bars_tokens.index(buffer), (it // 2) & 1)
        if valid < _C:
            clear_rows(do, valid, NUM_WARPS)
            clear_rows(dv, valid, NUM_WARPS)
            cleared()
        w_CC = warpgroup_mma(dv, u_T, zero_CC, use_acc=False, is_async=True)
        p_CC = warpgroup_mma(do, u_T, zero_CC, use_acc=False, is_async=True)
        mbarrier.wait(bar_state, it & 1)
        left_CK = warpgroup_mma(dv, state_s, zero_CK, use_acc=False, is_async=True)
        query_CK = warpgroup_mma(do, state_s, zero_CK, use_acc=False, is_async=True)
        w_CC = warpgroup_mma_wait(3, deps=[w_CC])
        lower = (row_C[:, None] >= col_C[None, :]) & (row_C < valid)[:, None]
        decay_CC = gl.where(lower, gl.exp2(key_row[:, None] - key_col[None, :]), 0.0)
        w_s.store(gl.where(row_C[:, None] > col_C[None, :], -w_CC * decay_CC, 0.0).to(dtype))
        p_CC = warpgroup_mma_wait(2, deps=[p_CC])
        if HAS_NORMS:
            decay_CC = gl.where(lower, gl.exp2(query_row[:, None] - key_col[None, :]), 0.0)
        p_s.store((p_CC * decay_CC * scale).to(dtype))
        fence_async_shared()
        mbarrier.wait(bar_dstate, it & 1)
        right_CK = warpgroup_mma(u_T.permute((1, 0)), dstate_s, zero_CK, use_acc=False, is_async=True)
        product = gl.full([32, _D], 0.0, gl.float32, ROWS)
        for j in gl.static_range(_D // 32):
            product += state_s.slice(j * 32, 32).load(ROWS).to(gl.float32) * dstate_s.slice(j * 32, 32).load(ROWS).to(
                gl.float32
            )
        gl.store(sums_at + SUM_STATES * _C + row_state, gl.sum(product, 1))
        left_CK, query_CK = warpgroup_mma_wait(1, deps=[left_CK, query_CK])
        # The state's tile is free.
        mbarrier.expect(bar_state, _D * _D * 2, pred=more)
        async_load(states_desc, [(chunk1 * HS + first_scratch_head + local1) * _D, 0], bar_state, state_s, pred=more)
        left_CK = left_CK * (-read_C)[:, None]
        query_CK = query_CK * query_C[:, None]
        mbarrier.wait(bar_qk, (it // R) & 1)
        if valid < _C:
            clear_rows(q_s, valid, NUM_WARPS)
            clear_rows(k_s, valid, NUM_WARPS)
            cleared()
        left_CK = warpgroup_mma(w_s, k_s, left_CK, is_async=True)
        query_CK = warpgroup_mma(p_s, k_s, query_CK, is_async=True)
        right_CK = warpgroup_mma_wait(2, deps=[right_CK])
        mbarrier.expect(bar_dstate, _D * _D * 2, pred=more)
        async_load(dstates_desc, [(chunk1 * H + local1) * _D, 0], bar_dstate, dstate_s, pred=more)
        _fetch_tokens(
            do_desc, dv_desc, updates_desc, do, dv, u_T, bars_tokens.index(buffer), token2, chunk2, local2,
            first_head, first_scratch_head, do_stride_h, dv_stride_g, dv_stride_r, dv_group, it + 2 < steps, HS,
        )  # fmt: skip
        k_CK = k_s.load(L_CK)
        right_CK = right_CK * write_C[:, None]
        _store_row_sums(sums_at + SUM_KEYS_STATE * _C, right_CK * k_CK.to(gl.float32))
        right_CK = warpgroup_mma(w_s.permute((1, 0)), k_s, right_CK, is_async=True)
        right_CK = warpgroup_mma(p_s.permute((1, 0)), q_s, right_CK, is_async=True)
        left_CK, query_CK = warpgroup_mma_wait(2, deps=[left_CK, query_CK])
        dk_CK += left_CK
        dq_CK += query_CK
        _store_row_sums(sums_at + SUM_KEYS_LEFT * _C, left_CK * k_CK.to(gl.float32))
        rest_CK = query_CK * q_s.load(L_CK).to(gl.float32)
        right_CK = warpgroup_mma_wait(0, deps=[right_CK])
        dk_CK += right_CK
        rest_CK -= right_CK * k_CK.to(gl.float32)
        _store_row_sums(sums_at + SUM_REST * _C, rest_CK)
        if it % R == R - 1:
            if HAS_NORMS:
                norm_row = norms_ptr + token.to(gl.int64) * (2 * (HV // R)) + h_first + h_k + row_K * (2 * (HV // R))
                inv_q = gl.load(norm_row, mask=row_K < valid, other=0.0)
                inv_k = gl.load(norm_row + (HV // R), mask=row_K < valid, other=0.0)
                q_CK = q_s.load(L_CK).to(gl.float32)
                dq_CK -= q_CK * (gl.sum(dq_CK * q_CK, 1) * inv_q * inv_q)[:, None]
                key_CK = k_s.load(L_CK).to(gl.float32)
                dk_CK -= key_CK * (gl.sum(dk_CK * key_CK, 1) * inv_k * inv_k)[:, None]
            # q and k are free: fetch the next item's.
            mbarrier.expect(bar_qk, 2 * _C * _D * 2, pred=more)
            async_load(k_desc, [token1, (h_first + h_k1) * k_stride_h], bar_qk, k_s, pred=more)
            async_load(q_desc, [token1, (h_first + h_k1) * q_stride_h], bar_qk, q_s, pred=more)
            out_t = (token + row_out).to(gl.int64)[:, None]
            mask = (row_out < valid)[:, None] & (col_out >= 0)[None, :]
            h = h_first + h_k
            dq_at = dq_ptr + (h // dq_group).to(gl.int64) * dq_stride_g + (h % dq_group).to(gl.int64) * dq_stride_r
            dk_at = dk_ptr + (h // dk_group).to(gl.int64) * dk_stride_g + (h % dk_group).to(gl.int64) * dk_stride_r
            dq_out = gl.convert_layout(dq_CK.to(dtype), ROWS)
            gl.store(dq_at + out_t * dq_stride_t + col_out[None, :], dq_out, mask=mask)
            dk_out = gl.convert_layout(dk_CK.to(dtype), ROWS)
            gl.store(dk_at + out_t * dk_stride_t + col_out[None, :], dk_out, mask=mask)
            dq_CK = zero_CK
            dk_CK = zero_CK


def gradients(
    q: Tensor, k: Tensor, do: Tensor, dv: Tensor, states: Tensor, dstates: Tensor, updates: Tensor, gates: Tensor,
    factors: Tensor, norms: Tensor | None, chunks: Chunks, scale: float,
    *, dq: Tensor, dk: Tensor, sums: Tensor, heads: range,
) -> None:  # fmt: skip
    """Fill dq, dk [T,G,R,K] for a range of value heads, and rows 8.. of sums [NT,H,NUM_SUMS,C].

    states [NT,HS,V,K] and updates [NT,HS,V,C] hold all value heads or those of the range; dstates [NT,H,V,K]; dv
    [T,G,R,V] as `reverse` wrote it.
    """
    HV = gates.shape[1]
    R = HV // k.shape[1]
    HS = states.shape[1]
    columns = (dv.shape[1] - 1) * dv.stride(1) + (dv.shape[2] - 1) * dv.stride(2) + dv.shape[3]
    dv_rows = dv.as_strided((dv.shape[0], columns), (dv.stride(0), 1))
    items = gates.shape[0] * (len(heads) // R)
    grid = min(multiprocessors(), items)
    launch(
        _gradients_kernel, (grid,),
        tma.heads(q, (CHUNK, 128)), tma.heads(k, (CHUNK, 128)), tma.heads(do, (CHUNK, 128)),
        tma.rows(dv_rows, (CHUNK, 128)), tma.rows(states.view(-1, states.shape[-1]), (128, 128)),
        tma.rows(dstates.view(-1, dstates.shape[-1]), (128, 128)), tma.rows(updates.view(-1, CHUNK), (128, CHUNK)),
        gates, factors, factors if norms is None else norms, sums, dq, dk, chunks.table, chunks.totals, scale,
        q.stride(1), k.stride(1), do.stride(1), dv.stride(1), dv.stride(2), dv.shape[2],
        *(dq.stride()[:3]), dq.shape[2], *(dk.stride()[:3]), dk.shape[2],
        heads.start, heads.start if HS == HV else 0, grid,
        HK=len(heads) // R, R=R, HV=HV, HS=HS, SUMS=NUM_SUMS, FACTORS=factors.shape[2],
        HAS_NORMS=norms is not None,
        NUM_WARPS=_NUM_WARPS, num_warps=_NUM_WARPS,
    )  # fmt: skip
