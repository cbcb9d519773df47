"""The pass: gradients that are put together into one row become a backward op that writes the row.

    before                                         after
    dq, dk, dv, dg = bwd(...)                      drow, _, _, _, dg = bwd_row(..., row_width=W,
    row = cat([view(dq), view(dk), view(dv)], -1)      q_layout=[0, D, 1, 0], k_layout=..., v_layout=...)
    dx = mm(row, w)                                dx = mm(drow, w)

Any data movement between the gradients and the row is understood (see `views`), so only what ends up where counts, not
how it was spelled. Columns that others write (a gate's gradient, say) are written first and the op fills in its own:

    row = as_strided_scatter(empty([B, T, W]), dz, ...)
    drow = auto_functionalized_v2(bwd_row_, row=row, ...)

Columns that depend on the op itself (a gradient that a hook changed, or that has a second use) are written after it.

Conditions, each with the reason code of a call that fails it:
 1. the gradients meet in one tensor of this graph ("split_elsewhere", "separate_rows");
 2. on the way there nothing computes with them ("computed_between", "cast_between"), and none of them is used by
    anything else ("used_elsewhere": that one is copied into the row after the op, the others are packed);
 3. the row holds whole tokens, in order, in a number of elements that is known ("dynamic_row_width", "not_token_rows");
 4. heads lie at regular places with dense channels ("head_layout"), and no element is written twice ("overlap");
 5. something is saved: two gradients meet, or one meets columns that others write ("nothing_to_save").
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.edits import Extents, call, output, outputs_of, same_sizes
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import Size, add, divide, is_dense, multiply, product, same, shape_of
from inductor_passes.views import (
    KEEP_NUMBERING,
    MOVES,
    Axis,
    Placement,
    Placements,
    arguments,
    gaps,
    is_zero,
    permutation,
    runs,
    whole,
)

aten = torch.ops.aten

_WRITES = {
    aten.cat.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.slice_backward.default,
    aten.select_scatter.default,
    aten.select_backward.default,
    aten.as_strided_scatter.default,
    aten.constant_pad_nd.default,
    aten.add.Tensor,
    aten.clone.default,
    aten.contiguous.default,
    aten._reshape_copy.default,
}
"""Ops that make new memory: what a row can be replaced at."""


@dataclass(frozen=True)
class Columns:
    """Part of a token's row: starts at `offset`, loops (extent, stride) in elements, all static."""

    offset: int
    loops: tuple[tuple[int, int], ...]

    def runs(self) -> list[tuple[int, int]]:
        """As (first, length) runs of neighbouring elements."""
        return runs(self.offset, self.loops)


@dataclass(frozen=True)
class Foreign:
    """Columns of the row that the op does not write: the whole tensor `source`, token by token."""

    source: Node
    columns: Columns


@dataclass(frozen=True)
class RowPlan:
    """One backward call and the row it shall write.

    root: the node that is the row; layouts: [offset, stride_group, group_len, stride_in_group] by operand;
    before, after: columns of others that do not, or do, depend on the call; left: operands that are not packed, with
    why.
    """

    variant: PackedVariant
    bwd: Node
    root: Node
    row_width: int
    layouts: dict[str, list[int]]
    before: tuple[Foreign, ...]
    after: tuple[Foreign, ...]
    uncovered: int
    left: tuple["Left", ...] = ()


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


# ------------------------------------------------------------------------------------------------------------ looking
def _elements(form: Placements) -> Size:
    """How many elements placements cover, if no two meet."""
    total: Size = 0
    for placement in form:
        total = add(total, product(axis.extent for axis in placement.axes))
    return total


