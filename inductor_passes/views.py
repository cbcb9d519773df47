"""Data movement, as an algebra: where each element of a tensor came from.

A tensor that only moves data is described by placements in the row-major numbering of its own (logical) shape:

    element  offset + sum(i_a * stride_a)   holds   element (i_0, i_1, ...) of `source`

and everything no placement covers is zero. A view that keeps the numbering (view, unsqueeze, clone, ...) keeps the
description, which is why it does not matter how user code spells a split: cat, slice_scatter, select_scatter, pad,
stack and sums of disjoint scatters all end as the same placements. Moves that change the numbering (permute, cat, ...)
take a placement apart into coordinates of the shape, move those, and number them again.

This file only describes; it edits nothing and asks nothing of the shape environment.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.fx import Node

from inductor_passes.sizes import (
    Size,
    add,
    contiguous_strides,
    divide,
    divide_with_rest,
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

aten = torch.ops.aten


class Axis(NamedTuple):
    """One loop along dimension `dim` of a source: `extent` elements, `stride` apart in the destination."""

    extent: Size
    stride: Size
    dim: int


@dataclass(frozen=True)
class Placement:
    """A whole source tensor, placed. Axes stand in the source's row-major order; those of extent 1 are left out."""

    source: Node
    axes: tuple[Axis, ...]
    offset: Size


class Step(NamedTuple):
    """A piece of an axis inside one dimension of a shape: coordinate += index * step."""

    extent: Size
    step: Size
    dim: int
    order: tuple[int, int]


class Coordinates(NamedTuple):
    """A placement by the coordinates of a shape: per dimension where it starts and how it steps."""

    starts: list[Size]
    steps: list[list[Step]]


Placements: TypeAlias = tuple[Placement, ...]


def whole(node: Node) -> Placement:
    """The node itself, as a placement: every element where it is."""
    shape = shape_of(node)
    axes = (Axis(n, s, dim) for dim, (n, s) in enumerate(zip(shape, contiguous_strides(shape), strict=True)) if n != 1)
    return Placement(node, tuple(axes), 0)


def to_coordinates(placement: Placement, shape: Sequence[Size]) -> Coordinates | None:
    """Take a placement in the numbering of `shape` apart into coordinates, or None where that cannot be proved right.

    The search below may guess; the last check makes it sound: all coordinates lie inside the shape, and a number has
    only one such representation.
    """
    numbering = contiguous_strides(list(shape))
    live = [dim for dim, extent in enumerate(shape) if extent != 1]
    starts: list[Size] = [0] * len(shape)
    rest = placement.offset
    for dim in live:
        if rest == 0:
            break
        starts[dim], rest = divide_with_rest(rest, numbering[dim])
    if rest != 0:
        return None

    steps: list[list[Step]] = [[] for _ in shape]
    for order, axis in enumerate(placement.axes):
        extent, stride = axis.extent, axis.stride
        for part in range(len(live), -1, -1):
            found = _fit(extent, stride, shape, numbering, starts, live)
            if found is None:
                return None
            dim, inner, step = found
            steps[dim].append(Step(inner, step, axis.dim, (order, part)))
            remaining = divide(extent, inner)
            if remaining is None:
                return None
            if remaining == 1:
                break
            extent, stride = remaining, multiply(stride, inner)
        else:
            return None

    for dim, extent in enumerate(shape):
        if not is_nonnegative(starts[dim]) or not is_nonnegative(
            subtract(extent, add(last_of(starts[dim], steps[dim]), 1))
        ):
            return None
    return Coordinates(starts, steps)


def _fit(
    extent: Size, stride: Size, shape: Sequence[Size], numbering: list[Size], starts: list[Size], live: list[int]
) -> tuple[int, Size, Size] | None:
    """The dimension that an axis steps through, how much of the axis stays inside it, and its step there."""
    if stride == 0:
        return None
    for dim in live:
        step = divide(stride, numbering[dim])
        if step is None:
            continue
        reach = add(starts[dim], multiply(step, subtract(extent, 1)))
        if is_nonnegative(subtract(shape[dim], add(reach, 1))):
            return dim, extent, step
        inner = divide(shape[dim], step)
        if inner is not None and inner != 1 and divide(extent, inner) is not None:
            return dim, inner, step
    return None


