"""Walks S <- M S + H along paths of matrices, for heads of 128: from summaries of segments to the states between them.

What a path is, `gdn_ops.backends.triton.walk` says, whose kernel does the same with other sizes and on other GPUs. The
same kernel goes along the cuts of documents (`segments.py`), where a step's numbers follow from the cut's.

A program takes BV value columns of one head along one path. The next M comes by TMA while it multiplies, the one after
as soon as there is room. M S is one tensor-core product of 128 rows by two warpgroups, M from registers, into which
either orientation can be loaded, and S from shared memory. Each is the sum of what TF32 holds of it and the rest; of
the four products of these parts three are taken: about as exact as float32. No result depends on BV.
Grid: (paths * HV, V / BV).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.launch import is_hopper, launch, on_device
from gdn_ops.backends.hopper.tma import ALIGNMENT, async_load, barrier
from gdn_ops.shapes import Stage

# Letters: HV value heads, K, V head sizes (both D), BV value columns of a program, P columns of a part of M.

_NUM_WARPS = 8
_PROGRAMS = 132
"""That run at once, one a multiprocessor."""

_NUMBERS = [
    "num_steps", "num_first", "source_rows", "source_block", "source_stride", "move_rows", "move_block", "move_stride",
    "later_source_rows", "later_source_block", "later_source_stride", "later_move_rows", "later_move_block",
    "later_move_stride",
]  # fmt: skip
"""Parameters that kernels are not specialised for: one kernel for any number of steps and ranks."""

_D = gl.constexpr(128)
_PART = gl.constexpr(32)
MOVES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.jit
def _leading(x):
    """The nearest number that TF32 holds. Of what is left no part has a sign that would make errors add up."""
    return ((x.to(gl.int32, bitcast=True) + 4096) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def _product(move_s, leading_s, rest_s, zero_KV, TRANSPOSED: gl.constexpr, LEFT: gl.constexpr):
    """M S of a tile that holds M, or M transposed, and of tiles with the two parts of S transposed."""
    columns = move_s if TRANSPOSED else move_s.permute((1, 0))
    main_KV = zero_KV
    small_KV = zero_KV
    for i in gl.static_range(_D // _PART):
        part = columns.slice(i * _PART, _PART).permute((1, 0)).load(LEFT)
        high = _leading(part)
        low = part - high
        leading = leading_s.permute((1, 0)).slice(i * _PART, _PART)
        rest = rest_s.permute((1, 0)).slice(i * _PART, _PART)
        small_KV = warpgroup_mma(low, leading, small_KV, is_async=True)
        main_KV = warpgroup_mma(high, leading, main_KV, is_async=True)
        small_KV = warpgroup_mma(high, rest, small_KV, is_async=True)
        # The next part of M is loaded while this one is multiplied.
        main_KV, small_KV = warpgroup_mma_wait(3 if i + 1 < _D // _PART else 0, deps=[main_KV, small_KV])
    return main_KV + small_KV


@gluon.jit
def _row(number, rows, block, stride):
    """Where row `number` of [blocks,rows,HV,D,D] begins, in rows of D, by its strides in such rows."""
    return number // rows * block + number % rows * stride


@gluon.jit
def tiles(BV: gl.constexpr):
    """Shared memory of a program: two tiles for M and their barriers, and the two parts of a transposed state."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    moves_s = gl.allocate_shared_memory(gl.float32, [2, _D, _D], TILE)
    leading_s = gl.allocate_shared_memory(gl.float32, [BV, _D], TILE)
    rest_s = gl.allocate_shared_memory(gl.float32, [BV, _D], TILE)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    barrier()
    return moves_s, leading_s, rest_s, arrived


@gluon.jit
def fetch(moves_desc, row, arrived, move_s, pred):
    """Start a copy of M, which begins at this row, to a tile that nobody reads."""
    mbarrier.expect(arrived, _D * _D * 4, pred=pred)
    async_load(moves_desc, [row, 0], arrived, move_s, pred=pred)


@gluon.jit
def share(state_KV, leading_s, rest_s):
    """Put the two parts of a state where the products of a step read them."""
    leading = _leading(state_KV)
    leading_s.permute((1, 0)).store(leading)
    rest_s.permute((1, 0)).store(state_KV - leading)
    fence_async_shared()
    barrier()