@dataclass
class _Flow:
    """Everything that a call's gradients flow into by data movement alone."""

    gradients: dict[Node, str]
    forms: dict[Node, Placements] = field(default_factory=dict)
    others: dict[Node, Placements] = field(default_factory=dict)
    stops: list[tuple[Node, Node]] = field(default_factory=list)

    def describe(self, node: Node) -> Placements:
        """A node's placements; what holds none of the gradients is one opaque piece, or nothing if it is zero."""
        form = self.forms.get(node)
        if form is None:
            form = self.others.get(node)
        if form is None:
            form = self.others[node] = self._describe_other(node)
        return form

    def _describe_other(self, node: Node) -> Placements:
        if is_zero(node):
            return ()
        # Where a tensor of others is zero, it leaves room for the gradients; only then is it worth taking apart.
        if node.target in _SPREADS or node.target in KEEP_NUMBERING or permutation(node) is not None:
            form = MOVES[node.target](node, self.describe)
            if form is not None and not same(_elements(form), product(shape_of(node))):
                return form
        return (whole(node),)


def _follow(gradients: dict[Node, str], position: dict[Node, int]) -> tuple[_Flow, list[Node]]:
    """Sweep forward from the gradients; returns the flow and the nodes it reached, in graph order."""
    flow = _Flow(gradients, {g: (whole(g),) for g in gradients})
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
            if user in queued:
                continue
            if user.target in MOVES:
                queued.add(user)
                heapq.heappush(heap, (position[user], user))
            else:
                flow.stops.append((node, user))
    return flow, reached


def find_packed_row(variant: PackedVariant, bwd: Node, position: dict[Node, int]) -> RowPlan | Left:
    """The row that the gradients of one backward call make up, or why there is none. Looks only.

    position: the place of every node in the graph.
    """
    outputs = outputs_of(bwd)
    gradients = {outputs[i]: name for name, i in zip(variant.operands, variant.gradients, strict=True) if i in outputs}
    gradients = {node: name for node, name in gradients.items() if node.users}
    if not gradients:
        return Left("no_gradient", "no gradient of " + ", ".join(variant.operands) + " is used")
    flow, reached = _follow(gradients, position)
    operands = arguments(bwd)
    lead = shape_of(operands[variant.operands[0]])[:2]  # type: ignore[arg-type]
    best: RowPlan | None = None
    refused: list[Left] = []
    for node in reached:
        if node.target not in _WRITES:
            continue
        plan = _plan(variant, bwd, node, flow, lead, position)
        if isinstance(plan, Left):
            refused.append(plan)
        elif best is None or len(plan.layouts) >= len(best.layouts):
            best = plan
    if best is None:
        return _why_none(flow, refused)
    # A lone gradient saves its own copy, but zeros have to be written around it where nothing else is.
    full = (best.before or best.after) and not best.uncovered
    worth = len(best.layouts) > 1 or full or 2 * _width(best, gradients) >= best.row_width
    known = {*best.layouts, *(left.operand for left in best.left)}
    missing = [_why_not(flow, name) for name in gradients.values() if name not in known]
    left = (*best.left, *missing)
    if not worth:
        alone = next(iter(best.layouts))
        first = next((f"; {part.detail}" for part in left), "")
        return Left(left[0].reason if left else "nothing_to_save", f"only {alone}'s gradient would be packed{first}")
    return replace(best, left=left)


def _width(plan: RowPlan, gradients: dict[Node, str]) -> int:
    """Elements of a token's row that the op writes itself."""
    return sum(
        int(node.meta["val"].shape[-1]) * int(node.meta["val"].shape[-2])
        for node, name in gradients.items()
        if name in plan.layouts
    )


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


def _why_not(flow: _Flow, name: str) -> Left:
    """Why one operand's gradient is not in a row that others are in."""
    for source, user in flow.stops:
        if any(flow.gradients.get(placement.source) == name for placement in flow.describe(source)):
            return Left(_code(source, user), f"the gradient of {name} goes through {describe_use(user)} first", name)
    return Left("separate_rows", f"the gradient of {name} does not reach the row", name)


