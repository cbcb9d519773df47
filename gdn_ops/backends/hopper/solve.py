"""The inverse that turns a chunk's targets into its updates: u = A (v - e^G k S).

    L_ij = beta_i k_i . k_j  (i > j)        X = (I + L)^-1        A_ij = X_ij * 2^(G_i - G_j) * beta_j

Only what lies below A's diagonal is stored: the diagonal is beta, and its users have that unrounded (`forward`).

The decay is a diagonal similarity, so the inverse is taken of the undecayed L and gated afterwards: nothing in it can
overflow, however strong the decay. X is built from 16 x 16 blocks: the diagonal ones by exact elimination (two 8 x 8
halves at once, then one product), the others by X_ij = -X_ii sum_k L_ik X_kj in TF32. All intermediates are bounded by
the keys' norms; a power series would not be, with nearly parallel keys.

k k^T comes from `scores`, which has the tiles anyway, once a query/key head. beta is kept from zero here
(`gates.kept_from_zero`); `epilogue` says what for.

Grid: one warp a chunk and value head; everything stays in its registers. What limits it is latency, so registers are
what counts: blocks below the diagonal are loaded after the diagonal ones are inverted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.gates import kept_from_zero, write_strength
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.scores import SOLVED_BLOCK
from gdn_ops.shapes import CHUNK, Options

# Letters: NT chunks, HV value heads, HK query/key heads, C chunk length (64), B block length (16).

_MAX_REGISTERS = 168
"""Of a thread: twelve warps on a multiprocessor instead of ten, for three spilled words (triton 3.6, sm_90)."""


@triton.jit
def _mul(a_BB, b_BB):
    return tl.dot(a_BB, b_BB, input_precision="tf32")


@triton.jit
def _eliminate(x_BB, products_ptr, beta_B, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr):
    """Clear column j of both 8 x 8 halves of diagonal block i, below the diagonal.

    The column is read from memory where it lies, not picked out of a register tile: that would be a sum over lanes.
    """
    r = tl.arange(0, 16)
    column = products_ptr + (i * 16 + r) * C + i * 16 + r // 8 * 8 + j
    a_B = tl.load(column, mask=r % 8 > j, other=0.0) * beta_B
    row_B = tl.sum(tl.where((r % 8 == j)[:, None], x_BB, 0.0), 0)
    same = (r // 8)[:, None] == (r // 8)[None, :]
    return tl.where(same, x_BB - a_B[:, None] * row_B[None, :], 0.0)


@triton.jit
def _join_halves(x_BB, products_ptr, beta_B, i: tl.constexpr, C: tl.constexpr):
    """From the inverses of the two 8 x 8 halves to that of the whole block i."""
    r = tl.arange(0, 16)
    below = (r // 8)[:, None] > (r // 8)[None, :]
    at = products_ptr + (i * 16 + r)[:, None] * C + i * 16 + r[None, :]
    l_BB = tl.load(at, mask=below, other=0.0) * beta_B[:, None]
    return x_BB - _mul(x_BB, _mul(l_BB, x_BB))


@triton.jit
def _inverse_of_blocks(products_ptr, b0, b1, b2, b3, C: tl.constexpr):
    """(I + L_ii)^-1 of the four diagonal blocks; interleaved, because each alone is one long dependency chain."""
    r = tl.arange(0, 16)
    x0 = tl.where(r[:, None] == r[None, :], 1.0, 0.0) + tl.zeros([16, 16], tl.float32)
    x1 = x0
    x2 = x0
    x3 = x0
    for j in tl.static_range(0, 7):
        x0 = _eliminate(x0, products_ptr, b0, 0, j, C)
        x1 = _eliminate(x1, products_ptr, b1, 1, j, C)
        x2 = _eliminate(x2, products_ptr, b2, 2, j, C)
        x3 = _eliminate(x3, products_ptr, b3, 3, j, C)
    x0 = _join_halves(x0, products_ptr, b0, 0, C)
    x1 = _join_halves(x1, products_ptr, b1, 1, C)
    x2 = _join_halves(x2, products_ptr, b2, 2, C)
    x3 = _join_halves(x3, products_ptr, b3, 3, C)
    return x0, x1, x2, x3


@triton.jit
def _store_block(solve_ptr, i: tl.constexpr, j: tl.constexpr, x_BB, gates_i, gates_j, beta_j, C: tl.constexpr):
    """Gate block (i, j) of X and store it; only exponents of the lower triangle are ever taken."""
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 16)[None, :]
    exponent = gates_i[:, None] - gates_j[None, :]
    if i == j:
        exponent = tl.where(r > c, exponent, 0.0)
        x_BB = tl.where(r > c, x_BB, 0.0)
    value = x_BB * tl.exp2(exponent) * beta_j[None, :]
    tl.store(solve_ptr + (i * 16 + r) * C + j * 16 + c, value.to(solve_ptr.dtype.element_ty))


@triton.jit
def _load_block(products_ptr, i: tl.constexpr, j: tl.constexpr, beta_i, C: tl.constexpr):
    """Block (i, j) of L, below the diagonal."""
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 16)[None, :]
    return tl.load(products_ptr + (i * 16 + r) * C + j * 16 + c) * beta_i[:, None]


@triton.jit
def _load_strength(beta_at, mask, SIGMOID: tl.constexpr, DOUBLED: tl.constexpr, IS_HALF: tl.constexpr):
    beta = write_strength(tl.load(beta_at, mask=mask, other=0.0), SIGMOID, DOUBLED)
    return tl.where(mask, kept_from_zero(beta, IS_HALF), 0.0)


@triton.jit
def _solve_kernel(
    products_ptr, beta_ptr, gates_ptr, solve_ptr, table_ptr,
    HV: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, B: tl.constexpr,
    SIGMOID: tl.constexpr, DOUBLED: tl.constexpr, IS_HALF: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    first = tl.load(table_ptr + i_c * 4)
    valid = tl.load(table_ptr + i_c * 4 + 1)
    if valid > 0:
        offs = tl.arange(0, B)
        beta_at = beta_ptr + (first.to(tl.int64) + offs) * HV + h
        b0 = _load_strength(beta_at, offs < valid, SIGMOID, DOUBLED, IS_HALF)
        b1 = _load_strength(beta_at + B * HV, offs + B < valid, SIGMOID, DOUBLED, IS_HALF)
        b2 = _load_strength(beta_at + 2 * B * HV, offs + 2 * B < valid, SIGMOID, DOUBLED, IS_HALF)
        b3 = _load_strength(beta_at + 3 * B * HV, offs + 3 * B < valid, SIGMOID, DOUBLED, IS_HALF)
        products = products_ptr + (i_c.to(tl.int64) * HK + h // (HV // HK)) * (C * C)
        x00, x11, x22, x33 = _inverse_of_blocks(products, b0, b1, b2, b3, C)
        l10 = _load_block(products, 1, 0, b1, C)
        l20 = _load_block(products, 2, 0, b2, C)
        l21 = _load_block(products, 2, 1, b2, C)
        l30 = _load_block(products, 3, 0, b3, C)
        l31 = _load_block(products, 3, 1, b3, C)
        l32 = _load_block(products, 3, 2, b3, C)
        row = i_c.to(tl.int64) * HV + h
        gates_at = gates_ptr + row * C + offs
        g0 = tl.load(gates_at)
        g1 = tl.load(gates_at + B)
        g2 = tl.load(gates_at + 2 * B)
        g3 = tl.load(gates_at + 3 * B)
        x10 = -_mul(x11, _mul(l10, x00))
        x21 = -_mul(x22, _mul(l21, x11))
        x32 = -_mul(x33, _mul(l32, x22))
        x20 = -_mul(x22, _mul(l20, x00) + _mul(l21, x10))
        x31 = -_mul(x33, _mul(l31, x11) + _mul(l32, x21))
        x30 = -_mul(x33, _mul(l30, x00) + _mul(l31, x10) + _mul(l32, x20))
        out = solve_ptr + row * (C * C)
        _store_block(out, 0, 0, x00, g0, g0, b0, C)
        _store_block(out, 1, 0, x10, g1, g0, b0, C)
        _store_block(out, 1, 1, x11, g1, g1, b1, C)
        _store_block(out, 2, 0, x20, g2, g0, b0, C)
        _store_block(out, 2, 1, x21, g2, g1, b1, C)
        _store_block(out, 2, 2, x22, g2, g2, b2, C)
        _store_block(out, 3, 0, x30, g3, g0, b0, C)
        _store_block(out, 3, 1, x31, g3, g1, b1, C)
        _store_block(out, 3, 2, x32, g3, g2, b2, C)
        _store_block(out, 3, 3, x33, g3, g3, b3, C)
        zero = tl.zeros([16, 16], solve_ptr.dtype.element_ty)
        at = out + offs[:, None] * C + offs[None, :]
        tl.store(at + B, zero)
        tl.store(at + 2 * B, zero)
        tl.store(at + 3 * B, zero)
        tl.store(at + B * C + 2 * B, zero)
        tl.store(at + B * C + 3 * B, zero)
        tl.store(at + 2 * B * C + 3 * B, zero)


def solve(products: Tensor, beta: Tensor, gates: Tensor, out: Tensor, chunks: Chunks, options: Options) -> None:
    """Fill `out` [NT,HV,C,C] from products [NT,HK,C,C] (k k^T), beta [T,HV] and gates [NT,HV,C]."""
    NT, HV = gates.shape[:2]
    launch(
        _solve_kernel, (NT * HV,),
        products, beta, gates, out, chunks.table,
        HV=HV, HK=products.shape[1], C=CHUNK, B=SOLVED_BLOCK, SIGMOID=options.use_beta_sigmoid,
        DOUBLED=options.allow_neg_eigval, IS_HALF=out.dtype == torch.float16, num_warps=1, maxnreg=_MAX_REGISTERS,
    )  # fmt: skip
