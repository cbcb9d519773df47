"""An L2 norm in front of the op, folded into it where that is asked for."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

import inductor_passes
from inductor_passes.inspection import eager_backend
from inductor_passes.norm_folding import find_source
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


def with_square_root_of_sum(x):
    return x / x.square().sum(-1, keepdim=True).sqrt()


def with_reciprocal(x):
    return x * (x * x).sum(-1, keepdim=True).add(1e-6).sqrt().reciprocal()


NORMS = {
    f.__name__: f
    for f in (
        normalize,
        with_rsqrt,
        with_division,
        with_norm,
        with_cast,
        of_a_multiple,
        with_square_root_of_sum,
        with_reciprocal,
    )
}
OTHERS = {
    "scaled": scaled,
    "l1": l1,
    "over heads": over_heads,
    "normalize, eps 5": lambda x: F.normalize(x, dim=-1, eps=5.0),
    "normalize, eps 0.1": lambda x: F.normalize(x, dim=-1, eps=0.1),
    "normalize, eps 1e-4": lambda x: F.normalize(x, dim=-1, eps=1e-4),
    "sum clamped at 1": lambda x: x / x.square().sum(-1, True).clamp_min(1.0).sqrt(),
    "long vectors only": lambda x: torch.where(x.norm(dim=-1, keepdim=True) > 1, normalize(x), x),
    "short vectors stay": lambda x: torch.where(x.norm(dim=-1, keepdim=True) > 1e-4, normalize(x), x),
    "very long vectors stay": lambda x: torch.where(x.norm(dim=-1, keepdim=True) < 50, normalize(x), x),
    "rsqrt, eps 1e-3": lambda x: x * torch.rsqrt(x.square().sum(-1, True) + 1e-3),
    "rsqrt, eps 1e-5": lambda x: x * torch.rsqrt(x.square().sum(-1, True) + 1e-5),
    "rsqrt, eps 1e-8": lambda x: x * torch.rsqrt(x.square().sum(-1, True) + 1e-8),
    "eps beside the norm": lambda x: x / (x.norm(dim=-1, keepdim=True) + 5e-5),
}


def run(norm, *, fold=True, repeat="", q_norm=None, decompositions=True, dynamic=False, eager=False):
    """Results, and the report's line, of a step with normed q and k; eager: of plain eager code, without a line."""

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
        y = (f if eager else torch.compile(f, backend=backend, dynamic=dynamic))(*leaves)
        (y * torch.arange(y.numel(), dtype=dtype).view_as(y).sin()).sum().backward()
    (call,) = [None] if eager else reports[0].calls
    return [y.detach(), *(leaf.grad for leaf in leaves)], call


def close(a, b):
    """Equal but for the order of sums in matrix products, which on some processors depends on how operands lie."""
    tolerance = 1e-12 if a.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norm_stays_unless_folding_is_switched_on(norm):
    off, call = run(norm, fold=False)
    assert not call.norm_folded
    assert call.reason == "packed_partly"
    for a, b in zip(run(norm, eager=True)[0], off, strict=True):
        close(a, b)


@pytest.mark.parametrize("decompositions", [True, False])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_norm_moves_into_the_op_and_the_row_is_whole(norm, decompositions):
    off, _ = run(norm, eager=True)
    on, call = run(norm, decompositions=decompositions)
    assert call.norm_folded
    if norm is not of_a_multiple:
        assert call.reason == "packed", call
        assert call.operands == ("q", "k", "v")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("repeat", ["before", "after"])
