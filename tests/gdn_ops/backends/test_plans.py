"""Recording a call's launches and repeating them, with kernels that are Python functions on addresses."""

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gdn_ops.backends import launching, plans

_CPU = torch.device("cpu")


def _floats(address, count):
    return (ctypes.c_float * count).from_address(address)


class Kernel:
    """y[i] = x[i] * factor, for n floats."""

    arg_names = ("x", "y", "n", "factor")

    def __init__(self):
        self.grids = []

    def __call__(self, grid, x, y, n, factor):
        self.grids.append(grid)
        source, target = _floats(x, n), _floats(y, n)
        for i in range(n):
            target[i] = source[i] * factor


@pytest.fixture
def kernel(monkeypatch):
    """A kernel whose compiled form has a launcher that nobody knows."""
    kernel = Kernel()

    def compiled_for(kernel, grid, args, options):
        compiled = {grid: lambda *args: kernel(grid, *args)}
        return Compiled(compiled), tuple(options.values())

    class Compiled(dict):
        run = None
        metadata = None

    monkeypatch.setattr(launching, "compiled_for", compiled_for)
    return kernel


def scale(kernel, x, y, factor):
    launching.launch(kernel, (x.numel(), 1, 1), (x, y, x.numel()), {"factor": factor})


def test_views_outputs_and_scratch_are_found_again(kernel):
    def run(tensors):
        x = tensors[0]
        scratch, out = x.new_empty(4), x.new_empty(2, 2)
        scale(kernel, x[1], scratch, 2.0)
        scale(kernel, scratch[2:], out[1], 3.0)
        scale(kernel, scratch[:2], out[0], 5.0)
        return (out,)

    plan = plans.record(run, [torch.empty(2, 4)], _CPU)
    for seed in range(2):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        (out,) = plan([x])
        assert torch.equal(out, torch.stack([x[1, :2] * 2 * 5, x[1, 2:] * 2 * 3]))
    assert kernel.grids == [(4, 1, 1), (2, 1, 1), (2, 1, 1)] * 2, "recording launches nothing"


def test_equal_tensors_and_views_of_one_row_are_told_apart(kernel):
    """What was recorded with q = k, or with both in one row, holds for two that have nothing in common."""

    def run(tensors):
        q, k = tensors
        out = q.new_empty(2, 2)
        scale(kernel, q, out[0], 1.0)
        scale(kernel, k, out[1], 1.0)
        return (out,)

    row = torch.randn(4)
    for recorded in ([row[:2], row[:2]], [row[:2], row[2:]]):
        plan = plans.record(run, recorded, _CPU)
        q, k = torch.randn(2), torch.randn(2)
        assert torch.equal(plan([q, k])[0], torch.stack([q, k]))


def test_none_stays_none(kernel):
    def run(tensors):
        out = tensors[0].new_empty(2)
        launching.launch(kernel, (1, 1, 1), (tensors[0], out, 2), {"factor": 1.0 if tensors[1] is None else 2.0})
        return (out,)

    x = torch.randn(2)
    assert torch.equal(plans.record(run, [x, None], _CPU)([x, None])[0], x)
    assert torch.equal(plans.record(run, [x, x], _CPU)([x, x])[0], 2 * x)


@pytest.mark.parametrize(
    "what",
    [
        lambda x: x.zero_(),
        lambda x: x + 1,
        lambda x: x.t().contiguous(),
        lambda x: x.clone(),
        lambda x: torch.zeros_like(x),
        lambda x: x.view(-1)[0].copy_(x.view(-1)[1]),
        lambda x: x.sum(),
    ],
)
def test_a_torch_operation_cannot_be_recorded(kernel, what):
    def run(tensors):
        what(tensors[0])
        return (tensors[0].new_empty(2),)

    assert plans.record(run, [torch.randn(2, 3)], _CPU) is None


