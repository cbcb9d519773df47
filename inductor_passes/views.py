"""Data movement, as an algebra: where each element of a tensor came from.

A tensor that only moves data is described by placements in the row-major numbering of its own (logical) shape:

    element  offset + sum(i_a * stride_a)   holds   element (i_0, i_1, ...) of `source`

and everything no placement covers is zero. A view that keeps the numbering (view, unsqueeze, clone, ...) keeps the
description, which is why it does not matter how user code spells a split: cat, slice_scatter, select_scatter, pad,
stack and sums of disjoint scatters all end as the same placements. Moves that change the numbering (permute, cat, ...)
take a placement apart into coordinates of the shape, move those, and number them again.

This file only describes; it edits nothing and asks nothing of the shape environment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch.fx import Node

from inductor_passes.sizes import (
    Size,
    add,
    contiguous_strides,
    divide,
    divide_with_rest,
    is_nonnegative,
    multiply,
    shape_of,
    subtract,
)


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
