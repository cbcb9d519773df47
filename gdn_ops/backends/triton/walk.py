"""Walks S <- M S + H along paths of matrices: from summaries of segments to the states between them.

A path is a list of steps, each with the row of H, the row of M (none: S becomes H) and the row that the state is
written to. Its steps may come in two stages, with matrices of their own: first those of other ranks, then this one's.
One launch takes every path, head and block of value columns, which do not depend on each other. The torch
form, right on every device, is `gdn_ops.context_parallel.segments.walk`.

On chip: the state, transposed, and a quarter of the rows of one M at a time, so that registers leave room for several
programs a multiprocessor, whose loads then hide behind each other's products. The numbers of a step are loaded during
the one before. Products are of TF32 in three parts, about as exact as float32.
Grid: (paths * HV, V / BV).

Another kernel, `place`, picks rows of a tensor by their numbers, with zeros for those that are none: the states of
documents from those of pieces. Torch's operations for that are five launches, and none can be in a recorded call.
Grid: (rows, elements of a row / BLOCK).
"""

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends import launching
from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.shapes import Stage

# Letters: HV value heads, K key head size, V value head size, BV value columns of a program, Q rows of a quarter of M.

# 48 heads of 128 are 384 programs of 16 columns or 192 of 32. Three of four warps with 168 registers fit on a
# multiprocessor, so the 384 all run at once; a wider block reads M less often.
_VALUE_COLUMNS = 16
_NUM_WARPS = 4
_MOST_REGISTERS = 168
_PLACED_WARPS = 8
_PLACED_ELEMENTS = 4096


