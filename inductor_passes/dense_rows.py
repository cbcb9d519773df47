"""The pass: a row that the op could not read where it lies is made dense once, in place of copies of its parts.

    before                                          after
    row = permute(silu(conv), [0, 2, 1])            row = dense_row(permute(silu(conv), [0, 2, 1]))
    q, k, v = split(row, ...)                       q, k, v = split(row, ...)
    o = fwd(q, k, v, ...)                           o = fwd(q, k, v, ...)

Ops read operands at any strides but one: channels have to be dense. Behind a channels-first convolution they are not,
and the op would copy each operand, in the forward and in the backward again. Inductor may also choose such a layout by
itself, since it drops a `.contiguous()` that no consumer insists on. `inductor_passes::dense_row` is the consumer that
does: under Inductor it costs nothing where the row is computed in this graph (the kernel that computes the row writes
it dense), elsewhere it is one copy. Bitwise the same.

Conditions: the operand's last axis is not dense as traced, or Inductor is free to lay out the row and something
transposed is upstream; dense memory for the row makes the operand's channels dense; the call's operands cover at least
half of the row (else each of them is made dense alone).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from inductor_passes.edits import call, update_value
from inductor_passes.moves import aten, permutation
from inductor_passes.operand_copies import count, shared_operands
from inductor_passes.operand_views import Strided, chain, lies, remade, through
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import contiguous_strides, shape_of

lib = torch.library.Library("inductor_passes", "DEF")
lib.define("dense_row(Tensor x) -> Tensor", tags=(torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag))


def _dense_row(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _dense_row_fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


lib.impl("dense_row", _dense_row, "CompositeExplicitAutograd")
torch.library.register_fake("inductor_passes::dense_row", _dense_row_fake, lib=lib)
DENSE_ROW = torch.ops.inductor_passes.dense_row.default


def register_lowering() -> None:
    """Tell Inductor what `dense_row` is: a demand on its operand's layout. Call it where Inductor is loaded."""
    from torch._inductor import ir, lowering

    if DENSE_ROW in lowering.lowerings:
        return

    def lower(x: Any) -> Any:
        return ir.ExternKernel.require_contiguous(x)

    lowering.register_lowering(DENSE_ROW, type_promotion_kind=None)(lower)


@dataclass(frozen=True)
class DenseRow:
    """One tensor to make dense, and by operand the views to make of it (outermost last)."""

    row: Node
    views: dict[Node, tuple[Node, ...]]


# ------------------------------------------------------------------------------------------------------------ looking
_FIXED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    DENSE_ROW,
}
"""Ops (and all that are not torch's own) whose results Inductor lays out as they were traced."""


def _is_fixed(node: Node) -> bool:
    if node.op != "call_function" or node.target in _FIXED:
        return True
    return getattr(node.target, "namespace", "aten") not in ("aten", "prims")


def _may_be_transposed(root: Node) -> bool:
    """Whether Inductor could lay out `root` in another order than it was traced with.

    It gives a computed tensor the order of what it is computed from; so something transposed has to be upstream, with
    no op of fixed layout between.
    """
    stack, seen = [root], {root}
    while stack:
        node = stack.pop()
        if permutation(node) is not None or node.target is aten.convolution.default:
            return True
        if node is not root and _is_fixed(node):
            continue
        for source in node.all_input_nodes:
            if source not in seen and "val" in source.meta:
                seen.add(source)
                stack.append(source)
    return False


def not_dense(variant: PackedVariant, callers: list[Node]) -> tuple[str, ...]:
    """The operands that the op has to copy if nothing is done: those whose last axis is not dense, as traced."""
    return tuple(name for name, node in shared_operands(variant, callers).items() if not lies(node).dense_last)


def _made_dense(row: Node, views: list[Node]) -> Strided | None:
    """How the last of these views would lie if the row were dense."""
    shape = shape_of(row)
    found: Strided | None = Strided(shape, contiguous_strides(shape))
    for view in views:
        found = None if found is None else through(view, found)
    return found


def find_dense_rows(variant: PackedVariant, callers: list[Node], *, strides_hold: bool) -> list[DenseRow]:
    """The rows that one call needs dense. Looks only.

    strides_hold: whether the compiler keeps the strides that tensors were traced with (Inductor does not).
    """
    chosen: dict[Node, dict[Node, tuple[Node, ...]]] = {}
    for operand in dict.fromkeys(shared_operands(variant, callers).values()):
        nodes = chain(operand)
        root = nodes[-1]
        free = not strides_hold and not _is_fixed(root)
        if lies(operand).dense_last and not (free and _may_be_transposed(root)):
            continue
        for row in reversed(nodes):
            views = nodes[: nodes.index(row)][::-1]
            found = _made_dense(row, views)
            if found is not None and found.dense_last:
                chosen.setdefault(row, {})[operand] = tuple(views)
                break
    rows = []
    for row, views_by_operand in chosen.items():
        if 2 * sum(count(operand) for operand in views_by_operand) >= count(row):
            rows.append(DenseRow(row, views_by_operand))
        else:
            rows += [DenseRow(operand, {operand: ()}) for operand in views_by_operand]
    return rows


# ------------------------------------------------------------------------------------------------------------ editing
def replace_dense_rows(graph: Graph, rows: list[DenseRow], callers: list[Node]) -> None:
    """Make the rows dense and let the calls read their parts from there."""
    made: dict[tuple[Node, Node], Node] = {}
    for found in rows:
        with graph.inserting_before(callers[0]):
            new = call(graph, found.row, DENSE_ROW, (found.row,))
            for operand, views in found.views.items():
                part = remade(graph, new, list(views), made)
                for node in callers:
                    node.replace_input_with(operand, part)
    for node in callers:
        update_value(node)
