"""What stands between an operand and the tensor whose memory it shows: chains of views, followed and made anew."""

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from inductor_passes.edits import call, output
from inductor_passes.moves import arguments, aten, permutation
from inductor_passes.sizes import Size, divide, multiply, same, same_shape, shape_of, size

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


def reshaped(value: Strided, shape: list[Size]) -> Strided | None:
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


_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_FUNCTIONAL = {"auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional"}
"""Calls that are no ops with a schema, but known to return memory of their own and to write to none of their inputs."""


def _tensor_inputs(node: Node) -> list[Node]:
    """A node's inputs without those that compute sizes."""
    return [x for x in node.all_input_nodes if not isinstance(x.meta.get("val"), int | float | torch.SymInt)]


def _is_understood(node: Node) -> bool:
    """Whether a call says which of its inputs its outputs may show and which it writes to."""
    if isinstance(node.target, HigherOrderOperator):
        return node.target.name() in _FUNCTIONAL
    return isinstance(node.target, OpOverload) or node.target is operator.getitem


def _annotated(node: Node, *, written: bool) -> list[Node]:
    """The nodes in arguments that the op's schema marks: as written to, or as anything that an output may alias."""
    assert isinstance(node.target, OpOverload)
    found: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is None or (written and not alias.is_write):
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
    return found


def _storage(node: Node) -> int | None:
    """What tells one fake storage from another; None where a node has no single strided tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _is_constant(node: Node) -> bool:
    """Computed from no tensor that is given to the graph."""
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        if node.op != "call_function":
            return False
        new = [source for source in _tensor_inputs(node) if source not in seen]
        seen.update(new)
        stack += new
    return True


def _is_like(source: Node, node: Node) -> bool:
    """Whether two nodes' tensors have the same shape and dtype, so that one could stand for the other."""
    one, other = source.meta.get("val"), node.meta.get("val")
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.dtype != other.dtype:
        return False
    return same_shape(shape_of(source), shape_of(node))


def _packets(*names: str) -> frozenset[object]:
    """Those of the named ATen ops that this torch has, all overloads."""
    return frozenset(getattr(aten, name) for name in names if hasattr(aten, name))


_MAY_DO_NOTHING = _packets(
    "cat", "clone", "constant_pad_nd", "repeat", "pow", "round", "floor", "ceil", "trunc", "lift_fresh_copy"
)
"""Inductor drops these where their result equals an input, and the caller's tensor stands in its place."""

_MAY_WRITE_IN_PLACE = _packets(
    "index_put", "_unsafe_index_put", "_index_put_impl", "index_copy", "index_add", "index_fill", "index_reduce", "put",
    "select_scatter", "slice_scatter", "as_strided_scatter", "diagonal_scatter", "scatter", "scatter_add",
    "scatter_reduce", "masked_scatter",
)  # fmt: skip
"""Functional writes: Inductor may carry them out in the memory of the first argument."""


def _may_show(node: Node) -> list[Node]:
    """The inputs whose memory a node's value may be in, whatever the op: what says so either way counts.

    That is the schema's alias annotations, the storages of the fake values, what Inductor may drop (functional forms of
    views, conversions to the same dtype, sums with a constant, copies), and functional writes that it may carry out in
    place.
    """
    sources = _tensor_inputs(node)
    if node.op != "call_function" or not sources:
        return []
    if node.target is operator.getitem:
        (parts,) = sources
        siblings = [x for x in parts.users if x is not node and _storage(x) == _storage(node)]
        return [parts, *siblings] if _may_show(parts) or not _is_understood(parts) else siblings
    if not _is_understood(node):
        return sources
    storage = _storage(node)
    same_storage = [source for source in sources if storage is not None and _storage(source) == storage]
    if isinstance(node.target, HigherOrderOperator):  # the functional form of a call that writes to its arguments
        return sources
    if not isinstance(node.target, OpOverload):
        return same_storage
    packet = node.target.overloadpacket
    if packet is aten.copy:
        return sources
    if packet in _MAY_WRITE_IN_PLACE:
        return [*sources[:1], *same_storage]
    if packet in _MAY_DO_NOTHING:
        return [*(source for source in sources if _is_like(source, node)), *same_storage]
    if torch.Tag.view_copy in node.target.tags or node.target.is_view:
        return sources
    value = node.meta.get("val")
    if node.target in (aten._to_copy.default, torch.ops.prims.convert_element_type.default):
        unchanged = isinstance(value, Tensor) and sources[0].meta["val"].dtype == value.dtype
        return sources if unchanged else same_storage
    if node.target in _ARITHMETIC and len(sources) == 2 and any(_is_constant(source) for source in sources):
        return sources
    return [*_annotated(node, written=False), *same_storage]


def is_private(node: Node) -> bool:
    """Whether only the graph can write to a node's memory: it computes it and neither returns it nor writes to it.

    What is the caller's may be written to between forward and backward, so a backward must not read it in place of a
    copy that the code made. Memory is followed up and down through everything that may share it, not through views
    alone that `viewed` can make anew; what is not understood counts as the caller's.
    """
    stack, seen = [node], {node}
    while stack:
        node = stack.pop()
        if node.op != "call_function" or not _is_understood(node):
            return False
        new = _may_show(node)
        for user in node.users:
            if user.op == "output":
                return False
            if isinstance(user.target, OpOverload) and node in _annotated(user, written=True):
                return False
            if node in _may_show(user):
                new.append(user)
        new = [other for other in new if other not in seen]
        seen.update(new)
        stack += new
    return True


def through(node: Node, value: Strided) -> Strided | None:
    """What a view node makes of a tensor that lies as `value`; None if that cannot be had without a copy."""
    shape = shape_of(node)
    if node.target in _KEEP_STRIDES:
        return reshaped(value, shape)
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
