"""A chunk's two matrices: its gated scores, and the inverse that turns targets into updates, u = A (v - e^G k S).

    P_ij = scale * q_i . k_j * 2^(G_i - G_j)  (i >= j)
    L_ij = beta_i k_i . k_j  (i > j)        X = (I + L)^-1 diag(beta)        A_ij = X_ij * 2^(G_i - G_j)

Only what lies below A's diagonal is stored: the diagonal is beta, and its users have that unrounded (`forward`). Rows
and columns of tokens past the document's end are zero.

Where keys are alike, k_i . k_j near 1, and little decays, A is nearly a difference operator: sums of u over a chunk
cancel, and what each rounding left adds up in the state. Such a chunk's A is stored with its diagonal, so that u is
made of the rounded y alone and what y lost cancels too; of beta the factors then have only what A's diagonal lost. And
its 16 x 16 diagonal blocks are rounded so that the sums of their rows and columns stay.

The decay is a diagonal similarity, so the inverse is taken of the undecayed L and gated afterwards: nothing in it can
overflow, however strong the decay. X is built from 16 x 16 blocks: the diagonal ones by exact elimination in float32,
the others by X_ij = -X_ii sum_k K_ik X_kj in TF32, where K = k k^T, since X_ii has beta in it. All intermediates are
bounded by the keys' norms; a power series would not be, with nearly parallel keys. beta is kept from zero
(`gates.kept_from_zero`, factor 3); `epilogue` says what for.

With norms, 1 / sqrt(sum(x^2) + eps) of every query and key comes from the diagonals of q q^T and k k^T and is filled in
too; it multiplies products, so q and k themselves stay raw. Tokens of no document get none.

Grid: four warps a query/key head, chunk and up to four of the head's value heads; of more, several programs, which then
write the same norms. Tiles of q and k come into shared memory once; both products stay on chip as what each head's P
and A are made from. Everything is transposed, with columns of A over the warps: the blocks of X follow from one another
by products from the right, so a warp's left operand is what it has just computed.
"""

# Tuples grow in the unrolled loops of kernels.
# mypy: disable-error-code="assignment,misc"

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper import tma
from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.tma import async_store, barrier, reinterpret, store_wait
from gdn_ops.shapes import CHUNK, L2NORM_EPS, Options

# Letters: NT chunks, HV value heads, HK query/key heads, R = HV / HK, H value heads of one program (R or more, if few),
# C chunk length, K head size, B block length. J rows and I columns of a transposed matrix: A_ij is at [j, i].

_MAX_HEADS = 4
"""Of a program. They share its k k^T, and their diagonal blocks are inverted at once; those of eight would take 32 KB
of shared memory and leave room for three programs on a multiprocessor instead of four."""

_MAX_REGISTERS = 128
"""Of a thread: four programs on a multiprocessor, for 88 bytes spilled (112 with norms). H200, 16/48 heads, 32768
tokens, triton 3.6: 0.253 ms; three programs (168 registers) 0.275 to 0.280, two (255) 0.298."""

_WARP_HEADS = 2
"""Heads that different warps take in the elimination: 128 threads are two heads' columns of diagonal blocks."""

_OPERAND_WIDTH = 2
"""Neighbouring numbers of a TF32 operand in one thread. With 1, at 168 registers, 0.299 ms for 0.275."""

_C = gl.constexpr(CHUNK)
_K = gl.constexpr(128)
_B = gl.constexpr(16)

_UNCUT = gl.constexpr((1 + 2**-11 * 0.7213) ** 2)
"""TF32 operands are cut off, not rounded, which makes them smaller by 2^-11 / (2 log 2) of themselves on average. Every
product with a block of k k^T goes through four operands, of which two, blocks of X, are rounded to nearest; so the
block is made larger by what the others lose, itself and its product with the first."""

