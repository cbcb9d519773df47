"""What each data-moving op does to placements (see `views`): one function an op, in one table.

This file only describes; it edits nothing.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch.fx import Node

from inductor_passes.sizes import (
    Size,
    add,
    has_unbacked,
    is_dense,
    is_nonnegative,
    multiply,
    product,
    same,
    same_shape,
    shape_of,
    size,
    subtract,
)
from inductor_passes.views import Axis, Coordinates, Placement, Placements, disjoint, from_coordinates, to_coordinates

aten = torch.ops.aten

Describe: TypeAlias = Callable[[Node], Placements]
Move: TypeAlias = Callable[[Node, Describe], Placements | None]

MOVES: dict[object, Move] = {}
"""By op: a function from a node and a way to describe its operands to the node's own description (None: cannot say)."""


def _moves(*targets: object) -> Callable[[Move], Move]:
    def add_to_table(move: Move) -> Move:
        MOVES.update(dict.fromkeys(targets, move))
        return move

    return add_to_table


def arguments(node: Node) -> dict[str, object]:
    """A node's arguments by name. Traced graphs leave out those equal to their default: the schema fills them in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values.update(zip((a.name for a in schema), node.args, strict=False))
    values.update(node.kwargs)
    return values


def _same_elements(a: Node, b: Node) -> bool:
    return a.meta["val"].dtype == b.meta["val"].dtype and same(product(shape_of(a)), product(shape_of(b)))


KEEP_NUMBERING = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten._reshape_copy.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.expand.default,
    aten.lift_fresh_copy.default,
}
"""Ops whose output has the elements of its first operand in the same order (where it has as many)."""


@_moves(*KEEP_NUMBERING)
def _keep_numbering(node: Node, describe: Describe) -> Placements | None:
    source = node.args[0]
    assert isinstance(source, Node)
    return describe(source) if _same_elements(node, source) else None


@_moves(aten.copy.default)
def _copy(node: Node, describe: Describe) -> Placements | None:
    target, source = node.args[:2]
    if not isinstance(target, Node) or not isinstance(source, Node):
        return None
    if not _same_elements(target, source) or not same_shape(shape_of(target), shape_of(source)):
        return None
    return describe(source)


@_moves(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(node: Node, describe: Describe) -> Placements | None:
    """Only where it says nothing more than a reshape of a whole dense tensor."""
    a = arguments(node)
    source = a["self"]
    assert isinstance(source, Node)
    # Flattened storage and logical order are one and the same only for dense tensors that start at their storage.
    dense = is_dense(source.meta["val"]) and is_dense(node.meta["val"])
    if not dense or a["storage_offset"] not in (0, None) or not _same_elements(node, source):
        return None
    return describe(source)


def permutation(node: Node) -> list[int] | None:
    """The order in which a permute, transpose or t takes its operand's dimensions; None for other ops."""
    if node.target not in (aten.permute.default, aten.transpose.int, aten.t.default):
        return None
    a = arguments(node)
    rank = len(shape_of(a["self"]))  # type: ignore[arg-type]
    if node.target is aten.permute.default:
        return [int(dim) % rank for dim in a["dims"]]  # type: ignore[attr-defined]
    order = list(range(rank))
    first, second = (0, rank - 1) if node.target is aten.t.default else (int(a["dim0"]) % rank, int(a["dim1"]) % rank)  # type: ignore[call-overload]
    order[first], order[second] = order[second], order[first]
    return order


@_moves(aten.permute.default, aten.transpose.int, aten.t.default)
def _permute(node: Node, describe: Describe) -> Placements | None:
    source, order = node.args[0], permutation(node)
    assert isinstance(source, Node) and order is not None
    shape = shape_of(source)
    moved = []
    for placement in describe(source):
        found = to_coordinates(placement, shape)
        if found is None:
            return None
        coordinates = Coordinates([found.starts[d] for d in order], [found.steps[d] for d in order])
        moved.append(from_coordinates(placement.source, coordinates, [shape[d] for d in order]))
    return tuple(moved)


