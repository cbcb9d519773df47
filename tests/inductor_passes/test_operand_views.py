"""What the caller can change between forward and backward is not read again in place of a copy that the code made."""

import pytest
import torch

import gdn_ops
import inductor_passes
from inductor_passes.inspection import eager_backend

HK, HV, D = 2, 4, 8
WIDTHS = [HK * D, HK * D, HV * D]


def heads(row):
    return [x.unflatten(-1, (-1, D)) for x in row.split(WIDTHS, -1)]


def repeated(row, g):
    q, k, v = heads(row)
    q, k = (x.repeat_interleave(HV // HK, 2) for x in (q, k))
    return gdn_ops.chunk_gated_delta_rule(q, k, v.contiguous(), -g.exp(), g.sigmoid(), use_qk_l2norm_in_kernel=True)[0]


def copied(row, g):
    q, k, v = (x.contiguous() for x in heads(row))
    return gdn_ops.chunk_gated_delta_rule(q, k, v, -g.exp(), g.sigmoid(), use_qk_l2norm_in_kernel=True)[0]


def normalised(row, g):
    q, k, v = heads(row)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return gdn_ops.chunk_gated_delta_rule(q, k, v.contiguous(), -g.exp(), g.sigmoid())[0]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(body, change, compile_it):
    """Gradients of weights and gates where the caller doubles what `change` names before the backward."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((1, 20, 6), (6, sum(WIDTHS)), (1, 20, HV))
    )
    w.requires_grad_()
    g.requires_grad_()
    if change == "input":
        row = (x @ w).detach() if body is normalised else x @ w
        o = (torch.compile(body) if compile_it else body)(row, g)
    else:

        def layer(x, w, g):
            row = (x @ w).detach() if body is normalised else x @ w
            return body(row, g), row.detach() if change == "returned view" else row

        o, row = (torch.compile(layer) if compile_it else layer)(x, w, g)
    with torch.no_grad():
        row.mul_(2)
    o.square().sum().backward()
    return [y.grad for y in (w, g) if y.grad is not None]


@pytest.mark.parametrize("change", ["input", "returned", "returned view"])
@pytest.mark.parametrize("body", [repeated, copied, normalised])
def test_changes_between_forward_and_backward_reach_no_gradient(body, change):
    expected = gradients(body, change, compile_it=False)
    with inductor_passes.configured(fold_norm=True):
        found = gradients(body, change, compile_it=True)
    assert len(expected) == len(found) == (1 if body is normalised else 2)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


VIEWS_OF_INPUT = {
    "as_strided": lambda row: row.as_strided(row.shape, (0, row.shape[-1], 1)),
    "unfold": lambda row: row.unfold(-1, row.shape[-1], 1).squeeze(2),
    "expand": lambda row: row[:1].expand(2, -1, -1),
    "diagonal": lambda row: row[:, None].diagonal(0, 1, 2).mT.expand(-1, 20, -1),
    "view as integers and back": lambda row: row.view(torch.int64).view(torch.float64),
    "real": lambda row: torch.view_as_real(torch.view_as_complex(row.unflatten(-1, (-1, 2)))).flatten(-2),
    "functional form of a view": lambda row: torch.ops.aten.expand_copy(row[:1], [2, -1, -1]),
    "plus zero": lambda row: row + torch.zeros_like(row),
    "times one": lambda row: torch.ones_like(row) * row,
    "broadcast": lambda row: torch.broadcast_to(row, (3, *row.shape))[0],
}

VIEWS_TO_RETURN = {
    "as_strided": lambda row: row.as_strided(row.shape, row.stride()),
    "unfold": lambda row: row.unfold(1, 2, 2),
    "expand": lambda row: row[None].expand(2, -1, -1, -1)[:1],
    "diagonal": lambda row: row.diagonal(0, 0, 2),
    "view as integers": lambda row: row.view(torch.int64),
    "part of a split": lambda row: row.split(WIDTHS, -1)[1],
    "part of an unbind": lambda row: row.unbind(1)[3],
    "view of a view": lambda row: row.mT[:, 3:].unfold(2, 4, 4).movedim(-1, 0),
}


def changed_between(body, backend, x, w, g):
    """Gradients of w and g where the other outputs, or x if there are none, are overwritten before the backward."""
    leaves = [w.clone().requires_grad_(), g.clone().requires_grad_()]
    x = x.clone()
    o, *others = (body if backend is None else torch.compile(body, backend=backend, fullgraph=True))(x, *leaves)
    for other in others or [x]:
        other.detach().zero_()
    o.square().sum().backward()
    return [leaf.grad for leaf in leaves]


def check_changed_between(body, x, backend=None):
    w = torch.randn(6, sum(WIDTHS), dtype=torch.float64)
    g = torch.randn(2, 20, HV, dtype=torch.float64)
    expected = changed_between(body, None, x, w, g)
    for a, b in zip(changed_between(body, backend or eager_backend(), x, w, g), expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


NOTHING_DONE = {
    "clone": torch.clone,
    "cat of one": lambda row: torch.cat([row]),
    "stack of one": lambda row: torch.stack([row])[0],
    "pad by nothing": lambda row: torch.nn.functional.pad(row, (0, 0, 0, 0)),
    "repeat once": lambda row: row.repeat(1, 1, 1),
    "first power": lambda row: row.pow(1),
    "copied into memory": lambda row: torch.empty_like(row).copy_(row),
}
"""What Inductor drops."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTHING_DONE)
def test_what_computes_nothing_of_an_input_is_the_callers(name):
    torch.manual_seed(0)

    def layer(x, w, g):
        return (repeated(NOTHING_DONE[name](x), g),)

    check_changed_between(layer, torch.randn(2, 20, sum(WIDTHS), dtype=torch.float64), "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clone", "repeat once"])
def test_what_computes_nothing_and_is_returned_is_the_callers(name):
    torch.manual_seed(0)

    def layer(x, w, g):
        row = x @ w
        return repeated(row, g), NOTHING_DONE[name](row.detach())

    check_changed_between(layer, torch.randn(2, 20, 6, dtype=torch.float64), "inductor")


def _index_put(cache, row):
    cache[:, torch.arange(20)] = row


def _select(cache, row):
    for i in range(2):
        cache[i] = row[i]


def _index_copy(cache, row):
    cache.index_copy_(1, torch.arange(20), row)


@pytest.mark.slow
@pytest.mark.parametrize("write", [_index_put, _select, _index_copy])
def test_a_cache_that_is_written_is_the_callers(write):
    """Two calls fill one cache in turn; each backward needs what its own forward read there."""
    torch.manual_seed(0)
    cache = torch.zeros(2, 20, sum(WIDTHS), dtype=torch.float64)
    w = torch.randn(6, sum(WIDTHS), dtype=torch.float64)
    xs = [torch.randn(2, 20, 6, dtype=torch.float64) for _ in range(2)]

    def layer(x, g, cache):
        write(cache, x @ w)
        return repeated(cache, g)

    found = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        g = torch.linspace(-1, 1, 2 * 20 * HV, dtype=torch.float64).view(2, 20, HV).requires_grad_()
        sum(run(x, g, cache).square().sum() for x in xs).backward()
        found.append(g.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("body", [repeated, copied])
@pytest.mark.parametrize("name", VIEWS_OF_INPUT)
def test_any_view_of_an_input_is_the_callers(name, body):
    torch.manual_seed(0)

    def layer(x, w, g):
        return (body(VIEWS_OF_INPUT[name](x), g),)

    x = torch.randn(2, 20, sum(WIDTHS), dtype=torch.float64)
    # What computes nothing is dropped by Inductor, not by the passes.
    check_changed_between(layer, x, "inductor" if name in ("plus zero", "times one") else None)


@pytest.mark.parametrize("name", VIEWS_TO_RETURN)
def test_any_view_that_is_returned_is_the_callers(name):
    torch.manual_seed(0)

    def layer(x, w, g):
        row = x @ w
        return copied(row, g), VIEWS_TO_RETURN[name](row.detach())

    check_changed_between(layer, torch.randn(2, 20, 6, dtype=torch.float64))


def test_an_expanded_parameter_is_the_callers():
    torch.manual_seed(0)

    def layer(query, w, g):
        _, k, v = heads(g.sin().sum(-1, keepdim=True) * w.sum(0))
        q = query.expand(2, -1, -1, -1).contiguous()
        return (gdn_ops.chunk_gated_delta_rule(q, k, v, -g.exp(), g.sigmoid(), use_qk_l2norm_in_kernel=True)[0],)

    check_changed_between(layer, torch.randn(1, 20, HK, D, dtype=torch.float64))


@pytest.mark.parametrize(
    "view",
    [
        lambda row: row,
        lambda row: row.as_strided(row.shape, row.stride()),
        lambda row: row[None].expand(2, -1, -1, -1)[0],
        lambda row: row + torch.randn_like(row),
        lambda row: row.flatten(0, 1).unflatten(0, row.shape[:2]),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_the_graph_computes_and_keeps_is_read_without_a_copy(view, dynamic):
    def layer(x, w, g):
        return copied(view(x @ w), g).sum(), (x @ w).sin(), x.mT

    leaves = [torch.randn(size, requires_grad=True) for size in ((2, 20, 6), (6, sum(WIDTHS)), (2, 20, HV))]
    if dynamic:
        for leaf in leaves[::2]:
            torch._dynamo.mark_dynamic(leaf, (0, 1))
    report = inductor_passes.explain(layer, *leaves)
    assert report.calls[0].copies_removed == 3
