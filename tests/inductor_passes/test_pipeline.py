"""All passes over one graph: what it costs."""

import pytest
import torch
from torch.fx import Graph

from inductor_passes import pipeline
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.cost import measure
from tests.inductor_passes.test_semantics import make, step, two_layers


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


@pytest.mark.slow
def test_the_passes_cost_less_than_two_percent_of_a_compilation():
    passes, whole = measure(4, dynamic=False)
    assert 0 < passes < 0.02 * whole, f"{passes:.2f} s of {whole:.1f} s"
