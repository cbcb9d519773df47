"""Device functions that several stages share: operand casts, dots, decay matrices, chunk-table look-ups.

Letters: C tokens of a chunk, K/V head sizes, BK/BV the same padded to a power of two (or a block of it).
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)
EPS = tl.constexpr(1e-6)
# 2**-160 is zero in float32, so a decay below it is clamped without changing exp2 of it; the clamp keeps the cumulative
# sum of a chunk below 2**14, where float32 still resolves the weak gates that follow a strong one.
MIN_LOG2_DECAY = tl.constexpr(-160.0)

# Triton's interpreter runs the kernels on CPU tensors (the tests do so).
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Rows of the per-(chunk, value head) factor table, see scores.py.
FACTORS = tl.constexpr(7)


@triton.jit
def trip_count(n):
    """A loop bound. The interpreter's own conversion of a tensor to an index fails with NumPy 2.4 and later."""
    if INTERPRETED:
        return int(n.handle.data.item())
    else:
        return n


@triton.jit
def operand(x, DTYPE: tl.constexpr):
    """Round an accumulator to a dot operand; float16 saturates, because inf * 0 in the next dot would be NaN."""
    if DTYPE == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, x)
        x = tl.where(x < -65504.0, -65504.0, x)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b, accumulated in float32; PRECISION matters for float32 operands only."""
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_chunk(chunk_ptr, chunk):
    """Batch row, first token and number of tokens of a chunk (0: unused; negative: tokens past the last document)."""
    batch = tl.load(chunk_ptr + chunk * 3).to(tl.int64)
    start = tl.load(chunk_ptr + chunk * 3 + 1).to(tl.int64)
    length = tl.load(chunk_ptr + chunk * 3 + 2)
    return batch, start, length


@triton.jit
def opaque_zero(readable_ptr, PTX: tl.constexpr):
    """An int32 zero that the compiler does not know and makes anew wherever this is called."""
    if PTX and not INTERPRETED:
        return tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        x = tl.load(readable_ptr, volatile=True)
        return x - x


@triton.jit
def tile_mask(offs_i, I, offs_j, J: tl.constexpr):
    """offs_i < I and offs_j < J; the second is left out where no block of J can be ragged, which saves registers."""
    mask = (offs_i < I)[:, None]
    if ((offs_j.shape[0] - 1) & J) != 0:  # block sizes are powers of two
        mask = mask & (offs_j < J)[None, :]
    return mask & tl.full([1, offs_j.shape[0]], True, tl.int1)


@triton.jit
def load_rows(ptr, stride_t, length, offs_d, D: tl.constexpr, first=0):
    """A [C, len(offs_d)] tile of token rows; rows past `length` and columns past D are zero and never read."""
    offs_t = first + tl.arange(0, CHUNK)
    ptrs = ptr + offs_t[:, None] * stride_t + offs_d[None, :]
    return tl.load(ptrs, mask=tile_mask(offs_t, length, offs_d, D), other=0.0)


@triton.jit
def load_columns(ptr, stride_t, length, offs_d, D: tl.constexpr):
    """The transpose of `load_rows`, [len(offs_d), C], as a load of its own: the software pipeline keeps such a tile in
    shared memory, but a row tile that is transposed afterwards in registers, two iterations long.
    """
    offs_t = tl.arange(0, CHUNK)
    ptrs = ptr + offs_t[None, :] * stride_t + offs_d[:, None]
    return tl.load(ptrs, mask=tl.trans(tile_mask(offs_t, length, offs_d, D)), other=0.0)


@triton.jit
def store_rows(ptr, stride_t, length, offs_d, D: tl.constexpr, x):
    """Store a [C, len(offs_d)] tile of token rows in the pointer's dtype."""
    offs_t = tl.arange(0, CHUNK)
    ptrs = ptr + offs_t[:, None] * stride_t + offs_d[None, :]
    tl.store(ptrs, operand(x, ptr.dtype.element_ty), mask=tile_mask(offs_t, length, offs_d, D))


@triton.jit
def zero_rows(ptr, stride_t, length, offs_d, D: tl.constexpr):
    """Store zeros where `store_rows` would store a tile."""
    store_rows(ptr, stride_t, length, offs_d, D, tl.zeros([CHUNK, offs_d.shape[0]], tl.float32))


@triton.jit
def load_matrix(ptr, offs_i, I: tl.constexpr, offs_j, J: tl.constexpr):
    """A tile of a dense [I, J] matrix, zero past its edges."""
    ptrs = ptr + offs_i[:, None] * J + offs_j[None, :]
    if ((offs_i.shape[0] - 1) & I) == 0 and ((offs_j.shape[0] - 1) & J) == 0:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=(offs_i < I)[:, None] & (offs_j < J)[None, :], other=0.0)


@triton.jit
def store_matrix(ptr, offs_i, I: tl.constexpr, offs_j, J: tl.constexpr, x):
    """Store a tile of a dense [I, J] matrix in the pointer's dtype."""
    ptrs = ptr + offs_i[:, None] * J + offs_j[None, :]
    x = operand(x, ptr.dtype.element_ty)
    if ((offs_i.shape[0] - 1) & I) == 0 and ((offs_j.shape[0] - 1) & J) == 0:
        tl.store(ptrs, x)
    else:
        tl.store(ptrs, x, mask=(offs_i < I)[:, None] & (offs_j < J)[None, :])


@triton.jit
def row_tiles(ptr, stride_t, first, length, D: tl.constexpr, BD: tl.constexpr):
    """A descriptor of one document's token rows in [C, BD] tiles, for the copy engine of Hopper (TMA).

    It ends with the document: what a tile has past its last token loads as zero, and nothing of the next document is
    read. Needs a pointer and a stride that are multiples of 16 bytes.
    """
    return tl.make_tensor_descriptor(
        ptr + first.to(tl.int64) * stride_t, [length, D], [stride_t.to(tl.int64), 1], [CHUNK, BD]
    )


@triton.jit
def square_tiles(ptr, first_chunk, num_chunks, head, HV: tl.constexpr):
    """A descriptor of one head's [C, C] matrices of a document; the one of chunk c starts at row c * HV * C."""
    rows = tl.maximum((num_chunks - 1) * HV + 1, 1) * CHUNK
    return tl.make_tensor_descriptor(
        ptr + (first_chunk * HV + head) * CHUNK * CHUNK, [rows, CHUNK], [CHUNK, 1], [CHUNK, CHUNK]
    )


@triton.jit
def softplus(x):
    """log(1 + exp(x)), accurate to float32 for every x (also where 1 + exp(x) rounds to 1)."""
    small = tl.exp(-tl.abs(x))
    one_plus = 1.0 + small
    exact = one_plus - 1.0
    # log(u) * y / (u - 1) cancels the rounding of u = 1 + y; where u == 1, log1p(y) is y itself.
    log1p = tl.where(exact == 0.0, small, tl.log(one_plus) * (small / tl.where(exact == 0.0, 1.0, exact)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)