def test_views_and_allocations_can_be_recorded(kernel):
    def run(tensors):
        x = tensors[0]
        x = x.contiguous().view(-1).unflatten(0, (3, 2)).unsqueeze(0).squeeze(0).split([1, 2])[1].flatten()
        x = x.as_strided((2,), (1,), x.storage_offset()).expand(2, 2).select(0, 0).permute(0)
        out = torch.empty(2, dtype=x.dtype, device=x.device)
        scale(kernel, x, out, 1.0)
        return (out, x.new_empty(0, 3))

    x = torch.arange(6.0)
    out, empty = plans.record(run, [x.view(2, 3)], _CPU)([x.view(2, 3)])
    assert out.tolist() == [2.0, 3.0]
    assert empty.shape == (0, 3)


def test_an_output_that_is_an_input_or_another_output_or_not_dense_cannot_be_planned(kernel):
    x = torch.randn(2, 2)

    def twice(tensors):
        out = tensors[0].new_empty(2)
        return (out, out)

    assert plans.record(lambda tensors: (tensors[0],), [x], _CPU) is None
    assert plans.record(twice, [x], _CPU) is None
    assert plans.record(lambda tensors: (tensors[0].new_empty(2, 2).t(),), [x], _CPU) is None


def test_nothing_runs_off_16_bytes(kernel):
    def run(tensors):
        out = tensors[0].new_empty(2)
        scale(kernel, tensors[0], out, 1.0)
        return (out,)

    base = torch.randn(8)
    plan = plans.record(run, [base[4:6]], _CPU)
    assert plan([base[1:3]]) is None
    assert kernel.grids == []
    assert plan([base[4:6]]) is not None


def test_recording_is_a_thread_s_own(kernel):
    seen = []

    def run(tensors):
        thread = threading.Thread(target=lambda: seen.append(launching.recording.recorder))
        thread.start()
        thread.join()
        seen.append(launching.recording.recorder)
        return (tensors[0].new_empty(2),)

    plans.record(run, [torch.randn(2)], _CPU)
    assert seen[0] is None
    assert seen[1] is not None
    assert launching.recording.recorder is None


def test_uninitialised_memory_is_poisoned_where_torch_is_asked_to(poison_memory, monkeypatch):
    monkeypatch.setattr(launching, "current_stream", lambda device: 11)
    plan = plans.record(lambda tensors: (tensors[0].new_empty(3),), [torch.randn(2)], _CPU)
    assert plan([torch.randn(2)])[0].isnan().all()


class TestArrange:
    def test_only_what_is_never_needed_together_overlaps(self):
        memories = [
            plans._Memory(size, first, last)
            for size, first, last in [(1000, 0, 1), (3000, 1, 2), (1000, 2, 3), (512, 0, 3), (2000, 3, 3), (0, 0, 3)]
        ]
        offsets, size = plans._arrange(memories)
        spans = [(at, at + m.size, m) for at, m in zip(offsets, memories, strict=True)]
        for i, (start, end, a) in enumerate(spans):
            assert start % 512 == 0
            assert end <= size
            for other_start, other_end, b in spans[:i]:
                together = a.first <= b.last and b.first <= a.last
                assert not (together and start < other_end and other_start < end)
        assert size < sum(m.size for m in memories)

    def test_two_turns_take_the_memory_of_one(self):
        turns = [plans._Memory(4096, first, first + 2) for first in (0, 3, 6)]
        assert plans._arrange(turns)[1] == 4096


class KnownLauncher:
    """A launcher as Triton's: `launch` is what it calls in the end, wrapped where there are tensor descriptors."""

    num_ctas = 1
    profile_scratch_size = 0

    def __init__(self, function, scratch=0):
        self.launch = function
        self.global_scratch_size = scratch
        self.asked = 0

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *args):
        scratch = None
        if self.global_scratch_size:
            import triton.runtime._allocation as allocation

            scratch = allocation._allocator.get()(x * y * z * self.global_scratch_size, 128, stream)
        self.launch(x, y, z, stream, function, scratch, *args)


def wrap_handle_tensordesc(launcher, signature, tensordesc_meta):
    return launcher


def known(function, scratch=0, grid=(1, 1, 1)):
    run = KnownLauncher(function, scratch)
    run.__class__.__module__ = __name__
    compiled = SimpleNamespace(
        run=run, function=7, packed_metadata=(4, 1, 0), src=SimpleNamespace(signature={}), metadata=SimpleNamespace()
    )
    return launching.Launcher(compiled, grid)


