"""Which calls are repeated by a plan, with a backend that notes what it is asked."""

import concurrent.futures
import sys
import time

import pytest
import torch

import gdn_ops
from gdn_ops import repeats, settings

NAMES = ("q", "g", "h0")


class Backend:
    """Records anything; its plans return what was asked for."""

    def __init__(self, can=True):
        self.recorded, self.planned, self.can = [], [], can

    def record(self, run, tensors, device):
        self.recorded.append(run(tensors))
        assert repeats.pinned.backend is self
        if not self.can:
            return None

        def plan(tensors):
            if any(x is not None and x.data_ptr() % 16 for x in tensors):
                return None
            self.planned.append(list(tensors))
            return tuple(self.recorded[-1])

        return plan


@pytest.fixture(autouse=True)
def fast_calls():
    with settings.configure(fast_calls=True):
        yield


@pytest.fixture
def backend():
    return Backend()


def remembered(backend, count=None):
    written = []

    def run(*args, **kwargs):
        if repeats.pinned.backend is None:
            written.append((args, kwargs))
        return (*args, *kwargs.items())

    return repeats.remembered(run, NAMES, lambda args, kwargs: backend, count), written


def test_the_first_call_of_a_kind_runs_as_written_and_the_second_is_recorded(backend):
    call, written = remembered(backend)
    x = torch.randn(2, 4)
    call(x)
    assert (len(written), len(backend.recorded), len(backend.planned)) == (1, 0, 0)
    for calls in (1, 2, 3):
        call(torch.randn(2, 4))
        assert (len(written), len(backend.recorded), len(backend.planned)) == (1, 1, calls)
    assert repeats.pinned.backend is None


@pytest.mark.parametrize(
    "other",
    [
        ((torch.randn(2, 5), None, None), {}),
        ((torch.randn(4, 2).t(), None, None), {}),
        ((torch.randn(2, 4).double(), None, None), {}),
        ((torch.randn(2, 4), torch.randn(2), None), {}),
        ((torch.randn(2, 4), None, torch.randn(2)), {}),
        ((torch.randn(2, 4), None, None), {"scale": 2.0}),
        ((torch.randn(2, 4), None, None), {"switch": True}),
    ],
)
def test_shapes_strides_dtypes_presence_and_options_make_kinds(backend, other):
    call, written = remembered(backend)
    for _ in range(3):
        call(torch.randn(2, 4), None, None)
    args, kwargs = other
    call(*args, **kwargs)
    assert len(written) == 2, "another kind's first call"
    call(*args, **kwargs)
    assert len(backend.recorded) == 2