@triton.jit
def _quarters(x_VK, V: tl.constexpr, K: tl.constexpr):
    """The columns of [V,K] in four blocks."""
    halves_VQ22 = tl.permute(tl.reshape(x_VK, [V, 2, 2, K // 4]), (0, 3, 1, 2))
    even_VQ2, odd_VQ2 = tl.split(halves_VQ22)
    first, third = tl.split(even_VQ2)
    second, fourth = tl.split(odd_VQ2)
    return first, second, third, fourth


@triton.jit
def _stage(
    state_VK, out_ptr, sources_ptr, moves_ptr, step_ptr, num_steps,
    source_rows, source_block, source_stride, move_rows, move_block, move_stride, h, offs_v,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SOURCES_TRANSPOSED: tl.constexpr, MOVES_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The state after a path's steps of one stage."""
    IN_QUARTERS: tl.constexpr = K >= 64
    Q: tl.constexpr = K // 4 if IN_QUARTERS else K
    offs_k = tl.arange(0, K)
    offs_q = tl.arange(0, Q)
    natural_VK = offs_k[None, :] * V + offs_v[:, None]
    # The state is transposed, so the move is too: element (j, i) of M^T lies at i * K + j of M as it is.
    if SOURCES_TRANSPOSED:
        source_VK = offs_v[:, None] * K + offs_k[None, :]
    else:
        source_VK = natural_VK
    QUARTER: tl.constexpr = Q * K if MOVES_TRANSPOSED else Q
    if MOVES_TRANSPOSED:
        move_QK = offs_q[:, None] * K + offs_k[None, :]
    else:
        move_QK = offs_k[None, :] * K + offs_q[:, None]
    source = tl.load(step_ptr, mask=num_steps > 0, other=-1).to(tl.int64)
    move = tl.load(step_ptr + 1, mask=num_steps > 0, other=-1).to(tl.int64)
    for step in range(num_steps):
        output = tl.load(step_ptr + 2).to(tl.int64)
        follows = step + 1 < num_steps
        next_source = tl.load(step_ptr + 3, mask=follows, other=-1).to(tl.int64)
        next_move = tl.load(step_ptr + 4, mask=follows, other=-1).to(tl.int64)
        if source >= 0:
            at = sources_ptr + source // source_rows * source_block + source % source_rows * source_stride
            found_VK = tl.load(at + h * (K * V) + source_VK)
            if move >= 0:
                at = moves_ptr + move // move_rows * move_block + move % move_rows * move_stride + h * (K * K)
                if IN_QUARTERS:
                    a_VQ, b_VQ, c_VQ, d_VQ = _quarters(state_VK, BV, K)
                    found_VK = tl.dot(a_VQ, tl.load(at + move_QK), acc=found_VK, input_precision="tf32x3")
                    at += QUARTER
                    found_VK = tl.dot(b_VQ, tl.load(at + move_QK), acc=found_VK, input_precision="tf32x3")
                    at += QUARTER
                    found_VK = tl.dot(c_VQ, tl.load(at + move_QK), acc=found_VK, input_precision="tf32x3")
                    at += QUARTER
                    found_VK = tl.dot(d_VQ, tl.load(at + move_QK), acc=found_VK, input_precision="tf32x3")
                else:
                    found_VK = tl.dot(state_VK, tl.load(at + move_QK), acc=found_VK, input_precision="tf32x3")
            state_VK = found_VK
        if output >= 0:
            tl.store(out_ptr + (output * HV + h) * (K * V) + natural_VK, state_VK)
        source = next_source
        move = next_move
        step_ptr += 3
    return state_VK


@triton.jit
def _walk_kernel(
    out_ptr, states_ptr, starts_ptr, steps_ptr, num_steps,
    sources_ptr, moves_ptr, num_first, source_rows, source_block, source_stride, move_rows, move_block, move_stride,
    later_sources_ptr, later_moves_ptr, later_source_rows, later_source_block, later_source_stride, later_move_rows,
    later_move_block, later_move_stride,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, HAS_STARTS: tl.constexpr,
    SOURCES_TRANSPOSED: tl.constexpr, MOVES_TRANSPOSED: tl.constexpr, HAS_LATER: tl.constexpr,
    LATER_SOURCES_TRANSPOSED: tl.constexpr, LATER_MOVES_TRANSPOSED: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    path = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    offs_v = tl.program_id(1) * BV + tl.arange(0, BV)
    state_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STARTS:
        start = tl.load(starts_ptr + path).to(tl.int64)
        natural_VK = tl.arange(0, K)[None, :] * V + offs_v[:, None]
        at = states_ptr + (start * HV + h) * (K * V)
        state_VK = tl.load(at + natural_VK, mask=(natural_VK >= 0) & (start >= 0), other=0.0)
    step_ptr = steps_ptr + path * num_steps * 3
    state_VK = _stage(
        state_VK, out_ptr, sources_ptr, moves_ptr, step_ptr, num_first,
        source_rows, source_block, source_stride, move_rows, move_block, move_stride, h, offs_v,
        HV, K, V, BV, SOURCES_TRANSPOSED, MOVES_TRANSPOSED,
    )  # fmt: skip
    if HAS_LATER:
        _stage(
            state_VK, out_ptr, later_sources_ptr, later_moves_ptr, step_ptr + num_first * 3, num_steps - num_first,
            later_source_rows, later_source_block, later_source_stride, later_move_rows, later_move_block,
            later_move_stride, h, offs_v, HV, K, V, BV, LATER_SOURCES_TRANSPOSED, LATER_MOVES_TRANSPOSED,
        )  # fmt: skip


@triton.jit
def _place_kernel(
    out_ptr, x_ptr, index_ptr, row_size, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr = 0
):  # fmt: skip
    wait_for_earlier(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < row_size
    if HAS_ROWS:
        source = tl.load(index_ptr + row).to(tl.int64)
        found = tl.load(x_ptr + source * row_size + at, mask=there & (source >= 0), other=0.0)
    else:
        found = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * row_size + at, found, mask=there)


def supports(dtype: torch.dtype, key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take states of this dtype and these head sizes, on a GPU."""
    sizes = all(16 <= size <= 128 and size & (size - 1) == 0 for size in (key_dim, value_dim))
    return sizes and dtype == torch.float32 and torch.version.hip is None


def place(out: Tensor, x: Tensor | None, index: Tensor) -> None:
    """Write x[index] to `out` [rows,...], zeros where the int32 index [rows] is -1 or there is no x; both dense."""
    if not out.numel():
        return
    num_rows = out.shape[0]
    row_size = out.numel() // num_rows
    has_rows = x is not None and x.shape[0] > 0
    options = {"HAS_ROWS": has_rows, "BLOCK": _PLACED_ELEMENTS, "num_warps": _PLACED_WARPS}
    grid = (num_rows, triton.cdiv(row_size, _PLACED_ELEMENTS), 1)
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        launching.launch(_place_kernel, grid, (out, x if has_rows else None, index, row_size), options)


def walk(out: Tensor, states: Tensor | None, starts: Tensor | None, steps: Tensor, stages: Sequence[Stage]) -> None:
    """Write the states along every path to rows of `out` [rows,HV,K,V]; rows that no step names stay as they are.

    starts int32 [paths]: the row of states [N,HV,K,V] that a path starts from (-1, or neither given: from zero).
    steps int32 [paths,steps,3]; stages: one or two, as `Stage`, whose steps follow each other. All dense but sources
    and moves.
    """
    num_paths, num_steps = steps.shape[:2]
    HV, K, V = out.shape[1:]
    if not num_paths or not num_steps:
        return
    block = min(_VALUE_COLUMNS, V)
    first, *later = stages
    other = later[0] if later else first
    has_starts = states is not None and starts is not None and states.shape[0] > 0
    args = (
        out, states if has_starts else None, starts if has_starts else None, steps, num_steps,
        first.sources, first.moves, first.num_steps, *first.strides, other.sources, other.moves, *other.strides,
    )  # fmt: skip
    options = {
        "HV": HV, "K": K, "V": V, "BV": block, "HAS_STARTS": has_starts,
        "SOURCES_TRANSPOSED": first.sources_transposed, "MOVES_TRANSPOSED": first.moves_transposed,
        "HAS_LATER": bool(later) and other.num_steps > 0, "LATER_SOURCES_TRANSPOSED": other.sources_transposed,
        "LATER_MOVES_TRANSPOSED": other.moves_transposed, "num_warps": _NUM_WARPS, "maxnreg": _MOST_REGISTERS,
    }  # fmt: skip
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        launching.launch(_walk_kernel, (num_paths * HV, V // block, 1), args, options)
