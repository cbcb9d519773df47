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
Where several calls have their columns in one row, the last of them is rewritten first, with the others' gradients as
columns of others; then the row as it is before that call is a row for the call before it.

A row that is kept sequence first, [T,B,W], is made as such and handed to the op as a [B,T,W] view:

    row = empty([T, B, W])
    drow = auto_functionalized_v2(bwd_row_, row=<row as [B,T,W]: strides [W, B*W, 1]>, ...)

Conditions, each with the reason code of a call that fails it:
 1. the gradients meet in one tensor of this graph ("split_elsewhere", "separate_rows");
 2. on the way there nothing computes with them ("computed_between", "cast_between"), and none of them is used by
    anything else ("used_elsewhere": that one is copied into the row after the op, the others are packed);
 3. the row holds whole tokens, batch first or sequence first, in a number of elements that is known
    ("dynamic_row_width", "not_token_rows");
 4. heads lie at regular places with dense channels ("head_layout"), and no element is written twice ("overlap");
 5. something is saved: two gradients meet, or one meets columns that others write ("nothing_to_save").
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from inductor_passes.edits import Extents, call, output, outputs_of, same_sizes, written_value
from inductor_passes.gradient_flow import DTYPE_ONLY, Flow, Left, describe_use, follow, other_use, why_none, why_not
from inductor_passes.moves import arguments, starts_undefined
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import Size, divide, is_dense, multiply, product, same, shape_of
from inductor_passes.views import Axis, Placement, Placements, gaps, runs

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
    """Part of a token's row: starts at `offset`, loops (extent, stride) in elements, all static.

    swapped: what lies there runs through batch and tokens in the other order than the row's memory does.
    """

    offset: int
    loops: tuple[tuple[int, int], ...]
    swapped: bool = False

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
    before, after: columns of others that do not, or do, depend on the call; tokens_first: the row's memory is [T,B,W];
    left: operands that are not packed, with why.
    """

    variant: PackedVariant
    bwd: Node
    root: Node
    row_width: int
    layouts: dict[str, list[int]]
    before: tuple[Foreign, ...]
    after: tuple[Foreign, ...]
    uncovered: int
    tokens_first: bool = False
    left: tuple[Left, ...] = ()


# ------------------------------------------------------------------------------------------------------------ looking
def find_packed_row(variant: PackedVariant, bwd: Node, position: dict[Node, int]) -> RowPlan | Left:
    """The row that the gradients of one backward call make up, or why there is none. Looks only.

    position: the place of every node in the graph.
    """
    outputs = outputs_of(bwd)
    gradients = {outputs[i]: name for name, i in zip(variant.operands, variant.gradients, strict=True) if i in outputs}
    gradients = {node: name for node, name in gradients.items() if node.users}
    if not gradients:
        return Left("no_gradient", "no gradient of " + ", ".join(variant.operands) + " is used")
    flow, reached = follow(gradients, position)
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
        return why_none(flow, refused, variant)
    # A lone gradient saves its own copy, but zeros have to be written around it where nothing else is.
    full = (best.before or best.after) and not best.uncovered
    worth = len(best.layouts) > 1 or full or 2 * _width(best, gradients) >= best.row_width
    known = {*best.layouts, *(left.operand for left in best.left)}
    missing = [why_not(flow, name, variant) for name in gradients.values() if name not in known]
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


def _plan(
    variant: PackedVariant, bwd: Node, root: Node, flow: Flow, lead: list[Size], position: dict[Node, int]
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
        shape = shape_of(root)
        if all(isinstance(extent, int) for extent in shape[min(2, len(shape) - 1) :]):
            return Left("not_token_rows", f"{root} {tuple(shape)} holds other tokens than the call's {tuple(lead)}")
        return Left("dynamic_row_width", f"{root} has {width or product(shape_of(root))} elements a token")
    unknown = [n for n in shape_of(root) if not isinstance(n, int) and not any(same(n, size) for size in lead)]
    if len(unknown) > 1:
        return Left("dynamic_row_width", f"sizes {unknown} of {root} follow from no single size of the call")
    batch, tokens = lead
    order = _token_order(form, flow, (batch, tokens), width)
    if order is None:
        return Left("not_token_rows", f"the gradients do not lie in {root} token by token")
    if order and variant.bwd_row_ is None:
        return Left("not_token_rows", f"{root} is sequence first, and {variant.fwd} has no op that writes into a row")
    row_order = (tokens, batch) if order else (batch, tokens)
    layouts: dict[str, list[int]] = {}
    left: list[Left] = []
    foreign: list[Foreign] = []
    taken: list[tuple[int, int]] = []
    for placement in form:
        source = placement.source
        columns = _columns(placement, row_order, width)
        name = flow.gradients.get(source)
        if columns is None or (name is not None and columns.swapped != order):
            return Left("not_token_rows", f"{source} does not lie in {root} token by token")
        taken += columns.runs()
        if name is not None:
            problem: Left | list[int] | None = None
            if source.meta["val"].dtype != value.dtype:
                problem = Left("cast_between", f"the gradient of {name} is {source.meta['val'].dtype}", name)
            elif (user := other_use(source, root, flow)) is not None:
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
    if starts_undefined(root):
        uncovered = 0  # another call shall write there
    if not layouts:
        return left[0] if left else Left("split_elsewhere", f"no gradient reaches {root}")
    late = [f for f in foreign if _depends_on(f.source, bwd, position)]
    early = [f for f in foreign if f not in late]
    if variant.bwd_row_ is None:
        early, late = [], foreign
    return RowPlan(variant, bwd, root, width, layouts, tuple(early), tuple(late), uncovered, order, tuple(left))


def _token_order(form: Placements, flow: Flow, lead: tuple[Size, Size], width: int) -> bool | None:
    """Whether the gradients lie sequence first (batch inside tokens); None if they do not lie token by token."""
    batch, tokens = lead
    mine = [placement for placement in form if placement.source in flow.gradients]
    for order, row_order in ((False, (batch, tokens)), (True, (tokens, batch))):
        found = [_columns(placement, row_order, width) for placement in mine]
        if all(columns is not None and columns.swapped == order for columns in found):
            return order
    return None


def _columns(placement: Placement, lead: tuple[Size, Size], width: int) -> Columns | None:
    """Where in a token's row a source lies, if it lies there token by token; `lead`: the row's leading sizes."""
    if not isinstance(placement.offset, int) or not 0 <= placement.offset < width:
        return None
    outer, inner = lead
    axes = placement.axes
    swapped = False
    count = _nested(axes, product(lead), width)
    if count is None:
        # The source has the row's inner size outside: it steps by one row first, and by `inner` rows after that.
        first = _nested(axes, inner, width)
        second = None if first is None else _nested(axes[first:], outer, multiply(inner, width))
        if first is None or second is None:
            return None
        swapped, count = True, first + second
    loops = []
    for axis in axes[count:]:
        if not isinstance(axis.extent, int) or not isinstance(axis.stride, int):
            return None
        loops.append((axis.extent, axis.stride))
    return Columns(placement.offset, tuple(loops), swapped)


def _nested(axes: tuple[Axis, ...], need: Size, stride: Size) -> int | None:
    """How many leading axes make one dense loop over `need` steps of `stride`; None if they do not."""
    seen: Size = 1
    count = 0
    while not same(seen, need):
        if count == len(axes):
            return None
        seen = multiply(seen, axes[count].extent)
        count += 1
    for axis in reversed(axes[:count]):
        if not same(axis.stride, stride):
            return None
        stride = multiply(stride, axis.extent)
    return count


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


def _depends_on(
    node: Node, ancestor: Node, position: dict[Node, int], waits: dict[Node, tuple[Node, ...]] | None = None
) -> bool:
    """Whether `node` needs `ancestor`; only what can stand behind the ancestor is searched.

    waits: what nodes shall need besides what they take.
    """
    waits = waits or {}
    start = position[ancestor]
    # A node that waits for what stands behind it leads from there back to itself.
    back = [(position[n], max(map(position.__getitem__, sources))) for n, sources in waits.items() if sources]
    for first, last in sorted(back, reverse=True):
        if first < start <= last:
            start = first
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if node is ancestor:
            return True
        if node not in seen and position[node] >= start:
            seen.add(node)
            stack.extend(node.all_input_nodes)
            stack.extend(waits.get(node, ()))
    return False


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
        if plan.before or plan.tokens_first:
            assert ops.bwd_row_ is not None
            row = _new_row(graph, plan, extents, first_operand)
            for foreign, source in zip(plan.before, sources, strict=True):
                row = _write(graph, bwd, row, source, foreign.columns, plan, extents)
            functional = torch.ops.higher_order.auto_functionalized_v2
            kwargs = {**given, **layouts, "_row_base_index": 0, **_as_batch_first(plan, extents), "_all_bases": [row]}
            value = None if plan.tokens_first else written_value(row, ops.bwd_row_, {**given, **layouts})
            new = call(graph, bwd, functional, (ops.bwd_row_,), kwargs, value)
            count = len(ops.bwd_row_._schema.returns)
            drow, shift = output(graph, bwd, new, count), 0
        else:
            kwargs = {**bwd.kwargs, **layouts, "row_width": plan.row_width, "zero_init": plan.uncovered > 0}
            new = call(graph, bwd, ops.bwd_row, bwd.args, kwargs)
            drow, shift = output(graph, bwd, new, 0), 1
        packed = {variant.gradients[variant.operands.index(name)] for name in plan.layouts}
        for index, old in old_outputs.items():
            if index in packed:
                for user in [user for user in old.users if user.target in DTYPE_ONLY]:
                    user.replace_input_with(old, drow)
                continue
            renamed[old] = output(graph, old, new, index + shift)
            old.replace_all_uses_with(renamed[old])

    root = plan.root
    with graph.inserting_before(root):
        for foreign in plan.after:
            source = renamed.get(foreign.source, foreign.source)
            drow = _write(graph, root, drow, source, foreign.columns, plan, extents)
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


def _lead(plan: RowPlan, extents: Extents) -> tuple[int | Node, int | Node]:
    """The row's leading sizes, in the order of its memory."""
    batch, tokens = extents.of(0), extents.of(1)
    return (tokens, batch) if plan.tokens_first else (batch, tokens)


