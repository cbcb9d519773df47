"""The pass: query/key heads that are repeated in front of the op become the op's own grouped heads.

    before                                            after
    q4 = view(clone(expand(unsqueeze(q, 3))))         o = fwd(q, k, v, ...)
    o = fwd(q4, k4, v, ...)                           dq, dk, dv = bwd(..., q, k, v, ...)
    dq4, dk4, dv = bwd(..., q4, k4, v, ...)
    dq = sum(view(dq4, [B, T, H, r, K]), [3])

`repeat_interleave`, `expand` + `reshape` and anything else that reads head h // r is understood (`repeat`, which reads
head h % H, is not the same and stays). The sum over a group then happens inside the op, in its accumulators: more
accurate than a sum in a low precision, so not bitwise the same there.

Conditions: every grouped operand is repeated, by the same factor; in the backward every one of their gradients that is
used goes to the sum over its group and nowhere else; outputs of the forward whose size changes are used by the
backward alone; symbolic sizes of new views can be had from the source or from an operand that is not repeated. Heads
repeated in several steps are folded step by step.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from inductor_passes.edits import call, erase_unused, outputs_of, outputs_stay_inside, same_sizes, update_value
from inductor_passes.moves import KEEP_NUMBERING, MOVES, arguments, permutation
from inductor_passes.operand_views import is_private, lies, reshaped
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import Size, contiguous_strides, divide, multiply, product, same, shape_of
from inductor_passes.views import Placements, to_coordinates, whole

aten = torch.ops.aten


class Read(NamedTuple):
    """One loop of a tensor over the numbering of what it is read from; stride 0 reads the same again."""

    extent: Size
    stride: Size


@dataclass(frozen=True)
class Repeated:
    """An operand [B,T,H*r,K] that repeats each head of `source` r times; `order` makes [B,T,H,K] of the source."""

    source: Node
    shape: list[Size]
    order: list[int]
    heads: int
    factor: int


@dataclass(frozen=True)
class Summed:
    """The node that sums a gradient over the groups, and the order in which it keeps the gradient's dimensions."""

    gradient: Node
    total: Node
    order: list[int]


@dataclass(frozen=True)
class GroupPlan:
    """One forward call, its backward calls, and what to replace."""

    fwd: Node | None
    bwds: list[Node]
    operands: dict[str, Repeated]
    sums: list[Summed]
    fwd_value: tuple[torch.Tensor, ...] | None = None


# ------------------------------------------------------------------------------------------------------------ looking
def _by_dimension(reads: list[Read], shape: list[Size]) -> list[list[Read]] | None:
    """The loops that make up each dimension of `shape`, taking loops apart where a dimension ends inside one."""
    rest = list(reads)
    dims: list[list[Read]] = []
    for extent in reversed(shape):
        mine: list[Read] = []
        need: Size = extent
        while need != 1:
            if not rest:
                return None
            read = rest.pop()
            fits = divide(need, read.extent)
            if fits is not None:
                mine.insert(0, read)
                need = fits
                continue
            outer = divide(read.extent, need)
            if outer is None:
                return None
            mine.insert(0, Read(need, read.stride))
            rest.append(Read(outer, multiply(read.stride, need)))
            need = 1
        dims.insert(0, mine)
    return dims if not rest else None


def _read_through(node: Node, reads: list[Read]) -> list[Read] | None:
    """The loops of a view-like node's output, given those of its input."""
    source = node.args[0]
    assert isinstance(source, Node)
    if node.target is aten.expand.default:
        before, after = shape_of(source), shape_of(node)
        dims = _by_dimension(reads, before)
        if dims is None:
            return None
        new = len(after) - len(before)
        result: list[Read] = []
        for dim, extent in enumerate(after):
            if dim < new or not same(extent, before[dim - new]):
                result.append(Read(extent, 0))
            else:
                result += dims[dim - new]
        return [read for read in result if read.extent != 1]
    order = permutation(node)
    if order is not None:
        dims = _by_dimension(reads, shape_of(source))
        return None if dims is None else [read for dim in order for read in dims[dim]]
    if node.target in KEEP_NUMBERING and node.meta["val"].dtype == source.meta["val"].dtype:
        return reads
    return None


