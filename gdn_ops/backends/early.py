"""Kernels that start before earlier ones have ended: programmatic dependent launch, and the rules that make it safe.

Between two kernels of a stream the chip idles for one to two microseconds. On GPUs of compute capability 9.0 and above
a kernel can be launched so that its programs are placed while the one before it ends, and wait there, on the device,
for its results (`griddepcontrol.wait`); then a third of a microsecond is left.

What keeps the order of a stream, for every kernel whose last parameter is `EARLY`:

1. Every program of it calls `wait_for_earlier` first of all, whether or not it has work. Before the call it does
   nothing but index arithmetic and what concerns its own shared memory (barriers). It reads no global memory: tables,
   `cu_seqlens` included, were written by an earlier kernel, ours or the caller's. It writes none: earlier kernels may
   still read what it writes, and scratch that it makes descriptors in was another kernel's a moment ago.
2. The call returns when all kernels that it was launched after have ended and their writes are visible to every thread
   of the waiting kernel. Since no program ends without it, a kernel that has ended means that all before it have, back
   to one that was launched as usual: waiting for one kernel is waiting for all. So one wait of a program's first warps,
   before the others are started (`warp_specialize`), is enough.
3. No kernel asks for its successor before its end (`griddepcontrol.launch_dependents`). Programs that wait take up
   shared memory and registers for as long as the kernel before them runs: a step took 1 to 2 % more
   (docs/experiments.md), and communication on another stream found no place.
4. What comes next need not know: a kernel launched as usual, an event, a copy or another stream waits for the end of
   the kernel, as ever.

A CUDA graph keeps the order in the same form. No result depends on any of this.
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

PARAMETER = "EARLY"
"""The name of the last parameter, with the default 0, of kernels that follow the rules above."""

_NO, _WAITS = 0, 1
"""Values of `EARLY`: launched as usual; launched early, so it waits."""

_CHOSEN = _WAITS


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr) -> None:
    """Wait for all earlier kernels, if this one was launched early; for kernels of Triton and of Gluon."""
    if EARLY:
        # One instruction; Triton wants a result.
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def with_options(kernel: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The compile-time parameters and options of a launch on the current device, with those that make it early."""
    if kernel.arg_names[-1] != PARAMETER:
        return options
    if _CHOSEN == _NO or not _supported(torch.cuda.current_device()):
        return {**options, PARAMETER: _NO}
    return {**options, PARAMETER: _CHOSEN, "launch_pdl": True}


@functools.cache
def _supported(device_index: int) -> bool:
    """Whether the device knows such launches and Triton's launcher asks for them."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device_index) < (9, 0):
        return False
    return _launcher_can()


def _launcher_can() -> bool:
    """Whether this Triton has the option `launch_pdl`."""
    backend = triton.backends.backends.get("nvidia")
    module = None if backend is None else sys.modules.get(backend.compiler.__module__)
    return hasattr(getattr(module, "CUDAOptions", None), "launch_pdl")
