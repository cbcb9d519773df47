"""The pass: `.contiguous()`, `.clone()` and copying reshapes in front of the op are dropped.

    before                                     after
    c = clone(slice(row, ...))                 q = view(slice(row, ...), [B, T, H, K])
    q = view(c, [B, T, H, K])
    o = fwd(q, ...)                            o = fwd(q, ...)

The op reads its operands at any strides, and the row is kept for the backward once, in place of the copies. Bitwise the
same.

Conditions: the views behind the copy can be made of what was copied, and the last axis stays dense; what was copied is
computed in this graph and not returned (else the caller may change it between forward and backward); the calls' copies
together cover at least half of the tensor they come from (else the backward would keep a large tensor for a small
copy).
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from inductor_passes.edits import update_value
from inductor_passes.moves import arguments
from inductor_passes.operand_views import Strided, chain, is_private, lies, remade, through, viewed
from inductor_passes.registry import PackedVariant

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten.contiguous.default}


@dataclass(frozen=True)
class CopyPlan:
    """One operand of the calls, what it is copied from, and the views to make of that instead (outermost last)."""

    name: str
    operand: Node
    source: Node
    views: tuple[Node, ...]


# ------------------------------------------------------------------------------------------------------------ looking
def find_copy(name: str, operand: Node) -> CopyPlan | None:
    """The copy farthest from the op that can be dropped in front of one operand. Looks only."""
    best: CopyPlan | None = None
    views: list[Node] = []
    node = operand
    while True:
        if (below := viewed(node)) is not None:
            views.append(node)
            node = below
            continue
        if node.op != "call_function" or node.target not in _COPIES:
            return best
        source = node.args[0]
        assert isinstance(source, Node)
        if source.meta["val"].dtype != operand.meta["val"].dtype or not is_private(source):
            return best
        found: Strided | None = lies(source)
        for view in reversed(views):
            found = None if found is None else through(view, found)
        if found is None or not found.dense_last:
            return best
        best = CopyPlan(name, operand, source, tuple(reversed(views)))
        node = source


def shared_operands(variant: PackedVariant, callers: list[Node]) -> dict[str, Node]:
    """The operands, by name, that a forward call and all its backward calls take as the same node."""
    given = [arguments(node) for node in callers]
    found = {name: given[0][name] for name in variant.operands}
    return {
        name: operand
        for name, operand in found.items()
        if isinstance(operand, Node) and all(a[name] is operand for a in given)
    }


def find_operand_copies(variant: PackedVariant, fwd: Node | None, bwds: list[Node]) -> list[CopyPlan]:
    """The copies in front of one call that can be dropped. Looks only."""
    if fwd is None:
        return []
    found = [find_copy(name, operand) for name, operand in shared_operands(variant, [fwd, *bwds]).items()]
    plans = [plan for plan in found if plan is not None]
    kept: dict[Node, int] = {}
    for plan in plans:
        root = chain(plan.source)[-1]
        kept[root] = kept.get(root, 0) + count(plan.operand)
    return [plan for plan in plans if 2 * kept[chain(plan.source)[-1]] >= count(chain(plan.source)[-1])]


def count(node: Node) -> int:
    """Elements of a node's tensor (symbolic sizes: their hints)."""
    number = node.meta["val"].numel()
    if isinstance(number, torch.SymInt):
        return int(number.node.hint) if number.node.has_hint() else 0
    return int(number)


# ------------------------------------------------------------------------------------------------------------ editing
def replace_operand_copies(graph: Graph, plans: list[CopyPlan], fwd: Node, bwds: list[Node]) -> None:
    """Let the calls read what was copied."""
    made: dict[tuple[Node, Node], Node] = {}
    for plan in plans:
        with graph.inserting_before(fwd):
            new = remade(graph, plan.source, list(plan.views), made)
        for node in (fwd, *bwds):
            node.replace_input_with(plan.operand, new)
    for node in (fwd, *bwds):
        update_value(node)