def last_of(start: Size, steps: Sequence[Step]) -> Size:
    """The largest coordinate that these steps reach."""
    for step in steps:
        start = add(start, multiply(step.step, subtract(step.extent, 1)))
    return start


def from_coordinates(source: Node, coordinates: Coordinates, shape: Sequence[Size]) -> Placement:
    """Number coordinates again, in the row-major numbering of `shape`."""
    numbering = contiguous_strides(list(shape))
    offset: Size = 0
    ordered: list[tuple[tuple[int, int], Axis]] = []
    for dim, unit in enumerate(numbering):
        offset = add(offset, multiply(coordinates.starts[dim], unit))
        for step in coordinates.steps[dim]:
            ordered.append((step.order, Axis(step.extent, multiply(step.step, unit), step.dim)))
    ordered.sort(key=lambda item: item[0])
    return Placement(source, tuple(axis for _, axis in ordered), offset)


# ------------------------------------------------------------------------------------------------ what each op moves
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


# ------------------------------------------------------------------------------------------- do placements ever meet?
def disjoint(placements: Placements, shape: Sequence[Size]) -> bool:
    """Provably no two placements cover one element, and none covers an element twice."""
    boxes: list[list[tuple[Size, Size]]] = []
    for placement in placements:
        found = to_coordinates(placement, shape)
        if found is None:
            return False
        boxes.append([(start, last_of(start, steps)) for start, steps in zip(found.starts, found.steps, strict=True)])
    unproved = [(i, j) for i in range(len(boxes)) for j in range(i) if not any(map(_apart, boxes[i], boxes[j]))]
    return not unproved or _disjoint_in_rows(placements, shape)


_LARGEST_ROW = 1 << 17
"""Elements that are counted one by one at most; no model's row is wider."""


def _apart(a: tuple[Size, Size], b: tuple[Size, Size]) -> bool:
    """Two closed ranges do not meet."""
    return is_nonnegative(subtract(a[0], add(b[1], 1))) or is_nonnegative(subtract(b[0], add(a[1], 1)))


def _disjoint_in_rows(placements: Placements, shape: Sequence[Size]) -> bool:
    """Interleaved placements: counted exactly inside the static trailing dimensions."""
    width = 1
    for extent in reversed(shape):
        if not isinstance(extent, int) or width * extent > _LARGEST_ROW:
            break
        width *= extent
    taken: list[tuple[int, int]] = []
    for placement in placements:
        inner = []
        for axis in placement.axes:
            # An axis that steps by whole rows cannot leave its place inside the row.
            if divide(axis.stride, width) is None:
                if not isinstance(axis.extent, int) or not isinstance(axis.stride, int):
                    return False
                inner.append((axis.extent, axis.stride))
        _, start = divide_with_rest(placement.offset, width)
        if not isinstance(start, int):
            return False
        taken += runs(start, inner)
    return gaps(taken, width) is not None


def runs(start: int, axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The elements `start + sum(i_a * stride_a)` as (first, length) runs of neighbours."""
    length = 1
    remaining = sorted(axes, key=lambda axis: axis[1])
    while remaining and remaining[0][1] == length:
        length *= remaining.pop(0)[0]
    firsts = [start]
    for extent, stride in remaining:
        firsts = [first + i * stride for i in range(extent) for first in firsts]
    return [(first, length) for first in firsts]


def gaps(taken: list[tuple[int, int]], width: int) -> int | None:
    """How many of `width` elements no run covers; None if two runs meet or one leaves the row."""
    position = covered = 0
    for first, length in sorted(taken):
        if first < position or first + length > width:
            return None
        position = first + length
        covered += length
    return width - covered