def _joined(reads: list[Read]) -> list[Read]:
    result: list[Read] = []
    for read in reads:
        if result and same(result[-1].stride, multiply(read.stride, read.extent)):
            result[-1] = Read(multiply(result[-1].extent, read.extent), read.stride)
        else:
            result.append(read)
    return result


_ADD_ONES = {aten.unsqueeze.default, aten.view.default}


def _without_ones(node: Node) -> list[Size]:
    return [extent for extent in shape_of(node) if extent != 1]


def find_repeated(operand: Node) -> Repeated | None:
    """What an operand [B,T,H*r,K] repeats the heads of, if it does. Looks only."""
    chain: list[Node] = []
    node = operand
    while not chain or chain[-1].target is not aten.expand.default:
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            return None
        if node.target not in KEEP_NUMBERING and permutation(node) is None:
            return None
        chain.append(node)
        node = node.args[0]
    while node.target in _ADD_ONES and _without_ones(node) == _without_ones(node.args[0]):  # type: ignore[arg-type]
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    shape = shape_of(operand)
    source_shape = shape_of(node)
    strides = contiguous_strides(source_shape)
    reads: list[Read] | None = [Read(n, s) for n, s in zip(source_shape, strides, strict=True) if n != 1]
    for step in reversed(chain):
        reads = None if reads is None else _read_through(step, reads)
    if reads is None or len(shape) != 4:
        return None
    dims = _by_dimension(reads, shape)
    if dims is None:
        return None
    heads = _joined(dims[2])
    if not heads or heads[-1].stride != 0 or not isinstance(heads[-1].extent, int) or len(heads) > 2:
        return None
    kept = [_joined(dims[0]), _joined(dims[1]), heads[:-1], _joined(dims[3])]
    if any(len(loops) > 1 or any(loop.stride == 0 for loop in loops) for loops in kept):
        return None
    count = heads[0].extent if len(heads) == 2 else 1
    if not isinstance(count, int):
        return None
    wanted = [shape[0], shape[1], count, shape[3]]
    order = _source_order(source_shape, wanted, kept)
    return None if order is None else Repeated(node, wanted, order, count, heads[-1].extent)


def _source_order(source_shape: list[Size], wanted: list[Size], kept: list[list[Read]]) -> list[int] | None:
    """The permutation that makes [B,T,H,K] of the source, or [] where a view alone does."""
    expected = contiguous_strides(wanted)
    if all(not loops or same(loops[0].stride, step) for loops, step in zip(kept, expected, strict=True)):
        return []
    strides = contiguous_strides(source_shape)
    if len(source_shape) != 4:
        return None
    order: list[int] = []
    for loops in kept:
        found = [
            dim
            for dim in range(4)
            if dim not in order
            and (
                (not loops and source_shape[dim] == 1)
                or (loops and same(source_shape[dim], loops[0].extent) and same(strides[dim], loops[0].stride))
            )
        ]
        if not found:
            return None
        order.append(found[0])
    return order