def _plan(
    variant: PackedVariant, bwd: Node, root: Node, flow: _Flow, lead: list[Size], position: dict[Node, int]
) -> RowPlan | Left:
    """The plan with `root` as the row, or why it cannot be one."""
    value = root.meta["val"]
    form = flow.forms[root]
    if not any(placement.source in flow.gradients for placement in form):
        return Left("split_elsewhere", f"no gradient reaches {root}")
    if not is_dense(value):
        return Left("not_token_rows", f"{root} is not dense")
    width = divide(product(shape_of(root)), product(lead))
    if not isinstance(width, int):
        return Left("dynamic_row_width", f"{root} has {width or product(shape_of(root))} elements a token")
    unknown = [n for n in shape_of(root) if not isinstance(n, int) and not any(same(n, size) for size in lead)]
    if len(unknown) > 1:
        return Left("dynamic_row_width", f"sizes {unknown} of {root} follow from no single size of the call")
    tokens = (lead[0], lead[1])
    layouts: dict[str, list[int]] = {}
    left: list[Left] = []
    foreign: list[Foreign] = []
    taken: list[tuple[int, int]] = []
    for placement in form:
        source = placement.source
        columns = _columns(placement, tokens, width)
        if columns is None:
            return Left("not_token_rows", f"{source} does not lie in {root} token by token")
        taken += columns.runs()
        name = flow.gradients.get(source)
        if name is not None:
            problem: Left | list[int] | None = None
            if source.meta["val"].dtype != value.dtype:
                problem = Left("cast_between", f"the gradient of {name} is {source.meta['val'].dtype}", name)
            elif (user := _other_use(source, root, flow)) is not None:
                problem = Left("used_elsewhere", f"the gradient of {name} is also used by {describe_use(user)}", name)
            else:
                problem = _layout(placement)
            if isinstance(problem, list) and name not in layouts:
                layouts[name] = problem
                continue
            left.append(
                problem
                if isinstance(problem, Left)
                else Left("head_layout", f"heads of {name} do not lie at regular places in {root}", name)
            )
        foreign.append(Foreign(source, columns))
    uncovered = gaps(taken, width)
    if uncovered is None:
        return Left("overlap", f"an element of {root} is written twice")
    if not layouts:
        return left[0] if left else Left("split_elsewhere", f"no gradient reaches {root}")
    late = [f for f in foreign if _depends_on(f.source, bwd, position)]
    early = [f for f in foreign if f not in late]
    if variant.bwd_row_ is None:
        early, late = [], foreign
    return RowPlan(variant, bwd, root, width, layouts, tuple(early), tuple(late), uncovered, tuple(left))


def _columns(placement: Placement, tokens: tuple[Size, Size], width: int) -> Columns | None:
    """Where in a token's row a source lies, if it lies there token by token, in its own order."""
    if not isinstance(placement.offset, int) or not 0 <= placement.offset < width:
        return None
    need = product(tokens)
    seen: Size = 1
    count = 0
    axes = placement.axes
    while not same(seen, need):
        if count == len(axes):
            return None
        seen = multiply(seen, axes[count].extent)
        count += 1
    stride: Size = width
    for axis in reversed(axes[:count]):
        if not same(axis.stride, stride):
            return None
        stride = multiply(stride, axis.extent)
    loops = []
    for axis in axes[count:]:
        if not isinstance(axis.extent, int) or not isinstance(axis.stride, int):
            return None
        loops.append((axis.extent, axis.stride))
    return Columns(placement.offset, tuple(loops))


def _merged(axes: Iterable[Axis]) -> list[tuple[int, int]]:
    """Loops over one dimension with neighbouring loops that run on joined into one."""
    loops: list[tuple[int, int]] = []
    for axis in axes:
        assert isinstance(axis.extent, int)
        assert isinstance(axis.stride, int)
        if loops and loops[-1][1] == axis.extent * axis.stride:
            loops[-1] = (loops[-1][0] * axis.extent, axis.stride)
        else:
            loops.append((axis.extent, axis.stride))
    return loops


