"""Graphs before and after, exactly; near-misses that are left alone; passes that find nothing the second time."""

import inspect
import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx import Graph

import inductor_passes
from inductor_passes import pipeline
from tests.inductor_passes.graphs import before_and_after
from tests.inductor_passes.spellings import HV, QW, SPELLINGS, WIDTH, H, K, V, heads, parts
from tests.inductor_passes.toy_attention import toy


def test_split_becomes_one_row():
    before, after = before_and_after(SPELLINGS["split_view"])
    assert_expected_inline(
        before,
        """\
%0 = attention_bwd()
%1 = getitem(%0, 0) : [2, 6, 2, 4]
%2 = getitem(%0, 1) : [2, 6, 2, 4]
%3 = getitem(%0, 2) : [2, 6, 4, 8]
%4 = getitem(%0, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%3, [2, 6, 32]) : [2, 6, 32]
%8 = view(%2, [2, 6, 8]) : [2, 6, 8]
%9 = view(%1, [2, 6, 8]) : [2, 6, 8]
%10 = cat([%9, %8, %7], 2) : [2, 6, 48]
%11 = view(%10, [12, 48]) : [12, 48]
%12 = permute(%11, [1, 0]) : [48, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=48, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 48]
%2 = getitem(%0, 4) : [2, 6, 4]
%3 = view(%2, [12, 4]) : [12, 4]
%4 = permute(%3, [1, 0]) : [4, 12]
%5 = view(%1, [12, 48]) : [12, 48]
%6 = permute(%5, [1, 0]) : [48, 12]""",
    )


def test_slices_become_one_row():
    before, after = before_and_after(SPELLINGS["slicing"])
    assert_expected_inline(
        before,
        """\
%0 = attention_bwd()
%1 = getitem(%0, 0) : [2, 6, 2, 4]
%2 = getitem(%0, 1) : [2, 6, 2, 4]
%3 = getitem(%0, 2) : [2, 6, 4, 8]
%4 = getitem(%0, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%3, [2, 6, 32]) : [2, 6, 32]
%8 = view(%2, [2, 6, 8]) : [2, 6, 8]
%9 = view(%1, [2, 6, 8]) : [2, 6, 8]
%10 = full([2, 6, 48], 0) : [2, 6, 48]
%11 = slice_scatter(%10, %7, 2, 16, 9223372036854775807) : [2, 6, 48]
%12 = full([2, 6, 48], 0) : [2, 6, 48]
%13 = slice_scatter(%12, %8, 2, 8, 16) : [2, 6, 48]
%14 = add.Tensor(%11, %13) : [2, 6, 48]
%15 = full([2, 6, 48], 0) : [2, 6, 48]
%16 = slice_scatter(%15, %9, 2, 0, 8) : [2, 6, 48]
%17 = add.Tensor(%14, %16) : [2, 6, 48]
%18 = view(%17, [12, 48]) : [12, 48]
%19 = permute(%18, [1, 0]) : [48, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=48, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 48]
%2 = getitem(%0, 4) : [2, 6, 4]
%3 = view(%2, [12, 4]) : [12, 4]
%4 = permute(%3, [1, 0]) : [4, 12]
%5 = view(%1, [12, 48]) : [12, 48]
%6 = permute(%5, [1, 0]) : [48, 12]""",
    )