def test_norm_and_repeated_heads_in_either_order(repeat):
    off, _ = run(normalize, eager=True, repeat=repeat)
    on, call = run(normalize, repeat=repeat)
    assert (call.norm_folded, call.grouped_heads, call.reason) == (True, True, "packed")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dynamic_sizes():
    off, _ = run(with_rsqrt, eager=True)
    on, call = run(with_rsqrt, dynamic=True)
    assert (call.norm_folded, call.reason) == (True, "packed")
    for a, b in zip(off, on, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decompositions", [True, False])
@pytest.mark.parametrize("norm", OTHERS.values(), ids=OTHERS)
def test_other_functions_are_left(norm, decompositions):
    on, call = run(norm, decompositions=decompositions)
    assert not call.norm_folded
    # Eager code has the bits without the pass, but where a decomposition sums in another order.
    off, _ = run(norm, fold=False) if decompositions and norm is over_heads else run(norm, eager=True)
    for a, b in zip(off, on, strict=True):
        close(a, b)


def test_one_operand_without_a_norm_is_left():
    _, call = run(normalize, q_norm=lambda x: x)
    assert not call.norm_folded
    assert call.operands == ("q", "v")


def source_of(norm, width):
    """Whether a function of [2,3,4,width] is taken for a norm with eps 1e-6, and which eps is found."""
    graph = make_fx(norm, tracing_mode="fake")(torch.randn(2, 3, 4, width)).graph
    (result,) = graph.output_node().all_input_nodes
    with _disable_current_modes():
        return find_source(result, 1e-6)


@pytest.mark.parametrize("width", [2, 128])
def test_what_is_a_norm_does_not_depend_on_the_width(width):
    """Random vectors of many elements are long, so a large eps or clamp is not met at one scale alone."""
    eps = dict.fromkeys(("normalize", "with_norm", "with_square_root_of_sum", "of_a_multiple"), 0.0)
    found = {name: source_of(norm, width) for name, norm in NORMS.items()}
    assert {name: source and source.eps for name, source in found.items()} == {n: eps.get(n, 1e-6) for n in NORMS}
    assert [name for name, norm in OTHERS.items() if source_of(norm, width) is not None] == []


@pytest.mark.parametrize("norm, length", [(with_rsqrt, 1e-5), (normalize, 1e-1), (normalize, 1.0)])
def test_what_is_documented_to_change_changes(norm, length):
    """Short vectors: the op's own formula agrees, and F.normalize differs by eps / (2 n^2)."""

    def f(x, w, g):
        q, k, v = heads(*parts(x @ w))
        q, k = (length * normalize(y).detach() + 0 * y for y in (q, k))
        return toy(norm(q), norm(k), v, g)

    torch.manual_seed(0)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 6, 16), (16, WIDTH), (2, 6, HV))]
    results, reports = [], []
    for fold in (False, True):
        torch._dynamo.reset()
        with inductor_passes.configured(fold_norm=fold):
            results.append(torch.compile(f, backend=eager_backend(reports.append))(*inputs).detach())
    assert [report.calls[0].norm_folded for report in reports] == [False, True]
    off, on = results
    # q and k both: twice the difference of one.
    expected = 0 if norm is with_rsqrt else 1e-6 / length**2
    difference = ((on - off).norm() / off.norm()).item()
    assert abs(difference - expected) <= 1e-3 * expected + 1e-12


def explained(norm_q, norm_k, norm_v, fold_norm=False):
    def f(x, w, g):
        q, k, v = heads(*parts(x @ w))
        q, k, v = norm_q(q), norm_k(k), norm_v(v)
        return toy(q, k, v, g)

    gen = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 6, 16, generator=gen), torch.randn(16, WIDTH, generator=gen, requires_grad=True)
    with inductor_passes.configured(fold_norm=fold_norm):
        (call,) = inductor_passes.explain(f, x, w, torch.randn(2, 6, HV, generator=gen))
    return call


def as_it_is(x):
    return x


@pytest.mark.parametrize("name", ["normalize", "with_rsqrt"])
def test_a_report_names_a_norm_in_front_and_the_remedy(name):
    call = explained(NORMS[name], NORMS[name], as_it_is)
    assert (call.reason, call.copied) == ("packed_partly", ("q", "k"))
    assert_expected_inline(
        call.detail,
        "an L2 norm stands between the split and q, k (remedy: use_norm=True or the setting fold_norm)",
    )
    assert explained(NORMS[name], NORMS[name], as_it_is, fold_norm=True).packed


def test_a_report_names_a_norm_beside_what_else_is_in_the_way():
    call = explained(normalize, normalize, torch.sin)
    assert call.reason == "computed_between"
    assert call.detail.startswith("an L2 norm stands between the split and q, k (remedy: use_norm=True or ")
    assert "; something computes between the split and the op (" in call.detail


def test_a_report_names_the_line_of_what_is_no_norm_of_the_op():
    """The op normalises both or none; nothing is said of a remedy that is none."""
    for norm_q, norm_k, norm_name in ((normalize, as_it_is, "normalize"), (scaled, scaled, "scaled")):
        call = explained(norm_q, norm_k, as_it_is)
        assert "L2 norm" not in call.detail
        line = inspect.getsourcelines(globals()[norm_name])[1] + 1
        assert f"the gradient of q goes through the backward of {__file__}:{line} (aten." in call.detail
