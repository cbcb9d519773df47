"""What the caller can change between forward and backward is not read again in place of a copy that the code made."""

import pytest
import torch

import gdn_ops
import inductor_passes

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
