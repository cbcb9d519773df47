"""The inverse that turns a chunk's targets into its updates: u = A (v - e^G k S).

    L_ij = beta_i k_i . k_j  (i > j)        X = (I + L)^-1        A_ij = X_ij * 2^(G_i - G_j) * beta_j

The decay is a diagonal similarity, so the inverse is taken of the undecayed L and gated afterwards: nothing in it can
overflow, however strong the decay. X is built from 16 x 16 blocks: the diagonal ones by exact elimination (two 8 x 8
halves at once, then one product), the others by X_ij = -X_ii sum_k L_ik X_kj in TF32. All intermediates are bounded by
the keys' norms; a power series would not be, with nearly parallel keys.

beta is kept from zero here (`gates.kept_from_zero`); `epilogue` says what for.

Grid: one warp a chunk and value head; everything stays in its registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.gates import kept_from_zero, write_strength
from gdn_ops.shapes import CHUNK, Options

# Letters: NT chunks, HV value heads, HK query/key heads, C chunk length (64), B block length (16), K key head size.

_BLOCK = 16


@triton.jit
def _mul(a_BB, b_BB):
    return tl.dot(a_BB, b_BB, input_precision="tf32")


@triton.jit
def _inverse_of_blocks(l0_BB, l1_BB, l2_BB, l3_BB):
    """(I + l)^-1 of four strictly lower 16 x 16 blocks; interleaved, because each alone is one long dependency chain.

    Both 8 x 8 diagonal halves are eliminated in the same seven steps: step j clears column j of each half.
    """
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 16)[None, :]
    same = (r // 8) == (c // 8)
    x0 = tl.where(r == c, 1.0, 0.0) + tl.zeros([16, 16], tl.float32)
    x1 = x0
    x2 = x0
    x3 = x0
    for j in tl.static_range(0, 7):
        column = same & ((c % 8) == j)
        row = (r % 8) == j
        a0 = tl.sum(tl.where(column, l0_BB, 0.0), 1)
        b0 = tl.sum(tl.where(row, x0, 0.0), 0)
        a1 = tl.sum(tl.where(column, l1_BB, 0.0), 1)
        b1 = tl.sum(tl.where(row, x1, 0.0), 0)
        a2 = tl.sum(tl.where(column, l2_BB, 0.0), 1)
        b2 = tl.sum(tl.where(row, x2, 0.0), 0)
        a3 = tl.sum(tl.where(column, l3_BB, 0.0), 1)
        b3 = tl.sum(tl.where(row, x3, 0.0), 0)
        x0 = tl.where(same, x0 - a0[:, None] * b0[None, :], 0.0)
        x1 = tl.where(same, x1 - a1[:, None] * b1[None, :], 0.0)
        x2 = tl.where(same, x2 - a2[:, None] * b2[None, :], 0.0)
        x3 = tl.where(same, x3 - a3[:, None] * b3[None, :], 0.0)
    x0 = x0 - _mul(x0, _mul(tl.where(same, 0.0, l0_BB), x0))
    x1 = x1 - _mul(x1, _mul(tl.where(same, 0.0, l1_BB), x1))
    x2 = x2 - _mul(x2, _mul(tl.where(same, 0.0, l2_BB), x2))
    x3 = x3 - _mul(x3, _mul(tl.where(same, 0.0, l3_BB), x3))
    return x0, x1, x2, x3


@triton.jit
def _store_block(solve_ptr, i: tl.constexpr, j: tl.constexpr, x_BB, gates_i, gates_j, beta_j, C: tl.constexpr):
    """Gate block (i, j) of X and store it; only exponents of the lower triangle are ever taken."""
    r = tl.arange(0, 16)[:, None]
    c = tl.arange(0, 16)[None, :]
    exponent = gates_i[:, None] - gates_j[None, :]
    if i == j:
        exponent = tl.where(r >= c, exponent, 0.0)
        x_BB = tl.where(r >= c, x_BB, 0.0)
    value = x_BB * tl.exp2(exponent) * beta_j[None, :]
    tl.store(solve_ptr + (i * 16 + r) * C + j * 16 + c, value.to(solve_ptr.dtype.element_ty))


@triton.jit
def _solve_kernel(
    k_ptr, beta_ptr, norms_ptr, gates_ptr, solve_ptr, table_ptr, k_stride_t, k_stride_h,
    HV: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    SIGMOID: tl.constexpr, DOUBLED: tl.constexpr, HAS_NORMS: tl.constexpr, IS_HALF: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % HV
    i_c = tl.program_id(0) // HV
    h_k = h // (HV // HK)
    first = tl.load(table_ptr + i_c * 4)
    valid = tl.load(table_ptr + i_c * 4 + 1)
    if valid > 0:
        offs = tl.arange(0, B)
        offs_k = tl.arange(0, K)
        token = first.to(tl.int64) + offs
        m0 = offs < valid
        m1 = offs + B < valid
        m2 = offs + 2 * B < valid
        m3 = offs + 3 * B < valid
        k_at = k_ptr + h_k.to(tl.int64) * k_stride_h + token[:, None] * k_stride_t + offs_k[None, :]
        k0 = tl.load(k_at, mask=m0[:, None], other=0.0)
        k1 = tl.load(k_at + B * k_stride_t, mask=m1[:, None], other=0.0)
        k2 = tl.load(k_at + 2 * B * k_stride_t, mask=m2[:, None], other=0.0)
        k3 = tl.load(k_at + 3 * B * k_stride_t, mask=m3[:, None], other=0.0)
        t0 = tl.trans(k0)
        t1 = tl.trans(k1)
        t2 = tl.trans(k2)
        t3 = tl.trans(k3)
        l00 = tl.dot(k0, t0)
        l10 = tl.dot(k1, t0)
        l11 = tl.dot(k1, t1)
        l20 = tl.dot(k2, t0)
        l21 = tl.dot(k2, t1)
        l22 = tl.dot(k2, t2)
        l30 = tl.dot(k3, t0)
        l31 = tl.dot(k3, t1)
        l32 = tl.dot(k3, t2)
        l33 = tl.dot(k3, t3)
        beta_at = beta_ptr + token * HV + h
        b0 = write_strength(tl.load(beta_at, mask=m0, other=0.0), SIGMOID, DOUBLED)
        b1 = write_strength(tl.load(beta_at + B * HV, mask=m1, other=0.0), SIGMOID, DOUBLED)
        b2 = write_strength(tl.load(beta_at + 2 * B * HV, mask=m2, other=0.0), SIGMOID, DOUBLED)
        b3 = write_strength(tl.load(beta_at + 3 * B * HV, mask=m3, other=0.0), SIGMOID, DOUBLED)
        b0 = tl.where(m0, kept_from_zero(b0, IS_HALF), 0.0)
        b1 = tl.where(m1, kept_from_zero(b1, IS_HALF), 0.0)
        b2 = tl.where(m2, kept_from_zero(b2, IS_HALF), 0.0)
        b3 = tl.where(m3, kept_from_zero(b3, IS_HALF), 0.0)
        if HAS_NORMS:
            norm_at = norms_ptr + token * (2 * HK) + HK + h_k
            n0 = tl.load(norm_at, mask=m0, other=0.0)
            n1 = tl.load(norm_at + B * (2 * HK), mask=m1, other=0.0)
            n2 = tl.load(norm_at + 2 * B * (2 * HK), mask=m2, other=0.0)
            n3 = tl.load(norm_at + 3 * B * (2 * HK), mask=m3, other=0.0)
            w0 = b0 * n0
            w1 = b1 * n1
            w2 = b2 * n2
            w3 = b3 * n3
            l00 = l00 * n0[None, :]
            l10 = l10 * n0[None, :]
            l20 = l20 * n0[None, :]
            l30 = l30 * n0[None, :]
            l11 = l11 * n1[None, :]
            l21 = l21 * n1[None, :]
            l31 = l31 * n1[None, :]
            l22 = l22 * n2[None, :]
            l32 = l32 * n2[None, :]
            l33 = l33 * n3[None, :]
        else:
            w0 = b0
            w1 = b1
            w2 = b2
            w3 = b3
        below = offs[:, None] > offs[None, :]
        x00, x11, x22, x33 = _inverse_of_blocks(
            tl.where(below, l00 * w0[:, None], 0.0),
            tl.where(below, l11 * w1[:, None], 0.0),
            tl.where(below, l22 * w2[:, None], 0.0),
            tl.where(below, l33 * w3[:, None], 0.0),
        )
        l10 *= w1[:, None]
        l20 *= w2[:, None]
        l21 *= w2[:, None]
        l30 *= w3[:, None]
        l31 *= w3[:, None]
        l32 *= w3[:, None]
        x10 = -_mul(x11, _mul(l10, x00))
        x21 = -_mul(x22, _mul(l21, x11))
        x32 = -_mul(x33, _mul(l32, x22))
        x20 = -_mul(x22, _mul(l20, x00) + _mul(l21, x10))
        x31 = -_mul(x33, _mul(l31, x11) + _mul(l32, x21))
        x30 = -_mul(x33, _mul(l30, x00) + _mul(l31, x10) + _mul(l32, x20))
        row = i_c.to(tl.int64) * HV + h
        gates_at = gates_ptr + row * C + offs
        g0 = tl.load(gates_at)
        g1 = tl.load(gates_at + B)
        g2 = tl.load(gates_at + 2 * B)
        g3 = tl.load(gates_at + 3 * B)
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


def solve(
    k: Tensor, beta: Tensor, norms: Tensor | None, gates: Tensor, out: Tensor, chunks: Chunks, options: Options
) -> None:
    """Fill `out` [NT,HV,C,C] from k [T,HK,K], beta [T,HV] and gates [NT,HV,C]."""
    NT, HV = gates.shape[:2]
    HK, K = k.shape[1:]
    _solve_kernel[(NT * HV,)](
        k, beta, norms, gates, out, chunks.table, k.stride(0), k.stride(1),
        HV=HV, HK=HK, C=CHUNK, K=K, B=_BLOCK, SIGMOID=options.use_beta_sigmoid, DOUBLED=options.allow_neg_eigval,
        HAS_NORMS=norms is not None, IS_HALF=k.dtype == torch.float16, num_warps=1,
    )  # fmt: skip
