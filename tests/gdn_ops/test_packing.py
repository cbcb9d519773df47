"""The eager packed path: one gradient row without a concatenation, and the right gradient wherever that is not so."""

import pytest
import torch

import gdn_ops
import inductor_passes

HK, HV, D, T = 2, 4, 8, 37
HEADS = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
W = (2 * HK + HV) * D


def problem(shape=(1, T), seed=0, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    row = (torch.randn(*shape, W, generator=gen) * 0.5).to(dtype)
    return row, -torch.rand(*shape, HV, generator=gen), torch.rand(*shape, HV, generator=gen)


def plain_views(row):
    q, k, v = row.split([HK * D, HK * D, HV * D], dim=-1)
    return q.unflatten(-1, (HK, D)), k.unflatten(-1, (HK, D)), v.unflatten(-1, (HV, D))


def weights(o, seed=1):
    return torch.randn(o.shape, generator=torch.Generator().manual_seed(seed)).to(o.dtype)


def gradient(views, row, g, beta, edit=None, **kwargs):
    """Row gradient of a weighted sum of the output, with q, k, v made by `views`; exact counts of this backward."""
    row = row.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    q, k, v = views(row)
    if edit is not None:
        edit(q, k, v)
    o, _ = gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, **kwargs)
    gdn_ops.reset_stats()
    (o * weights(o)).sum().backward()
    return row.grad, gdn_ops.stats()


def packed(row):
    return gdn_ops.packed_qkv_views(row, **HEADS)


