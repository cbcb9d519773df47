"""The data-movement algebra against torch itself: what a description says is what the elements do."""

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes import moves, sizes, views
from inductor_passes.edits import restore_order


def described(graph, inputs):
    """The output that the placements of the graph's last node say, element by element, from the inputs' values."""
    forms = {}

    def describe(node):
        if node not in forms:
            if moves.is_zero(node):
                forms[node] = ()
            elif node.target in moves.MOVES:
                forms[node] = moves.MOVES[node.target](node, describe)
            else:
                forms[node] = (views.whole(node),)
        if forms[node] is None:
            raise LookupError(str(node.target))
        return forms[node]

    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    values = dict(zip(placeholders, inputs, strict=True))
    (result,) = (n for n in graph.nodes if n.op == "output")
    last = result.args[0]
    flat = torch.zeros(last.meta["val"].numel(), dtype=torch.int64)
    for placement in describe(last):
        # Axes stand in the source's row-major order, so walking them in order walks the source.
        index = torch.tensor([placement.offset])
        for axis in placement.axes:
            index = (index[:, None] + axis.stride * torch.arange(axis.extent)[None, :]).reshape(-1)
        flat[index] += values[placement.source].reshape(-1)
    return flat.view(last.meta["val"].shape)


def move(x, kind, other):
    """One data-moving step of the kind that gradients of views go through; x and the result have 3 dimensions."""
    A, B, C = x.shape
    dim, size, flip = other % 3, 1 + other % 4, other % 2
    if kind == "view":
        return x.reshape(A * B, 1, C) if flip else x.reshape(A, B * C, 1)
    if kind == "permute":
        return x.permute([(0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0)][other % 4])
    if kind == "cat":
        return torch.cat([torch.zeros_like(x), x] if flip else [x, torch.zeros_like(x)], dim=dim)
    if kind == "slice_scatter":
        shape = [n + size if i == dim else n for i, n in enumerate(x.shape)]
        return torch.slice_scatter(x.new_zeros(shape), x, dim, size, size + x.shape[dim])
    if kind == "slice_step":
        shape = [2 * n if i == dim else n for i, n in enumerate(x.shape)]
        return torch.slice_scatter(x.new_zeros(shape), x, dim, flip, 2 * x.shape[dim], 2)
    if kind == "select_scatter":
        return torch.select_scatter(x.new_zeros(A * B, 3, C), x.reshape(A * B, C), 1, other % 3)
    if kind == "pad":
        return torch.nn.functional.pad(x, (flip, size, 0, 1 - flip))
    if kind == "stack":
        return torch.stack([x, torch.zeros_like(x)], dim=other % 4).flatten(0, 1)
    if kind == "sum_of_disjoint":
        left = torch.slice_scatter(x.new_zeros(A, B, 2 * C), x, 2, 0, C)
        right = torch.slice_scatter(x.new_zeros(A, B, 2 * C), x.clone(), 2, C, 2 * C)
        return left + right
    if kind == "as_strided":
        dense = x.contiguous()
        base = dense.new_zeros(A, B, C + size)
        strides = (B * (C + size), C + size, 1)
        return torch.as_strided_scatter(base, dense, (A, B, C), strides, size)
    return x.clone()


KINDS = ["view", "permute", "cat", "slice_scatter", "slice_step", "select_scatter", "pad", "stack", "sum_of_disjoint",
         "as_strided", "clone"]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11)), min_size=1, max_size=4),
)
def test_descriptions_say_what_torch_does(shape, steps):
    x = torch.randint(1, 1000, shape)

    def f(x):
        for kind, other in steps:
            x = move(x, kind, other)
        return x

    graph = make_fx(f, tracing_mode="fake")(x).graph
    expected = f(x)
    try:
        found = described(graph, [x])
    except LookupError:
        return  # "cannot say" is always allowed; the next test holds that single steps are understood
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", range(4))
def test_single_steps_are_understood(kind, other):
    x = torch.randint(1, 1000, (2, 3, 4))
    graph = make_fx(lambda x: move(x, kind, other), tracing_mode="fake")(x).graph
    assert torch.equal(described(graph, [x]), move(x, kind, other))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=3), st.integers(0, 5))
def test_runs_cover_the_elements(axes, start):
    elements = [start]
    for extent, stride in axes:
        elements = [e + i * stride for e in elements for i in range(extent)]
    found = [e for first, length in views.runs(start, axes) for e in range(first, first + length)]
    assert sorted(found) == sorted(elements)
    width = max(elements) + 2
    expected = None if len(set(elements)) < len(elements) else width - len(elements)
    assert views.gaps(views.runs(start, axes), width) == expected
    assert views.gaps([*views.runs(start, axes), (width, 1)], width) is None


s, t = sympy.Symbol("s0", positive=True, integer=True), sympy.Symbol("s1", positive=True, integer=True)
u = sympy.Symbol("u0", integer=True)
free = sympy.Symbol("k", integer=True)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [(0, True), (-1, False), (s - 1, True), (s - 2, False), (s * t - s, True), (s * t - s - t, False), (u, True),
     (u - 1, False), (free, False), (sympy.floor(s / 2), False), (2 * s * t - s - t, True)],
)  # fmt: skip
def test_nonnegative_means_for_every_value(expression, expected):
    assert sizes.is_nonnegative(expression) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(12, 4, 3), (12, 5, None), (3, 0, None), (s * 48, 48, s), (s * 48, s, 48), (s * t * 48, s * 48, t),
     (s * 3, 2, None), (s + 1, s, None), (s * t + s, s, t + 1)],
)  # fmt: skip
def test_division_is_exact_or_refused(a, b, expected):
    assert sizes.divide(a, b) == expected


@pytest.mark.parametrize(("a", "b"), [(3 * s + 5, 2), (s * t * 48 + s * 7 + 3, s * 48), (7, s), (u + 3, 4)])
def test_quotient_and_rest_make_the_number_in_whole_steps(a, b):
    quotient, rest = sizes.divide_with_rest(a, b)
    assert sympy.expand(quotient * b + rest - a) == 0
    assert all(c.is_Integer for c in sympy.Poly(quotient, s, t, u).coeffs())


def test_order_is_restored_by_moving_as_little_as_possible():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.neg, (x,))
    b = graph.call_function(torch.abs, (a,))
    c = graph.call_function(torch.exp, (x,))
    graph.output((b, c))
    c.append(a)  # a now stands behind its user b
    assert [n.name for n in graph.nodes] == ["x", "abs_1", "exp", "neg", "output"]
    assert restore_order(graph) == 1
    graph.lint()
    assert [n.name for n in graph.nodes] == ["x", "exp", "neg", "abs_1", "output"]
    assert restore_order(graph) == 0
