"""Repeated heads become the op's own: the switch, the accuracy, and near-misses that stay."""

import inspect

import pytest
import torch

import gdn_ops
import inductor_passes
from inductor_passes import pipeline
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import HV, WIDTH, H, heads, parts
from tests.inductor_passes.toy_attention import toy

R = HV // H


def repeated(x, times=R):
    return x.repeat_interleave(times, dim=2)


def run(prepare, dtype=torch.float64, **settings):
    """Results, and the report's line, of a step with q, k, v prepared from a row's heads."""

    def f(x, w, g):
        return toy(*prepare(*heads(*parts(x @ w))), g)

    torch._dynamo.reset()
    torch.manual_seed(0)
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((2, 6, 16), (16, WIDTH), (2, 6, HV))]
    reports = []
    with inductor_passes.configured(**settings):
        y = torch.compile(f, backend=eager_backend(reports.append), fullgraph=True)(*leaves)
        y.backward(torch.arange(y.numel()).view_as(y).sin().to(dtype))
    (call,) = reports[0].calls
    return [y.detach(), *(leaf.grad for leaf in leaves)], call


def both(q, k, v):
    return repeated(q), repeated(k), v


def test_folding_is_on_counted_said_and_can_be_switched_off():
    before = pipeline.counters["grouped_heads"]
    on, call = run(both)
    assert (call.grouped_heads, call.reason, pipeline.counters["grouped_heads"]) == (True, "packed", before + 1)
    off, call = run(both, grouped_heads=False)
    assert (call.grouped_heads, call.operands, pipeline.counters["grouped_heads"]) == (False, ("v",), before + 1)
    line = inspect.getsourcelines(repeated)[1] + 1
    assert f"the gradient of q goes through the backward of {__file__}:{line} (aten.sum" in call.detail
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_do_not_get_worse(dtype):
    exact, _ = run(both)
    on, call = run(both, dtype)
    assert call.grouped_heads
    off, _ = run(both, dtype, grouped_heads=False)
    for truth, a, b in zip(exact, on, off, strict=True):
        ours, theirs = (((x.double() - truth).norm() / truth.norm()).item() for x in (a, b))
        assert ours <= 1.5 * theirs + torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "prepare",
    [
        lambda q, k, v: (repeated(q), k.repeat(1, 1, R, 1), v),
        lambda q, k, v: (repeated(q) * 2, repeated(k), v),
        lambda q, k, v: (repeated(q), repeated(k[:, :, :1], HV), v),
        lambda q, k, v: (repeated(q), repeated(k) + 0 * v[..., :1], v),
    ],
    ids=["k is tiled", "q is scaled behind", "factors differ", "k is computed behind"],
)
def test_near_misses_stay(prepare):
    on, call = run(prepare)
    assert not call.grouped_heads
    off, _ = run(prepare, grouped_heads=False)
    for a, b in zip(on, off, strict=True):
        assert torch.equal(a, b)


FLAT_TOKENS = {
    "reshape": lambda x, B, T: repeated(x.reshape(B * T, 1, H, -1)).view(B, T, HV, -1),
    "flatten": lambda x, B, T: x.flatten(0, 1).repeat_interleave(R, 1).unflatten(0, (B, T)),
    "expand": lambda x, B, T: x.reshape(B * T, H, 1, -1).expand(-1, -1, R, -1).reshape(B, T, HV, -1),
}


@pytest.mark.parametrize("name", FLAT_TOKENS)
def test_heads_of_flat_tokens_with_dynamic_batch_and_length(name):
    def f(x, w, g):
        B, T, _ = x.shape
        q, k, v = heads(*parts(x @ w))
        return toy(FLAT_TOKENS[name](q, B, T), FLAT_TOKENS[name](k, B, T), v, g)

    torch._dynamo.reset()
    torch.manual_seed(0)
    reports = []
    compiled = torch.compile(f, backend=eager_backend(reports.append), fullgraph=True)
    for B, T in ((2, 6), (2, 9), (3, 5)):  # the second shape makes T dynamic, the third B as well
        leaves = [torch.randn(s, dtype=torch.float64) for s in ((B, T, 16), (16, WIDTH), (B, T, HV))]
        results = []
        for function in (f, compiled):
            inputs = [leaf.clone().requires_grad_() for leaf in leaves]
            y = function(*inputs)
            y.square().sum().backward()
            results.append([y.detach(), *(leaf.grad for leaf in inputs)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(reports) == 3
    assert all(call.grouped_heads and call.reason == "packed" for report in reports for call in report.calls)


def test_heads_repeated_in_two_steps_are_folded_both_times():
    def prepare(q, k, v, step=lambda x: x[:, :, :1].repeat_interleave(H, 2)):
        return repeated(step(q)), repeated(step(k)), v

    on, call = run(prepare)
    assert (call.grouped_heads, call.operands, call.copied) == (True, ("q", "k", "v"), ())
    off, _ = run(prepare, grouped_heads=False)
    for a, b in zip(on, off, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_groups_that_no_view_makes_heads_are_left():
    """Two groups of two query, two key and four value heads: their heads lie apart; only a copy joins them."""
    torch._dynamo.reset()
    groups, K, V = 2, 8, 8

    def layer(row, g):
        q, k, v = row.unflatten(-1, (groups, -1)).split([2 * K, 2 * K, 4 * V], -1)
        q, k = (t.unflatten(-1, (2, K)).repeat_interleave(2, 3).flatten(2, 3) for t in (q, k))
        v = v.unflatten(-1, (4, V)).flatten(2, 3)
        return gdn_ops.chunk_gated_delta_rule(q, k, v, -g.exp(), g.sigmoid(), use_qk_l2norm_in_kernel=True)[0]

    row, g = torch.randn(2, 70, groups * (4 * K + 4 * V)), torch.randn(2, 70, groups * 4)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True)(row * 1.5, g)
        torch.testing.assert_close(found, layer(row * 1.5, g))
