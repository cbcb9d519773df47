"""The convolution's kernels: numerics through Triton's interpreter, resources without a GPU, and on a GPU.

The interpreter is chosen when Triton is imported, so the checks run in one process of their own.
"""

import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest
import torch

triton = pytest.importorskip("triton")

from gdn_ops.backends import early  # noqa: E402

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[3]

_spec = importlib.util.spec_from_file_location("conv_harness", _HERE / "conv_harness.py")
assert _spec is not None and _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules["conv_harness"] = harness
_spec.loader.exec_module(harness)
Case, conv = harness.Case, harness.conv


# ---- interpreter


def _names() -> tuple[list[str], list[str]]:
    """Names of the checks, without importing the module that needs the interpreter."""
    tree = ast.parse((_HERE / "conv_interpreted.py").read_text())
    found: dict[str, list[str]] = {"ERROR_CASES": [], "CHECKS": []}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if node.targets[0].id == "ERROR_CASES":
                assert isinstance(node.value, ast.Dict)
                found["ERROR_CASES"] = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            if node.targets[0].id == "CHECKS":
                assert isinstance(node.value, ast.Tuple)
                found["CHECKS"] = [name.id for name in node.value.elts if isinstance(name, ast.Name)]
    return found["ERROR_CASES"] + [f"width_{width}" for width in (2, 3, 5, 6, 7, 8)], found["CHECKS"]


_CASES, _CHECKS = _names()

# Sums of a few products in another order; float16: twice the rounding of an output (2**-11 / sqrt(3)).
_BUDGET = {"float32": 5e-7, "float16": 6e-4}


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
    environment.pop("PYTHONWARNINGS", None)
    done = subprocess.run(
        [sys.executable, str(_HERE / "conv_interpreted.py")],
        env=environment, capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", _CASES)
def test_close_to_float64(results: dict[str, dict], name: str) -> None:
    line = results[name]
    wrong = {key: error for key, error in line["errors"].items() if not error <= _BUDGET[line["dtype"]]}
    assert not wrong


@pytest.mark.parametrize("name", _CHECKS)
def test_property(results: dict[str, dict], name: str) -> None:
    assert results[name]["passed"] is True


def test_every_check_is_listed(results: dict[str, dict]) -> None:
    assert set(results) == {*_CASES, *_CHECKS}


# ---- resources, without a GPU

_TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


@pytest.fixture
def launches(monkeypatch):
    """Launches of one forward and backward call of a production row of width 4, by kernel name."""
    seen = {}

    def record(kernel, grid, args, constants, num_warps, num_stages):
        seen[kernel.__name__] = (kernel, args, constants, num_warps, num_stages)

    monkeypatch.setattr(conv, "launch", record)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    W, width, F = 10240, 4, 6
    x, weight, bias, history = empty(32768, W), empty(W, width), empty(W), empty(F, width - 1, W)
    cu_seqlens, fragments = empty(F + 1, dtype=torch.int32), empty(2, dtype=torch.int64)
    conv.conv_fwd(x, weight, bias, history, cu_seqlens, True)
    conv.conv_bwd(x, x, weight, bias, history, history.float(), cu_seqlens, True)
    conv.conv_history_bwd(x, x, weight, bias, history, cu_seqlens, fragments, True)
    assert len(seen) == 5
    return seen


def _compile(launch, arch):
    kernel, args, constants, num_warps, num_stages = launch
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, arg) in enumerate(zip(kernel.arg_names, args, strict=False)):
        if isinstance(arg, torch.Tensor):
            signature[name] = "*" + _TYPES[arg.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
            if arg % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name, value in {**constants, early.PARAMETER: early._WAITS if arch >= 90 else 0}.items():
        signature[name], constexprs[name] = "constexpr", value
    assert list(signature) == list(kernel.arg_names)  # `launch` passes constants by position, in this order
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = triton.backends.compiler.GPUTarget("cuda", arch, 32)
    return triton.compile(source, target=target, options=dict(num_warps=num_warps, num_stages=num_stages))


def test_kernels_spill_nothing_on_hopper(launches):
    from triton.backends.nvidia.compiler import get_ptxas

    for name, launch in launches.items():
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(_compile(launch, 90).asm["ptx"])
            file.flush()
            command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert re.findall(r"(\d+) bytes spill stores", report) == ["0"], name


@pytest.mark.parametrize("arch", [80, 100])
def test_other_architectures_compile(launches, arch):
    for name, launch in launches.items():
        ahead, wait, _ = _compile(launch, arch).asm["ptx"].partition("griddepcontrol.wait")
        assert bool(wait) == (arch >= 90), name
        if wait:  # before any global memory is touched, and before any program can end
            assert not re.search(r"\b((ld|st|atom|red)\.global|cp\.|prefetch|tensormap|bra|ret)\b", ahead), name


# ---- on a GPU


_GPU_CASES = [
    (torch.bfloat16, 5e-3, 2, 1000),
    (torch.bfloat16, 5e-3, 4, 512),
    (torch.bfloat16, 5e-3, 7, 512),
    (torch.bfloat16, 5e-3, 8, 512),
    (torch.float16, 6e-4, 4, 512),
    (torch.float32, 1e-6, 4, 512),
]


# Kernels compile in seconds, not parts of one: the cases share row widths where they can.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype, budget, width, W", _GPU_CASES)
def test_gpu_is_close_to_float64(dtype, budget, width, W):
    case = Case(
        fragments=(300, 0, 1, 2, 900, 5, 41), unused=70, W=W, width=width, dtype=dtype, history=True,
        bias=width != 7, silu=width != 7, index_dtype=torch.int64 if width == 8 else torch.int32,
    )  # fmt: skip
    wrong = {name: error for name, error in harness.errors(case, "cuda").items() if not error <= budget}
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["wider", "sliced"])
def test_gpu_strides_change_no_bit(rows):
    dense, other = (
        harness.run(case, harness.make(case, "cuda"))
        for case in (Case(fragments=(900, 70), W=512, dtype=torch.bfloat16, rows=r) for r in ("dense", rows))
    )
    assert harness.same(dense, other)