def test_slices_as_traced_become_one_row():
    before, after = before_and_after(SPELLINGS["slicing"], decompositions=False)
    assert_expected_inline(
        before,
        """\
%0 = attention_bwd()
%1 = getitem(%0, 0) : [2, 6, 2, 4]
%2 = getitem(%0, 1) : [2, 6, 2, 4]
%3 = getitem(%0, 2) : [2, 6, 4, 8]
%4 = getitem(%0, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = t(%5) : [4, 12]
%7 = view(%3, [2, 6, 32]) : [2, 6, 32]
%8 = view(%2, [2, 6, 8]) : [2, 6, 8]
%9 = view(%1, [2, 6, 8]) : [2, 6, 8]
%10 = slice_backward(%7, [2, 6, 48], 2, 16, 9223372036854775807, 1) : [2, 6, 48]
%11 = slice_backward(%8, [2, 6, 48], 2, 8, 16, 1) : [2, 6, 48]
%12 = add.Tensor(%10, %11) : [2, 6, 48]
%13 = slice_backward(%9, [2, 6, 48], 2, 0, 8, 1) : [2, 6, 48]
%14 = add.Tensor(%12, %13) : [2, 6, 48]
%15 = view(%14, [12, 48]) : [12, 48]
%16 = t(%15) : [48, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=48, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 48]
%2 = getitem(%0, 4) : [2, 6, 4]
%3 = view(%2, [12, 4]) : [12, 4]
%4 = t(%3) : [4, 12]
%5 = view(%1, [12, 48]) : [12, 48]
%6 = t(%5) : [48, 12]""",
    )


def test_unbind_becomes_one_row():
    before, after = before_and_after(SPELLINGS["unbind"])
    assert_expected_inline(
        before,
        """\
%0 = full([16, 32], 0) : [16, 32]
%1 = slice_scatter(%0, _, 1, 0, 8) : [16, 32]
%2 = attention_bwd()
%3 = getitem(%2, 0) : [2, 6, 2, 4]
%4 = getitem(%2, 1) : [2, 6, 2, 4]
%5 = getitem(%2, 2) : [2, 6, 2, 4]
%6 = getitem(%2, 3) : [2, 6, 2]
%7 = full([2, 6, 4], 0) : [2, 6, 4]
%8 = slice_scatter(%7, %6, 2, 0, 2) : [2, 6, 4]
%9 = view(%8, [12, 4]) : [12, 4]
%10 = permute(%9, [1, 0]) : [4, 12]
%11 = cat([%3, %4, %5], 2) : [2, 6, 6, 4]
%12 = view(%11, [2, 6, 3, 2, 4]) : [2, 6, 3, 2, 4]
%13 = view(%12, [2, 6, 24]) : [2, 6, 24]
%14 = view(%13, [12, 24]) : [12, 24]
%15 = permute(%14, [1, 0]) : [24, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = full([16, 32], 0) : [16, 32]
%1 = slice_scatter(%0, _, 1, 0, 8) : [16, 32]
%2 = attention_bwd_row(row_width=24, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 4, 1, 0])
%3 = getitem(%2, 0) : [2, 6, 24]
%4 = getitem(%2, 4) : [2, 6, 2]
%5 = full([2, 6, 4], 0) : [2, 6, 4]
%6 = slice_scatter(%5, %4, 2, 0, 2) : [2, 6, 4]
%7 = view(%6, [12, 4]) : [12, 4]
%8 = permute(%7, [1, 0]) : [4, 12]
%9 = view(%3, [2, 6, 6, 4]) : [2, 6, 6, 4]
%10 = view(%9, [2, 6, 3, 2, 4]) : [2, 6, 3, 2, 4]
%11 = view(%10, [2, 6, 24]) : [2, 6, 24]
%12 = view(%11, [12, 24]) : [12, 24]
%13 = permute(%12, [1, 0]) : [24, 12]""",
    )