def find_group_sum(gradient: Node, factor: int) -> Summed | None:
    """The sum over groups of `factor` heads that a gradient [B,T,H*r,K] goes to, if nowhere else. Looks only."""
    form: Placements = (whole(gradient),)
    node = gradient
    while True:
        if len(node.users) != 1:
            return None
        user = next(iter(node.users))
        if user.target is aten.sum.dim_IntList:
            break
        if user.target not in MOVES:
            return None
        known = {node: form}

        def describe(operand: Node, known: dict[Node, Placements] = known) -> Placements:
            return known.get(operand) or (whole(operand),)

        moved = MOVES[user.target](user, describe)
        if moved is None or len(moved) != 1 or moved[0].source is not gradient:
            return None
        if not same(product(shape_of(user)), product(shape_of(gradient))):
            return None
        node, form = user, moved
    a = arguments(user)
    if a["self"] is not node or user.meta["val"].dtype != gradient.meta["val"].dtype:
        return None
    shape = shape_of(node)
    found = to_coordinates(form[0], shape)
    if found is None or not a["dim"]:
        return None
    reduced = {int(dim) % len(shape) for dim in a["dim"]}  # type: ignore[attr-defined]
    steps = sorted((step.order, step, dim) for dim, mine in enumerate(found.steps) for step in mine)
    heads = [(step.extent, dim in reduced) for _, step, dim in steps if step.dim == 2]
    if any(step.dim != 2 for _, step, dim in steps if dim in reduced):
        return None
    inner = product(extent for extent, is_reduced in heads if is_reduced)
    split = [is_reduced for _, is_reduced in heads]
    if not same(inner, factor) or split != sorted(split):  # the repeats are the inner loop: kept heads come first
        return None
    order: list[int] = []
    for dim in range(len(shape)):
        if dim in reduced:
            continue
        dims = [step.dim for step in sorted(found.steps[dim], key=lambda step: step.order)]
        order += [d for d in dims if not order or order[-1] != d]
    if len(set(order)) != len(order):
        return None
    missing = [d for d in range(4) if d not in order]
    merged = [step for mine in found.steps for step in mine]
    if missing and order != sorted(order):
        return None  # sizes of 1 could stand anywhere; only the plain order is sure
    if len(merged) != len({(step.dim, dim in reduced) for _, step, dim in steps}):
        return None
    return Summed(gradient, user, [] if order == sorted(order) else order)


def find_grouped_heads(variant: PackedVariant, fwd: Node | None, bwds: list[Node]) -> GroupPlan | None:
    """What folding the repeated heads of one call takes, or None if it cannot be done. Looks only."""
    callers = [node for node in (fwd, *bwds) if node is not None]
    if not variant.grouped_operands or not callers:
        return None
    operands: dict[str, Repeated] = {}
    given = [arguments(node) for node in callers]
    for name in variant.grouped_operands:
        operand = given[0][name]
        if not isinstance(operand, Node) or any(a[name] is not operand for a in given):
            return None
        found = find_repeated(operand)
        if found is None or (bwds and not is_private(found.source)):
            return None
        operands[name] = found
    others = _other_operands(variant, callers[0])
    if any(not found.order and reshaped(lies(found.source), found.shape) is None for found in operands.values()):
        return None  # no view of the source has that shape
    if not all(found.order or _can_view(found.shape, [found.source, *others]) for found in operands.values()):
        return None
    if len({(found.heads, found.factor) for found in operands.values()}) != 1:
        return None
    factor = next(iter(operands.values())).factor
    sums: list[Summed] = []
    for bwd in bwds:
        outputs = outputs_of(bwd)
        for name, index in zip(variant.operands, variant.gradients, strict=True):
            gradient = outputs.get(index)
            if name not in operands or gradient is None or not gradient.users:
                continue
            total = find_group_sum(gradient, factor)
            if total is None or not _can_view(shape_of(total.total), [operands[name].source, *others]):
                return None
            sums.append(total)
    plan = GroupPlan(fwd, bwds, operands, sums)
    if fwd is not None:
        replaced = {given[0][name]: _fake_source(found, others) for name, found in operands.items()}
        value = outputs_stay_inside(fwd, bwds, replaced)  # type: ignore[arg-type]
        return None if value is None else replace(plan, fwd_value=value)
    return plan


def _fake_mode(values: object) -> torch._subclasses.FakeTensorMode:
    return next(x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor))