@pytest.mark.gpu
def test_gpu_runs_are_bitwise_equal():
    case = Case(fragments=(3000, 1, 1095), W=512, dtype=torch.bfloat16, history=True)
    made = harness.make(case, "cuda")
    first = harness.run(case, made)
    assert all(harness.same(first, harness.run(case, made)) for _ in range(3))


@pytest.mark.gpu
def test_gpu_document_alone_has_the_bits_it_has_in_a_pack():
    case = Case(fragments=(77, 1500, 9), W=512, dtype=torch.bfloat16)
    made = harness.make(case, "cuda")
    together, part = harness.run(case, made), slice(77, 1577)
    cut = made | {"dy": made["dy"][part], "x": made["x"][part]}
    cut |= {"cu_seqlens": torch.tensor([0, 1500], device="cuda"), "used": torch.tensor([0], device="cuda")}
    single = harness.run(Case(fragments=(1500,), W=512, dtype=torch.bfloat16), cut)
    assert torch.equal(together["y"][part], single["y"])
    assert torch.equal(together["dx"][part], single["dx"])


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gpu_nan_stays_in_its_document(value):
    case = Case(fragments=(700, 801, 600), W=512, dtype=torch.bfloat16, unused=40)
    clean, made = harness.run(case, harness.make(case, "cuda")), harness.make(case, "cuda")
    made["x"][700:1501] = made["dy"][700:1501] = value
    made["x"][2101:] = made["dy"][2101:] = value
    dirty = harness.run(case, made)
    for part in (slice(0, 700), slice(1501, None)):
        assert torch.equal(clean["y"][part], dirty["y"][part])
        assert torch.equal(clean["dx"][part], dirty["dx"][part])


@pytest.mark.gpu
def test_gpu_first_call_is_captured_in_a_graph():
    """A shape that nothing compiled before: capture, replay on other values, and no host synchronisation."""
    case = Case(fragments=(333, 100), W=264, width=3, dtype=torch.float16)
    made = harness.make(case, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv.conv_fwd(made["x"], made["weight"], made["bias"], made["history"], made["cu_seqlens"], True)
        dx, dweight, dbias = conv.conv_bwd(
            made["dy"],
            made["x"],
            made["weight"],
            made["bias"],
            made["history"],
            made["tails"],
            made["cu_seqlens"],
            True,
        )
    other = harness.make(Case(**{**vars(case), "seed": 1}), "cuda")
    for name in ("x", "dy"):
        made[name].copy_(other[name])
    graph.replay()
    wanted = harness.run(case, made)
    assert harness.same({"y": y, "dx": dx, "dweight": dweight, "dbias": dbias}, wanted)


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device():
    case = Case(fragments=(333, 100), W=512, dtype=torch.bfloat16, history=True)
    made = harness.make(case, "cuda")
    harness.run(case, made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        harness.run(case, made)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    """More than 2**31 elements: the last tokens alone give the same bits."""
    T, W = 2**31 // 8192 + 1000, 8192
    x = torch.empty((T, W), dtype=torch.bfloat16, device="cuda")
    x.view(-1)[: 2**26].normal_()
    x[2**26 // W :] = 1
    x[-300:].normal_()
    weight = torch.randn(W, 4, device="cuda")
    none = x.new_empty((0, 3, W))
    y = conv.conv_fwd(x, weight, None, none, torch.tensor([0, T - 200, T], device="cuda"), True)
    last = torch.tensor([0, 200], device="cuda")
    assert torch.equal(y[-200:], conv.conv_fwd(x[-200:], weight, None, none, last, True))
    del y
    dx, _, _ = conv.conv_bwd(x, x, weight, None, none, none, torch.tensor([0, T - 200, T], device="cuda"), True)
    alone, _, _ = conv.conv_bwd(x[-200:], x[-200:], weight, None, none, none, last, True)
    assert torch.equal(dx[-200:], alone)
