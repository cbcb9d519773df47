"""How kernels are launched, and the launch configurations' type.

The configurations themselves are data at the top of each stage's file. There is no timing autotuner: equal inputs take
the same code on every rank and in every run, and the first call may already be captured in a CUDA graph.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gdn_ops.backends import launching
from gdn_ops.backends.triton.primitives import INTERPRETED
from gdn_ops.shapes import Sizes


class Config(NamedTuple):
    """Numbers of one kernel launch: warps a program, depth of the load pipeline, width of the value block."""

    num_warps: int
    num_stages: int
    block_v: int = 0


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def padded(size: int) -> int:
    """The power of two, at least 16, that a head of `size` channels is padded to inside a kernel."""
    return max(16, triton.next_power_of_2(size))


def is_amd() -> bool:
    """Whether torch, and so every GPU it sees, is AMD's."""
    return torch.version.hip is not None


def dot_precision(dtype: torch.dtype) -> str:
    """How dots of `dtype` operands are computed: float32 needs three TF32 products, or true float32 on AMD."""
    return "tf32x3" if dtype == torch.float32 and not is_amd() else "ieee"


LARGE_SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper and Blackwell data-centre GPUs; others get configurations of smaller tiles."""

WIDE_SHARED_MEMORY = 163 * 1024
"""Bytes a program may use on compute capability 8.0. Heads of more than 128 need it: `gradients` takes 100 KB in 16
bits and 144 in float32, and the GPUs below (8.6, 8.9, 12.0) have 99."""

TMA_TOKENS = 256
"""Mean length of a document from which tiles are loaded by TMA. A program makes five to eight descriptors, 128 bytes of
scratch each, before its first chunk; what that costs short documents was not measured."""


@functools.cache
def shared_memory_of(device_index: int) -> int:
    """Bytes of shared memory that a program may use on a GPU."""
    properties = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stubs


def shared_memory() -> int:
    """Bytes of shared memory that a program may use on the current device; without one, those of a Hopper GPU."""
    return shared_memory_of(torch.cuda.current_device()) if torch.cuda.is_available() else LARGE_SHARED_MEMORY


@functools.cache
def _has_tensor_memory(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == 10


def has_tensor_memory() -> bool:
    """Whether the current device keeps accumulators in tensor memory, whose 512 columns a program's have to fit."""
    return torch.cuda.is_available() and not is_amd() and _has_tensor_memory(torch.cuda.current_device())


def choose(large: Config, small: Config, amd: Config, tensor_memory: Config | None = None) -> Config:
    """The configuration for the current device: `large` tiles where its shared memory holds them, else `small` ones.

    `tensor_memory`: the one for data-centre Blackwell GPUs, where `large` would not fit their tensor memory.
    """
    if is_amd():
        return amd
    if tensor_memory is not None and has_tensor_memory():
        return tensor_memory
    return large if shared_memory() >= LARGE_SHARED_MEMORY else small


@functools.cache
def _is_hopper(device_index: int) -> bool:
    return torch.cuda.get_device_capability(device_index)[0] == 9


def on_hopper() -> bool:
    """Whether the current device is a Hopper GPU."""
    return torch.cuda.is_available() and not is_amd() and _is_hopper(torch.cuda.current_device())


def has_tiles(s: Sizes, x: torch.Tensor) -> bool:
    """Whether the sequential kernels take their tiles for heads of 128 in 16 bits on Hopper, whatever the strides."""
    return s.K == s.V == 128 and x.element_size() == 2 and on_hopper()


def takes_tma(s: Sizes, itemsize: int) -> bool:
    """Whether sizes are such that the copy engine of Hopper loads tiles, if the strides allow it too."""
    # Descriptors take 32-bit rows.
    return s.K == s.V == 128 and itemsize == 2 and s.T >= TMA_TOKENS * s.N and s.T * s.HV < 2**31


def uses_tma(s: Sizes, *rows: torch.Tensor) -> bool:
    """Whether the copy engine of Hopper can load tiles of all these operands [B,T,H,D].

    It changes no bit: a tile holds the same numbers, however it was loaded.
    """
    if not takes_tma(s, rows[0].element_size()):
        return False
    for x in rows:
        step = 16 // x.element_size()
        if x.data_ptr() % 16 or x.stride(1) < step or any(x.stride(i) % step for i in range(3)):
            return False
    return True


def launch(
    kernel: Any, grid: int, args: Sequence[Any], constants: Mapping[str, Any], num_warps: int, num_stages: int
) -> None:
    """Launch `grid` programs on the current stream (all on axis 0, whose limit is 2**31 - 1).

    `constants` come last in the kernel's signature, in order.
    """
    if grid <= 0:
        return
    options = {**constants, "num_warps": num_warps, "num_stages": num_stages}
    if INTERPRETED.value and launching.recording.recorder is None:
        kernel[(grid,)](*args, **options)
    else:
        launching.launch(kernel, (grid, 1, 1), tuple(args), options)
