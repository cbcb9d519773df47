"""The rows that a convolution's halo moves: picked, put in another order, and added up, in one launch each.

    out[i, d] = sum_s x[row(i, d, s)]        s = 0 ... S - 1, a row that there is not adds nothing

Grid: (rows of out) * (blocks of channels). The torch forms are in `gdn_ops.context_parallel.conv`.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import launch

_BLOCK_W = 1024


@triton.jit
def _rows_kernel(
    x_ptr, rows_ptr, positions_ptr, out_ptr, stride_x, depth,
    W: tl.constexpr, P: tl.constexpr, S: tl.constexpr, BLOCKS: tl.constexpr, BW: tl.constexpr,
    READS_BACKWARDS: tl.constexpr, WRITES_BACKWARDS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    number = tl.program_id(0) // BLOCKS
    offs_w = tl.program_id(0) % BLOCKS * BW + tl.arange(0, BW)
    mask_w = offs_w < W
    i = number // depth
    d = number % depth
    at = (i * P + d) * S
    for s in tl.static_range(S):
        row = tl.load(rows_ptr + at + s).to(tl.int64)
        there = row >= 0
        if positions_ptr is not None:
            position = tl.load(positions_ptr + at + s)
            # A narrower convolution reaches less far back than the plan does.
            there = there & (position < depth)
            if READS_BACKWARDS:
                position = depth - 1 - position
            row = row * depth + position
        value = tl.load(x_ptr + row * stride_x + offs_w, mask=mask_w & there, other=0.0)
        if s == 0:
            total = value
        else:
            total += value
    if WRITES_BACKWARDS:
        d = depth - 1 - d
    tl.store(out_ptr + (i * depth + d).to(tl.int64) * W + offs_w, total, mask=mask_w)


def move_rows(
    x: Tensor, rows: Tensor, positions: Tensor | None, depth: int, *, reads_backwards: bool, writes_backwards: bool
) -> Tensor:
    """[N,depth,W] from x, rows of W dense channels at any stride.

    rows, positions int32 [N,P] or [N,P,S], depth <= P: which row of x (-1: none); with positions, which of x's groups
    of `depth` rows, and which row of that, counted from its end if reads_backwards. writes_backwards: out[i, d] becomes
    out[i, depth - 1 - d].
    """
    W = x.shape[-1]
    out = x.new_empty((rows.shape[0], depth, W))
    flat = x.view(-1, W) if x.dim() == 3 else x
    block = min(_BLOCK_W, triton.next_power_of_2(max(W, 1)))
    blocks = triton.cdiv(W, block)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        launch(
            _rows_kernel, rows.shape[0] * depth * blocks,
            (flat, rows, positions, out, flat.stride(0), depth),
            {
                "W": W, "P": rows.shape[1], "S": rows.shape[2] if rows.dim() == 3 else 1,
                "BLOCKS": blocks, "BW": block,
                "READS_BACKWARDS": reads_backwards, "WRITES_BACKWARDS": writes_backwards,
            },
            4, 1,
        )  # fmt: skip
    return out
