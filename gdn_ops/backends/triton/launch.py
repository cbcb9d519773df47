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


class Config(NamedTuple):
    """Numbers of one kernel launch: warps a program, depth of the load pipeline, width of the value block."""

    num_warps: int
    num_stages: int
    block_v: int = 0


TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def padded(size: int) -> int:
    """The power of two, at least 16, that a head of `size` channels is padded to inside a kernel."""
    return max(16, triton.next_power_of_2(size))


def dot_precision(dtype: torch.dtype) -> str:
    """How dots of `dtype` operands are computed: float32 needs three TF32 products, or true float32 on AMD."""
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None else "ieee"


LARGE_SHARED_MEMORY = 227 * 1024
"""Bytes a program may use on Hopper and Blackwell data-centre GPUs; others get configurations of smaller tiles."""


@functools.cache
def _shared_memory(device_index: int) -> int:
    properties = torch.cuda.get_device_properties(device_index)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stubs


def choose(large: Config, small: Config, x: torch.Tensor) -> Config:
    """The configuration for the device of `x`: `large` tiles where its shared memory holds them."""
    if torch.version.hip is not None:
        return small
    if not x.is_cuda and launching.recording.recorder is None:  # the interpreter, or compiling without a GPU
        return large
    return large if _shared_memory(torch.cuda.current_device()) >= LARGE_SHARED_MEMORY else small


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