def _place_slice(
    source: Node, describe: Describe, shape: list[Size], dim: int, start: Size, step: int = 1
) -> Placements | None:
    """The source's placements in a larger shape, at [start::step] of `dim`."""
    inner = shape_of(source)
    moved = []
    for placement in describe(source):
        found = to_coordinates(placement, inner)
        if found is None:
            return None
        starts, steps = list(found.starts), list(found.steps)
        starts[dim] = add(multiply(starts[dim], step), start)
        steps[dim] = [s._replace(step=multiply(s.step, step)) for s in steps[dim]]
        moved.append(from_coordinates(placement.source, Coordinates(starts, steps), shape))
    return tuple(moved)


def _place_select(source: Node, describe: Describe, shape: list[Size], dim: int, index: int) -> Placements | None:
    """The source's placements in a shape with one more dimension, at `index` of it."""
    inner = shape_of(source)
    moved = []
    for placement in describe(source):
        found = to_coordinates(placement, inner)
        if found is None:
            return None
        starts, steps = list(found.starts), list(found.steps)
        starts.insert(dim, index)
        steps.insert(dim, [])
        moved.append(from_coordinates(placement.source, Coordinates(starts, steps), shape))
    return tuple(moved)


@_moves(aten.cat.default)
def _cat(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    shape = shape_of(node)
    dim = int(a["dim"]) % len(shape)  # type: ignore[call-overload]
    start: Size = 0
    moved: list[Placement] = []
    for source in a["tensors"]:  # type: ignore[attr-defined]
        extents = shape_of(source)
        if len(extents) != len(shape) or source.meta["val"].dtype != node.meta["val"].dtype:
            return None  # an old-style empty operand, or a promotion
        placed = _place_slice(source, describe, shape, dim, start)
        if placed is None:
            return None
        moved.extend(placed)
        start = add(start, extents[dim])
    return tuple(moved)


@_moves(aten.stack.default)
def _stack(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    shape = shape_of(node)
    dim = int(a["dim"]) % len(shape)  # type: ignore[call-overload]
    moved: list[Placement] = []
    for index, source in enumerate(a["tensors"]):  # type: ignore[arg-type, var-annotated]
        placed = _place_select(source, describe, shape, dim, index)
        if placed is None or source.meta["val"].dtype != node.meta["val"].dtype:
            return None
        moved.extend(placed)
    return tuple(moved)


def _slice_start(start: object, extent: Size) -> Size | None:
    if start is None:
        return 0
    if isinstance(start, Node):
        start = start.meta["val"]
    if isinstance(start, torch.SymInt):
        # Unlike an extent, a start that only the data knows may be negative, which means another place.
        found = size(start)
        return found if is_nonnegative(found) and not has_unbacked(found) else None
    assert isinstance(start, int)
    return start if start >= 0 else add(extent, start)


def _slice_into(node: Node, source: Node, describe: Describe, a: dict[str, object]) -> Placements | None:
    shape = shape_of(node)
    dim = int(a["dim"]) % len(shape)  # type: ignore[call-overload]
    start = _slice_start(a["start"], shape[dim])
    if start is None or not isinstance(a["step"], int):
        return None
    return _place_slice(source, describe, shape, dim, start, a["step"])


def _select_into(node: Node, source: Node, describe: Describe, a: dict[str, object]) -> Placements | None:
    shape = shape_of(node)
    dim, index = int(a["dim"]) % len(shape), a["index"]  # type: ignore[call-overload]
    if not isinstance(index, int):
        return None
    if index < 0:
        if not isinstance(shape[dim], int):
            return None
        index += int(shape[dim])
    return _place_select(source, describe, shape, dim, index)


def _over(node: Node, base: object, new: Placements | None, describe: Describe) -> Placements | None:
    """`new` written over `base`: only where they do not meet (what is overwritten would have to be cut out)."""
    assert isinstance(base, Node)
    if new is None or base.meta["val"].dtype != node.meta["val"].dtype:
        return None
    both = (*describe(base), *new)
    return both if len(both) == len(new) or disjoint(both, shape_of(node)) else None


@_moves(aten.slice_scatter.default)
def _slice_scatter(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    return _over(node, a["self"], _slice_into(node, a["src"], describe, a), describe)  # type: ignore[arg-type]


@_moves(aten.slice_backward.default)
def _slice_backward(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    return _slice_into(node, a["grad_output"], describe, a)  # type: ignore[arg-type]


@_moves(aten.select_scatter.default)
def _select_scatter(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    return _over(node, a["self"], _select_into(node, a["src"], describe, a), describe)  # type: ignore[arg-type]


@_moves(aten.select_backward.default)
def _select_backward(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    return _select_into(node, a["grad_output"], describe, a)  # type: ignore[arg-type]


def _one_to_one(shape: list[Size], strides: list[Size]) -> bool:
    """No two indices of a strided view are the same element (checked from the inside out)."""
    loops = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if not all(isinstance(s, int) for _, s in loops):
        ordered = loops[::-1]
    else:
        ordered = sorted(loops, key=lambda loop: loop[1])  # type: ignore[arg-type, return-value]
    reach: Size = 0
    for extent, stride in ordered:
        if not is_nonnegative(subtract(stride, add(reach, 1))):
            return False
        reach = add(reach, multiply(stride, subtract(extent, 1)))
    return True


@_moves(aten.as_strided_scatter.default)
def _as_strided_scatter(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    base, source = a["self"], a["src"]
    assert isinstance(base, Node) and isinstance(source, Node)
    if not is_dense(base.meta["val"]):
        return None
    shape = shape_of(source)
    strides = [size(s) for s in a["stride"]]  # type: ignore[attr-defined]
    if not _one_to_one(shape, strides):
        return None
    start = size(a["storage_offset"] or 0)  # type: ignore[arg-type]
    moved = []
    for placement in describe(source):
        found = to_coordinates(placement, shape)
        if found is None:
            return None
        offset, ordered = start, []
        for dim, stride in enumerate(strides):
            offset = add(offset, multiply(found.starts[dim], stride))
            ordered += [(s.order, Axis(s.extent, multiply(s.step, stride), s.dim)) for s in found.steps[dim]]
        ordered.sort(key=lambda item: item[0])
        moved.append(Placement(placement.source, tuple(axis for _, axis in ordered), offset))
    return _over(node, base, tuple(moved), describe)


@_moves(aten.constant_pad_nd.default)
def _pad(node: Node, describe: Describe) -> Placements | None:
    a = arguments(node)
    source, pad, value = a["self"], a["pad"], a["value"]
    assert isinstance(source, Node)
    if value != 0 or any(not isinstance(p, int) or p < 0 for p in pad):  # type: ignore[attr-defined]
        return None
    inner, shape = shape_of(source), shape_of(node)
    moved = []
    for placement in describe(source):
        found = to_coordinates(placement, inner)
        if found is None:
            return None
        starts = list(found.starts)
        for pair in range(len(pad) // 2):  # type: ignore[arg-type]
            starts[-1 - pair] = add(starts[-1 - pair], pad[2 * pair])  # type: ignore[index]
        moved.append(from_coordinates(placement.source, Coordinates(starts, found.steps), shape))
    return tuple(moved)


@_moves(aten.add.Tensor)
def _add(node: Node, describe: Describe) -> Placements | None:
    """A sum of tensors that are nowhere both non-zero is their union (x + 0 is x, but for the sign of -0.0)."""
    a = arguments(node)
    left, right = a["self"], a["other"]
    if not isinstance(left, Node) or not isinstance(right, Node) or a["alpha"] != 1:
        return None
    for operand in (left, right):
        if not same_shape(shape_of(operand), shape_of(node)) or not _same_elements(operand, node):
            return None
    both = (*describe(left), *describe(right))
    return both if disjoint(both, shape_of(node)) else None


_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
_FULL = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}


def is_zero(node: Node) -> bool:
    """The node is a tensor of zeros, as the graph stands."""
    while node.op == "call_function":
        if node.target in _ZEROS:
            return True
        if node.target in _FULL:
            return bool(node.args[_FULL[node.target]] == 0)  # type: ignore[index]
        # An expanded scalar zero is as zero as the scalar, so shapes need not agree here.
        if MOVES.get(node.target) not in (_keep_numbering, _permute) or not isinstance(node.args[0], Node):
            return False
        node = node.args[0]
    return False


def starts_undefined(node: Node) -> bool:
    """The node is memory that nothing was written to yet, or that scatters wrote to in part: the rest may be anything.

    Such is a row that a call of this graph shall write into.
    """
    while node.target is aten.as_strided_scatter.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.target is aten.empty.memory_format
