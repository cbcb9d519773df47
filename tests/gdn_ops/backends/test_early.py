"""Launches that start before earlier kernels have ended: which, what kernels do about it, and that no bit shows it."""

import ast
import pathlib
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

import gdn_ops  # noqa: E402
from gdn_ops import settings  # noqa: E402
from gdn_ops.backends import early, launching  # noqa: E402

BACKENDS = pathlib.Path(early.__file__).parent


# ---- what is launched early


@pytest.fixture(autouse=True)
def forget_devices():
    early._supported.cache_clear()
    yield
    early._supported.cache_clear()


@pytest.fixture
def device(monkeypatch):
    """A current device of the given compute capability, and a Triton that compiles nothing."""

    def of(*capability):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(launching, "_compiled", {})

    return of


KERNEL = SimpleNamespace(arg_names=["x", "SIZE", "EARLY"])
OTHER = SimpleNamespace(arg_names=["x", "EARLY", "SIZE"])
GIVEN = {"SIZE": 3, "num_warps": 4}


@pytest.mark.parametrize("capability, starts_early", [((8, 0), 0), ((8, 9), 0), ((9, 0), 1), ((10, 0), 1)])
def test_devices_that_know_such_launches_get_them(device, capability, starts_early):
    device(*capability)
    wanted = {"EARLY": 1, "launch_pdl": True} if starts_early else {"EARLY": 0}
    assert early.with_options(KERNEL, GIVEN) == {**GIVEN, **wanted}
    assert early.with_options(OTHER, GIVEN) == GIVEN, "a kernel that does not wait"


def test_an_amd_gpu_does_not(device, monkeypatch):
    device(9, 4)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert early.with_options(KERNEL, GIVEN) == {**GIVEN, "EARLY": 0}


@pytest.mark.parametrize("there", ["no option", "no backend"])
def test_a_triton_that_does_not_know_them_launches_as_usual(device, monkeypatch, there):
    device(9, 0)
    from triton.backends.nvidia import compiler

    if there == "no option":
        monkeypatch.setattr(compiler, "CUDAOptions", type("CUDAOptions", (), {"num_warps": 4}))
    else:
        monkeypatch.delitem(triton.backends.backends, "nvidia")
    assert early.with_options(KERNEL, GIVEN) == {**GIVEN, "EARLY": 0}


def test_the_installed_triton_s_launcher_asks_for_them():
    """Its options have the attribute, and the launcher of a compiled kernel passes it on."""
    import inspect

    from triton.backends.nvidia import compiler, driver

    assert early._launcher_can()
    assert compiler.CUDAOptions.launch_pdl is False
    assert "launch_pdl" in inspect.getsource(driver.CudaLauncher.__call__)


class Kernel:
    """Compiled anew at each launch through Triton; notes with which options, and its compiled forms' arguments."""

    arg_names = ("x", "SIZE", "EARLY")

    def __init__(self):
        self.options, self.launched = [], []

    def _compiled(self, options):
        self.options.append(options)
        kernel = self

        class Compiled:
            metadata = SimpleNamespace(global_scratch_size=0)

            def __getitem__(self, grid):
                return lambda *args: kernel.launched.append(args)

        return Compiled()

    def __getitem__(self, grid):
        return lambda *args, **options: self._compiled(options)

    def warmup(self, *args, grid, **options):
        return self._compiled(options)


@pytest.mark.parametrize("capability, value", [((8, 0), 0), ((9, 0), 1)])
def test_first_launches_later_ones_and_recorded_ones_are_alike(device, capability, value):
    device(*capability)
    kernel, x = Kernel(), torch.zeros(64)
    for _ in range(2):
        launching.launch(kernel, (1, 1, 1), (x,), GIVEN)
    assert [options.get("launch_pdl", False) for options in kernel.options] == [value > 0], "compiled once"
    assert kernel.options[0]["EARLY"] == value
    assert [args[1:] for args in kernel.launched] == [(3, value)]
    _, constants = launching.compiled_for(kernel, (1, 1, 1), (torch.empty(64, device="meta"),), GIVEN)
    assert constants == (3, value)
    assert len(kernel.options) == 1, "a recorded launch is of the same compiled kernel"
    launching._compiled.clear()
    launching.compiled_for(kernel, (1, 1, 1), (x,), GIVEN)
    assert kernel.options[1] == kernel.options[0]