class TestLauncher:
    def test_the_final_arguments_are_made_by_triton_and_reach_the_function(self):
        seen = []
        builtin = seen.append  # like a C function, no Python function
        launcher = known(builtin, grid=(2, 3, 1))
        assert launcher.is_direct
        function, arguments = launcher.direct(11, (1, 2.0, None))
        assert function is builtin
        assert arguments == (2, 3, 1, 11, 7, None, 1, 2.0, None)
        assert seen == [], "nothing was launched"

    def test_scratch_of_a_kernel_s_own_comes_from_the_plan(self):
        launcher = known([].append, scratch=128, grid=(2, 3, 1))
        assert launcher.scratch_bytes == 6 * 128
        assert launcher.direct(11, (), scratch=4096).arguments[5] == 4096

    def test_an_unknown_launcher_goes_through_triton(self):
        for run in (None, SimpleNamespace(launch=[].append), known([].append).compiled.run):
            if isinstance(run, KnownLauncher):
                run.profile_scratch_size = 16  # of an instrumented kernel
            assert not launching.Launcher(SimpleNamespace(run=run), (1, 1, 1)).is_direct


def test_addresses_seen_before_are_not_made_again(monkeypatch):
    made = []

    class Made(list):
        def append(self, *arguments):
            super().append(arguments)

    calls = Made()
    launcher = known(calls.append)
    monkeypatch.setattr(launching, "current_stream", lambda device: 11)
    direct = launcher.direct
    launcher.direct = lambda *args: made.append(args) or direct(*args)
    step = plans.Step(launcher, (plans.Place(0, 4), 3), plans.Place(1, 0))
    plan = plans.Plan(_CPU, [step], [], 0)
    x, other = torch.randn(2), torch.randn(2)
    for tensor in (x, x, other, x):
        plan([tensor])
    assert len(made) == 2
    assert [c[6] for c in calls] == [t.data_ptr() + 4 for t in (x, x, other, x)]
    monkeypatch.setattr(launching, "current_stream", lambda device: 12)
    plan([x])
    assert calls[-1][3] == 12, "the stream of the call, not of the first one"
    assert len(made) == 3


def test_the_memory_of_addresses_is_bounded(monkeypatch, capsys):
    monkeypatch.setattr(launching, "current_stream", lambda device: 11)
    monkeypatch.setattr(plans, "_MOST_ADDRESSES", 3)
    plan = plans.Plan(_CPU, [plans.Step(known(print), (plans.Place(0, 0),), plans.Place(1, 0))], [], 0)
    kept = [torch.randn(4) for _ in range(8)]
    for x in kept:
        plan([x])
    assert len(plan._calls) == 3


def test_the_memory_of_all_plans_is_bounded(monkeypatch):
    """As with many lengths that come again and again: each has a plan, and each plan all layers' addresses."""
    monkeypatch.setattr(launching, "current_stream", lambda device: 11)
    monkeypatch.setattr(plans, "_MOST_IN_ALL", 5)
    monkeypatch.setattr(plans, "_num_prepared", 0)
    step = plans.Step(known([].append), (plans.Place(0, 0),), plans.Place(1, 0))
    several = [plans.Plan(_CPU, [step], [], 0) for _ in range(4)]
    kept = [torch.randn(4) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(several[0].steps[0].launcher, "direct", lambda stream, *at: launching.Direct(int, (stream,)))
        for x in kept:
            for plan in several:
                plan([x])
                assert sum(len(p._calls) for p in several) <= 5
                assert sum(len(p._made[0]) for p in several) <= 5
    assert sum(len(p._calls) for p in several) == 2, "of twelve, the last of which are remembered again"


def test_launch_hooks_see_every_launch(monkeypatch):
    seen = []
    launcher = type(
        "Watched", (), {"is_direct": True, "scratch_bytes": 0, "__call__": lambda self, args: seen.append(args)}
    )()
    plan = plans.Plan(_CPU, [plans.Step(launcher, (plans.Place(0, 0), 5), plans.Place(1, 0))], [], 0)
    monkeypatch.setattr(launching, "hooked", lambda: True)
    x = torch.randn(2)
    plan([x])
    assert seen == [(x.data_ptr(), 5)]
