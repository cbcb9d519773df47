"""All passes over one graph: what it costs."""

import inspect

import pytest
import torch
from torch.fx import Graph

import inductor_passes
from inductor_passes import packed_views, pipeline
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.cost import measure
from tests.inductor_passes.spellings import HV, QW, H, heads, parts
from tests.inductor_passes.test_semantics import make, rows_that_swap_k, step, two_layers
from tests.inductor_passes.toy_attention import toy


def test_a_graph_is_sorted_and_cleaned_once(monkeypatch):
    inside, calls = [], []
    rewrite, sort, clean = pipeline.rewrite_graph, pipeline.restore_order, Graph.eliminate_dead_code

    def counted_rewrite(*args, **kwargs):
        inside.append(True)
        try:
            return rewrite(*args, **kwargs)
        finally:
            inside.pop()

    def counted_sort(graph):
        calls.append("sort")
        return sort(graph)

    def counted_clean(self, *args, **kwargs):
        if inside:
            calls.append("clean")
        return clean(self, *args, **kwargs)

    monkeypatch.setattr(pipeline, "rewrite_graph", counted_rewrite)
    monkeypatch.setattr(pipeline, "restore_order", counted_sort)
    monkeypatch.setattr(Graph, "eliminate_dead_code", counted_clean)
    model, x = make(two_layers)
    reports = []
    step(torch.compile(model, backend=eager_backend(reports.append), fullgraph=True), model, x)
    assert reports[0].packed == 2
    assert calls == ["sort", "clean"]


def test_a_graph_that_cannot_be_ordered_is_left_as_it_was(monkeypatch, caplog):
    """The net below the planning: here the plan does not see what depends on what."""
    model, x = make(rows_that_swap_k)
    expected = step(model, model, x)
    texts, reports = [], []
    monkeypatch.setattr(packed_views, "_depends_on", lambda *args: False)
    monkeypatch.setattr(pipeline, "observers", [lambda graph, stage: texts.append(str(graph))])
    real = pipeline.rewrite_graph

    def watched(graph, *args, **kwargs):
        report = real(graph, *args, **kwargs)
        texts.append(str(graph))
        graph.lint()
        return report

    monkeypatch.setattr(pipeline, "rewrite_graph", watched)
    found = step(torch.compile(model, backend=eager_backend(reports.append), fullgraph=True), model, x)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert [call.reason for call in reports[0]] == ["cyclic_graph"] * 2
    assert "rows are not packed in this graph" in caplog.text
    assert texts[0] == texts[-1]


def test_a_call_on_the_output_of_another_is_its_own_call():
    """The saved tensors say whose backward it is; an operand that another call returned does not."""

    def chained(self, x):
        g = self.decay(x)
        q, k, v = heads(*parts(self.rows[0](x)))
        r = HV // H
        o = toy(q.repeat_interleave(r, 2), k.repeat_interleave(r, 2), v, g)  # first line
        q, k = (y.unflatten(-1, (H, -1)).repeat_interleave(r, 2) for y in self.rows[1](x)[..., : 2 * QW].chunk(2, -1))
        return self.finish(toy(q, k, o, g))  # second line

    model, x = make(chained)
    report = inductor_passes.explain(model, x.requires_grad_())
    assert [(call.reason, call.operands) for call in report] == [
        ("packed", ("q", "k", "v")),
        ("packed_partly", ("q", "k")),
    ]
    lines, start = inspect.getsourcelines(chained)
    marked = [start + i for i, text in enumerate(lines) if "line\n" in text]
    assert [call.location for call in report] == [f"{__file__}:{line}" for line in marked]
    assert all(call.grouped_heads for call in report)


@pytest.mark.slow
def test_the_passes_cost_less_than_two_percent_of_a_compilation():
    passes, whole = measure(4, dynamic=False)
    assert 0 < passes < 0.02 * whole, f"{passes:.2f} s of {whole:.1f} s"
