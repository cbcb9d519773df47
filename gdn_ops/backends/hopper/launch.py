"""How this backend's kernels are launched (`launching.launch`), and what they ask of the device."""

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gdn_ops.backends import launching


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)` on the current device.

    `args` are the kernel's run-time parameters in order, `options` its compile-time ones (declared after them) and
    Triton's own, such as num_warps.
    """
    x, y, z = (*grid, 1, 1)[:3]
    launching.launch(kernel, (x, y, z), args, options)


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of `x` current; while a call is recorded, on stand-ins, it is already."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device is what these kernels are written for."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors() -> int:
    """How many multiprocessors the current device has."""
    return _multiprocessors(torch.cuda.current_device())
