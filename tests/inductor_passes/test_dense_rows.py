"""Rows whose channels are not dense: made dense once, not copied by every call."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

import gdn_ops
import inductor_passes
from inductor_passes import dense_rows, pipeline
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.corpus import QW, SITES, VW, WIDTH, D, H, Weights, cut, gdn


def wide_channels_first(w, x):
    """q is a small part of a wide row, k and v have rows of their own."""
    wide = w.qkvz(x).repeat(1, 1, 4).transpose(1, 2).contiguous().transpose(1, 2)
    q, k, v = wide[..., :QW], w.k(x), w.v(x)
    return gdn(w, *(y.unflatten(-1, (-1, D)) for y in (q, k, v)), x)


def heads_inside(w, x):
    """The last axis is dense as traced, but in memory of its own for each operand."""
    q, k, v = (y.unflatten(-1, (-1, D)).mT.sin().mT for y in cut(w.qkv(x)))
    return gdn(w, q, k, v, x)


def row_inside(w, x):
    q, k, v = (y.unflatten(-1, (-1, D)) for y in cut(w.qkv(x).transpose(1, 2).sin().transpose(1, 2)))
    return gdn(w, q, k, v, x)


def copies_behind_a_convolution(w, x):
    y = F.conv1d(w.qkv(x).transpose(1, 2), w.conv, padding=3, groups=WIDTH)[..., : x.shape[1]].transpose(1, 2)
    q, k, v = (F.silu(part.unflatten(-1, (-1, D)).contiguous()) for part in cut(y))
    return gdn(w, q, k, v, x)


def run(function, *, backend="inductor", dynamic=False, training=True, shape=(2, 9, 16), **settings):
    """Results of the second call of a compiled function, the copies it made of operands, and the rows made dense."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    w, x = Weights(), torch.randn(shape, dtype=torch.float64)
    before = pipeline.counters["rows_made"]
    caches_off = torch._inductor.config.patch(fx_graph_cache=False)
    with inductor_passes.configured(**settings), caches_off, torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
        for step in range(2):
            copies = gdn_ops.stats().input_copies
            w.zero_grad(set_to_none=True)
            leaf = x.clone().requires_grad_(training)
            with torch.set_grad_enabled(training):
                y = compiled(w, leaf)
            if training:
                y.square().sum().backward()
            if dynamic and step == 0:
                x = torch.randn(shape[0] + 1, shape[1] + 3, shape[2], dtype=torch.float64)
    results = [y.detach(), *(p.grad for p in (leaf, *w.parameters()) if p.grad is not None)]
    return results, gdn_ops.stats().input_copies - copies, pipeline.counters["rows_made"] - before


@pytest.mark.slow
def test_no_call_copies_its_operands_behind_a_convolution():
    on, copies, made = run(SITES["qwen35"].call)
    assert (copies, made) == (0, 1)
    off, copies, made = run(SITES["qwen35"].call, remove_copies=False)
    assert (copies, made) == (6, 0), "q, k and v, in the forward and in the backward"
    for a, b in zip(on, off, strict=True):
        assert torch.equal(a, b)


def channels_first(w, x):
    row = w.qkv(x).transpose(1, 2).contiguous().sin().transpose(1, 2)
    return gdn(w, *(part.unflatten(-1, (-1, D)) for part in cut(row)), x)


def test_dynamic_sizes():
    on, copies, made = run(channels_first, dynamic=True)
    assert (copies, made) == (0, 1), "one compilation, and it copies nothing"
    eager, copies, _ = run(channels_first, backend="eager", dynamic=True)
    assert copies == 6
    for a, b in zip(on, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "function, rows", [(row_inside, 1), (heads_inside, 3), (copies_behind_a_convolution, 3)], ids=lambda x: str(x)[:24]
)
def test_layouts_that_inductor_chooses_itself(function, rows, monkeypatch):
    """In inference nothing holds Inductor to the strides that were traced."""
    on, copies, made = run(function, training=False)
    assert (copies, made) == (0, rows)
    monkeypatch.setattr(dense_rows, "_may_be_transposed", lambda root: False)
    off, copies, made = run(function, training=False)
    assert (copies, made) == (3, 0), "without the pass the op copies; else this function shows nothing"
    assert torch.equal(on[0], off[0])