def _layout(placement: Placement) -> list[int] | None:
    """A gradient's place in the row as [offset, stride_group, group_len, stride_in_group], or None if it has none."""
    shape = placement.source.meta["val"].shape
    if len(shape) != 4 or isinstance(shape[2], torch.SymInt) or isinstance(shape[3], torch.SymInt):
        return None
    # Tokens have been checked to be the outer loops, which for [B,T,H,D] are dimensions 0 and 1.
    heads = _merged(axis for axis in placement.axes if axis.dim == 2)
    channels = _merged(axis for axis in placement.axes if axis.dim == 3)
    if shape[3] != 1 and channels != [(shape[3], 1)]:
        return None
    assert isinstance(placement.offset, int)
    if not heads:
        return [placement.offset, int(shape[3]), 1, 0]
    if len(heads) == 1:
        return [placement.offset, heads[0][1], 1, 0]
    if len(heads) == 2:
        return [placement.offset, heads[0][1], heads[1][0], heads[1][1]]
    return None


_DTYPE_ONLY = {
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.new_full.default,
    aten.new_empty_strided.default,
}
"""Ops that ask a tensor for its dtype and device alone."""


def _other_use(gradient: Node, root: Node, flow: _Flow) -> Node | None:
    """A use of the gradient that does not go into `root` by data movement alone."""
    stack, seen = [gradient], {root}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.target in _DTYPE_ONLY:
                continue
            if user is not root and user not in flow.forms:
                return user
            stack.append(user)
    return None


def _depends_on(node: Node, ancestor: Node, position: dict[Node, int]) -> bool:
    """Whether `node` needs `ancestor`; only what stands behind the ancestor is searched."""
    start = position[ancestor]
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if node is ancestor:
            return True
        if node not in seen and position[node] > start:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


def describe_use(user: Node) -> str:
    """A use in words."""
    return "the graph's output" if user.op == "output" else f"{user.target} ({user.name})"


_COPY_PRECISION = {torch.ops.prims.convert_element_type.default, aten._to_copy.default}


def _why_none(flow: _Flow, refused: list[Left]) -> Left:
    """The most telling of the reasons why no row was found."""
    for code in ("overlap", "dynamic_row_width", "head_layout", "used_elsewhere", "not_token_rows", "cast_between"):
        for left in refused:
            if left.reason == code:
                return left
    ends: dict[str, Node] = {}
    sources: dict[str, Node] = {}
    for source, user in flow.stops:
        for placement in flow.describe(source):
            if placement.source in flow.gradients:
                ends.setdefault(flow.gradients[placement.source], user)
                sources.setdefault(flow.gradients[placement.source], source)
    if not ends:
        return Left("split_elsewhere", "the gradients are not used in this graph")
    for name, user in ends.items():
        code = _code(sources[name], user)
        if code != "computed_between":
            return Left(code, f"the gradient of {name} goes through {describe_use(user)} first")
    if all(user.op == "output" for user in ends.values()):
        return Left("split_elsewhere", "the gradients leave the graph one by one: the split is in another graph")
    places = "; ".join(f"{name}: {describe_use(user)}" for name, user in sorted(ends.items()))
    if (
        len(ends) > 1
        and len(set(ends.values())) == len(ends)
        and all(user.target in _CONSUMERS for user in ends.values())
    ):
        return Left("separate_rows", f"each gradient goes to a place of its own ({places})")
    return Left("computed_between", f"something computes between the split and the op ({places})")


_CONSUMERS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.convolution_backward.default}


