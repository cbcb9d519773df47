"""Every spelling, through the passes: what is packed, and the same bits as without them or in eager."""

import pytest
import torch

import inductor_passes
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import SPELLINGS, Layer, make_input, train_step


def compiled_step(name, *, decompositions=True, dynamic=False, enabled=True):
    spelling = SPELLINGS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(spelling)
    reports = []
    backend = eager_backend(reports.append, decompositions=decompositions)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=dynamic)
    with inductor_passes.configured(enabled=enabled):
        results = train_step(compiled, layer, make_input(spelling))
        if dynamic:
            results += train_step(compiled, layer, make_input(spelling, B=3, T=9))
    return results, reports


def eager_step(name, *, dynamic=False):
    spelling = SPELLINGS[name]
    torch.manual_seed(0)
    layer = Layer(spelling)
    results = train_step(layer, layer, make_input(spelling))
    return results + (train_step(layer, layer, make_input(spelling, B=3, T=9)) if dynamic else [])


def assert_same(a, b, exact=True):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert not y.isnan().any()
        torch.testing.assert_close(x, y, rtol=0 if exact else 1e-12, atol=0 if exact else 1e-12)


def check(name, call):
    spelling = SPELLINGS[name]
    assert ("".join(call.operands), call.reason) == (spelling.packed, spelling.reason), call
    assert call.packed == (spelling.reason == "packed")
    assert call.grouped_heads == spelling.grouped
    assert call.copies_removed == spelling.copies
    assert call.rows_made == spelling.rows_made
    assert (call.saved_bytes > 0) == bool(spelling.packed)


@pytest.mark.parametrize("name", SPELLINGS)
def test_same_bits_on_and_off(name):
    """Static sizes, with Inductor's decompositions: what Inductor sees."""
    spelling = SPELLINGS[name]
    on, reports = compiled_step(name)
    (call,) = reports[0].calls
    check(name, call)
    if spelling.exact and spelling.extra != "returned":  # what a compiled output gets as .grad is not what eager's gets
        assert_same(eager_step(name), on)  # the bits without the passes: to compile it again would add nothing
        return
    off, _ = compiled_step(name, enabled=False)
    assert_same(off, on)
    if spelling.extra != "returned":
        assert_same(eager_step(name), on, spelling.exact)


@pytest.mark.parametrize("name", SPELLINGS)
def test_as_traced_with_dynamic_sizes(name):
    """Symbolic sizes, without decompositions: what other compilers may see. Whole numbers, so eager has the bits."""
    spelling = SPELLINGS[name]
    on, reports = compiled_step(name, decompositions=False, dynamic=True)
    assert len(reports) == 1, "one compilation for two batch sizes and lengths"
    if spelling.extra != "returned":
        assert_same(eager_step(name, dynamic=True), on, spelling.exact)
    if spelling.dynamic:
        check(name, *reports[0].calls)
