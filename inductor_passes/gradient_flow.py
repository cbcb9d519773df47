"""Where a backward call's gradients go by data movement alone, and in words why they get no further.

Looks only. `packed_views` asks: what is each node made of, does a gradient have another use, and why was nothing found.
"""

import heapq
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from inductor_passes.moves import KEEP_NUMBERING, MOVES, is_zero, permutation
from inductor_passes.registry import PackedVariant
from inductor_passes.report import location
from inductor_passes.sizes import Size, add, product, same, shape_of
from inductor_passes.views import Placements, whole

aten = torch.ops.aten


@dataclass(frozen=True)
class Left:
    """Why a backward call, or one operand of it, is left as it was: a reason code and words."""

    reason: str
    detail: str
    operand: str = ""


_SPREADS = {
    aten.slice_scatter.default,
    aten.slice_backward.default,
    aten.select_scatter.default,
    aten.select_backward.default,
    aten.as_strided_scatter.default,
    aten.constant_pad_nd.default,
    aten.add.Tensor,
}
"""Ops that can leave zeros between what they place."""


DTYPE_ONLY = {
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}
"""Ops that ask a tensor for its dtype and device alone."""
_COPY_PRECISION = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}
_CONSUMERS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution_backward.default}
"""What a projection's backward hands the row's gradient to; beside it a sum, if it has a bias."""


def _elements(form: Placements) -> Size:
    """How many elements placements cover, if no two meet."""
    total: Size = 0
    for placement in form:
        total = add(total, product(axis.extent for axis in placement.axes))
    return total


@dataclass
class Flow:
    """Everything that a call's gradients flow into by data movement alone."""

    gradients: dict[Node, str]
    forms: dict[Node, Placements] = field(default_factory=dict)
    others: dict[Node, Placements] = field(default_factory=dict)
    stops: list[tuple[Node, Node]] = field(default_factory=list)

    def describe(self, node: Node) -> Placements:
        """A node's placements; what holds none of the gradients is one opaque piece, or nothing if it is zero or
        undefined."""
        form = self.forms.get(node)
        if form is None:
            form = self.others.get(node)
        if form is None:
            form = self.others[node] = self._describe_other(node)
        return form

    def _describe_other(self, node: Node) -> Placements:
        if is_zero(node) or node.target is aten.empty.memory_format:
            return ()
        # Where a tensor of others is zero, it leaves room for the gradients; only then is it worth taking apart.
        if node.target in _SPREADS or node.target in KEEP_NUMBERING or permutation(node) is not None:
            form = MOVES[node.target](node, self.describe)
            if form is not None and not same(_elements(form), product(shape_of(node))):
                return form
        return (whole(node),)


def follow(gradients: dict[Node, str], position: dict[Node, int]) -> tuple[Flow, list[Node]]:
    """Sweep forward from the gradients; returns the flow and the nodes it reached, in graph order."""
    flow = Flow(gradients, {g: (whole(g),) for g in gradients})
    reached: list[Node] = []
    queued = set(gradients)
    heap = [(position[g], g) for g in gradients]
    heapq.heapify(heap)
    while heap:
        _, node = heapq.heappop(heap)
        if node not in gradients:
            form = MOVES[node.target](node, flow.describe)
            if form is None:
                flow.stops += [(source, node) for source in node.all_input_nodes if source in queued]
                continue
            flow.forms[node] = form
            reached.append(node)
        for user in node.users:
            if user in queued or user.target in DTYPE_ONLY:
                continue
            if user.target in MOVES:
                queued.add(user)
                heapq.heappush(heap, (position[user], user))
            else:
                flow.stops.append((node, user))
    return flow, reached


def other_use(gradient: Node, root: Node, flow: Flow) -> Node | None:
    """A use of the gradient that does not go into `root` by data movement alone."""
    stack, seen = [gradient], {root}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.target in DTYPE_ONLY:
                continue
            if user is not root and user not in flow.forms:
                return user
            stack.append(user)
    return None


def describe_use(user: Node) -> str:
    """A use in words."""
    return "the graph's output" if user.op == "output" else f"{user.target} ({user.name})"


def _describe_computation(user: Node, variant: PackedVariant) -> str:
    """What computes, by the line of the user's code that it is the backward of (autograd notes it), if that is known:
    nobody wrote the `neg` that a division's backward has."""
    where = location(user, variant) if user.op == "call_function" else ""
    return f"the backward of {where} ({user.target}, {user.name})" if where else describe_use(user)


def why_none(flow: Flow, refused: list[Left], variant: PackedVariant) -> Left:
    """The most telling of the reasons why no row was found."""
    for code in ("overlap", "dynamic_row_width", "head_layout", "used_elsewhere", "not_token_rows", "cast_between"):
        for left in refused:
            if left.reason == code:
                return left
    ends: dict[str, Node] = {}
    sources: dict[str, Node] = {}
    for source, user in flow.stops:
        for placement in flow.describe(source):
            name = flow.gradients.get(placement.source)
            bias = name in ends and ends[name].target is aten.sum.dim_IntList and user.target in _CONSUMERS
            if name is not None and (name not in ends or bias):
                ends[name], sources[name] = user, source
    if not ends:
        return Left("split_elsewhere", "the gradients are not used in this graph")
    for name, user in ends.items():
        code = _code(sources[name], user)
        if code != "computed_between":
            return Left(code, f"the gradient of {name} goes through {describe_use(user)} first")
    if all(user.op == "output" for user in ends.values()):
        return Left("split_elsewhere", "the gradients leave the graph one by one: the split is in another graph")
    if (
        len(ends) > 1
        and len(set(ends.values())) == len(ends)
        and all(user.target in _CONSUMERS for user in ends.values())
    ):
        places = "; ".join(f"{name}: {describe_use(user)}" for name, user in sorted(ends.items()))
        return Left("separate_rows", f"each gradient goes to a place of its own ({places})")
    places = "; ".join(f"{name}: {_describe_computation(user, variant)}" for name, user in sorted(ends.items()))
    return Left("computed_between", f"something computes between the split and the op ({places})")


def _code(source: Node, user: Node) -> str:
    """The reason code of a gradient that stops being mere data movement at `user`."""
    if user.target in _COPY_PRECISION:
        return "cast_between"
    if user.target is aten.add.Tensor:
        return "overlap"
    if user.target in MOVES:
        known = all(isinstance(extent, int) for extent in shape_of(source)[2:])
        return "not_token_rows" if known else "dynamic_row_width"
    return "computed_between"


def why_not(flow: Flow, name: str, variant: PackedVariant) -> Left:
    """Why one operand's gradient is not in a row that others are in."""
    for source, user in flow.stops:
        if any(flow.gradients.get(placement.source) == name for placement in flow.describe(source)):
            if user.target in _CONSUMERS:
                return Left("separate_rows", f"the gradient of {name} goes elsewhere ({describe_use(user)})", name)
            code = _code(source, user)
            what = _describe_computation(user, variant) if code == "computed_between" else describe_use(user)
            return Left(code, f"the gradient of {name} goes through {what} first", name)
    return Left("separate_rows", f"the gradient of {name} does not reach the row", name)