def test_the_backend_setting_and_torch_s_deterministic_mode_make_kinds(backend):
    call, written = remembered(backend)
    x = torch.randn(2, 4)
    for _ in range(3):
        call(x, deterministic=False)
    with settings.configure(backend="triton"):
        call(x, deterministic=False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        call(x, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(written) == 3


@pytest.mark.parametrize("changes", [{"debug": True}, {"fast_calls": False}])
def test_a_call_that_checks_values_and_every_call_without_the_setting_run_as_written(backend, changes):
    call, written = remembered(backend)
    with settings.configure(**changes):
        for _ in range(3):
            call(torch.randn(2, 4))
    assert len(written) == 3


def test_the_backend_is_asked_about_the_copies(backend):
    asked = []

    def backend_of(args, kwargs):
        asked.append(args[0].stride())
        return backend

    call = repeats.remembered(lambda *args: args, NAMES, backend_of, None)
    for _ in range(3):
        call(torch.randn(4, 2).t())
    assert asked == [(4, 1)]
    assert backend.planned[0][0].stride() == (4, 1)


def test_what_cannot_be_recorded_runs_as_written():
    backend = Backend(can=False)
    call, written = remembered(backend)
    for _ in range(4):
        call(torch.randn(2, 4))
    assert (len(written), len(backend.recorded)) == (4, 1)
    call, written = remembered(object())  # a backend without plans
    for _ in range(4):
        call(torch.randn(2, 4))
    assert len(written) == 4


def test_tensors_off_16_bytes_run_as_written_and_their_backend_is_never_that_of_others(backend):
    call, written = remembered(backend)
    odd, even = torch.randn(9)[1:], torch.randn(8)
    for _ in range(3):
        call(odd)
    assert (len(written), len(backend.recorded)) == (3, 0)
    call(even)
    call(odd)
    assert (len(written), len(backend.recorded), len(backend.planned)) == (4, 1, 1)


def test_operands_are_made_dense_and_counted_as_without_a_plan(backend):
    call, _ = remembered(backend)
    q, g = torch.randn(4, 2).t(), torch.randn(6, 2).t()
    for _ in range(2):
        call(q, g)
    gdn_ops.reset_stats()
    call(q, g, None)
    call(q, g)
    assert gdn_ops.stats().input_copies == 1, "only the planned call counts here; g is not counted"
    planned_q, planned_g = backend.planned[-1]
    assert planned_q.is_contiguous()
    assert planned_g.is_contiguous()
    assert torch.equal(planned_q, q)
    assert torch.equal(planned_g, g)


def test_a_gradient_whose_tokens_are_far_apart_is_copied(backend):
    near, far = (
        torch.empty_strided((1, 70, 2, 16), (0, stride, 16, 1), device="meta") for stride in (2**25 - 1, 2**25)
    )
    few = torch.empty_strided((2, 1, 2, 16), (32, 2**31, 16, 1), device="meta")
    assert not repeats.is_gradient_ready(far)
    call = repeats.remembered(lambda *args: args, ("do", "q"), lambda args, kwargs: backend, None)
    for do, token in ((near, 2**25 - 1), (far, 32), (few, 2**31)):
        gdn_ops.reset_stats()
        for _ in range(2):
            call(do, far)
        planned, q = backend.planned[-1]
        assert planned.stride(1) == token
        assert q is far, "backends refuse such operands instead"
        assert gdn_ops.stats().gradient_copies == int(do is far)


def test_planned_calls_are_counted_once_each(backend):
    call, _ = remembered(backend, count="packed_gradients")
    gdn_ops.reset_stats()
    row = torch.randn(2, 4)
    for _ in range(4):
        call(torch.randn(2, 4), layout=[1, 2], row=row)
    assert gdn_ops.stats().packed_gradients == 3, "all but the first, which the implementation counts"
    assert backend.planned[-1][-1] is row
    call(torch.randn(2, 4), layout=[1, 3], row=row)
    assert len(backend.recorded) == 1, "another layout is another kind"


def test_the_memory_of_kinds_is_bounded(backend, monkeypatch):
    monkeypatch.setattr(repeats, "_GENERATION", 3)
    call, written = remembered(backend)
    for _ in range(2):
        for n in range(1, 8):
            call(torch.randn(n, 4))
    assert len(written) == 14, "seven kinds in turn never fit in a memory of twice three"
    for _ in range(4):
        for n in range(1, 4):
            call(torch.randn(n, 4))
    assert len(backend.recorded) == 3, "three always fit"
    assert len(backend.planned) == 9


def test_a_kind_that_comes_again_outlives_those_that_come_once(backend, monkeypatch):
    monkeypatch.setattr(repeats, "_GENERATION", 4)
    call, written = remembered(backend)
    again = torch.randn(2, 4)
    call(again)
    call(again)
    for n in range(3, 40):
        call(torch.randn(n, 4))
        call(again)
    assert len(backend.recorded) == 1
    assert len(written) == 1 + 37


def test_threads_may_take_turns_at_every_instruction(monkeypatch):
    monkeypatch.setattr(repeats, "_GENERATION", 1)
    monkeypatch.setattr(repeats, "_record", lambda *_: repeats._Kind(lambda tensors: (tensors[0],)))
    call = repeats.remembered(lambda *args: args, NAMES, lambda args, kwargs: None, None)
    inputs = [torch.randn(n, 4) for n in range(1, 40)]
    finished = []

    def give_way(frame, event, arg):
        if frame.f_code.co_filename != repeats.__file__:
            return None
        frame.f_trace_opcodes = True
        time.sleep(0)
        return give_way

    def work(start):
        sys.settrace(give_way)
        for i in range(50):
            x = inputs[(start + i) % len(inputs)]
            assert call(x)[0] is x
        finished.append(start)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, 10 * n) for n in range(4)]:
            future.result()
    assert sorted(finished) == [0, 10, 20, 30]


# ---- on a GPU: plans of the real backends

HK, HV, D, T = 2, 4, 128, 300


