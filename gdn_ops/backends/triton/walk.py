"""Walks S <- M S + H along paths of matrices: from summaries of segments to the states between them.

A path is a list of steps, each with the row of H, the row of M (none: S becomes H) and the row that the state is
written to. One launch takes every path, head and block of value columns, which do not depend on each other. The torch
form, right on every device, is `gdn_ops.context_parallel.segments.walk`.

On chip: the state, transposed, and one M at a time. Products are of TF32 in three parts, about as exact as float32.
Grid: (paths * HV, V / BV).
"""

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends import launching

# Letters: HV value heads, K key head size, V value head size, BV value columns of a program.

_VALUE_COLUMNS = 16
_NUM_WARPS = 8


@triton.jit
def _walk_kernel(
    out_ptr, starts_ptr, sources_ptr, moves_ptr, steps_ptr, num_steps,
    source_rows, source_block, source_stride, move_rows, move_block, move_stride,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HAS_STARTS: tl.constexpr, SOURCES_TRANSPOSED: tl.constexpr, MOVES_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    offs_v = tl.program_id(1) * BV + tl.arange(0, BV)
    offs_k = tl.arange(0, K)
    natural_VK = offs_k[None, :] * V + offs_v[:, None]
    # The state is transposed, so the move is too: element (j, i) of M^T lies at i * K + j of M as it is.
    if SOURCES_TRANSPOSED:
        source_VK = offs_v[:, None] * K + offs_k[None, :]
    else:
        source_VK = natural_VK
    if MOVES_TRANSPOSED:
        move_KK = offs_k[:, None] * K + offs_k[None, :]
    else:
        move_KK = offs_k[None, :] * K + offs_k[:, None]
    state_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STARTS:
        start = tl.load(starts_ptr + path).to(tl.int64)
        at = out_ptr + (start * HV + h) * (K * V)
        state_VK = tl.load(at + natural_VK, mask=(natural_VK >= 0) & (start >= 0), other=0.0)
    for step in range(num_steps):
        step_ptr = steps_ptr + (path * num_steps + step) * 3
        source = tl.load(step_ptr).to(tl.int64)
        move = tl.load(step_ptr + 1).to(tl.int64)
        output = tl.load(step_ptr + 2).to(tl.int64)
        if source >= 0:
            at = sources_ptr + source // source_rows * source_block + source % source_rows * source_stride
            own_VK = tl.load(at + h * (K * V) + source_VK)
            if move >= 0:
                at = moves_ptr + move // move_rows * move_block + move % move_rows * move_stride
                moves_KK = tl.load(at + h * (K * K) + move_KK)
                state_VK = tl.dot(state_VK, moves_KK, acc=own_VK, input_precision="tf32x3")
            else:
                state_VK = own_VK
        if output >= 0:
            tl.store(out_ptr + (output * HV + h) * (K * V) + natural_VK, state_VK)


def supports(x: Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes states like `x` of these head sizes."""
    sizes = all(16 <= size <= 128 and size & (size - 1) == 0 for size in (key_dim, value_dim))
    return sizes and x.is_cuda and x.dtype == torch.float32 and torch.version.hip is None


def walk(
    out: Tensor, starts: Tensor | None, sources: Tensor, moves: Tensor, steps: Tensor,
    *, sources_transposed: bool, moves_transposed: bool,
) -> None:  # fmt: skip
    """Write the states along every path to rows of `out` [rows,HV,K,V], dense.

    starts [paths] or None: the row of `out` that a path starts from (none: from zero). sources [blocks,rows,HV,K,V], or
    [blocks,rows,HV,V,K] if transposed, moves [blocks,rows,HV,K,K]: a row's number counts over blocks, which may be any
    distance apart. steps int32 [paths,steps,3].
    """
    num_paths, num_steps = steps.shape[:2]
    HV, K, V = out.shape[1:]
    if not num_paths or not num_steps:
        return
    block = min(_VALUE_COLUMNS, V)
    args = (
        out, starts, sources, moves, steps, num_steps,
        max(sources.shape[1], 1), sources.stride(0), sources.stride(1),
        max(moves.shape[1], 1), moves.stride(0), moves.stride(1),
    )  # fmt: skip
    options = {
        "HV": HV, "K": K, "V": V, "BV": block, "HAS_STARTS": starts is not None,
        "SOURCES_TRANSPOSED": sources_transposed, "MOVES_TRANSPOSED": moves_transposed, "num_warps": _NUM_WARPS,
    }  # fmt: skip
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        launching.launch(_walk_kernel, (num_paths * HV, V // block, 1), args, options)
