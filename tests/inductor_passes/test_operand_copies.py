"""Copies in front of the op: dropped where that is safe and worth it, else left."""

import pytest
import torch

import inductor_passes
from tests.inductor_passes.spellings import HV, QW, WIDTH, H, K, V, heads, parts
from tests.inductor_passes.toy_attention import toy


def leaf(*shape):
    torch.manual_seed(0)
    return torch.randn(shape).requires_grad_()


def removed(f, *inputs, **settings):
    torch._dynamo.reset()
    with inductor_passes.configured(**settings):
        (call,) = inductor_passes.explain(f, *inputs).calls
    return call.copies_removed


def copied(row, g):
    return toy(*heads(*(y.contiguous() for y in parts(row * 2))), g)


def test_copies_are_dropped_unless_switched_off():
    inputs = leaf(2, 6, WIDTH), leaf(2, 6, HV)
    assert removed(copied, *inputs) == 3
    assert removed(copied, *inputs, remove_copies=False) == 0


def of_an_input(row, g):
    # The caller may change the row between forward and backward; the copies may be why that is safe.
    return toy(*heads(*(y.clone() for y in parts(row))), g)


def with_a_cast(row, g):
    return toy(*heads(*(y.double() for y in parts(row * 2))), g.double())


def channels_first(row, g):
    return toy(*heads(*(y.contiguous() for y in parts((row * 2).mT.contiguous().sin().mT))), g)


@pytest.mark.parametrize("f", [of_an_input, with_a_cast, channels_first])
def test_near_misses_stay(f):
    assert removed(f, leaf(2, 6, WIDTH), leaf(2, 6, HV)) == 0


@pytest.mark.parametrize("width, expected", [(4 * WIDTH, 0), (WIDTH + QW, 3)])
def test_a_small_copy_does_not_keep_a_large_tensor(width, expected):
    def f(row, g):
        q, k, v, _ = (row * 2).split([QW, QW, WIDTH - 2 * QW, row.shape[-1] - WIDTH], dim=-1)
        return toy(*heads(q.contiguous(), k.contiguous(), v.contiguous()), g)

    assert removed(f, leaf(2, 6, width), leaf(2, 6, HV)) == expected
    assert WIDTH == 2 * H * K + HV * V
