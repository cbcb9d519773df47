"""When a call may leave the dispatcher out, and that it then gives the same bits."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gdn_ops
from gdn_ops import autograd, ops, plain
from gdn_ops.plain import is_plain
from gdn_ops.shapes import Saved


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


def test_tensors_and_parameters_are_plain():
    x = torch.randn(2, 3)
    assert is_plain([x, None, x.t(), x.requires_grad_(), torch.nn.Parameter(torch.randn(2)), x[:0], torch.tensor([1])])
    with torch.no_grad():
        assert is_plain([x])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2).as_subclass(Subclass),
        lambda: torch.randn(2, device="meta"),
        lambda: torch.randn(2).to_sparse(),
        lambda: torch.randn(2, dtype=torch.complex64).conj(),
        lambda: torch.randn(2, dtype=torch.complex64).conj().imag,  # a negative bit
        lambda: torch._efficientzerotensor(2),
        lambda: torch.nested.nested_tensor([torch.randn(2)]),
        lambda: FakeTensorMode().from_tensor(torch.randn(2)),
        lambda: [1.0, 2.0],
        lambda: 1.0,
    ],
)
def test_other_things_are_not(make):
    assert not is_plain([torch.randn(2), make()])


def test_inference_tensors_are_not_and_learning_in_inference_mode_learns_nothing_wrong(monkeypatch):
    monkeypatch.setattr(plain, "_plain_keys", {})
    x = torch.randn(2)
    with torch.inference_mode():
        assert not is_plain([torch.randn(2)])
        assert is_plain([x])
    assert is_plain([x])


@pytest.mark.parametrize(
    "listening",
    [
        Passing,
        PassingFunctions,
        lambda: torch.device("cpu"),
        FakeTensorMode,
        torch.profiler.profile,
        torch.autograd.profiler.profile,
        torch.autograd.forward_ad.dual_level,
    ],
)
def test_nothing_is_plain_while_something_listens(listening):
    x = torch.randn(2)
    with listening():
        assert not is_plain([x])
    assert is_plain([x])


def test_function_transforms_and_tracing_listen():
    found = []

    def ask(x):
        found.append(is_plain([x]))
        return x * 2

    torch.vmap(ask)(torch.randn(2))
    torch.func.grad(lambda x: ask(x).sum())(torch.randn(2))
    torch.jit.trace(ask, torch.randn(2), check_trace=False)
    assert found == [False] * 3


def test_a_version_that_cannot_be_asked_always_dispatches(monkeypatch):
    monkeypatch.setattr(plain, "_can_ask", False)
    assert not is_plain([torch.randn(2)])


HK, HV, D, T = 1, 2, 8, 70


def step(form):
    gen = torch.Generator().manual_seed(3)
    row = torch.randn(1, T, (2 * HK + HV) * D, generator=gen).requires_grad_()
    g = (-torch.rand(1, T, HV, generator=gen)).requires_grad_()
    beta = torch.rand(1, T, HV, generator=gen).requires_grad_()
    state = torch.randn(1, HV, D, D, generator=gen).requires_grad_()
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if form == "packed":
        o, final = gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, **heads, **options)
    else:
        split = gdn_ops.packed_qkv_views if form == "views" else gdn_ops.packing.split_row
        o, final = gdn_ops.chunk_gated_delta_rule(*split(row, **heads), g, beta, **options)
    (o.sin().sum() + final.cos().sum()).backward()
    return [o.detach(), final.detach(), *(x.grad for x in (row, g, beta, state))]


@pytest.mark.parametrize("form", ["plain", "packed", "views"])
def test_without_the_dispatcher_bits_counts_and_gradients_are_the_same(form, monkeypatch):
    calls = []
    for key, run in list(ops.kernels.items()):
        monkeypatch.setitem(
            ops.kernels, key, lambda *a, _run=run, _key=key, **k: calls.append(_key[0]) or _run(*a, **k)
        )
    gdn_ops.reset_stats()
    direct, counts = step(form), gdn_ops.stats()
    assert len(calls) == 2, "one forward, one backward"
    monkeypatch.setattr(plain, "_can_ask", False)
    gdn_ops.reset_stats()
    dispatched = step(form)
    assert len(calls) == 2
    assert counts == gdn_ops.stats()
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)


def test_modes_and_profilers_see_the_ops():
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watching():
        step("plain")
    assert {"gdn.chunk_fwd.default", "gdn.chunk_bwd.default"} <= set(seen)
    with torch.profiler.profile() as profiler:
        step("plain")
    assert {"gdn::chunk_fwd", "gdn::chunk_bwd"} <= {event.name for event in profiler.events()}


def test_a_plain_call_keeps_what_is_saved_to_itself():
    q, k, v = (torch.randn(1, T, h, D, requires_grad=True) for h in (HK, HK, HV))
    gates = torch.rand(1, T, HV)
    tensors = (q, k, v, -gates, gates, None, None, None, None)
    options = {"scale": 1.0, "save": "solve"}
    assert len(autograd.chunk_fwd(True, *tensors, **options)) == 2
    assert len(autograd.chunk_fwd(False, *tensors, **options)) == 2 + len(Saved._fields)