@gluon.jit
def step(
    source_ptr, is_moved, moves_s, leading_s, rest_s, arrived, taken, zero_KV,
    MOVES_TRANSPOSED: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """M S + H, or H, which lies at `source_ptr`; S is what was shared, M what was fetched after `taken` others."""
    # Not before the fence of `share`, which waits for all loads.
    found_KV = gl.load(source_ptr)
    if is_moved:
        mbarrier.wait(arrived.index(taken % 2), (taken // 2) & 1)
        found_KV += _product(moves_s.index(taken % 2), leading_s, rest_s, zero_KV, MOVES_TRANSPOSED, LEFT)
        # Behind this barrier nobody reads the tiles: the products, of all that was loaded, have ended.
        barrier()
    return found_KV


@gluon.jit
def _numbers(steps_ptr, i, num_steps):
    """The rows of H, M and the output of step `i`, -1 for none; without H there is no M."""
    there = i < num_steps
    source = gl.load(steps_ptr + i * 3, mask=there, other=-1)
    move = gl.load(steps_ptr + i * 3 + 1, mask=there, other=-1)
    output = gl.load(steps_ptr + i * 3 + 2, mask=there, other=-1)
    return source, gl.where(source >= 0, move, -1), output


@gluon.jit
def _fetch_of_step(
    i, move, num_first, h, moves_desc, move_rows, move_block, move_stride, later_moves_desc, later_move_rows,
    later_move_block, later_move_stride, fetched, moves_s, arrived, HAS_LATER: gl.constexpr,
):  # fmt: skip
    """Fetch the M of step `i`, if there is one, after `fetched` others; returns how many have been fetched then."""
    arrived = arrived.index(fetched % 2)
    move_s = moves_s.index(fetched % 2)
    row = _row(move, move_rows, move_block, move_stride) + h * _D
    fetch(moves_desc, row, arrived, move_s, (move >= 0) & (i < num_first))
    if HAS_LATER:
        row = _row(move, later_move_rows, later_move_block, later_move_stride) + h * _D
        fetch(later_moves_desc, row, arrived, move_s, (move >= 0) & (i >= num_first))
    return fetched + (move >= 0).to(gl.int32)


@gluon.jit(do_not_specialize=_NUMBERS)
def _walk_tma_kernel(
    out_ptr, states_ptr, starts_ptr, steps_ptr, num_steps,
    sources_ptr, moves_desc, num_first, source_rows, source_block, source_stride, move_rows, move_block, move_stride,
    later_sources_ptr, later_moves_desc, later_source_rows, later_source_block, later_source_stride, later_move_rows,
    later_move_block, later_move_stride,
    HV: gl.constexpr, BV: gl.constexpr, HAS_STARTS: gl.constexpr, SOURCES_TRANSPOSED: gl.constexpr,
    MOVES_TRANSPOSED: gl.constexpr, HAS_LATER: gl.constexpr, LATER_SOURCES_TRANSPOSED: gl.constexpr,
    LATER_MOVES_TRANSPOSED: gl.constexpr, NUM_WARPS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    L_KV: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BV, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L_KV, 1)
    moves_s, leading_s, rest_s, arrived = tiles(BV)
    wait_for_earlier(EARLY)
    path = gl.program_id(0) // HV
    h = gl.program_id(0) % HV
    key = gl.arange(0, _D, gl.SliceLayout(1, L_KV))
    value = gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(0, L_KV))
    natural_KV = h * (_D * _D) + key[:, None] * _D + value[None, :]
    transposed_KV = h * (_D * _D) + value[None, :] * _D + key[:, None]
    zero_KV = gl.full([_D, BV], 0.0, gl.float32, L_KV)
    steps_ptr += path * num_steps * 3
    source, move, output = _numbers(steps_ptr, 0, num_steps)
    next_source, next_move, next_output = _numbers(steps_ptr, 1, num_steps)
    fetched = 0
    for i in gl.static_range(2):
        fetched = _fetch_of_step(
            i, next_move if i == 1 else move, num_first, h, moves_desc, move_rows, move_block, move_stride,
            later_moves_desc, later_move_rows, later_move_block, later_move_stride, fetched, moves_s, arrived,
            HAS_LATER,
        )  # fmt: skip
    state_KV = zero_KV
    if HAS_STARTS:
        start = gl.load(starts_ptr + path)
        states_ptr += start.to(gl.int64) * (HV * _D * _D)
        state_KV = gl.load(states_ptr + natural_KV, mask=(natural_KV >= 0) & (start >= 0), other=0.0)
    taken = 0
    for j in range(num_steps):
        is_moved = move >= 0
        if is_moved:
            share(state_KV, leading_s, rest_s)
        # Numbers are loaded two steps ahead: M is fetched so early, and other loads evict them from the L1.
        last_source, last_move, last_output = _numbers(steps_ptr, j + 2, num_steps)
        if source >= 0:
            if j < num_first:
                at = _row(source, source_rows, source_block, source_stride).to(gl.int64) * _D
                state_KV = step(
                    sources_ptr + at + (transposed_KV if SOURCES_TRANSPOSED else natural_KV), is_moved,
                    moves_s, leading_s, rest_s, arrived, taken, zero_KV, MOVES_TRANSPOSED, LEFT,
                )  # fmt: skip
            else:
                if HAS_LATER:
                    at = _row(source, later_source_rows, later_source_block, later_source_stride).to(gl.int64) * _D
                    state_KV = step(
                        later_sources_ptr + at + (transposed_KV if LATER_SOURCES_TRANSPOSED else natural_KV), is_moved,
                        moves_s, leading_s, rest_s, arrived, taken, zero_KV, LATER_MOVES_TRANSPOSED, LEFT,
                    )  # fmt: skip
        taken += is_moved.to(gl.int32)
        # At most one M waits for the next step, so the other tile is free.
        fetched = _fetch_of_step(
            j + 2, last_move, num_first, h, moves_desc, move_rows, move_block, move_stride, later_moves_desc,
            later_move_rows, later_move_block, later_move_stride, fetched, moves_s, arrived, HAS_LATER,
        )  # fmt: skip
        if output >= 0:
            gl.store(out_ptr + output.to(gl.int64) * (HV * _D * _D) + natural_KV, state_KV)
        source = next_source
        move = next_move
        output = next_output
        next_source = last_source
        next_move = last_move
        next_output = last_output


def _matrix(x: Tensor) -> TensorDescriptor:
    """Describe moves [blocks,rows,HV,D,D], whose strides are multiples of D, as one matrix with rows of D."""
    D = x.shape[-1]
    last = sum((size - 1) * stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    shape, strides = [last // D + x.shape[2] * D, D], [D, 1]
    return TensorDescriptor(x, shape, strides, [D, D], MOVES)


def value_columns(chains: int) -> int:
    """BV where so many paths times heads are walked: the narrowest block with which all programs run at once."""
    return next((block for block in (16, 32) if chains * (_D.value // block) <= _PROGRAMS), 64)


def supports(out: Tensor, stages: Sequence[Stage]) -> bool:
    """Whether the kernel can write these states: on this GPU, with these sizes, from moves that a descriptor takes."""
    if out.dtype != torch.float32 or out.shape[-2:] != (_D.value, _D.value) or not is_hopper(_device(out)):
        return False
    return all(
        x.stride(axis) % _D.value == 0 and x.data_ptr() % ALIGNMENT == 0
        for stage in stages
        for x in (stage.sources, stage.moves)
        for axis in (0, 1)
    )


def _device(x: Tensor) -> torch.device:
    """Where `x` is, or where a call will run that is recorded on stand-ins."""
    if x.is_cuda or not torch.cuda.is_available():
        return x.device
    return torch.device("cuda", torch.cuda.current_device())


def walk(out: Tensor, states: Tensor | None, starts: Tensor | None, steps: Tensor, stages: Sequence[Stage]) -> None:
    """As `gdn_ops.backends.triton.walk.walk`."""
    num_paths, num_steps = steps.shape[:2]
    HV, D = out.shape[1:3]
    if not num_paths or not num_steps or not out.numel():
        return
    block = value_columns(num_paths * HV)
    first, *later = stages
    other = later[0] if later else first
    has_starts = states is not None and starts is not None and states.shape[0] > 0
    # Where there are no moves no step names one: any matrix will do.
    moves = [_matrix(stage.moves if stage.moves.numel() else out[None]) for stage in (first, other)]
    strides = [[x if i % 3 == 0 else x // D for i, x in enumerate(stage.strides)] for stage in (first, other)]
    has_later = bool(later) and other.num_steps > 0
    with on_device(out):
        launch(
            _walk_tma_kernel, (num_paths * HV, D // block), out, states if has_starts else None,
            starts if has_starts else None, steps, num_steps, first.sources, moves[0], first.num_steps, *strides[0],
            other.sources, moves[1], *strides[1], HV=HV, BV=block, HAS_STARTS=has_starts,
            SOURCES_TRANSPOSED=first.sources_transposed, MOVES_TRANSPOSED=first.moves_transposed, HAS_LATER=has_later,
            LATER_SOURCES_TRANSPOSED=other.sources_transposed, LATER_MOVES_TRANSPOSED=other.moves_transposed,
            NUM_WARPS=_NUM_WARPS, num_warps=_NUM_WARPS,
        )  # fmt: skip
