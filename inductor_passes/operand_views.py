"""What stands between an operand and the tensor whose memory it shows: chains of views, followed and made anew."""

import operator
from dataclasses import dataclass

from torch.fx import Graph, Node

from inductor_passes.edits import call, output
from inductor_passes.moves import arguments, aten, permutation
from inductor_passes.sizes import Size, divide, multiply, same, shape_of, size

_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_KEEP_STRIDES = {*_RESHAPES, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


@dataclass(frozen=True)
class Strided:
    """How a view lies in memory (where it starts does not matter here)."""

    shape: list[Size]
    strides: list[Size]

    @property
    def dense_last(self) -> bool:
        """The last axis runs through neighbouring elements."""
        return self.strides[-1] == 1 or self.shape[-1] == 1


def lies(node: Node) -> Strided:
    """How a node's tensor lies in memory, as traced."""
    return Strided(shape_of(node), [size(s) for s in node.meta["val"].stride()])


def _reshaped(value: Strided, shape: list[Size]) -> Strided | None:
    """A view of another shape, if memory allows one without a copy."""
    pieces: list[tuple[Size, Size]] = []  # (elements, stride) of runs of dimensions that lie as one
    for extent, stride in zip(value.shape, value.strides, strict=True):
        if extent == 1:
            continue
        if pieces and same(pieces[-1][1], multiply(extent, stride)):
            pieces[-1] = (multiply(pieces[-1][0], extent), stride)
        else:
            pieces.append((extent, stride))
    strides: list[Size] = []
    left: Size = 1
    step: Size = 1
    for extent in reversed(shape):
        if extent == 1:
            strides.insert(0, step)
            continue
        if left == 1:
            if not pieces:
                return None
            left, step = pieces.pop()
        rest = divide(left, extent)
        if rest is None:
            return None
        strides.insert(0, step)
        left, step = rest, multiply(step, extent)
    return Strided(shape, strides) if left == 1 and not pieces else None


def viewed(node: Node) -> Node | None:
    """The tensor that a node is a view of; None if it is no view."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parts = node.args[0]
        assert isinstance(parts, Node)
        node = parts if parts.target in _SPLITS else node
    elif not (
        node.target in _KEEP_STRIDES
        or node.target in (aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.select.int)
        or permutation(node) is not None
    ):
        return None
    source = node.args[0]
    return source if isinstance(source, Node) and node.target is not operator.getitem else None


def chain(node: Node) -> list[Node]:
    """The node, what it is a view of, and so on, up to the tensor whose memory they all show."""
    found = [node]
    while (source := viewed(found[-1])) is not None:
        found.append(source)
    return found


def is_private(node: Node) -> bool:
    """Whether only the graph can write to a node's memory: it computes it and does not return it, or a view of it.

    What is the caller's may be written to between forward and backward, so a backward must not read it in place of a
    copy that the code made.
    """
    root = chain(node)[-1]
    if root.op != "call_function":
        return False
    returned = node.graph.output_node().all_input_nodes
    return all(chain(x)[-1] is not root for x in returned)


def through(node: Node, value: Strided) -> Strided | None:
    """What a view node makes of a tensor that lies as `value`; None if that cannot be had without a copy."""
    shape = shape_of(node)
    if node.target in _KEEP_STRIDES:
        return _reshaped(value, shape)
    if node.target in (aten.alias.default, aten.detach.default):
        return value
    order = permutation(node)
    if order is not None:
        return Strided([value.shape[d] for d in order], [value.strides[d] for d in order])
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    a = arguments(node)
    dim = int(a["dim"]) % len(value.shape)  # type: ignore[call-overload]
    strides = list(value.strides)
    if node.target in (aten.select.int, aten.unbind.int):
        del strides[dim]
    elif node.target is aten.slice.Tensor:
        strides[dim] = multiply(strides[dim], size(a["step"]))  # type: ignore[arg-type]
    return Strided(shape, strides)


def remade(graph: Graph, new: Node, views: list[Node], made: dict[tuple[Node, Node], Node]) -> Node:
    """The same views (outermost last) of another tensor, at the graph's insertion point.

    made: (tensor, view or split) pairs that exist already, so that parts of one row share one split; added to here.
    """
    for view in views:
        source, key = new, (new, view)
        if key not in made:
            if view.target is operator.getitem:
                parts = view.args[0]
                assert isinstance(parts, Node)
                if (source, parts) not in made:
                    made[source, parts] = call(graph, parts, parts.target, (source, *parts.args[1:]), parts.kwargs)
                made[key] = output(graph, view, made[source, parts], view.args[1])  # type: ignore[arg-type]
            else:
                target = aten.view.default if view.target in _RESHAPES else view.target
                made[key] = call(graph, view, target, (source, *view.args[1:]), view.kwargs)
        new = made[key]
    return new