def test_gate_is_written_first_and_the_op_fills_in():
    before, after = before_and_after(SPELLINGS["with_gate"])
    assert_expected_inline(
        before,
        """\
%0 = attention_bwd()
%1 = getitem(%0, 0) : [2, 6, 2, 4]
%2 = getitem(%0, 1) : [2, 6, 2, 4]
%3 = getitem(%0, 2) : [2, 6, 4, 8]
%4 = getitem(%0, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%3, [2, 6, 32]) : [2, 6, 32]
%8 = view(%2, [2, 6, 8]) : [2, 6, 8]
%9 = view(%1, [2, 6, 8]) : [2, 6, 8]
%10 = cat([%9, %8, %7, _], 2) : [2, 6, 80]
%11 = view(%10, [12, 80]) : [12, 80]
%12 = permute(%11, [1, 0]) : [80, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = empty.memory_format([2, 6, 80]) : [2, 6, 80]
%1 = as_strided_scatter(%0, _, [2, 6, 32], [480, 80, 1], 48) : [2, 6, 80]
%2 = attention_bwd_row_(q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0], row=%1)
%3 = getitem(%2, 4) : [2, 6, 80]
%4 = getitem(%2, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%3, [12, 80]) : [12, 80]
%8 = permute(%7, [1, 0]) : [80, 12]""",
    )


def test_per_head_row_with_gate():
    _, after = before_and_after(SPELLINGS["per_head_with_gate"])
    assert_expected_inline(
        after,
        """\
%0 = empty.memory_format([2, 6, 80]) : [2, 6, 80]
%1 = as_strided_scatter(%0, _, [2, 6, 2, 16], [480, 80, 40, 1], 24) : [2, 6, 80]
%2 = attention_bwd_row_(q_layout=[0, 40, 1, 0], k_layout=[4, 40, 1, 0], v_layout=[8, 40, 2, 8], row=%1)
%3 = getitem(%2, 4) : [2, 6, 80]
%4 = getitem(%2, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%3, [2, 6, 2, 40]) : [2, 6, 2, 40]
%8 = view(%7, [2, 6, 80]) : [2, 6, 80]
%9 = view(%8, [12, 80]) : [12, 80]
%10 = permute(%9, [1, 0]) : [80, 12]""",
    )


def test_repeated_heads_are_folded():
    before, after = before_and_after(SPELLINGS["repeat_interleave"])
    assert_expected_inline(
        before,
        """\
%0 = attention_bwd()
%1 = getitem(%0, 0) : [2, 6, 4, 4]
%2 = getitem(%0, 1) : [2, 6, 4, 4]
%3 = getitem(%0, 2) : [2, 6, 4, 8]
%4 = getitem(%0, 3) : [2, 6, 4]
%5 = view(%4, [12, 4]) : [12, 4]
%6 = permute(%5, [1, 0]) : [4, 12]
%7 = view(%2, [2, 6, 2, 2, 4]) : [2, 6, 2, 2, 4]
%8 = sum.dim_IntList(%7, [3], True) : [2, 6, 2, 1, 4]
%9 = squeeze.dim(%8, 3) : [2, 6, 2, 4]
%10 = view(%1, [2, 6, 2, 2, 4]) : [2, 6, 2, 2, 4]
%11 = sum.dim_IntList(%10, [3], True) : [2, 6, 2, 1, 4]
%12 = squeeze.dim(%11, 3) : [2, 6, 2, 4]
%13 = view(%3, [2, 6, 32]) : [2, 6, 32]
%14 = view(%9, [2, 6, 8]) : [2, 6, 8]
%15 = view(%12, [2, 6, 8]) : [2, 6, 8]
%16 = cat([%15, %14, %13], 2) : [2, 6, 48]
%17 = view(%16, [12, 48]) : [12, 48]
%18 = permute(%17, [1, 0]) : [48, 12]""",
    )
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=48, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 48]
%2 = getitem(%0, 4) : [2, 6, 4]
%3 = view(%2, [12, 4]) : [12, 4]
%4 = permute(%3, [1, 0]) : [4, 12]
%5 = view(%1, [12, 48]) : [12, 48]
%6 = permute(%5, [1, 0]) : [48, 12]""",
    )


def test_gap_is_zeroed():
    _, after = before_and_after(SPELLINGS["gap"])
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=56, zero_init=True, q_layout=[0, 4, 1, 0], k_layout=[8, 4, 1, 0], v_layout=[24, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 56]
%2 = getitem(%0, 4) : [2, 6, 4]
%3 = view(%2, [12, 4]) : [12, 4]
%4 = permute(%3, [1, 0]) : [4, 12]
%5 = view(%1, [12, 56]) : [12, 56]
%6 = permute(%5, [1, 0]) : [56, 12]""",  # noqa: E501
    )