_ALIKE = gl.constexpr(0.45)
"""Sum of squares that a row of X must have below its diagonal and within its diagonal block, on average, for a chunk's
keys to count as alike: most of it is what stands beside the diagonal, about -beta^2 k_i . k_(i-1)."""
_LITTLE_DECAY = gl.constexpr(4.0)
"""Log2 of the decay from a chunk's start up to which a token's column counts among them."""


@gluon.jit
def _unstack(x_HBI, H: gl.constexpr):
    """The sixteen [H,4] parts of [H,4,16]."""
    parts = (gl.permute(gl.reshape(x_HBI, [H, 4, 2, 2, 2, 2]), (0, 1, 5, 4, 3, 2)),)
    for level in gl.static_range(4):
        halves = ()
        for j in gl.static_range(2**level):
            a, b = gl.split(parts[j])
            halves = halves + (a, b)
        parts = halves
    return parts


@gluon.jit
def _stack(parts, H: gl.constexpr):
    """[H * 64, 16] from sixteen [H,4,16], along a last axis."""
    for level in gl.static_range(4):
        pairs = ()
        for j in gl.static_range(8 // 2**level):
            pairs = pairs + (gl.join(parts[j], parts[j + 8 // 2**level]),)
        parts = pairs
    return gl.reshape(parts[0], [H * _C, _B])


@gluon.jit
def _invert_blocks(products_s, beta_s, H: gl.constexpr, WARP_HEADS: gl.constexpr):
    """Transposed diagonal blocks of X: [H * 64 (head, block, column), 16 (row)], and [H,4,16] the sum of squares of
    every column of theirs below the diagonal.

    products_s [16 * 16 (row, column), 4 (block)] holds those of -k k^T. A thread owns one column of some heads: its
    rows follow from one another by numbers that are the same for all threads of a block.
    """
    COLUMNS: gl.constexpr = gl.BlockedLayout([H // WARP_HEADS, 1, 1], [1, 2, 16], [WARP_HEADS, 2, 1], [2, 1, 0])
    BLOCKS: gl.constexpr = gl.SliceLayout(2, COLUMNS)
    WHOLE: gl.constexpr = gl.BlockedLayout([H // WARP_HEADS, 1, 16], [1, 2, 16], [WARP_HEADS, 2, 1], [2, 1, 0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    products = reinterpret(products_s, gl.float32, [256, 4], VECTOR)  # whose rows are read one by one
    betas = _unstack(reinterpret(beta_s, gl.float32, [H, 4, _B], CUBE).load(WHOLE), H)
    column = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, COLUMNS)))[None, None, :]
    zero = gl.full([H, 4, 16], 0.0, gl.float32, COLUMNS)
    rows = (gl.where(column == 0, gl.convert_layout(betas[0], BLOCKS)[:, :, None], zero),)
    squares = zero
    for i in gl.static_range(1, 16):
        total = gl.where(column == i, 1.0, zero)
        for j in gl.static_range(i):
            product = products.index(i * 16 + j).load(gl.SliceLayout(0, BLOCKS))
            total += product[None, :][:, :, None] * rows[j]
        x = gl.convert_layout(betas[i], BLOCKS)[:, :, None] * total
        squares += gl.where(column == i, 0.0, x * x)
        rows = rows + (x,)
    return _stack(rows, H), squares


@gluon.jit
def _nearest(x):
    """A TF32 operand: half of its last place is added, so that what the tensor cores cut off rounds to nearest."""
    return (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)


@gluon.jit
def _mul(a, b, acc):
    return mma_v2(a, b, acc, input_precision="tf32")


@gluon.jit
def _is_alike(squares_s, r: gl.constexpr, valid):
    """Whether value head r's keys count as alike, by the sums of squares below its diagonal blocks' diagonals [H * 4].

    Every thread adds them up, from addresses that are the same for all: so what follows is known to be a branch that
    the threads of a warp take together.
    """
    EACH: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    return gl.sum(squares_s.slice(r * 4, 4).load(EACH), 0) > _ALIKE * valid.to(gl.float32)


@gluon.jit
def _keep_sums(a_JI, valid, dtype: gl.constexpr):
    """Give what rounding to `dtype` will leave of a transposed A's diagonal blocks, but for their diagonal, to each
    block's first column and last row, so that the sums of rows and columns stay; nothing in a block with rows past
    `valid`, which are zero."""
    blocks = _diagonal_blocks(a_JI)
    L_BLOCKS: gl.constexpr = blocks.type.layout
    block = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L_BLOCKS)))[:, None, None]
    column = gl.arange(0, _B, gl.SliceLayout(0, gl.SliceLayout(2, L_BLOCKS)))[None, :, None]
    row = gl.arange(0, _B, gl.SliceLayout(0, gl.SliceLayout(1, L_BLOCKS)))[None, None, :]
    inner = (row > column) & (row < _B - 1) & (column > 0) & (block * _B + _B <= valid)
    left = gl.where(inner, blocks.to(dtype).to(gl.float32) - blocks, 0.0)
    of_rows = gl.sum(left, 1)
    of_columns = gl.sum(left, 2)
    of_all = gl.sum(of_rows, 1)
    change = gl.where(column == 0, of_rows[:, None, :], 0.0)
    last = gl.where(column == 0, -of_all[:, None][:, None, :], of_columns[:, :, None])
    change += gl.where(row == _B - 1, last, 0.0)
    wide = gl.reshape(a_JI, [4, _B, 4, _B])
    L_WIDE: gl.constexpr = wide.type.layout
    L_3: gl.constexpr = gl.SliceLayout(3, L_WIDE)
    own = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L_3)))[:, None, None, None]
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L_3)))[None, None, :, None]
    wide -= gl.where(own == other, gl.convert_layout(change, gl.SliceLayout(2, L_WIDE))[:, :, None, :], 0.0)
    return gl.convert_layout(gl.reshape(wide, [_C, _C]), a_JI.type.layout)


