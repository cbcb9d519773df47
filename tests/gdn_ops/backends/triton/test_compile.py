"""Every kernel compiles for the GPUs that are supported, without one: resources fit and the small kernels do not spill.

The launchers run on meta tensors with `launch` replaced by a recorder, so what is compiled is what is launched.
"""

import re
import subprocess
import tempfile

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import get_ptxas  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from gdn_ops.backends import triton as backend  # noqa: E402
from gdn_ops.backends.triton import chunks, forward, gradients, reverse, scores, solve  # noqa: E402
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd  # noqa: E402
from gdn_ops.shapes import Inputs, Options  # noqa: E402

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32"}
_HOPPER_SHARED = 227 * 1024


@pytest.fixture
def launches(monkeypatch):
    """Kernel launches of one forward and backward call at 16/48 heads of 128, by kernel name."""
    seen = {}

    def record(kernel, grid, args, constants, num_warps, num_stages):
        seen[kernel.__name__] = (kernel, args, constants, num_warps, num_stages)

    for stage in (chunks, forward, gradients, reverse, scores, solve):
        monkeypatch.setattr(stage, "launch", record)
    HK, HV, D, T = 16, 48, 128, 32768
    row = torch.empty((1, T, (2 * HK + HV) * D), dtype=torch.bfloat16, device="meta")
    q, k, v = (row[..., a * D : b * D].view(1, T, b - a, D) for a, b in ((0, HK), (HK, 2 * HK), (2 * HK, 2 * HK + HV)))
    gate = torch.empty((1, T, HV), device="meta")
    per_head = torch.empty(HV, device="meta")
    inputs = Inputs(q, k, v, gate, gate, None, torch.empty(6, dtype=torch.int32, device="meta"), per_head, per_head)
    options = Options(D**-0.5, True, True)
    out = allocate_chunk_fwd(inputs, output_final_state=True, use_qk_l2norm=True, save="inputs")
    backend.chunk_fwd(out, inputs, options, "inputs")
    grads = allocate_chunk_bwd(inputs)
    targets = grads._replace(dq=grads.dq.unsqueeze(3), dk=grads.dk.unsqueeze(3), dv=grads.dv.unsqueeze(3))
    backend.chunk_bwd(targets, torch.empty_like(v), None, inputs, out.saved, options)
    assert len(seen) == 8
    return seen


def _source(kernel, args, constants):
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if arg is None or (isinstance(arg, int) and arg == 1):
            signature[name], constexprs[name] = "constexpr", arg
        elif isinstance(arg, torch.Tensor):
            signature[name] = "*" + _TYPES[arg.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(arg, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if arg < 2**31 else "i64"
            if arg % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name, value in constants.items():
        signature[name], constexprs[name] = "constexpr", value
    assert list(signature) == list(kernel.arg_names)  # `launch` passes constants by position, in this order
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)


def _compile(launch, arch):
    kernel, args, constants, num_warps, num_stages = launch
    options = dict(num_warps=num_warps, num_stages=num_stages)
    return triton.compile(_source(kernel, args, constants), target=GPUTarget("cuda", arch, 32), options=options)


def _spilled_bytes(ptx):
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # Triton ships two assemblers and takes the one that knows the PTX version it writes for a target.
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"(\d+) bytes spill stores", report)
    assert found is not None
    return int(found.group(1))


# What the three large kernels spill, in bytes a thread. forward and reverse: addresses of the software pipeline, a few
# registers beyond 255. gradients: the sum over a group's heads (96 registers) is parked while the pair products are
# formed; it is the reason for that kernel's speed (docs/kernels.md) and may only go down.
_SPILLS = {"_forward_kernel": 128, "_reverse_kernel": 192, "_gradients_kernel": 1100}


def test_hopper_resources(launches):
    for name, launch in launches.items():
        compiled = _compile(launch, 90)
        assert compiled.metadata.shared <= _HOPPER_SHARED, name
        assert _spilled_bytes(compiled.asm["ptx"]) <= _SPILLS.get(name, 0), name


@pytest.mark.parametrize("arch", [80, 100])
def test_other_architectures_compile(launches, arch):
    for launch in launches.values():
        assert _compile(launch, arch).metadata.name