def test_hooked_gradient_is_written_after_the_op():
    _, after = before_and_after(SPELLINGS["hook_on_q"])
    assert_expected_inline(
        after,
        """\
%0 = attention_bwd_row(row_width=48, q_layout=[], k_layout=[8, 4, 1, 0], v_layout=[16, 8, 1, 0])
%1 = getitem(%0, 0) : [2, 6, 48]
%2 = getitem(%0, 1) : [2, 6, 2, 4]
%3 = getitem(%0, 4) : [2, 6, 4]
%4 = view(%3, [12, 4]) : [12, 4]
%5 = permute(%4, [1, 0]) : [4, 12]
%6 = as_strided_scatter(%1, _, [2, 6, 8], [288, 48, 1], 0) : [2, 6, 48]
%7 = view(%6, [12, 48]) : [12, 48]
%8 = permute(%7, [1, 0]) : [48, 12]""",
    )


# ---- near-misses: one condition broken each
def reason_of(function, *inputs):
    torch._dynamo.reset()
    report = inductor_passes.explain(function, *inputs)
    return [(call.packed, call.reason) for call in report]


def leaf(*shape):
    torch.manual_seed(0)
    return torch.randint(-2, 3, shape).double().requires_grad_()


def test_two_rows_are_two_rows():
    def f(a, b, c, w, g):
        q, k, v = a @ w[:, :QW], b @ w[:, QW : 2 * QW], c @ w[:, 2 * QW :]
        return toy(*heads(q, k, v), g)

    x = leaf(2, 6, 16)
    assert reason_of(f, x, leaf(2, 6, 16), leaf(2, 6, 16), leaf(16, WIDTH), leaf(2, 6, HV)) == [
        (False, "separate_rows")
    ]


def test_projections_with_a_bias_are_rows_of_their_own():
    """The weight's and the bias's gradients alone: what is projected needs none."""

    def f(x, wq, wk, wv, bq, bk, bv, g):
        return toy(*heads(x @ wq + bq, x @ wk + bk, x @ wv + bv), g)

    widths = (QW, QW, WIDTH - 2 * QW)
    weights, biases = [leaf(16, n) for n in widths], [leaf(n) for n in widths]
    found = reason_of(f, leaf(2, 6, 16).detach(), *weights, *biases, leaf(2, 6, HV))
    assert found == [(False, "separate_rows")]


