"""Ops as others write them: one output, nothing saved but the inputs, no op that writes into a given row; mistakes."""

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor

import inductor_passes
from inductor_passes import registry
from inductor_passes.inspection import eager_backend
from tests.inductor_passes import toy_attention
from tests.inductor_passes.spellings import HV, QW, VW, H, heads

inductor_passes.install()

lib = torch.library.Library("plain", "DEF")
QKV = "Tensor q, Tensor k, Tensor v"
LAYOUTS = toy_attention.LAYOUTS
GRADS = "Tensor, Tensor, Tensor"
BWD = f"Tensor do, {QKV}"
for schema in (
    f"attention({QKV}) -> Tensor",
    f"attention_bwd({BWD}) -> ({GRADS})",
    f"attention_bwd_row({BWD}, *, int row_width, {LAYOUTS}, bool zero_init=False) -> (Tensor, {GRADS})",
    f"attention_bwd_row_({BWD}, *, Tensor(a!) row, {LAYOUTS}) -> ({GRADS})",
):
    lib.define(schema, tags=toy_attention.TAGS)


def attention(q, k, v):
    """q, k [B,T,H,K], v [B,T,HV,V] -> o [B,T,HV,V]: not causal, heads grouped."""
    q, k = (toy_attention.grow(x, v.shape[2]) for x in (q, k))
    return torch.einsum("bthk,bshk,bshv->bthv", q, k, v).contiguous()


def gradients(do, q, k, v):
    heads = v.shape[2]
    gq, gk = (toy_attention.grow(x, heads) for x in (q, k))
    dv = torch.einsum("bthk,bshk,bthv->bshv", gq, gk, do)
    dq = torch.einsum("bthv,bshv,bshk->bthk", do, v, gk)
    dk = torch.einsum("bthv,bshv,bthk->bshk", do, v, gq)
    dq, dk = (d.unflatten(2, (x.shape[2], -1)).sum(3) for d, x in ((dq, q), (dk, k)))
    return [dq.contiguous(), dk.contiguous(), dv.contiguous()]


def attention_bwd_row(do, q, k, v, *, row_width, q_layout, k_layout, v_layout, zero_init=False):
    row = q.new_full((*q.shape[:2], row_width), 0.0 if zero_init else float("nan"))
    return row, *toy_attention.write(row, gradients(do, q, k, v), (q_layout, k_layout, v_layout))


def attention_bwd_row_(do, q, k, v, *, row, q_layout, k_layout, v_layout):
    return toy_attention.write(row, gradients(do, q, k, v), (q_layout, k_layout, v_layout))


def row_fake(do, q, k, v, *, row_width, q_layout, k_layout, v_layout, zero_init=False):
    row = q.new_empty((*q.shape[:2], row_width))
    return row, *toy_attention.dense((q, k, v), (q_layout, k_layout, v_layout))


def row__fake(do, q, k, v, *, row, q_layout, k_layout, v_layout):
    return toy_attention.dense((q, k, v), (q_layout, k_layout, v_layout))


for name, real, fake in (
    ("attention", attention, lambda q, k, v: v.new_empty(v.shape)),
    ("attention_bwd", lambda *args: tuple(gradients(*args)), lambda do, *qkv: toy_attention.dense(qkv, ((), (), ()))),
    ("attention_bwd_row", attention_bwd_row, row_fake),
    ("attention_bwd_row_", attention_bwd_row_, row__fake),
):
    lib.impl(name, real, "CPU")
    torch.library.register_fake(f"plain::{name}", fake, lib=lib)
