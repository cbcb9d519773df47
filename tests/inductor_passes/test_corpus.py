"""Call sites of real model families, and whole models: nothing is left between the op and the row's gradient."""

import importlib.util

import pytest
import torch
from torch.fx import Graph

import gdn_ops
from inductor_passes import inspection, pipeline
from inductor_passes.moves import MOVES
from tests.inductor_passes.corpus import SITES, Weights

aten = torch.ops.aten
LEFTOVERS = {
    aten.cat.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.expand.default,
    aten.sum.dim_IntList,
}
FUNCTIONAL = torch.ops.higher_order.auto_functionalized_v2


def leftovers(graph: Graph) -> list[str]:
    """What still moves the gradients of q, k, v (or the row that holds them) before something computes with them."""
    calls = [n for n in graph.nodes if "chunk_bwd" in str(n.target) or n.target is FUNCTIONAL]
    found, stack, seen = [], [], set()
    for call in calls:
        rows = (0, 1, 2) if call.target is torch.ops.gdn.chunk_bwd.default else (0, 1, 2, 3)
        rows = (0, 1, 2, 8) if call.target is FUNCTIONAL else rows
        stack += [n for user in call.users if user.args[1] in rows for n in user.users]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in LEFTOVERS:
            found.append(str(node.target))
        if node.target in MOVES:
            stack += node.users
    return found


def test_the_corpus_is_large_enough():
    assert len(SITES) >= 20


@pytest.mark.parametrize("name", SITES)
def test_site(name):
    site = SITES[name]
    torch.manual_seed(0)
    weights = Weights()
    x = torch.randn(site.batch, 9, 16, dtype=torch.float64)
    graphs, reports, results = [], [], []

    def keep(graph, stage):
        graphs.append((stage, leftovers(graph)))

    for compiled in (False, True):
        torch._dynamo.reset()
        weights.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        f = site.call
        if compiled:
            f = torch.compile(f, backend=inspection.eager_backend(reports.append), fullgraph=True)
            pipeline.observers.append(keep)
        try:
            f(weights, leaf).square().sum().backward()
        finally:
            if compiled:
                pipeline.observers.remove(keep)
        results.append([leaf.grad, *(p.grad for p in weights.parameters() if p.grad is not None)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    (call,) = reports[0].calls
    assert call.reason == site.reason, call
    if site.reason == "packed":
        stages = dict(graphs)
        assert stages["before"], "there was something to remove"
        assert stages["after"] == []


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "use_cache": False,
}


def transformers_model(kind):
    """A whole language model of transformers, as installed, in float64."""
    import transformers

    torch.manual_seed(0)
    if kind == "qwen3_5":
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SIZES))
    else:
        mixture = {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0, 1, 2],
        }
        model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES, **mixture))
    return model.double()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers_own_model_patched_at_the_op_alone(kind):
    from gdn_ops.integrations import transformers as integration

    model = transformers_model(kind)
    ids = torch.randint(SIZES["vocab_size"], (2, 70))

    def loss(model, ids):
        logits = model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    graphs, reports, results = [], [], []

    def keep(graph, stage):
        graphs.append((stage, leftovers(graph)))

    integration.patch(model)
    try:
        for compiled in (False, True):
            torch._dynamo.reset()
            model.zero_grad(set_to_none=True)
            f = loss
            if compiled:
                f = torch.compile(loss, backend=inspection.eager_backend(reports.append), fullgraph=True)
                pipeline.observers.append(keep)
            copies = gdn_ops.stats().input_copies
            try:
                value = f(model, ids)
                value.backward()
            finally:
                if compiled:
                    pipeline.observers.remove(keep)
            results.append([value.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert gdn_ops.stats().input_copies == copies, "no operand is copied by the op"
    finally:
        integration.unpatch(model)
    assert len(results[0]) > 1 + len(list(model.parameters())) // 2
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # their gates are float32
    (report,) = reports
    assert [(call.reason, call.rows_made) for call in report] == [("packed", 1)] * 2, report
    assert all(f"modeling_{kind}.py:" in call.location for call in report)
    stages = dict(graphs)
    assert stages["before"], "there was something to remove"
    assert stages["after"] == []