def _as_batch_first(plan: RowPlan, extents: Extents) -> dict[str, Any]:
    """How auto_functionalized_v2 is told that the op's row is a [B,T,W] view of a [T,B,W] tensor."""
    if not plan.tokens_first:
        return {}
    tokens, batch = _lead(plan, extents)
    width = plan.row_width
    strides = [width, extents.times(batch, width), 1]
    return {"_row_size": [batch, tokens, width], "_row_stride": strides, "_row_storage_offset": 0}


def _new_row(graph: Graph, plan: RowPlan, extents: Extents, like: Node) -> Node:
    value = like.meta["val"]
    shape = [*_lead(plan, extents), plan.row_width]
    kwargs = {"dtype": plan.root.meta["val"].dtype, "device": value.device}
    if plan.uncovered:
        return call(graph, plan.bwd, aten.full.default, (shape, 0), kwargs)
    return call(graph, plan.bwd, aten.empty.memory_format, (shape,), kwargs)


def _write(
    graph: Graph, like: Node, row: Node, source: Node, columns: Columns, plan: RowPlan, extents: Extents
) -> Node:
    """The row with one foreign tensor in its columns.

    as_strided_scatter is the one scatter that Inductor always turns into a copy into the row it is given; slice_scatter
    would become a kernel that reads and writes the whole row.
    """
    outer, inner = _lead(plan, extents)
    width = plan.row_width
    lead = [(outer, extents.times(inner, width)), (inner, width)]
    sizes = shape_of(row)[:2]
    if columns.swapped:
        lead, sizes = lead[::-1], sizes[::-1]
    extra = [extent for extent, _ in columns.loops]
    shape: list[Any] = [*(extent for extent, _ in lead), *extra]
    if not same_sizes(source, [*sizes, *extra]):
        viewed = aten.view.default if is_dense(source.meta["val"]) else aten.reshape.default
        source = call(graph, like, viewed, (source, shape))
    strides = [*(stride for _, stride in lead), *(stride for _, stride in columns.loops)]
    return call(graph, like, aten.as_strided_scatter.default, (row, source, shape, strides, columns.offset))


def choose(plans: list[RowPlan], position: dict[Node, int]) -> list[RowPlan]:
    """The plans of a list that can be carried out together, as they then have to be carried out.

    None touches what another one replaces: of plans with one row, that of the last backward call is taken. It waits
    for the others' gradients, so they are written first, and the other calls can be planned again, into that row.

    Columns that are written first make a backward call wait for more than it did, for another call's backward perhaps.
    Where that one waits for columns that come from this one, these are written behind it instead.
    """
    chosen: list[RowPlan] = []
    replaced: set[Node] = set()
    waits: dict[Node, tuple[Node, ...]] = {}
    for plan in sorted(plans, key=lambda plan: position[plan.bwd], reverse=True):
        mine = {plan.root, *(f.source for f in (*plan.before, *plan.after))}
        if mine & replaced:
            continue
        late = tuple(f for f in plan.before if _depends_on(f.source, plan.bwd, position, waits))
        if late:
            plan = replace(plan, before=tuple(f for f in plan.before if f not in late), after=(*plan.after, *late))
        waits[plan.bwd] = tuple(f.source for f in plan.before)
        chosen.append(plan)
        replaced |= mine
    return chosen