torch.library.register_autograd(
    "plain::attention",
    lambda ctx, do: torch.ops.plain.attention_bwd(do, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=lib,
)

VARIANT = inductor_passes.PackedVariant(
    fwd="plain::attention",
    bwd="plain::attention_bwd",
    bwd_row="plain::attention_bwd_row",
    bwd_row_="plain::attention_bwd_row_",
    grouped_operands=("q", "k"),
)


@pytest.fixture
def registered(request):
    """Registers a variant (VARIANT, or the test's parameter) for one test."""
    torch._dynamo.reset()
    variant = inductor_passes.register(getattr(request, "param", VARIANT))
    yield variant
    registry.unregister(variant)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.plain.attention(*heads(q, k, v))


def one_split(row):
    return plain(*row.split([QW, QW, VW], -1))


def repeated(row):
    q, k, v = row.split([QW, QW, VW], -1)
    q, k = (x.unflatten(-1, (H, -1)).repeat_interleave(HV // H, 2) for x in (q, k))
    return torch.ops.plain.attention(q, k, v.unflatten(-1, (HV, -1)))


def gated(row):
    q, k, v, z = torch.cat([row, row[..., :VW].tanh()], -1).split([QW, QW, VW, VW], -1)
    return plain(q, k, v) * z.unflatten(-1, (HV, -1))


def two_ops(row):
    q, k, v, q2, k2, v2 = torch.cat([row, row * 3], -1).split([QW, QW, VW] * 2, -1)
    return plain(q, k, v) + plain(q2, k2, v2)


def gradient(function, backend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, w = torch.randint(-1, 2, (2, 6, 4)).double(), torch.randint(-1, 2, (4, 2 * QW + VW)).double()
    x.requires_grad_()
    y = torch.compile(lambda x, w: function(x @ w), backend=backend, fullgraph=True)(x, w)
    (y * (torch.arange(y.numel(), dtype=y.dtype) % 5 - 2).view_as(y)).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("function", "calls", "backend"),
    [
        (one_split, 1, None),
        (repeated, 1, None),
        (repeated, 1, "inductor"),
        (gated, 1, None),
        (two_ops, 2, None),
        (two_ops, 2, "inductor"),
    ],
)
def test_one_output_and_nothing_saved_but_the_inputs(registered, function, calls, backend):
    reports = []
    with inductor_passes.configured(strict=True):
        found = gradient(function, backend or eager_backend(reports.append))
    assert torch.allclose(found, gradient(function, "eager"), rtol=1e-12)
    if not backend:
        assert [(call.packed, call.reason) for report in reports for call in report] == [(True, "packed")] * calls


@pytest.mark.parametrize("registered", [dataclasses.replace(VARIANT, bwd_row_=None)], indirect=True)
def test_without_an_op_that_writes_into_a_row_one_call_of_a_row_is_packed(registered):
    reports = []
    found = gradient(two_ops, eager_backend(reports.append))
    assert torch.equal(found, gradient(two_ops, "eager"))
    (first, second) = sorted((call for report in reports for call in report), key=lambda call: call.packed)
    assert second.packed
    assert (first.reason, first.operands) == ("used_elsewhere", ())
    assert "another call writes its row" in first.detail


lib.define("row_attention(Tensor row) -> Tensor", tags=toy_attention.TAGS)
lib.define("row_attention_bwd(Tensor do, Tensor row) -> Tensor", tags=toy_attention.TAGS)


def _row_heads(row):
    return heads(*row.split([QW, QW, VW], -1))


lib.impl("row_attention", lambda row: attention(*_row_heads(row)), "CPU")
lib.impl(
    "row_attention_bwd",
    lambda do, row: torch.cat([d.flatten(-2) for d in gradients(do, *_row_heads(row))], -1),
    "CPU",
)
torch.library.register_fake("plain::row_attention", lambda row: attention(*_row_heads(row)), lib=lib)
torch.library.register_fake("plain::row_attention_bwd", lambda do, row: torch.empty_like(row), lib=lib)
torch.library.register_autograd(
    "plain::row_attention",
    lambda ctx, do: torch.ops.plain.row_attention_bwd(do, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=lib,
)


def beside_a_split(row):
    first = torch.ops.plain.row_attention(row + 1)
    return one_split(row) + first + torch.ops.plain.row_attention(row.cos())


@pytest.mark.parametrize(
    "registered", [dataclasses.replace(VARIANT, takes_row=("plain::row_attention",))], indirect=True
)
def test_calls_that_take_the_row_itself_are_told_in_order_and_not_counted_as_the_passes_work(registered):
    row = torch.randn(2, 6, 2 * QW + VW, dtype=torch.float64, requires_grad=True)
    before = Counter(inductor_passes.counters)
    calls = inductor_passes.explain(beside_a_split, row, strict=True).calls
    assert [(call.op, call.packed, call.operands, call.detail) for call in calls] == [
        ("plain::row_attention", True, (), "takes the row itself"),
        ("plain::attention", True, ("q", "k", "v"), ""),
        ("plain::row_attention", True, (), "takes the row itself"),
    ]
    assert all("test_registry.py:" in call.location for call in calls)
    found = Counter(inductor_passes.counters) - before
    assert (found["graphs"], found["packed"], found["left"]) == (1, 1, 0)
    with inductor_passes.disabled():
        reasons = [call.reason for call in inductor_passes.explain(beside_a_split, row)]
    assert reasons == ["packed", "disabled", "packed"]


def test_names_of_ops_that_take_the_row_are_checked():
    with pytest.raises(ValueError, match="must read 'namespace::name', got 'row_attention'"):
        dataclasses.replace(VARIANT, takes_row=("row_attention",))


MISSING = inductor_passes.PackedVariant("nowhere::op", "nowhere::op_bwd", "nowhere::op_bwd_row")


@pytest.mark.parametrize("registered", [MISSING], indirect=True)
def test_a_variant_of_an_op_that_is_not_defined_says_so(registered):
    with pytest.raises(Exception, match="a packed variant of 'nowhere::op' is registered, but one of its ops is not"):
        torch.compile(lambda x: x + 1)(torch.ones(2))


def test_the_same_again_is_no_second_variant(registered):
    assert inductor_passes.register(dataclasses.replace(VARIANT)) is registered
    with pytest.raises(ValueError, match="another packed variant already"):
        inductor_passes.register(dataclasses.replace(VARIANT, grouped_operands=()))