@pytest.mark.parametrize("shape", [(T,), (1, T), (2, T), (1, 1), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_views_give_the_plain_views_bits_without_a_concatenation(shape, dtype):
    problem_ = problem(shape, dtype=dtype)
    expected, counts = gradient(plain_views, *problem_)
    assert counts.packed_gradients == 0
    found, counts = gradient(packed, *problem_)
    assert torch.equal(found, expected)
    assert found.is_contiguous()
    if shape[-1]:
        assert (counts.packed_gradients, counts.concatenations) == (1, 0)


@pytest.mark.parametrize("rows", ["every_second_token", "wider", "channels_first", "heads_only"])
def test_any_row_gives_the_right_gradient(rows):
    row, g, beta = problem((2, T))
    if rows == "every_second_token":
        base = torch.randn(2, 2 * T, W)
        take = lambda x: x[:, ::2]  # noqa: E731
    elif rows == "wider":
        base = torch.randn(2, T, W + 24)
        take = lambda x: x[..., 8 : 8 + W]  # noqa: E731
    elif rows == "channels_first":
        base = torch.randn(2, W, T)
        take = lambda x: x.transpose(1, 2)  # noqa: E731
    else:
        base = row
        take = lambda x: x  # noqa: E731
    expected, _ = gradient(lambda x: plain_views(take(x)), base, g, beta)
    found, counts = gradient(lambda x: packed(take(x)), base, g, beta)
    assert torch.equal(found, expected)
    # The gradient of the (sliced) row is one dense row in every case; what the slice makes of it is torch's.
    assert (counts.packed_gradients, counts.concatenations) == (1, 0)
    assert counts.input_copies == (3 if rows == "channels_first" else 0)
    base = base.requires_grad_()
    o, _ = gdn_ops.chunk_gated_delta_rule_packed(take(base), g, beta, **HEADS)
    (o * weights(o)).sum().backward()
    assert torch.equal(base.grad, expected)


def test_hooks_and_retain_grad_see_the_right_gradients():
    row, g, beta = problem()
    seen = {}

    def edit(q, k, v):
        for name, x in (("q", q), ("k", k), ("v", v)):
            x.retain_grad()
            x.register_hook(lambda grad, name=name: seen.update({name: grad.clone()}))
        seen["views"] = (q, k, v)

    found, counts = gradient(packed, row, g, beta, edit)
    assert (counts.packed_gradients, counts.concatenations) == (1, 0)
    for name, view, part in zip("qkv", seen["views"], plain_views(found), strict=True):
        assert torch.equal(seen[name], part)
        assert torch.equal(view.grad, part)
        assert view.grad.untyped_storage()._cdata != found.untyped_storage()._cdata


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_hook_that_changes_a_gradient_is_obeyed(which, in_place):
    row, g, beta = problem()

    def edit(*views):
        views[which].register_hook(lambda grad: grad.mul_(3) if in_place else grad * 3)

    expected, _ = gradient(plain_views, row, g, beta, lambda *views: views[which].register_hook(lambda grad: grad * 3))
    found, counts = gradient(packed, row, g, beta, edit)
    assert torch.equal(found, expected)
    assert counts.concatenations == (0 if in_place else 1)


def test_a_second_use_is_added_and_the_row_concatenated():
    row, g, beta = problem()

    def with_second_use(views):
        leaf = row.clone().requires_grad_()
        q, k, v = views(leaf)
        o, _ = gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta)
        gdn_ops.reset_stats()
        ((o * weights(o)).sum() + (q * 2).sum()).backward()
        return leaf.grad

    expected = with_second_use(plain_views)
    found = with_second_use(packed)
    assert gdn_ops.stats().concatenations == 1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("missing", [(0,), (2,), (0, 1)])
def test_views_without_a_gradient_count_as_zero(missing):
    row, g, beta = problem()
    leaf = row.clone().requires_grad_()
    views = list(packed(leaf))
    for i in missing:
        views[i] = views[i].detach()
    gdn_ops.reset_stats()
    o, _ = gdn_ops.chunk_gated_delta_rule(*views, g, beta)
    (o * weights(o)).sum().backward()
    assert gdn_ops.stats().concatenations == 1
    assert gdn_ops.stats().packed_gradients == 0
    expected, _ = gradient(plain_views, row, g, beta)
    for i, (found, right) in enumerate(zip(plain_views(leaf.grad), plain_views(expected), strict=True)):
        assert torch.equal(found, torch.zeros_like(right) if i in missing else right)


def test_views_in_another_order_or_of_two_rows_are_not_taken_for_the_row():
    row, g, beta = problem()
    leaf, other = row.clone().requires_grad_(), row.clone().requires_grad_()
    q, k, v = packed(leaf)
    _, k2, _ = packed(other)
    gdn_ops.reset_stats()
    for a, b in ((k, q), (q, k2)):
        o, _ = gdn_ops.chunk_gated_delta_rule(a, b, v, g, beta)
        o.sum().backward(retain_graph=True)
    assert gdn_ops.stats().packed_gradients == 0


@pytest.mark.parametrize("which", [0, 1, 2])
def test_in_place_edit_of_a_view_is_refused_while_the_row_requires_grad(which):
    row, _, _ = problem()
    with pytest.raises(RuntimeError, match="modified inplace"):
        packed(row.clone().requires_grad_())[which].mul_(2)
    packed(row)[which].mul_(2)  # no graph, nothing to protect


def test_backward_twice_with_retained_graph_accumulates():
    row, g, beta = problem()
    leaf = row.clone().requires_grad_()
    o, _ = gdn_ops.chunk_gated_delta_rule(*packed(leaf), g, beta)
    loss = (o * weights(o)).sum()
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()
    loss.backward()
    assert torch.equal(leaf.grad, 2 * first)


def test_inside_a_larger_graph_the_row_gradient_flows_on():
    _row, g, beta = problem()
    x = torch.randn(1, T, 16, requires_grad=True)
    weight = (torch.randn(16, W) * 0.1).requires_grad_()
    grads = []
    for views in (plain_views, packed):
        x.grad = weight.grad = None
        o, _ = gdn_ops.chunk_gated_delta_rule(*views(x @ weight), g, beta)
        (o * weights(o)).sum().backward()
        grads.append((x.grad, weight.grad))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("trained", [True, False])
def test_explain_has_a_line_for_a_call_that_takes_the_row_itself(trained):
    row, g, beta = problem()

    def layer(row, g, beta):
        return gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, **HEADS)[0]

    report = inductor_passes.explain(layer, row.requires_grad_(trained), g, beta, strict=True)
    (call,) = report.calls
    assert (call.op, call.packed, call.reason) == ("gdn::chunk_packed_fwd", True, "packed")
    assert call.detail == "takes the row itself"
    assert call.location.startswith(f"{__file__}:")
    assert (report.packed, report.saved_bytes) == (1, 0)
    assert "takes the row itself" in str(report)
