"""Tensor Memory Accelerator: what differs between Triton versions, and how descriptors are made. Nothing else knows.

Triton 3.8 renamed Gluon's copy functions (`async_copy_global_to_shared` became `async_load`) and others. The kernels of
this folder use the newer names, which this file binds on either version.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if hasattr(tma, "async_load"):
    async_load = tma.async_load
    async_store = tma.async_store
else:
    async_load = tma.async_copy_global_to_shared
    async_store = tma.async_copy_shared_to_global
store_wait = tma.store_wait
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_tile = gl.shared_memory_descriptor
reinterpret = _tile.reinterpret if hasattr(_tile, "reinterpret") else _tile._reinterpret

ALIGNMENT = 16
"""Bytes: what a descriptor's base address, its strides and a head's column must be a multiple of."""

_MAX_EXTENT = 2**31 - 1

TILE_16BIT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
TILE_FLOAT32 = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def rows(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe a dense matrix [R,W] as tiles of `block`."""
    layout = TILE_FLOAT32 if x.dtype == torch.float32 else TILE_16BIT
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block), layout)


def heads(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Describe a token-major [T,H,D], whatever its strides, as a matrix: token by row, head h at column h * stride(1).

    Rows past T read as zeros.
    """
    columns = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    return TensorDescriptor(x, [x.shape[0], columns], [x.stride(0), 1], list(block), TILE_16BIT)


def unaddressable(x: Tensor) -> str | None:
    """Why `heads` cannot describe [T,H,D] with a dense last axis, or None."""
    size = x.element_size()
    if x.data_ptr() % ALIGNMENT:
        return f"starts at an address that is no multiple of {ALIGNMENT} bytes"
    if x.stride(0) <= 0 or x.stride(0) * size % ALIGNMENT:
        return f"has a token stride of {x.stride(0)} elements, not a positive multiple of {ALIGNMENT // size}"
    if x.shape[1] > 1 and (x.stride(1) <= 0 or x.stride(1) * size % ALIGNMENT):
        return f"has a head stride of {x.stride(1)} elements, not a positive multiple of {ALIGNMENT // size}"
    if (x.shape[1] - 1) * x.stride(1) + x.shape[2] > _MAX_EXTENT:
        return f"spans more than {_MAX_EXTENT} elements from its first to its last head"
    return None


@gluon.jit
def clear_rows(tile, valid, NUM_WARPS: gl.constexpr):
    """Zero rows `valid`.. of a token-major shared tile, so that neither NaN nor infinity of the tokens after a
    document's end reaches a product (0 * NaN is NaN).

    Several warpgroups may clear one tile at the same time: each writes the same values and, after its own barrier,
    reads what it wrote itself.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLS: gl.constexpr = tile.shape[1]
    STEP: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [NUM_WARPS, 1], [1, 0])
    row = gl.arange(0, STEP, gl.SliceLayout(1, layout))
    for r0 in gl.static_range(0, ROWS, STEP):
        part = tile.slice(r0, STEP)
        x = part.load(layout)
        part.store(gl.where((r0 + row < valid)[:, None], x, gl.full([STEP, COLS], 0.0, tile.dtype, layout)))


@gluon.jit
def cleared():
    """Make what `clear_rows` wrote visible to the tensor cores of this partition."""
    fence_async_shared()
    barrier()