@gluon.jit
def _inverse(diagonal_s, products_s, is_alike, r: gl.constexpr, L_JI: gl.constexpr, WIDTH: gl.constexpr):
    """X of value head r, transposed, without its diagonal unless keys are alike: [64 (column), 64 (row)].

    diagonal_s [H * 64, 16] is what `_invert_blocks` returns, products_s [256, 16] the blocks of -k k^T.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, WIDTH)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, WIDTH)
    zero = gl.full([_C, _B], 0.0, gl.float32, MMA)
    diagonal = diagonal_s.slice(r * _C, _C).load(MMA)
    column = gl.arange(0, _C, gl.SliceLayout(1, MMA))[:, None]
    row = gl.arange(0, _B, gl.SliceLayout(0, MMA))[None, :]
    hollow = gl.where((column % _B == row) & (is_alike == 0), 0.0, diagonal)
    # Each of these is a block of rows of X, over all columns.
    rows = (gl.where(column // _B == 0, hollow, 0.0),)
    operands = (gl.convert_layout(gl.where(column // _B == 0, _nearest(diagonal), 0.0), LEFT),)
    for i in gl.static_range(1, 4):
        total = zero
        for j in gl.static_range(i):
            total = _mul(operands[j], products_s.slice((4 * i + j) * _B, _B).permute((1, 0)).load(RIGHT), total)
        own = _nearest(diagonal_s.slice(r * _C + i * _B, _B).load(RIGHT))
        x = _mul(gl.convert_layout(total, LEFT), own, zero)
        rows = rows + (gl.where(column // _B == i, hollow, x),)
        if i < 3:
            operands = operands + (gl.convert_layout(_nearest(gl.where(column // _B == i, diagonal, x)), LEFT),)
    x = gl.join(gl.join(rows[0], rows[2]), gl.join(rows[1], rows[3]))
    return gl.convert_layout(gl.reshape(gl.permute(x, (0, 2, 3, 1)), [_C, _C]), L_JI)


@gluon.jit
def _diagonal_blocks(x_CC):
    """[4,16,16], the diagonal blocks of an accumulator, each in the warp that has its rows."""
    blocks = gl.reshape(x_CC, [4, _B, 4, _B])
    L_BLOCKS: gl.constexpr = blocks.type.layout
    L_3: gl.constexpr = gl.SliceLayout(3, L_BLOCKS)
    row = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L_3)))[:, None, None, None]
    column = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L_3)))[None, None, :, None]
    return gl.sum(gl.where(row == column, blocks, 0.0), 2)


@gluon.jit
def _inverse_norms(blocks, eps, layout: gl.constexpr):
    """1 / sqrt(diagonal + eps) [64] from the diagonal blocks [4,16,16] of x x^T."""
    L_BLOCKS: gl.constexpr = blocks.type.layout
    row = gl.arange(0, _B, gl.SliceLayout(0, gl.SliceLayout(2, L_BLOCKS)))[None, :, None]
    column = gl.arange(0, _B, gl.SliceLayout(0, gl.SliceLayout(1, L_BLOCKS)))[None, None, :]
    squares = gl.sum(gl.where(row == column, blocks, 0.0), 2)
    return gl.convert_layout(gl.reshape(gl.rsqrt(squares + eps), [_C]), layout)


@gluon.jit
def _solve_kernel(
    scores_desc, solve_desc, q_ptr, k_ptr, norms_ptr, gates_ptr, factors_ptr, table_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, scale, eps,
    HV: gl.constexpr, HK: gl.constexpr, HAS_NORMS: gl.constexpr, HAS_SCORES: gl.constexpr, FACTORS: gl.constexpr,
    H: gl.constexpr, WARP_HEADS: gl.constexpr, WIDTH: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    R: gl.constexpr = HV // HK
    PROGRAMS: gl.constexpr = (R + H - 1) // H
    L_JI: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    L_J: gl.constexpr = gl.SliceLayout(1, L_JI)
    L_I: gl.constexpr = gl.SliceLayout(0, L_JI)
    L_CK: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    L_HC: gl.constexpr = gl.BlockedLayout([H // 2], [32], [4], [0])
    L_C: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BLOCKS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    pid = gl.program_id(0)
    h_k = (pid // PROGRAMS) % HK
    r0 = (pid % PROGRAMS) * H
    i_c = pid // (PROGRAMS * HK)
    first = gl.load(table_ptr + i_c * 4)
    valid = gl.load(table_ptr + i_c * 4 + 1)
    if valid > 0:
        offs_c = gl.arange(0, _C, gl.SliceLayout(1, L_CK))
        offs_k = gl.arange(0, _K, gl.SliceLayout(0, L_CK))
        token = (first + offs_c).to(gl.int64)
        mask = (offs_c < valid)[:, None] & (offs_k >= 0)[None, :]
        head = h_k.to(gl.int64)
        k_CK = gl.load(
            k_ptr + head * k_stride_h + (token * k_stride_t)[:, None] + offs_k[None, :], mask=mask, other=0.0
        )
        if HAS_SCORES:
            q_CK = gl.load(
                q_ptr + head * q_stride_h + (token * q_stride_t)[:, None] + offs_k[None, :], mask=mask, other=0.0
            )
        # Gates and write strengths of the heads, ahead of their use. Where there are fewer, the last one's again.
        row0 = i_c.to(gl.int64) * HV + h_k * R + r0
        offs_hc = gl.arange(0, H * _C, L_HC)
        h_own = gl.minimum(offs_hc // _C, R - r0 - 1)
        gates_HC = gl.load(gates_ptr + row0 * _C + h_own * _C + offs_hc % _C)
        beta_HC = gl.load(factors_ptr + row0 * (FACTORS * _C) + 3 * _C + h_own * (FACTORS * _C) + offs_hc % _C)
        gates_s = gl.allocate_shared_memory(gl.float32, [H * _C], VECTOR)
        beta_s = gl.allocate_shared_memory(gl.float32, [H * _C], VECTOR)
        gates_s.store(gates_HC)
        beta_s.store(beta_HC)
        k_s = gl.allocate_shared_memory(dtype, [_C, _K], tma.TILE_16BIT)
        k_s.store(k_CK)
        if HAS_SCORES:
            q_s = gl.allocate_shared_memory(dtype, [_C, _K], tma.TILE_16BIT)
            q_s.store(q_CK)
        fence_async_shared()
        barrier()
        zero_JI = gl.full([_C, _C], 0.0, gl.float32, L_JI)
        kk_JI = warpgroup_mma(k_s, k_s.permute((1, 0)), zero_JI, use_acc=False, is_async=True)
        if HAS_SCORES:
            kq_JI = warpgroup_mma(k_s, q_s.permute((1, 0)), zero_JI, use_acc=False, is_async=True)
        if HAS_SCORES and HAS_NORMS:
            qq_JI = warpgroup_mma(q_s, q_s.permute((1, 0)), zero_JI, use_acc=False, is_async=True)
        kk_JI = warpgroup_mma_wait((1 if HAS_SCORES else 0) + (1 if HAS_SCORES and HAS_NORMS else 0), deps=[kk_JI])
        j = gl.arange(0, _C, L_J)
        i = gl.arange(0, _C, L_I)
        if HAS_NORMS:
            norm_at = norms_ptr + (first + j).to(gl.int64) * (2 * HK) + h_k
            inv_k_C = _inverse_norms(_diagonal_blocks(kk_JI), eps, L_J)
            gl.store(norm_at + HK, inv_k_C, mask=j < valid)
            kk_JI = kk_JI * (inv_k_C * -_UNCUT)[:, None] * gl.convert_layout(inv_k_C, L_I)[None, :]
        else:
            kk_JI = kk_JI * -_UNCUT
        diagonal = _diagonal_blocks(kk_JI) * (1.0 / _UNCUT)
        diagonal_s = gl.allocate_shared_memory(gl.float32, [256, 4], FLAT)
        diagonal_s.store(gl.reshape(gl.permute(diagonal, (1, 2, 0)), [256, 4]))
        products_s = gl.allocate_shared_memory(gl.float32, [256, _B], BLOCKS)
        products_s.store(gl.reshape(gl.permute(gl.reshape(kk_JI, [4, _B, 4, _B]), (0, 2, 1, 3)), [256, _B]))
        inverted, squares = _invert_blocks(diagonal_s, beta_s, H, WARP_HEADS)
        CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        gates_HBC = reinterpret(gates_s, gl.float32, [H, 4, _B], CUBE).load(squares.type.layout)
        counted = gl.sum(gl.where(gates_HBC > -_LITTLE_DECAY, squares, 0.0), 2)
        squares_s = gl.allocate_shared_memory(gl.float32, [H * 4], VECTOR)
        reinterpret(squares_s, gl.float32, [H, 4], FLAT).store(counted)
        # What is allocated from here on lies where q and k are, which the products of every warp must have read first.
        # Triton takes a product for done where it is issued, and a tile for dead after its last use by this very name:
        # as what an earlier wait has returned it would not be kept.
        if HAS_SCORES and HAS_NORMS:
            kq_JI, qq_JI, q_s, k_s = warpgroup_mma_wait(0, deps=[kq_JI, qq_JI, q_s, k_s])
        elif HAS_SCORES:
            kq_JI, q_s, k_s = warpgroup_mma_wait(0, deps=[kq_JI, q_s, k_s])
        else:
            kk_JI, k_s = warpgroup_mma_wait(0, deps=[kk_JI, k_s])
        barrier()
        inverted_s = gl.allocate_shared_memory(gl.float32, [H * _C, _B], BLOCKS)
        inverted_s.store(inverted)
        if HAS_SCORES:
            if HAS_NORMS:
                inv_q_C = _inverse_norms(_diagonal_blocks(qq_JI), eps, L_J)
                gl.store(norm_at, inv_q_C, mask=j < valid)
                kq_JI = kq_JI * (inv_k_C * scale)[:, None] * gl.convert_layout(inv_q_C, L_I)[None, :]
            else:
                kq_JI = kq_JI * scale
            p_s = gl.allocate_shared_memory(dtype, [_C, _C], tma.TILE_16BIT)
        a_s = gl.allocate_shared_memory(dtype, [_C, _C], tma.TILE_16BIT)
        HEADS: gl.constexpr = H if PROGRAMS > 1 else R
        is_alike = _is_alike(squares_s, 0, valid)
        x_JI = _inverse(inverted_s, products_s, is_alike, 0, L_JI, WIDTH)
        for r in gl.static_range(HEADS):
            # The table's last number is zero. Read in every head, so that the compiler cannot make masks and zeros
            # once and hold them in registers that there are not.
            zero = gl.load(table_ptr + i_c * 4 + 3)
            gates_C = gates_s.slice(r * _C, _C)
            decay_JI = gl.exp2(gates_C.load(L_I)[None, :] - gates_C.load(L_J)[:, None])
            keep = (j + zero)[:, None] <= i[None, :]
            nothing = zero.to(gl.float32)
            if HAS_SCORES:
                p_JI = gl.where(keep, kq_JI * decay_JI, nothing).to(dtype)
            a_JI = gl.where(keep, x_JI * decay_JI, nothing)
            if is_alike:
                a_JI = _keep_sums(a_JI, valid, dtype)
                if not HAS_NORMS:
                    # With norms `gates` runs once more, and finds the mark in the matrix.
                    beta_C = beta_s.slice(r * _C, _C).load(L_C)
                    at = factors_ptr + (row0 + r) * (FACTORS * _C) + 3 * _C + gl.arange(0, _C, L_C)
                    is_own = gl.arange(0, _C, L_C) < (R - r0 - r) * _C  # all of them, or none
                    gl.store(at, beta_C - beta_C.to(dtype).to(gl.float32), mask=is_own)
            a_JI = a_JI.to(dtype)
            if r > 0:
                store_wait(0)
                barrier()
            a_s.permute((1, 0)).store(a_JI)
            if HAS_SCORES:
                p_s.permute((1, 0)).store(p_JI)
            fence_async_shared()
            barrier()
            if r0 + r < R:
                at = ((row0 + r) * _C).to(gl.int32)
                async_store(solve_desc, [at, 0], a_s)
                if HAS_SCORES:
                    async_store(scores_desc, [at, 0], p_s)
            if r + 1 < HEADS:
                is_alike = _is_alike(squares_s, r + 1, valid)
                x_JI = _inverse(inverted_s, products_s, is_alike, r + 1, L_JI, WIDTH)
        store_wait(0)


def solve(
    q: Tensor, k: Tensor, gates: Tensor, factors: Tensor, chunks: Chunks, options: Options,
    *, norms: Tensor | None, scores: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Fill `out` (A) and, where they are given, `scores` (P) [NT,HV,C,C] and `norms` [T,2,HK].

    q, k [T,HK,K]; gates [NT,HV,C]; factors [NT,HV,F,C], of which only row 3 is read, and without norms written where
    keys are alike. Without scores q is not read, and its norms are not filled in.
    """
    NT, HV = gates.shape[:2]
    HK = k.shape[1]
    H = min(_MAX_HEADS, max(_WARP_HEADS, triton.next_power_of_2(HV // HK)))
    solve_desc = tma.rows(out.view(-1, CHUNK), (CHUNK, CHUNK))
    scores_desc = solve_desc if scores is None else tma.rows(scores.view(-1, CHUNK), (CHUNK, CHUNK))
    launch(
        _solve_kernel, (NT * HK * triton.cdiv(HV // HK, H),),
        scores_desc, solve_desc, q, k, norms, gates, factors, chunks.table,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), options.scale, L2NORM_EPS,
        HV=HV, HK=HK, HAS_NORMS=norms is not None, HAS_SCORES=scores is not None, FACTORS=factors.shape[2],
        H=H, WARP_HEADS=_WARP_HEADS, WIDTH=_OPERAND_WIDTH, num_warps=4, maxnreg=_MAX_REGISTERS,
    )  # fmt: skip