def forward_text(graph):
    """The nodes from a convolution to the op."""
    names, lines = {}, []
    for node in graph.nodes:
        if node.target is torch.ops.aten.convolution.default or any(n in names for n in node.all_input_nodes):
            names[node] = f"%{len(names)}"
            args = torch.fx.map_arg(node.args, lambda n: names.get(n, "_"))
            short = getattr(node.target, "__name__", str(node.target)).replace(".default", "")
            if node.target is torch.ops.gdn.chunk_fwd.default:
                lines.append(f"{short}({', '.join(args[:3])}, ...)")
                return "\n".join(lines)
            if node.target is not torch.ops.aten.convolution.default:
                lines.append(f"{names[node]} = {short}({', '.join(map(str, args))})".replace("'", ""))
    raise AssertionError("no call")


def convolved(w, x):
    y = F.conv1d(w.qkv(x).transpose(1, 2), w.conv, padding=3, groups=WIDTH)[..., : x.shape[1]].transpose(1, 2)
    return gdn(w, *(part.unflatten(-1, (-1, D)) for part in cut(y)), x)


def texts(function):
    found = []

    def keep(graph, stage):
        found.append(forward_text(graph))

    pipeline.observers.append(keep)
    try:
        run(function, backend=eager_backend())
    finally:
        pipeline.observers.remove(keep)
    return found


def test_the_row_is_made_dense_in_front_of_the_split():
    before, after = texts(convolved)
    assert_expected_inline(
        before,
        """\
%1 = slice.Tensor(%0, 2, 0, 9)
%2 = permute(%1, [0, 2, 1])
%3 = split_with_sizes(%2, [16, 16, 32], -1)
%4 = getitem(%3, 0)
%5 = getitem(%3, 1)
%6 = getitem(%3, 2)
%7 = view(%4, [2, 9, 2, 8])
%8 = view(%5, [2, 9, 2, 8])
%9 = view(%6, [2, 9, 4, 8])
chunk_fwd(%7, %8, %9, ...)""",
    )
    assert_expected_inline(
        after,
        """\
%1 = slice.Tensor(%0, 2, 0, 9)
%2 = permute(%1, [0, 2, 1])
%3 = dense_row(%2)
%4 = split_with_sizes(%3, [16, 16, 32], -1)
%5 = getitem(%4, 0)
%6 = view(%5, [2, 9, 2, 8])
%7 = getitem(%4, 1)
%8 = view(%7, [2, 9, 2, 8])
%9 = getitem(%4, 2)
%10 = view(%9, [2, 9, 4, 8])
chunk_fwd(%6, %8, %10, ...)""",
    )


@pytest.mark.parametrize("name", ["fla_fused", "named_views", "megatron_packed", "qwen3_next_no_convolution"])
def test_dense_rows_are_left(name):
    site = SITES[name]
    _, copies, made = run(site.call, backend=eager_backend(), shape=(site.batch, 9, 16))
    assert (copies, made) == (0, 0)


def test_a_small_part_of_a_wide_row_is_made_dense_alone():
    shapes = []

    def keep(graph, stage):
        if stage == "after":
            nodes = [node for node in graph.nodes if node.target is dense_rows.DENSE_ROW]
            shapes.extend(tuple(node.meta["val"].shape) for node in nodes)

    pipeline.observers.append(keep)
    try:
        _, copies, made = run(wide_channels_first, backend=eager_backend())
    finally:
        pipeline.observers.remove(keep)
    assert (copies, made, shapes) == (0, 1, [(2, 9, H, D)])


def test_second_run_finds_nothing():
    graphs = []
    pipeline.observers.append(lambda graph, stage: graphs.append(graph))
    try:
        run(convolved, backend=eager_backend())
    finally:
        pipeline.observers.pop()
    text = str(graphs[-1])
    before = pipeline.counters["rows_made"]
    pipeline.rewrite_graph(graphs[-1], strides_hold=False)
    assert pipeline.counters["rows_made"] == before
    assert str(graphs[-1]) == text


def test_the_report_says_it():
    torch.manual_seed(0)
    w, x = Weights(), torch.randn(2, 9, 16, dtype=torch.float64)
    model = nn.Module()
    model.w, model.forward = w, lambda x: convolved(w, x)
    report = inductor_passes.explain(model, x)
    assert report.calls[0].rows_made == 1
    assert "1 made dense before the call" in str(report)
    with inductor_passes.configured(remove_copies=False):
        report = inductor_passes.explain(model, x)
    assert report.calls[0].copied_inside == ("q", "k", "v")
    assert "q, k, v copied in every call" in str(report)


def test_the_op_itself():
    x = torch.randn(2, 3, 4, dtype=torch.float64).transpose(1, 2)
    y = torch.ops.inductor_passes.dense_row(x)
    assert y.is_contiguous()
    assert torch.equal(x, y)
    torch.library.opcheck(dense_rows.DENSE_ROW, (x,))
    assert VW == 2 * QW, "what the functions above are written for"