def test_devices_of_one_process_differ(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 0), (9, 0))[index])
    for index, value in enumerate((0, 1)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        assert early.with_options(KERNEL, GIVEN)["EARLY"] == value


# ---- what kernels do


def kernels():
    for folder in ("hopper", "triton"):
        for path in sorted((BACKENDS / folder).glob("*.py")):
            for node in ast.parse(path.read_text()).body:
                is_kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
                if is_kernel and any(ast.unparse(x) in ("triton.jit", "gluon.jit") for x in node.decorator_list):
                    yield pytest.param(node, id=f"{folder}.{path.stem}.{node.name}")


def calls(node):
    return [ast.unparse(x.func) for x in ast.walk(node) if isinstance(x, ast.Call)]


@pytest.mark.parametrize("kernel", list(kernels()))
def test_every_kernel_waits_in_every_program_and_touches_no_memory_before(kernel):
    """By the source: a wait that is under no condition, and in front of it nothing that reads, writes or returns."""
    assert kernel.args.args[-1].arg == early.PARAMETER
    assert ast.unparse(kernel.args.defaults[-1]) == "0"
    waits = [i for i, x in enumerate(kernel.body) if ast.unparse(x) == "wait_for_earlier(EARLY)"]
    assert len(waits) == 1
    assert calls(kernel).count("wait_for_earlier") == 1
    allowed = {"program_id", "allocate_shared_memory", "index", "init", "static_range", "fence_async_shared", "barrier"}
    allowed |= {"arange", "where", "maximum", "minimum", "full", "zeros"}
    ahead = kernel.body[: waits[0]]
    assert not any(isinstance(x, ast.Return) for statement in ahead for x in ast.walk(statement))
    if any("tiles" in calls(statement) for statement in ahead):
        walk = ast.parse((BACKENDS / "hopper" / "walk.py").read_text())
        ahead += next(x.body for x in walk.body if isinstance(x, ast.FunctionDef) and x.name == "tiles")
        allowed |= {"tiles"}
    for statement in ahead:
        for called in calls(statement):
            assert called.split(".")[-1] in allowed or called.endswith("Layout"), called


# ---- on a GPU

HK, HV, D, T = 2, 4, 128, 3000


def gpu_backends():
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() < (9, 0):
        return ["none"]
    return ["triton", "hopper"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]


def leaves_of(seed):
    gen = torch.Generator().manual_seed(seed)
    row = torch.randn(1, T, (2 * HK + HV) * D, generator=gen).to("cuda", torch.bfloat16)
    g, beta = -torch.rand(1, T, HV, generator=gen).cuda(), torch.rand(1, T, HV, generator=gen).cuda()
    return [x.requires_grad_() for x in (row, g, beta)], torch.tensor([0, 1, 70, 70, 2500, 2990], device="cuda")


def step(leaves, cu_seqlens):
    o, _ = gdn_ops.chunk_gated_delta_rule_packed(
        *leaves, num_qk_heads=HK, num_v_heads=HV, head_dim=D, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True
    )
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]


def ordinary_steps(leaves, cu_seqlens, monkeypatch):
    """As host code does it (what was recorded before keeps its launches), launched as usual."""
    with monkeypatch.context() as patch, settings.configure(debug=True):
        patch.setattr(early, "_CHOSEN", 0)
        return step(leaves, cu_seqlens)


def assert_same_bits(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_backends() == ["none"], reason="needs an NVIDIA GPU of compute capability 9.0 or above")
@pytest.mark.parametrize("backend", gpu_backends())
@pytest.mark.parametrize("plans", [False, True], ids=["host code", "plans"])
def test_gpu_early_launches_change_no_bit(backend, plans, monkeypatch, poison_memory):
    with settings.configure(backend=backend):
        leaves, cu_seqlens = leaves_of(0)
        wanted = ordinary_steps(leaves, cu_seqlens, monkeypatch)
        with settings.configure(debug=not plans):
            for _ in range(20):
                assert_same_bits(step(leaves, cu_seqlens), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(gpu_backends() == ["none"], reason="needs an NVIDIA GPU of compute capability 9.0 or above")
@pytest.mark.parametrize("backend", gpu_backends())
def test_gpu_early_launches_on_two_streams_and_in_a_graph(backend, monkeypatch):
    """Behind and before what is no kernel of this package: copies, fills, waits for another stream."""
    with settings.configure(backend=backend):
        leaves, cu_seqlens = leaves_of(0)
        others, _ = leaves_of(1)
        wanted = [ordinary_steps(x, cu_seqlens, monkeypatch) for x in (leaves, others)]
        for _ in range(3):
            step(leaves, cu_seqlens)
        streams = [torch.cuda.Stream() for _ in range(2)]
        found = []
        torch.cuda.synchronize()
        for i in range(8):
            with torch.cuda.stream(streams[i % 2]):
                found.append((i // 2 % 2, step((leaves, others)[i // 2 % 2], cu_seqlens)))
        torch.cuda.synchronize()
        for which, results in found:
            assert_same_bits(results, wanted[which])
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            x = torch.zeros(1 << 20, device="cuda")
            y = torch.empty_like(x).copy_(x)
            step(leaves, cu_seqlens)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y.add_(1)
            torch.cuda.current_stream().wait_stream(side)
            captured = step(leaves, cu_seqlens)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                copies = [z.clone() for z in captured]
            torch.cuda.current_stream().wait_stream(side)
        kept = [z.detach().clone() for z in leaves]
        for i in range(6):
            with torch.no_grad():
                for z, value in zip(leaves, (kept, others)[i % 2], strict=True):
                    z.copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(captured, wanted[i % 2])
            assert_same_bits(copies, wanted[i % 2])
