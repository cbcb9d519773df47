"""Making nodes: every new node carries a fake value and the tags of the node that it stands in for."""

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves, tree_map_only

from inductor_passes.sizes import Size, same, shape_of, size

aten = torch.ops.aten

# These describe the old node's value or its origin in the traced program, not the place in the program.
_OWN_META = frozenset({"val", "tensor_meta", "eager_input_vals", "unbacked_bindings", "original_aten", "from_node"})


def call(
    graph: Graph,
    like: Node,
    target: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    value: Any = None,
) -> Node:
    """Insert a call at the graph's insertion point.

    It takes over `like`'s metadata (stack trace, the partitioner's and the recompute tags), and gets the fake value of
    its own outputs (`value`, where the caller knows it).
    """
    node = graph.call_function(target, tuple(args), kwargs or {})
    node.meta = {key: value for key, value in like.meta.items() if key not in _OWN_META}
    update_value(node, like=like, keep_inputs="eager_input_vals" in like.meta, value=value)
    return node


def written_value(row: Node, op: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The fake value of an op that writes into `row`, functionalized: its outputs, and the row as it is then.

    The same as tracing the functional op, which evaluates every step of it, at a fraction of the time.
    """
    values = tree_map_only(Node, lambda n: n.meta["val"], kwargs)
    before = row.meta["val"]
    with before.fake_mode:
        outputs = op(**values, row=before)
        after = torch.empty_strided(before.shape, before.stride(), dtype=before.dtype, device=before.device)
    return (*outputs, after)


def update_value(node: Node, like: Node | None = None, keep_inputs: bool | None = None, value: Any = None) -> None:
    """Run the node on the fake values of its inputs (in `like`'s fake mode if it has none), and keep the result.

    value: the result, where it is known; keep_inputs: also keep the inputs, whose strides Inductor then holds for ops
    that ask for exact strides.
    """
    args, kwargs = tree_map_only(Node, lambda n: n.meta["val"], (tuple(node.args), dict(node.kwargs)))
    if node.target is operator.getitem:
        node.meta["val"] = args[0][args[1]]
        return
    known = (args, kwargs, None if like is None else like.meta["val"])
    modes = [x.fake_mode for x in tree_leaves(known) if isinstance(x, FakeTensor)]
    # Without a mode the call would be real: sizes alone may be computed so, tensors must not be.
    if value is None:
        with modes[0] if modes else contextlib.nullcontext():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
    node.meta["val"] = value
    if keep_inputs if keep_inputs is not None else "eager_input_vals" in node.meta:
        node.meta["eager_input_vals"] = (args, kwargs)


def output(graph: Graph, like: Node, source: Node, index: int) -> Node:
    """One output of a call that returns several."""
    node = graph.call_function(operator.getitem, (source, index))
    node.meta = {key: value for key, value in like.meta.items() if key not in _OWN_META}
    update_value(node)
    return node


def outputs_of(node: Node) -> dict[int, Node]:
    """The nodes that take one output each of a call, by index (the first, should there be several)."""
    found: dict[int, Node] = {}
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            found.setdefault(user.args[1], user)
    return found


def outputs_stay_inside(
    fwd: Node, bwds: Sequence[Node], replaced: dict[Node, torch.Tensor], changes: dict[str, Any] | None = None
) -> Any:
    """The fake value of a forward call with other operands and options (a tensor, or a tuple of them, as the op returns
    it), if it changes the size of no output but those that the backward calls alone use; else None."""
    args, kwargs = tree_map_only(
        Node, lambda n: replaced.get(n, n.meta["val"]), (tuple(fwd.args), {**fwd.kwargs, **(changes or {})})
    )
    mode = next(x.fake_mode for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
    with mode:
        new = fwd.target(*args, **kwargs)  # type: ignore[operator]
    single = isinstance(new, torch.Tensor)
    for node, value in [(fwd, new)] if single else [(node, new[index]) for index, node in outputs_of(fwd).items()]:
        if not same_sizes(node, [size(n) for n in value.shape]) and any(user not in bwds for user in node.users):
            return None
    return new if single else tuple(new)


class Extents:
    """Sizes as arguments of new nodes: ints where static, else nodes that compute them (made once each)."""

    def __init__(self, graph: Graph, like: Node, source: Node) -> None:
        self._graph, self._like, self._source = graph, like, source
        self._made: list[tuple[Size, Node]] = []

    def of(self, dim: int) -> int | Node:
        """The size of dimension `dim` of the source."""
        value = self._source.meta["val"].shape[dim]
        if not isinstance(value, torch.SymInt):
            return int(value)
        return self._remember(
            size(value), lambda: call(self._graph, self._like, aten.sym_size.int, (self._source, dim))
        )

    def times(self, a: int | Node, b: int) -> int | Node:
        """a * b."""
        if isinstance(a, int):
            return a * b
        value = size(a.meta["val"] * b)
        return self._remember(value, lambda: call(self._graph, self._like, operator.mul, (a, b)))

    def shape(self, wanted: Sequence[Size]) -> list[int | Node]:
        """A view's shape argument for these sizes, of which one at most may be unknown here."""
        result: list[int | Node] = []
        unknown = 0
        for extent in wanted:
            known = extent if isinstance(extent, int) else self._known(extent)
            if known is None:
                unknown += 1
                known = -1
            result.append(known)
        assert unknown <= 1, wanted
        return result

    def _known(self, extent: Size) -> Node | None:
        return next((node for value, node in self._made if same(value, extent)), None)

    def _remember(self, value: Size, make: Any) -> Node:
        known = self._known(value)
        if known is None:
            known = make()
            self._made.append((value, known))
        return known


class CyclicGraphError(RuntimeError):
    """Nodes need each other, so no order is right."""


class Snapshot:
    """What every node of a graph takes, and their order: edits that erase none of them can be taken back."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._nodes = [(node, node.args, node.kwargs) for node in graph.nodes]

    def restore(self) -> None:
        """Make the graph what it was."""
        for node, args, kwargs in self._nodes:
            node.args, node.kwargs = args, kwargs
        known = {node for node, _, _ in self._nodes}
        made = [node for node in self._graph.nodes if node not in known]
        for node in made:
            node.args, node.kwargs = (), {}
        for node in made:
            self._graph.erase_node(node)
        last = self._nodes[0][0]
        for node, _, _ in self._nodes[1:]:
            last.append(node)
            last = node


def restore_order(graph: Graph) -> int:
    """Move every node that stands before one of its inputs to right behind the last of them; returns how many moved.

    Nodes that stand right are not touched, so the order of the program is kept wherever it can be.

    CyclicGraphError if there is no order.
    """
    placed: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}
    moved = 0
    for node in list(graph.nodes):
        missing = next((source for source in node.all_input_nodes if source not in placed), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(node)
            continue
        placed.add(node)
        last, ready = node, waiting.pop(node, [])
        while ready:
            late = ready.pop(0)
            missing = next((source for source in late.all_input_nodes if source not in placed), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(late)
                continue
            last.append(late)
            placed.add(late)
            last, moved = late, moved + 1
            ready += waiting.pop(late, [])
    if waiting:
        raise CyclicGraphError(f"no order of the graph is right: {min(map(str, waiting))} needs itself")
    return moved


def erase_unused(graph: Graph, node: Node) -> None:
    """Erase a node without users, and then whatever only it used. (Looking at uses is wrong while dead ones count.)"""
    stack = [node]
    while stack:
        node = stack.pop()
        if node.users or node.op != "call_function":
            continue
        sources = node.all_input_nodes
        graph.erase_node(node)
        stack += sources


def same_sizes(a: Node, b: Sequence[Size]) -> bool:
    """The node's tensor has exactly these sizes."""
    shape = shape_of(a)
    return len(shape) == len(b) and all(same(x, y) for x, y in zip(shape, b, strict=True))
