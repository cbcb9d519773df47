"""Stage 2, per (chunk, value head): the inverse of the chunk's triangular system.

    N_ij = r_k,i r_k,j (k_i . k_j) 2^(G_i - G_j) beta_j   (i > j)
    E    = (I + N)^-1, stored without its unit diagonal    solve [NT, HV, C, C]

E maps the residual y = v - 2^G r_k (k S) of a chunk to e = E y, each token's update before its write strength
(u = beta e). Its unit diagonal is added in float32 by whoever multiplies with E, so the largest entry of every row is
exact. Scaling columns by beta (not rows) keeps e, and with it the gradient of beta, right at beta = 0.

Where keys are nearly parallel and little decays, E is nearly a difference operator: sums of e over a chunk cancel, and
what each rounding left adds up in the state. Such a chunk's E is stored with its diagonal, so that what the rounding of
y to an operand left cancels too, and its diagonal blocks are rounded so that the sums of their rows and columns stay.

Four diagonal 16 x 16 blocks are inverted by exact elimination (as 8 + 8, halves the dependent steps), then merged by
block products whose intermediates the true inverse bounds. A Neumann series grows binomially with correlated keys, and
bf16 merges lose a digit there; TF32 does not, if blocks of the inverse are rounded to nearest. Tensor cores cut
operands off instead, which with nearly parallel keys makes E as wrong as its rounding to bf16 does.

Grid: NT * HV programs of one warp: the work is a chain of small dependent steps, so many programs hide its latency.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import Config, dot_precision, is_amd, launch, padded
from gdn_ops.backends.triton.primitives import CHUNK, FACTORS, INTERPRETED, dot, load_chunk, operand
from gdn_ops.shapes import Inputs, Options, Sizes

_SOLVE = Config(num_warps=1, num_stages=1)
_BLOCK_K = 16
"""Channels of k loaded at a time in float32 and for heads larger than 128, where whole rows spill (float32: 3492 bytes
a thread, blocks 132). Others are loaded whole. H200, 16/48 heads of 128, 32768 tokens, bfloat16: whole rows 0.303 ms,
blocks of 64 0.347, of 32 0.487, of 16 0.442 (with at most 128 registers 0.376). A whole tile takes 255 registers, which
leaves room for 8 programs an SM, blocks of 16 take 142 (14 programs): loads in flight count for more."""

ALIKE = tl.constexpr(0.5)
"""Sum of squares that a row of E must have within its diagonal block, on average, for a chunk's keys to count as nearly
parallel: most of it is what stands beside the diagonal, about -beta k_i . k_(i-1). Random keys of 128 channels have
0.01, with beta about 0.95 those of k_i . k_j about 0.92 have 0.7, of 0.8 0.55."""
LITTLE_DECAY = tl.constexpr(4.0)
"""Log2 of the decay over a whole chunk below which that is so: what a row's sum keeps is moved among its tokens."""


