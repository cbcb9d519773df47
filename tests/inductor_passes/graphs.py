"""Canonical text of the part of a graph that the passes touch: the same on every supported torch."""

import operator

import torch
from torch.fx import Graph, Node, map_arg

from inductor_passes import pipeline, registry
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import Layer, make_input, train_step

SHOWN = ("row_width", "zero_init", "q_layout", "k_layout", "v_layout")


def backward_text(graph: Graph) -> str:
    """Nodes from the backward op to the first op that computes, numbered anew; everything else is `_`."""
    names: dict[Node, str] = {}
    lines = []
    ops = {op for variant in registry.variants() for op in variant.ops[1:] if op is not None}
    made = {torch.ops.aten.empty.memory_format, torch.ops.aten.full.default}
    functional = torch.ops.higher_order.auto_functionalized_v2
    moves = set(pipeline.MOVES) | made | {operator.getitem, torch.ops.aten.sum.dim_IntList}
    rows = {n for n in graph.nodes if n.target in made and any("scatter" in str(u.target) for u in n.users)}
    for node in graph.nodes:
        root = node.target in ops or node.target is functional or node in rows
        if not root and not (any(s in names for s in node.all_input_nodes) and node.target in moves):
            continue
        names[node] = f"%{len(names)}"
        target = node.args[0] if node.target is functional else node.target
        short = getattr(target, "__name__", str(target)).replace(".default", "")
        args = () if node.target in ops or node.target is functional else node.args
        shown = [str(map_arg(a, lambda n: names.get(n, "_"))).replace("'", "") for a in args]
        shown += [f"{key}={node.kwargs[key]}" for key in SHOWN if node.kwargs.get(key) not in (None, False)]
        if node.target is functional:
            shown.append(f"row={names[node.kwargs['_all_bases'][0]]}")
        value = node.meta["val"]
        shape = f" : {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"{names[node]} = {short}({', '.join(shown)}){shape}")
    return "\n".join(lines)


def before_and_after(spelling, **backend_options) -> tuple[str, str]:
    """The text of a spelling's joint graph before and after the passes."""
    texts = []

    def record(graph, stage):
        texts.append(backward_text(graph))

    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(spelling)
    pipeline.observers.append(record)
    try:
        compiled = torch.compile(layer, backend=eager_backend(**backend_options), fullgraph=True, dynamic=False)
        train_step(compiled, layer, make_input(spelling))
    finally:
        pipeline.observers.remove(record)
    before, after = texts
    return before, after
