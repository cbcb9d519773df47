"""Compile the Hopper backend's kernels for sm_90 on a machine without a GPU.

`python offline.py CASE...` runs the backend's own launchers on meta tensors, with a stand-in for Triton's driver that
names the target and launches nothing; so what is compiled is what a call would launch, specialisation included. One
line of JSON a kernel: its name, shared memory, what a test counts in its PTX and, with `--waits`, what ptxas adds.
"""

import argparse
import json
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from gdn_ops.backends import early, hopper, launching
from gdn_ops.backends.hopper import summaries
from gdn_ops.backends.hopper import walk as walk_tma
from gdn_ops.backends.triton import walk
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd, allocate_row, gradient_target
from gdn_ops.shapes import Inputs, Options, Stage, packed_layouts, packed_width


class _OfflineDriver:
    """As much of a Triton driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


CASES: dict[str, dict[str, Any]] = {
    "plain": {"R": 5},
    "states": {"R": 5, "save": "states"},
    "states_long": {"T": 32768, "save": "states"},
    "full": {
        "norm": True, "gate": True, "sigmoid": True, "doubled": True, "varlen": True, "initial": True, "packed": True,
        "save": "inputs",
    },
    "stretches": {"T": 32768},
    "stretches_full": {"T": 32768, "initial": True, "norm": True},
    "long_full": {
        "HK": 1, "R": 1, "T": 32768, "varlen": True, "initial": True, "norm": True, "save": "inputs", "packed": True,
    },
    "parts": {"T": 32768, "varlen": True},
    "parts_full": {
        "T": 262144, "N": 20, "varlen": True, "initial": True, "norm": True, "gate": True, "save": "inputs",
        "packed": True,
    },
    "states_only": {"varlen": True, "states_only": True},
    "half": {"dtype": torch.float16, "norm": True, "HK": 2, "R": 1, "B": 2, "T": 100},
}  # fmt: skip
"""Calls that between them reach every compile-time branch of every kernel."""


def compile_case(
    *, HK: int = 16, R: int = 3, B: int = 1, T: int = 4096, dtype: torch.dtype = torch.bfloat16, norm: bool = False,
    gate: bool = False, sigmoid: bool = False, doubled: bool = False, varlen: bool = False, initial: bool = False,
    packed: bool = False, save: str = "solve", states_only: bool = False, N: int = 5,
) -> list[Any]:  # fmt: skip
    """Compile everything that a forward and a backward of this shape launch; the compiled kernels, in launch order."""
    HV, D = HK * R, 128
    compiled: list[Any] = []

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if packed:
        width = packed_width(HK, HV, D)
        row = empty(B, T, width, dtype=dtype)
        q, k, v = (
            gradient_target(row, row, layout, heads, D).flatten(2, 3)
            for layout, heads in zip(packed_layouts(HK, HV, D), (HK, HK, HV), strict=True)
        )
    else:
        q, k, v = (empty(B, T, heads, D, dtype=dtype) for heads in (HK, HK, HV))
    cu_seqlens = empty(N + 1, dtype=torch.int32) if varlen else None
    inputs = Inputs(
        q, k, v, empty(B, T, HV), empty(B, T, HV, dtype=dtype),
        empty(N if varlen else B, HV, D, D) if initial else None, cu_seqlens,
        empty(HV) if gate else None, empty(HV) if gate else None,
    )  # fmt: skip
    options = Options(D**-0.5, norm, sigmoid, doubled)

    def compile_only(fn: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(fn, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    class Forgetful(dict):
        """Remembers no compiled kernel: one that was compiled for a target without a GPU must not be launched."""

        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    run = JITFunction.run
    launching._compiled = Forgetful()
    torch.cuda.current_device = lambda: 0
    driver = triton.runtime.driver
    JITFunction.run = compile_only
    driver.set_active(_OfflineDriver())
    multiprocessors = hopper.gradients.__globals__["multiprocessors"]
    hopper.gradients.__globals__["multiprocessors"] = lambda: 132
    try:
        out = allocate_chunk_fwd(inputs, output_final_state=initial, use_qk_l2norm=norm, save=save)
        hopper.chunk_fwd(out, inputs, options, save)
        grads = allocate_chunk_bwd(inputs, (packed, packed, packed))
        layouts = packed_layouts(HK, HV, D) if packed else (None, None, None)
        drow = allocate_row(inputs, packed_width(HK, HV, D)) if packed else None
        targets = [
            gradient_target(grad, drow, layout, heads, D)
            for grad, layout, heads in zip(grads[:3], layouts, (HK, HK, HV), strict=True)
        ]
        grads = grads._replace(dq=targets[0], dk=targets[1], dv=targets[2])
        do = empty(B, T, HV, D, dtype=dtype)
        hopper.chunk_bwd(grads, do, empty(*out.final_state.shape) if initial else None, inputs, out.saved, options)
        if states_only:
            states, table = empty(4, HV, D, D), empty(5, 8, dtype=torch.int32)
            summaries.segments_fwd(states, states, table, inputs, options)
            summaries.segments_bwd(states, do, None, table[1:], inputs, out.saved, options)
            stages = [Stage(states[None], states[None], 1, is_first, not is_first) for is_first in (True, False)]
            for kernel in (walk, walk_tma):
                kernel.walk(states, states, table[:, 0], empty(5, 2, 3, dtype=torch.int32), stages)
    finally:
        JITFunction.run = run
        hopper.gradients.__globals__["multiprocessors"] = multiprocessors
    return compiled


def describe(kernel: Any) -> dict[str, Any]:
    """What a test asks of one compiled kernel."""
    return {
        "name": kernel.metadata.name,
        "hash": kernel.hash,
        "target": kernel.metadata.target.arch,
        "shared": kernel.metadata.shared,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "tma": kernel.asm["ptx"].count("cp.async.bulk.tensor"),
        "early": getattr(kernel.metadata, "launch_pdl", False),
        "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
        "releases": kernel.asm["ptx"].count("griddepcontrol.launch_dependents"),
        "ahead": accesses_ahead_of_the_wait(kernel.asm["ptx"]),
    }


def accesses_ahead_of_the_wait(ptx: str) -> list[str]:
    """Instructions on global memory, and ends of the kernel, that come before the wait for earlier kernels.

    By the text, in which blocks of a warp-specialised kernel that come earlier run later: those of the other warps,
    which are started behind the wait, are left out.
    """
    ahead, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return []
    return re.findall(r"\b(?:ld|st|atom|red)\.global\S*|\bcp\.\S*|\bprefetch\S*|\btensormap\S*|\bret\b", ahead)


def injected_waits(ptx: str) -> int:
    """How many waits for products ptxas says to have put in, each for every product that is running there."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout + done.stderr).count("warpgroup.wait is injected")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--early", type=int, default=0, help="as kernels that start early would have it (`early.py`)")
    parser.add_argument("--waits", action="store_true", help="with the waits for products that ptxas puts in")
    parser.add_argument("--cubin", help="folder to write each kernel's machine code to")
    chosen = parser.parse_args()
    early._supported = lambda device_index: True
    early._CHOSEN = chosen.early
    for case in chosen.cases:
        for i, kernel in enumerate(compile_case(**CASES[case])):
            more = {"injected": injected_waits(kernel.asm["ptx"])} if chosen.waits else {}
            print(json.dumps({"triton": triton.__version__, "case": case, **describe(kernel), **more}), flush=True)
            if chosen.cubin:
                with open(f"{chosen.cubin}/{case}_{i}_{kernel.metadata.name}.cubin", "wb") as f:
                    f.write(kernel.asm["cubin"])
                with open(f"{chosen.cubin}/{case}_{i}_{kernel.metadata.name}.ptx", "w") as f:
                    f.write(kernel.asm["ptx"])