def gpu_backends():
    if not torch.cuda.is_available():
        return ["none"]
    return ["triton", "hopper"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]


def leaves_of(seed, device="cuda"):
    """A packed row, g and beta that require grad, and boundaries that move with the seed."""
    gen = torch.Generator().manual_seed(seed)
    row = torch.randn(1, T, (2 * HK + HV) * D, generator=gen).to(device, torch.bfloat16)
    g = -torch.rand(1, T, HV, generator=gen).to(device)
    beta = torch.rand(1, T, HV, generator=gen).to(device)
    cu_seqlens = torch.tensor([0, 50 + seed, 290], device=device)
    return [x.requires_grad_() for x in (row, g, beta)], cu_seqlens


def gpu_step(form, leaves, cu_seqlens):
    """Output and gradients of one step."""
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    options = {"cu_seqlens": cu_seqlens, "use_qk_l2norm_in_kernel": True}
    row, g, beta = leaves
    if form == "packed":
        o, _ = gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, **heads, **options)
    else:
        split = gdn_ops.packed_qkv_views if form == "views" else gdn_ops.packing.split_row
        o, _ = gdn_ops.chunk_gated_delta_rule(*split(row, **heads), g, beta, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]


def assert_same_bits(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", gpu_backends())
@pytest.mark.parametrize("form", ["plain", "packed", "views"])
def test_gpu_plans_give_the_bits_of_the_host_code(backend, form, poison_memory):
    with settings.configure(backend=backend):
        for seed in range(4):
            leaves, cu_seqlens = leaves_of(seed)
            found = gpu_step(form, leaves, cu_seqlens)
            with settings.configure(debug=True):  # runs as written
                assert_same_bits(found, gpu_step(form, leaves, cu_seqlens))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", gpu_backends())
def test_gpu_calls_allocate_their_outputs_and_one_workspace_and_hooks_see_few_launches(backend):
    from triton import knobs

    def allocations():
        return torch.cuda.memory_stats()["allocation.all.allocated"]

    (row, g, beta), cu_seqlens = leaves_of(0)
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    launches = []
    with settings.configure(backend=backend):
        for _ in range(3):
            gpu_step("packed", [row, g, beta], cu_seqlens)
        do = torch.ones(1, T, HV, D, dtype=row.dtype, device="cuda")
        start = allocations()
        o, _ = gdn_ops.chunk_gated_delta_rule_packed(
            row, g, beta, **heads, cu_seqlens=cu_seqlens, use_qk_l2norm_in_kernel=True
        )
        after_forward = allocations()
        torch.autograd.grad(o, [row, g, beta], do)
        after_backward = allocations()
        knobs.runtime.launch_enter_hook.add(launches.append)
        try:
            gpu_step("packed", [row, g, beta], cu_seqlens)
        finally:
            knobs.runtime.launch_enter_hook.remove(launches.append)
    assert after_forward - start <= 6, "o, norms, gates, solve, scores and a workspace"
    assert after_backward - after_forward <= 4, "one row, dg, dbeta and a workspace"
    assert 7 <= len(launches) <= 20, "forward and backward, and hooks see each launch"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", gpu_backends())
def test_gpu_plans_follow_the_current_stream_and_are_captured(backend):
    leaves, cu_seqlens = leaves_of(0)
    with settings.configure(backend=backend):
        for _ in range(3):
            wanted = gpu_step("packed", leaves, cu_seqlens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = gpu_step("packed", leaves, cu_seqlens)
        side.synchronize()
        assert_same_bits(found, wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = gpu_step("packed", leaves, cu_seqlens)
        others, other_bounds = leaves_of(1)
        with torch.no_grad():
            for x, y in zip(leaves, others, strict=True):
                x.copy_(y)
        cu_seqlens.copy_(other_bounds)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(captured, gpu_step("packed", others, other_bounds))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_gpu_plans_run_on_the_tensors_device():
    with settings.configure(backend="triton"):
        for seed in range(3):
            leaves, cu_seqlens = leaves_of(seed, "cuda:1")
            with torch.cuda.device(0):
                found = gpu_step("packed", leaves, cu_seqlens)
            others, other_bounds = leaves_of(seed, "cuda:0")
            assert_same_bits([x.cpu() for x in found], [x.cpu() for x in gpu_step("packed", others, other_bounds)])
