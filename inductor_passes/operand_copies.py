"""The pass: `.contiguous()`, `.clone()` and copying reshapes in front of the op are dropped.

    before                                     after
    c = clone(slice(row, ...))                 q = view(slice(row, ...), [B, T, H, K])
    q = view(c, [B, T, H, K])
    o = fwd(q, ...)                            o = fwd(q, ...)

The op reads its operands at any strides, and the row is kept for the backward once, in place of the copies. Bitwise the
same.

Conditions: the views behind the copy can be made of what was copied, and the last axis stays dense; what was copied is
computed in this graph (an input of the graph may be changed by the caller between forward and backward); the calls'
copies together cover at least half of the tensor they come from (else the backward would keep a large tensor for a
small copy).
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from inductor_passes.edits import call, update_value
from inductor_passes.moves import arguments, permutation
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import Size, divide, multiply, same, shape_of, size

aten = torch.ops.aten

_RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_SQUEEZES = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
_COPIES = {aten.clone.default, aten.contiguous.default}


@dataclass(frozen=True)
class Strided:
    """How a view lies in memory (where it starts does not matter here)."""

    shape: list[Size]
    strides: list[Size]


@dataclass(frozen=True)
class CopyPlan:
    """One operand of the calls, what it is copied from, and the views to make of that instead (outermost last)."""

    name: str
    operand: Node
    source: Node
    views: tuple[Node, ...]


# ------------------------------------------------------------------------------------------------------------ looking
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


def _through(node: Node, value: Strided) -> Strided | None:
    """What a view node makes of a tensor that lies as `value`; None if it is no view or could not be one of this."""
    shape = shape_of(node)
    if node.target in _RESHAPES or node.target in _SQUEEZES or node.target is aten.unsqueeze.default:
        return _reshaped(value, shape)
    if node.target is aten.alias.default:
        return value
    order = permutation(node)
    if order is not None:
        return Strided([value.shape[d] for d in order], [value.strides[d] for d in order])
    if node.target not in (aten.slice.Tensor, aten.select.int):
        return None
    a = arguments(node)
    dim = int(a["dim"]) % len(value.shape)  # type: ignore[call-overload]
    strides = list(value.strides)
    if node.target is aten.select.int:
        del strides[dim]
    else:
        strides[dim] = multiply(strides[dim], size(a["step"]))  # type: ignore[arg-type]
    return Strided(shape, strides)


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target in _RESHAPES
        or node.target in _SQUEEZES
        or node.target in (aten.unsqueeze.default, aten.alias.default, aten.slice.Tensor, aten.select.int)
        or permutation(node) is not None
    )


def _root(node: Node) -> Node:
    """The tensor whose memory a chain of views shows."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def find_copy(name: str, operand: Node) -> CopyPlan | None:
    """The copy farthest from the op that can be dropped in front of one operand. Looks only."""
    best: CopyPlan | None = None
    views: list[Node] = []
    node = operand
    while True:
        if _is_view(node):
            views.append(node)
            node = node.args[0]  # type: ignore[assignment]
            continue
        if node.op != "call_function" or node.target not in _COPIES:
            return best
        source = node.args[0]
        assert isinstance(source, Node)
        root, value = _root(source), source.meta["val"]
        if value.dtype != operand.meta["val"].dtype or root.op != "call_function":
            return best
        lies: Strided | None = Strided(shape_of(source), [size(s) for s in value.stride()])
        for view in reversed(views):
            lies = None if lies is None else _through(view, lies)
        if lies is None or not (lies.strides[-1] == 1 or lies.shape[-1] == 1):
            return best
        best = CopyPlan(name, operand, source, tuple(reversed(views)))
        node = source


def find_operand_copies(variant: PackedVariant, fwd: Node | None, bwds: list[Node]) -> list[CopyPlan]:
    """The copies in front of one call that can be dropped. Looks only."""
    if fwd is None:
        return []
    given = [arguments(node) for node in (fwd, *bwds)]
    plans = []
    for name in variant.operands:
        operand = given[0][name]
        if isinstance(operand, Node) and all(a[name] is operand for a in given):
            plan = find_copy(name, operand)
            if plan is not None:
                plans.append(plan)
    kept: dict[Node, int] = {}
    for plan in plans:
        kept[_root(plan.source)] = kept.get(_root(plan.source), 0) + _count(plan.operand)
    return [plan for plan in plans if 2 * kept[_root(plan.source)] >= _count(_root(plan.source))]


def _count(node: Node) -> int:
    count = node.meta["val"].numel()
    if isinstance(count, torch.SymInt):
        return int(count.node.hint) if count.node.has_hint() else 0
    return int(count)


# ------------------------------------------------------------------------------------------------------------ editing
def replace_operand_copies(graph: Graph, plans: list[CopyPlan], fwd: Node, bwds: list[Node]) -> None:
    """Let the calls read what was copied."""
    for plan in plans:
        with graph.inserting_before(fwd):
            new = plan.source
            for view in plan.views:
                target = aten.view.default if view.target in _RESHAPES else view.target
                new = call(graph, view, target, (new, *view.args[1:]), dict(view.kwargs))
        for node in (fwd, *bwds):
            node.replace_input_with(plan.operand, new)
    for node in (fwd, *bwds):
        update_value(node)