@triton.jit
def _nearest(x, PRECISION: tl.constexpr):
    """x as a TF32 operand: half of its last place is added, so that what the tensor cores cut off rounds to nearest."""
    if PRECISION == "tf32":
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        if INTERPRETED:
            bits = bits & -0x2000
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _multiply(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _eliminate(n, x, step: tl.constexpr):
    """Subtract multiples of row `step` of each 8 x 8 diagonal block from the rows below it."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    column = tl.sum(tl.where(j % 8 == step, n, 0.0), 1)
    row = tl.sum(tl.where(i % 8 == step, x, 0.0), 0)
    return tl.where(i // 8 == j // 8, x - column[:, None] * row[None, :], 0.0)


@triton.jit
def _invert_blocks(n0, n1, n2, n3, PRECISION: tl.constexpr):
    """Inverses of I + n for four strictly lower triangular blocks; four independent chains fill the pipeline."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    near = i // 8 == j // 8
    near0 = tl.where(near, n0, 0.0)
    near1 = tl.where(near, n1, 0.0)
    near2 = tl.where(near, n2, 0.0)
    near3 = tl.where(near, n3, 0.0)
    x0 = tl.where(i == j, 1.0, 0.0) + tl.zeros([16, 16], tl.float32)
    x1 = x0
    x2 = x0
    x3 = x0
    for step in tl.static_range(0, 7):
        x0 = _eliminate(near0, x0, step)
        x1 = _eliminate(near1, x1, step)
        x2 = _eliminate(near2, x2, step)
        x3 = _eliminate(near3, x3, step)
    x0 -= _multiply(x0, _multiply(tl.where(near, 0.0, n0), x0, PRECISION), PRECISION)
    x1 -= _multiply(x1, _multiply(tl.where(near, 0.0, n1), x1, PRECISION), PRECISION)
    x2 -= _multiply(x2, _multiply(tl.where(near, 0.0, n2), x2, PRECISION), PRECISION)
    x3 -= _multiply(x3, _multiply(tl.where(near, 0.0, n3), x3, PRECISION), PRECISION)
    return x0, x1, x2, x3


@triton.jit
def _load_block(ptr, stride_t, length, first: tl.constexpr, offs_k, K: tl.constexpr):
    offs_t = first + tl.arange(0, 16)
    mask = (offs_t < length)[:, None] & (offs_k < K)[None, :]
    return tl.load(ptr + offs_t[:, None] * stride_t + offs_k[None, :], mask=mask, other=0.0)


@triton.jit
def _store_block(ptr, block_i: tl.constexpr, block_j: tl.constexpr, x):
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    tl.store(ptr + (block_i * 16 + i) * CHUNK + block_j * 16 + j, operand(x, ptr.dtype.element_ty))


@triton.jit
def _keep_sums(x, last: tl.constexpr, length, DTYPE: tl.constexpr):
    """Give what rounding to DTYPE will leave to the first column and the last row, so that row and column sums of the
    rounded block stay; nothing in a block with rows past `length`, which are zero."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    inner = (i > j) & (i < 15) & (j > 0) & (last < length)
    left = tl.where(inner, operand(x, DTYPE).to(tl.float32) - x, 0.0)
    of_rows = tl.sum(left, 1)
    of_columns = tl.where(j == 0, -tl.sum(of_rows), tl.sum(left, 0)[None, :])
    return x - tl.where(j == 0, of_rows[:, None], 0.0) - tl.where(i == 15, of_columns, 0.0)


@triton.jit
def _decay(gate_i, gate_j, beta_j):
    return tl.exp2(gate_i[:, None] - gate_j[None, :]) * beta_j[None, :]


@triton.jit
def _solve_kernel(
    k_ptr, chunk_ptr, norm_ptr, gate_ptr, factor_ptr, solve_ptr, T, stride_kb, stride_kt, stride_kh,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr,
    PRECISION: tl.constexpr, MERGE_PRECISION: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    chunk = (tl.program_id(0) // HV).to(tl.int64)
    head = tl.program_id(0) % HV
    head_k = head // (HV // HK)
    batch, start, length = load_chunk(chunk_ptr, chunk)
    if length > 0:
        offs = tl.arange(0, 16)
        i = offs[:, None]
        j = offs[None, :]
        zero = tl.zeros([16, 16], tl.float32)
        n00 = zero
        n10 = zero
        n11 = zero
        n20 = zero
        n21 = zero
        n22 = zero
        n30 = zero
        n31 = zero
        n32 = zero
        n33 = zero
        k_ptr += batch * stride_kb + start * stride_kt + head_k.to(tl.int64) * stride_kh
        # Not unrolled: in float32 eight blocks took 42 s to compile and sixteen 120, in a loop 5 to 9.
        for k0 in tl.range(0, K, BK):
            offs_k = k0 + tl.arange(0, BK)
            k0_IK = _load_block(k_ptr, stride_kt, length, 0, offs_k, K)
            k1_IK = _load_block(k_ptr, stride_kt, length, 16, offs_k, K)
            k2_IK = _load_block(k_ptr, stride_kt, length, 32, offs_k, K)
            k3_IK = _load_block(k_ptr, stride_kt, length, 48, offs_k, K)
            k0_KI = tl.trans(k0_IK)
            k1_KI = tl.trans(k1_IK)
            k2_KI = tl.trans(k2_IK)
            n00 = dot(k0_IK, k0_KI, n00, PRECISION)
            n10 = dot(k1_IK, k0_KI, n10, PRECISION)
            n11 = dot(k1_IK, k1_KI, n11, PRECISION)
            n20 = dot(k2_IK, k0_KI, n20, PRECISION)
            n21 = dot(k2_IK, k1_KI, n21, PRECISION)
            n22 = dot(k2_IK, k2_KI, n22, PRECISION)
            n30 = dot(k3_IK, k0_KI, n30, PRECISION)
            n31 = dot(k3_IK, k1_KI, n31, PRECISION)
            n32 = dot(k3_IK, k2_KI, n32, PRECISION)
            n33 = dot(k3_IK, tl.trans(k3_IK), n33, PRECISION)

        row = chunk * HV + head
        gate_ptrs = gate_ptr + row * CHUNK + offs
        g0 = tl.load(gate_ptrs)
        g1 = tl.load(gate_ptrs + 16)
        g2 = tl.load(gate_ptrs + 32)
        g3 = tl.load(gate_ptrs + 48)
        beta_ptrs = factor_ptr + (row * FACTORS + 3) * CHUNK + offs
        b0 = tl.load(beta_ptrs)
        b1 = tl.load(beta_ptrs + 16)
        b2 = tl.load(beta_ptrs + 32)
        b3 = tl.load(beta_ptrs + 48)
        if NORM:
            norm_ptrs = norm_ptr + ((batch * T + start + offs) * 2 + 1) * HK + head_k
            r0 = tl.load(norm_ptrs, mask=offs < length, other=0.0)
            r1 = tl.load(norm_ptrs + 32 * HK, mask=16 + offs < length, other=0.0)
            r2 = tl.load(norm_ptrs + 64 * HK, mask=32 + offs < length, other=0.0)
            r3 = tl.load(norm_ptrs + 96 * HK, mask=48 + offs < length, other=0.0)
            n00 *= r0[:, None]
            n10 *= r1[:, None]
            n11 *= r1[:, None]
            n20 *= r2[:, None]
            n21 *= r2[:, None]
            n22 *= r2[:, None]
            n30 *= r3[:, None]
            n31 *= r3[:, None]
            n32 *= r3[:, None]
            n33 *= r3[:, None]
            b0 *= r0
            b1 *= r1
            b2 *= r2
            b3 *= r3
        # Above the diagonal the exponent is positive and may overflow: masked before it is taken.
        lower = i > j
        n00 = tl.where(lower, n00 * tl.exp2(tl.where(lower, g0[:, None] - g0[None, :], 0.0)) * b0[None, :], 0.0)
        n11 = tl.where(lower, n11 * tl.exp2(tl.where(lower, g1[:, None] - g1[None, :], 0.0)) * b1[None, :], 0.0)
        n22 = tl.where(lower, n22 * tl.exp2(tl.where(lower, g2[:, None] - g2[None, :], 0.0)) * b2[None, :], 0.0)
        n33 = tl.where(lower, n33 * tl.exp2(tl.where(lower, g3[:, None] - g3[None, :], 0.0)) * b3[None, :], 0.0)
        n10 *= _decay(g1, g0, b0)
        n20 *= _decay(g2, g0, b0)
        n21 *= _decay(g2, g1, b1)
        n30 *= _decay(g3, g0, b0)
        n31 *= _decay(g3, g1, b1)
        n32 *= _decay(g3, g2, b2)

        x00, x11, x22, x33 = _invert_blocks(n00, n11, n22, n33, MERGE_PRECISION)
        x00_op = _nearest(x00, MERGE_PRECISION)
        x11_op = _nearest(x11, MERGE_PRECISION)
        x22_op = _nearest(x22, MERGE_PRECISION)
        x33_op = _nearest(x33, MERGE_PRECISION)
        DTYPE: tl.constexpr = solve_ptr.dtype.element_ty
        stored = lower
        if DTYPE != tl.float32:
            gates = gate_ptr + row * CHUNK
            squares = tl.sum(tl.where(lower, x00 * x00 + x11 * x11 + x22 * x22 + x33 * x33, 0.0))
            alike = (squares > ALIKE * length) & (tl.load(gates) - tl.load(gates + CHUNK - 1) < LITTLE_DECAY)
            if alike:
                x00 = _keep_sums(x00, 15, length, DTYPE)
                x11 = _keep_sums(x11, 31, length, DTYPE)
                x22 = _keep_sums(x22, 47, length, DTYPE)
                x33 = _keep_sums(x33, 63, length, DTYPE)
            stored = tl.where(alike, i >= j, lower)
        solve_ptr += row * CHUNK * CHUNK
        _store_block(solve_ptr, 0, 0, tl.where(stored, x00, 0.0))
        _store_block(solve_ptr, 1, 1, tl.where(stored, x11, 0.0))
        _store_block(solve_ptr, 2, 2, tl.where(stored, x22, 0.0))
        _store_block(solve_ptr, 3, 3, tl.where(stored, x33, 0.0))
        x10 = -_multiply(x11_op, _multiply(n10, x00_op, MERGE_PRECISION), MERGE_PRECISION)
        x21 = -_multiply(x22_op, _multiply(n21, x11_op, MERGE_PRECISION), MERGE_PRECISION)
        x32 = -_multiply(x33_op, _multiply(n32, x22_op, MERGE_PRECISION), MERGE_PRECISION)
        x10_op = _nearest(x10, MERGE_PRECISION)
        right = dot(n21, x10_op, _multiply(n20, x00_op, MERGE_PRECISION), MERGE_PRECISION)
        x20 = -_multiply(x22_op, right, MERGE_PRECISION)
        right = dot(n32, _nearest(x21, MERGE_PRECISION), _multiply(n31, x11_op, MERGE_PRECISION), MERGE_PRECISION)
        x31 = -_multiply(x33_op, right, MERGE_PRECISION)
        right = dot(n31, x10_op, _multiply(n30, x00_op, MERGE_PRECISION), MERGE_PRECISION)
        right = dot(n32, _nearest(x20, MERGE_PRECISION), right, MERGE_PRECISION)
        x30 = -_multiply(x33_op, right, MERGE_PRECISION)

        _store_block(solve_ptr, 1, 0, x10)
        _store_block(solve_ptr, 2, 0, x20)
        _store_block(solve_ptr, 2, 1, x21)
        _store_block(solve_ptr, 3, 0, x30)
        _store_block(solve_ptr, 3, 1, x31)
        _store_block(solve_ptr, 3, 2, x32)
        _store_block(solve_ptr, 0, 1, zero)
        _store_block(solve_ptr, 0, 2, zero)
        _store_block(solve_ptr, 0, 3, zero)
        _store_block(solve_ptr, 1, 2, zero)
        _store_block(solve_ptr, 1, 3, zero)
        _store_block(solve_ptr, 2, 3, zero)


def solve(
    inputs: Inputs, options: Options, sizes: Sizes, chunks: Tensor,
    norms: Tensor, gates: Tensor, factors: Tensor, inverse: Tensor,
) -> None:  # fmt: skip
    """Fill the inverse from k and what `scores` left (norms, gates, beta in the factor table)."""
    k = inputs.k
    precision = dot_precision(k.dtype)
    # 16-bit operands: TF32 merges err less than the rounding of the result. float32 needs more.
    merge_precision = "tf32" if k.element_size() == 2 and not is_amd() else precision
    BK = padded(sizes.K)
    if BK > 128 or k.element_size() != 2 or is_amd():
        BK = _BLOCK_K
    launch(
        _solve_kernel, sizes.num_chunks * sizes.HV,
        (k, chunks, norms, gates, factors, inverse, sizes.T, *k.stride()[:3]),
        dict(HK=sizes.HK, HV=sizes.HV, K=sizes.K, BK=BK, NORM=options.use_qk_l2norm,
             PRECISION=precision, MERGE_PRECISION=merge_precision),
        _SOLVE.num_warps, _SOLVE.num_stages,
    )  # fmt: skip
