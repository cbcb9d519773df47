"""An L2 norm in front of the op, folded into it where that is asked for."""

import pytest
import torch
import torch.nn.functional as F

import inductor_passes
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import HV, WIDTH, H, heads, parts
from tests.inductor_passes.toy_attention import toy


def normalize(x):
    return F.normalize(x, dim=-1)


def with_rsqrt(x):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def with_division(x):
    return x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def with_norm(x):
    return x / x.norm(dim=-1, keepdim=True)


def of_a_multiple(x):
    return normalize(x * 3)


def with_cast(x):
    y = x.double()
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def scaled(x):
    return 2 * normalize(x)


def l1(x):
    return F.normalize(x, p=1, dim=-1)


def over_heads(x):
    return F.normalize(x, dim=2)


def run(norm, *, fold, repeat="", q_norm=None, decompositions=True, dynamic=False):
    def f(x, w, g):
        q, k, v = heads(*parts(x @ w))
        if repeat == "before":
            q, k = q.repeat_interleave(HV // H, 2), k.repeat_interleave(HV // H, 2)
        q, k = (q_norm or norm)(q), norm(k)
        if repeat == "after":
            q, k = q.repeat_interleave(HV // H, 2), k.repeat_interleave(HV // H, 2)
        return toy(q, k, v, g)

    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = torch.float32 if norm is with_cast else torch.float64
    leaves = [torch.randn(s, dtype=dtype).requires_grad_() for s in ((2, 6, 16), (16, WIDTH), (2, 6, HV))]
    reports = []
    backend = eager_backend(reports.append, decompositions=decompositions)
    with inductor_passes.configured(fold_norm=fold):
        y = torch.compile(f, backend=backend, dynamic=dynamic)(*leaves)
        (y * torch.arange(y.numel(), dtype=dtype).view_as(y).sin()).sum().backward()
    (call,) = reports[0].calls
    return [y.detach(), *(leaf.grad for leaf in leaves)], call


@pytest.mark.parametrize("decompositions", [True, False])
@pytest.mark.parametrize("norm", [normalize, with_rsqrt, with_division, with_norm, with_cast, of_a_multiple])
def test_norm_moves_into_the_op_and_the_row_is_whole(norm, decompositions):
    off, call = run(norm, fold=False, decompositions=decompositions)
    assert not call.norm_folded
    assert call.reason == "packed_partly"
    on, call = run(norm, fold=True, decompositions=decompositions)
    assert call.norm_folded
    if norm is not of_a_multiple:
        assert call.reason == "packed", call
        assert call.operands == ("q", "k", "v")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("repeat", ["before", "after"])
def test_norm_and_repeated_heads_in_either_order(repeat):
    off, _ = run(normalize, fold=False, repeat=repeat)
    on, call = run(normalize, fold=True, repeat=repeat)
    assert (call.norm_folded, call.grouped_heads, call.reason) == (True, True, "packed")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dynamic_sizes():
    off, _ = run(with_rsqrt, fold=False, dynamic=True)
    on, call = run(with_rsqrt, fold=True, dynamic=True)
    assert (call.norm_folded, call.reason) == (True, "packed")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [scaled, l1, over_heads])
def test_other_norms_are_left(norm):
    off, _ = run(norm, fold=False)
    on, call = run(norm, fold=True)
    assert not call.norm_folded
    for a, b in zip(off, on, strict=True):
        assert torch.equal(a, b)


def test_one_operand_without_a_norm_is_left():
    _, call = run(normalize, fold=True, q_norm=lambda x: x)
    assert not call.norm_folded
    assert call.operands == ("q", "v")