def _other_operands(variant: PackedVariant, caller: Node) -> list[Node]:
    """The operands of a call whose heads are not repeated: they have the batch and token axes that all have."""
    given = arguments(caller)
    found = [given[name] for name in variant.operands if name not in variant.grouped_operands]
    return [operand for operand in found if isinstance(operand, Node)]


def _size_from(extent: Size, sources: list[Node]) -> tuple[Node, int] | None:
    """A tensor and the dimension of it that has this symbolic size."""
    return next(((x, dim) for x in sources for dim, n in enumerate(shape_of(x)) if same(n, extent)), None)


def _can_view(wanted: list[Size], sources: list[Node]) -> bool:
    """Whether a view's shape can be written with sizes of these tensors; one may be left to be inferred."""
    return sum(not isinstance(n, int) and _size_from(n, sources) is None for n in wanted) <= 1


def _fake_source(found: Repeated, others: list[Node]) -> torch.Tensor:
    value = found.source.meta["val"]
    with _fake_mode(value):
        if found.order:
            return value.permute(found.order)
        if same_sizes(found.source, found.shape):
            return value
        sources = [found.source, *others]
        shape: list[int | torch.SymInt] = []
        for extent in found.shape:
            known = None if isinstance(extent, int) else _size_from(extent, sources)
            inferred = extent if isinstance(extent, int) else -1
            shape.append(inferred if known is None else known[0].meta["val"].shape[known[1]])
        return value.reshape(shape)


# ------------------------------------------------------------------------------------------------------------ editing
def replace_grouped_heads(graph: Graph, plan: GroupPlan, variant: PackedVariant) -> None:
    """Do what a plan says."""
    callers = [node for node in (plan.fwd, *plan.bwds) if node is not None]
    others = _other_operands(variant, callers[0])
    for name, found in plan.operands.items():
        old = arguments(callers[0])[name]
        assert isinstance(old, Node)
        with graph.inserting_before(callers[0]):
            new = _take_source(graph, old, found, others)
        for node in callers:
            positions = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
            if name in node.kwargs:
                node.update_kwarg(name, new)
            else:
                node.update_arg(positions.index(name), new)
    for node in callers:
        update_value(node, value=plan.fwd_value if node is plan.fwd else None)
        for item in outputs_of(node).values():
            update_value(item)
    like = next(iter(plan.operands.values())).source
    for summed in plan.sums:
        total = summed.total
        with graph.inserting_before(total):
            new = summed.gradient
            if summed.order:
                new = call(graph, total, aten.permute.default, (new, summed.order))
            if not same_sizes(new, shape_of(total)):
                # Sizes come from the forward's operand: a use of the gradient for its size would look like a use.
                shape = _shape_argument(graph, total, [like, *others], shape_of(total))
                new = call(graph, total, aten.view.default, (new, shape))
        total.replace_all_uses_with(new)
        erase_unused(graph, total)
    further = find_grouped_heads(variant, plan.fwd, plan.bwds)
    if further is not None:  # what was folded was repeated itself
        replace_grouped_heads(graph, further, variant)


def _take_source(graph: Graph, like: Node, found: Repeated, others: list[Node]) -> Node:
    source = found.source
    if found.order:
        if found.order == [0, 1, 2, 3]:
            return source
        return call(graph, like, aten.permute.default, (source, found.order))
    if same_sizes(source, found.shape):
        return source
    return call(graph, like, aten.view.default, (source, _shape_argument(graph, like, [source, *others], found.shape)))


def _shape_argument(graph: Graph, like: Node, sources: list[Node], wanted: list[Size]) -> list[int | Node]:
    """A view's shape, with symbolic sizes taken from dimensions of these tensors."""
    result: list[int | Node] = []
    for extent in wanted:
        if isinstance(extent, int):
            result.append(extent)
            continue
        known = _size_from(extent, sources)
        result.append(-1 if known is None else call(graph, like, aten.sym_size.int, known))
    return result