@pytest.mark.parametrize("index", [(slice(None), slice(0, 5)), (slice(0, 1),)], ids=["tokens", "batch"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_sliced_behind_the_split_are_no_row_of_tokens(index, dynamic):
    def f(row, g):
        q, k, v = (y[index] for y in heads(*parts(row * 2)))
        return toy(q, k, v, g[index])

    row, g = leaf(2, 6, WIDTH), leaf(2, 6, HV)
    if dynamic:
        for x in (row, g):
            torch._dynamo.mark_dynamic(x, 1)
    assert reason_of(f, row, g) == [(False, "not_token_rows")]


def test_a_part_edited_in_place_names_the_edit():
    def f(row, g):
        q, k, v = parts(row * 2)
        q = q.clone()
        q[..., 0] = 0
        return toy(*heads(q, k, v), g)

    torch._dynamo.reset()
    (call,) = inductor_passes.explain(f, leaf(2, 6, WIDTH), leaf(2, 6, HV))
    assert (call.reason, call.copied) == ("packed_partly", ("q",))
    line = inspect.getsourcelines(f)[1] + 3
    assert f"the gradient of q goes through the backward of {__file__}:{line} (aten." in call.detail
    assert "empty" not in call.detail, call.detail


def test_split_in_another_graph():
    def f(q, k, v, g):
        return toy(q, k, v, g)

    shapes = [(2, 6, H, K), (2, 6, H, K), (2, 6, HV, V), (2, 6, HV)]
    assert reason_of(f, *(leaf(*shape) for shape in shapes)) == [(False, "split_elsewhere")]


def test_split_before_a_graph_break():
    def f(row, w, g):
        q, k, v = heads(*parts(row @ w))
        torch._dynamo.graph_break()
        return toy(q, k, v, g)

    assert reason_of(f, leaf(2, 6, 16), leaf(16, WIDTH), leaf(2, 6, HV)) == [(False, "split_elsewhere")]


def test_inference_has_no_backward():
    def f(row, g):
        return toy(*heads(*parts(row)), g)

    with torch.no_grad():
        assert reason_of(f, leaf(2, 6, WIDTH), leaf(2, 6, HV)) == [(False, "no_backward")]


def test_two_ops_on_one_row_add_up():
    def f(row, g):
        q, k, v = heads(*parts(row * 2))
        return toy(q, k, v, g) + toy(q, k, v, g * 2)

    assert reason_of(f, leaf(2, 6, WIDTH), leaf(2, 6, HV)) == [(False, "overlap")] * 2


def test_tokens_in_another_order():
    def f(row, g):
        row = row * 2
        index = torch.arange(5, -1, -1)
        q, k, v = heads(*parts(row))
        return toy(q[:, index], k[:, index], v[:, index], g)

    assert reason_of(f, leaf(2, 6, WIDTH), leaf(2, 6, HV)) == [(False, "computed_between")]


def test_dynamic_row_width_is_left():
    def f(row, g):
        width = row.shape[-1] // 3
        q, k, v = (x.unflatten(-1, (2, -1)) for x in (row * 2).split([width] * 3, dim=-1))
        return toy(q, k, v, g)

    row, g = leaf(2, 6, 24), leaf(2, 6, 2)
    torch._dynamo.mark_dynamic(row, 2)
    (found,) = reason_of(f, row, g)
    assert found == (False, "dynamic_row_width")


def test_lone_gradient_of_a_narrow_slice_is_left():
    def f(row, k, v, g):
        q = (row * 2)[..., :QW].unflatten(-1, (H, K))
        return toy(q, k, v, g)

    others = (leaf(2, 6, H, K).detach(), leaf(2, 6, HV, V).detach(), leaf(2, 6, HV).detach())
    found = reason_of(f, leaf(2, 6, 6 * QW), *others)
    assert found == [(False, "nothing_to_save")]


def rewritten_graph(name) -> Graph:
    """The joint graph of a spelling, as the passes leave it."""
    graphs = []

    def keep(graph: Graph, stage: str) -> None:
        if stage == "after":
            graphs.append(graph)

    pipeline.observers.append(keep)
    try:
        before_and_after(SPELLINGS[name])
    finally:
        pipeline.observers.remove(keep)
    (graph,) = graphs
    return graph


@pytest.mark.parametrize("name", ["slicing", "with_gate", "repeat_interleave", "hook_on_q"])
def test_second_run_finds_nothing(name):
    graph = rewritten_graph(name)
    text = str(graph)
    report = inductor_passes.rewrite_graph(graph)
    assert str(graph) == text
    assert report.packed == 0


def test_new_nodes_carry_tags_and_values():
    graph = rewritten_graph("with_gate")
    made = [n for n in graph.nodes if n.target is torch.ops.higher_order.auto_functionalized_v2]
    helpers = (torch.ops.aten.empty.memory_format, torch.ops.aten.as_strided_scatter.default)
    made += [n for n in graph.nodes if n.target in helpers]
    assert len(made) == 3
    for node in made:
        assert "val" in node.meta
        assert node.meta.get("partitioner_tag") == "is_backward", node
        assert "stack_trace" in node.meta or "fwd_nn_module_stack" in node.meta
    assert all("val" in n.meta for n in graph.nodes if n.target is operator.getitem)
