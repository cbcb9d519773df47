"""Every spelling, through the passes: what is packed, and the same bits as without them or in eager.

Most of a small layer's compilation does not depend on the layer, so several spellings are compiled as one model, in
which each has weights and an input of its own.
"""

import pytest
import torch
from torch import nn

import inductor_passes
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import SPELLINGS, Layer, make_input, train_steps

# What a compiled output gets as .grad is not what eager's gets.
LIKE_EAGER = [name for name, spelling in SPELLINGS.items() if spelling.extra != "returned"]
# Eager code has the bits without the passes: to compile these again would add nothing.
EXACT = [name for name in LIKE_EAGER if SPELLINGS[name].exact]


def batches(names, size=8):
    cut = [names[i : i + size] for i in range(0, len(names), size)]
    return [pytest.param(batch, id=f"{batch[0]}...{batch[-1]}") for batch in cut]


class Several(nn.Module):
    """The layers of several spellings side by side, each with its own input."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs):
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def steps(names, dynamic, make):
    """The steps' results by name, with the model that `make` makes of the layers; dynamic: another size after one."""
    layers, inputs = [], []
    for name in names:
        torch.manual_seed(0)
        layers.append(Layer(SPELLINGS[name]))
        sizes = [{}, {"B": 3, "T": 9}] if dynamic else [{}]
        inputs.append([make_input(SPELLINGS[name], **size) for size in sizes])
    model = make(Several(layers))
    results = [train_steps(model, layers, xs) for xs in zip(*inputs, strict=True)]
    return {name: [y for step in results for y in step[i]] for i, name in enumerate(names)}


def compiled_steps(names, *, decompositions=True, dynamic=False, enabled=True):
    torch._dynamo.reset()
    reports = []
    backend = eager_backend(reports.append, decompositions=decompositions)
    with inductor_passes.configured(enabled=enabled):
        results = steps(
            names, dynamic, lambda model: torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
        )
    return results, reports


def assert_same(name, expected, found, exact=True):
    assert len(expected) == len(found), name
    for x, y in zip(expected, found, strict=True):
        assert not y.isnan().any(), name
        tolerance = 0 if exact else 1e-12
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def check(name, call):
    spelling = SPELLINGS[name]
    assert ("".join(call.operands), call.reason) == (spelling.packed, spelling.reason), (name, call)
    assert call.packed == (spelling.reason == "packed"), name
    assert call.grouped_heads == spelling.grouped, name
    assert call.copies_removed == spelling.copies, name
    assert call.rows_made == spelling.rows_made, name
    assert (call.saved_bytes > 0) == bool(spelling.packed), name


@pytest.mark.parametrize("names", batches(EXACT) + batches([name for name in SPELLINGS if name not in EXACT]))
def test_same_bits_on_and_off(names):
    """Static sizes, with Inductor's decompositions: what Inductor sees."""
    on, (report,) = compiled_steps(names)
    for name, call in zip(names, report.calls, strict=True):
        check(name, call)
    eager = steps(names, False, lambda model: model)
    if not set(names) <= set(EXACT):
        off, _ = compiled_steps(names, enabled=False)
        for name in names:
            assert_same(name, off[name], on[name])
    for name in names:
        if name in LIKE_EAGER:
            assert_same(name, eager[name], on[name], SPELLINGS[name].exact)


@pytest.mark.parametrize("names", batches(list(SPELLINGS)))
def test_as_traced_with_dynamic_sizes(names):
    """Symbolic sizes, without decompositions: what other compilers may see. Whole numbers, so eager has the bits."""
    on, reports = compiled_steps(names, decompositions=False, dynamic=True)
    (report,) = reports  # one compilation for two batch sizes and lengths
    eager = steps(names, True, lambda model: model)
    for name, call in zip(names, report.calls, strict=True):
        if name in LIKE_EAGER:
            assert_same(name, eager[name], on[name], SPELLINGS[name].exact)
        if SPELLINGS[name].dynamic:
            check(name, call)