# ------------------------------------------------------------------------------------------------------------ editing
def replace_packed_row(graph: Graph, plan: RowPlan, renamed: dict[Node, Node]) -> Node:
    """Do what a plan says; returns the new row. The graph may need `edits.restore_order` afterwards.

    renamed: gradients that this or an earlier plan replaced (old node to new), added to here.
    """
    bwd, variant = plan.bwd, plan.variant
    ops = variant.ops
    given = arguments(bwd)
    layouts = {f"{name}_layout": plan.layouts.get(name, []) for name in variant.operands}
    first_operand = given[variant.operands[0]]
    assert isinstance(first_operand, Node)
    old_outputs = outputs_of(bwd)

    sources = [renamed.get(f.source, f.source) for f in plan.before]
    anchor = bwd if not sources else _behind(graph, [bwd, *sources])
    with graph.inserting_before(anchor):
        extents = Extents(graph, bwd, first_operand)
        if plan.before:
            assert ops.bwd_row_ is not None
            row = _new_row(graph, plan, extents, first_operand)
            for foreign, source in zip(plan.before, sources, strict=True):
                row = _write(graph, bwd, row, source, foreign.columns, plan.row_width, extents)
            functional = torch.ops.higher_order.auto_functionalized_v2
            kwargs = {**given, **layouts, "_row_base_index": 0, "_all_bases": [row]}
            new = call(graph, bwd, functional, (ops.bwd_row_,), kwargs)
            count = len(ops.bwd_row_._schema.returns)
            drow, shift = output(graph, bwd, new, count), 0
        else:
            kwargs = {**bwd.kwargs, **layouts, "row_width": plan.row_width, "zero_init": plan.uncovered > 0}
            new = call(graph, bwd, ops.bwd_row, bwd.args, kwargs)
            drow, shift = output(graph, bwd, new, 0), 1
        packed = {variant.gradients[variant.operands.index(name)] for name in plan.layouts}
        for index, old in old_outputs.items():
            if index in packed:
                for user in [user for user in old.users if user.target in _DTYPE_ONLY]:
                    user.replace_input_with(old, drow)
                continue
            renamed[old] = output(graph, old, new, index + shift)
            old.replace_all_uses_with(renamed[old])

    root = plan.root
    with graph.inserting_before(root):
        for foreign in plan.after:
            source = renamed.get(foreign.source, foreign.source)
            drow = _write(graph, root, drow, source, foreign.columns, plan.row_width, extents)
        shape = shape_of(root)
        if not same_sizes(drow, shape):
            extents.of(0)
            extents.of(1)
            drow = call(graph, root, aten.view.default, (drow, extents.shape(shape)))
    root.replace_all_uses_with(drow)
    return drow


def _behind(graph: Graph, nodes: list[Node]) -> Node:
    """The node that follows the last of these."""
    wanted = set(nodes)
    return next(node for node in reversed(graph.nodes) if node in wanted).next


def _new_row(graph: Graph, plan: RowPlan, extents: Extents, like: Node) -> Node:
    value = like.meta["val"]
    shape = [extents.of(0), extents.of(1), plan.row_width]
    kwargs = {"dtype": plan.root.meta["val"].dtype, "device": value.device}
    if plan.uncovered:
        return call(graph, plan.bwd, aten.full.default, (shape, 0), kwargs)
    return call(graph, plan.bwd, aten.empty.memory_format, (shape,), kwargs)


def _write(graph: Graph, like: Node, row: Node, source: Node, columns: Columns, width: int, extents: Extents) -> Node:
    """The row with one foreign tensor in its columns.

    as_strided_scatter is the one scatter that Inductor always turns into a copy into the row it is given; slice_scatter
    would become a kernel that reads and writes the whole row.
    """
    batch, tokens = extents.of(0), extents.of(1)
    inner = [extent for extent, _ in columns.loops]
    shape: list[Any] = [batch, tokens, *inner]
    wanted = [*shape_of(row)[:2], *inner]
    if not same_sizes(source, wanted):
        viewed = aten.view.default if is_dense(source.meta["val"]) else aten.reshape.default
        source = call(graph, like, viewed, (source, shape))
    strides = [extents.times(tokens, width), width, *(stride for _, stride in columns.loops)]
    return call(graph, like, aten.as_strided_scatter.default, (row, source, shape, strides, columns.offset))


def conflicts(plans: list[RowPlan]) -> list[RowPlan]:
    """The plans of a list that can be carried out together: none touches what an earlier one replaces."""
    chosen: list[RowPlan] = []
    replaced: set[Node] = set()
    for plan in plans:
        mine = {plan.root, *(f.source for f in (*plan.before, *plan.after))}
        if mine & replaced:
            continue
        chosen.append(plan)
        replaced |= mine
    return chosen
