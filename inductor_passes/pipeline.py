"""One graph through all passes, in order, with one sort and one dead-code elimination at the end."""

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph, Node

from inductor_passes import registry, settings
from inductor_passes.dense_rows import find_dense_rows, not_dense, replace_dense_rows
from inductor_passes.edits import CyclicGraphError, Snapshot, outputs_of, restore_order
from inductor_passes.gradient_flow import Left
from inductor_passes.grouped_heads import find_grouped_heads, replace_grouped_heads
from inductor_passes.moves import MOVES, arguments
from inductor_passes.norm_folding import are_norms, find_norms, replace_norms
from inductor_passes.operand_copies import find_operand_copies, replace_operand_copies
from inductor_passes.packed_views import RowPlan, choose, find_packed_row, replace_packed_row
from inductor_passes.registry import PackedVariant
from inductor_passes.report import CallReport, Report, UnpackedCallError, location, saved_bytes
from inductor_passes.settings import Settings

__all__ = ["MOVES", "CallSite", "counters", "find_calls", "observers", "rewrite_graph"]

log = logging.getLogger("inductor_passes")

counters: Counter[str] = Counter()
"""What the passes did since the process started: graphs; calls packed, packed_partly, left, grouped_heads, norm_folded;
copies_removed, rows_made; microseconds spent."""


@dataclass
class CallSite:
    """A registered forward call (None in a backward-only graph) and the backward calls that belong to it."""

    variant: PackedVariant
    fwd: Node | None
    bwds: list[Node]
    grouped_heads: bool = False
    copies_removed: int = 0
    rows_made: int = 0
    copied_inside: tuple[str, ...] = ()
    norm_folded: bool = False


observers: list[Callable[[Graph, str], None]] = []
"""Called with every graph that has registered calls, and "before" or "after"."""


def _show(graph: Graph, stage: str) -> None:
    """Graphs before and after, for the debug log and whoever observes."""
    for observer in observers:
        observer(graph, stage)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("graph %s the passes:\n%s", stage, graph)


def find_calls(graph: Graph) -> list[CallSite]:
    """Every registered call of the graph, in order. Looks only."""
    by_fwd = {variant.ops.fwd: variant for variant in registry.variants()}
    by_bwd = {variant.ops.bwd: variant for variant in by_fwd.values()}
    sites: dict[Node, CallSite] = {}
    takers: dict[tuple[Node, ...], list[CallSite]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in by_fwd:
            variant = by_fwd[node.target]
            sites[node] = CallSite(variant, node, [])
            takers.setdefault(_operands(node, variant), []).append(sites[node])
        elif node.target in by_bwd:
            variant = by_bwd[node.target]
            site = _site_of(node, variant, sites, takers.get(_operands(node, variant), []))
            if site is None:
                site = sites[node] = CallSite(variant, None, [])
            site.bwds.append(node)
    return list(sites.values())


def _in_order(graph: Graph, sites: list[CallSite]) -> list[CallSite | CallReport]:
    """The calls to rewrite and, in words, those of ops that take the row itself, for which there is nothing to do."""
    found = {site.fwd or site.bwds[0]: site for site in sites}
    by_op = {op: variant for variant in registry.variants() for op in variant.ops.takes_row}
    calls: list[CallSite | CallReport] = []
    for node in graph.nodes:
        if node in found:
            calls.append(found[node])
        elif node.op == "call_function" and node.target in by_op:
            where = location(node, by_op[node.target])
            calls.append(CallReport(node.target._schema.name, True, "packed", "takes the row itself", where))
    return calls


def _operands(node: Node, variant: PackedVariant) -> tuple[Node, ...]:
    given = arguments(node)
    return tuple(given[name] for name in variant.operands)  # type: ignore[misc]


def _site_of(bwd: Node, variant: PackedVariant, sites: dict[Node, CallSite], takers: list[CallSite]) -> CallSite | None:
    """The call that a backward call belongs to; `takers`: calls of its variant that take the same operands.

    What the forward saved leads back to it, whatever became of its operands. (Operands lead elsewhere: one may be what
    another call returned.) A forward that saves nothing but its inputs is the one that takes the same ones.
    """
    given = arguments(bwd)
    inputs = {argument.name for argument in variant.ops.fwd._schema.arguments}
    saved: Counter[Node] = Counter()
    for name, value in given.items():
        if name not in inputs and isinstance(value, Node):
            fwd = value.args[0] if value.target is operator.getitem else value
            if isinstance(fwd, Node) and fwd.target is variant.ops.fwd:
                saved[fwd] += 1

    def agreement(site: CallSite) -> tuple[int, int, int]:
        assert site.fwd is not None
        theirs = arguments(site.fwd)
        equal = sum(theirs[name] == given[name] for name in inputs & given.keys())
        return saved[site.fwd], equal, -len(site.bwds)

    found = [site for site in sites.values() if site.fwd in saved] if saved else takers
    return max(found, key=agreement, default=None)


def rewrite_graph(graph: Graph, options: Settings | None = None, *, strides_hold: bool = True) -> Report:
    """Run the passes on a joint, forward or backward graph, in place, and say what became of every registered call.

    A plain function of the graph: use it in any compiler that gives you an aten graph with fake values in
    `meta["val"]`, for instance in the partition function of an AOTAutograd backend. The caller recompiles the graph
    module.

    strides_hold: whether the compiler keeps the strides that the graph was traced with. Inductor does not.

    Raises UnpackedCallError in strict mode.
    """
    options = settings.current() if options is None else options
    sites = find_calls(graph)
    calls = _in_order(graph, sites)
    if not sites or not options.enabled:
        return Report(tuple(_plain_report(call, "disabled") if isinstance(call, CallSite) else call for call in calls))
    started = time.perf_counter()
    _show(graph, "before")
    changed = False
    for site in sites:
        # Heads may be repeated behind the norm or in front of it: whichever stands nearer to the op goes first.
        changed |= options.grouped_heads and _group_heads(graph, site)
        if options.fold_norm:
            norms = find_norms(site.variant, site.fwd, site.bwds)
            if norms is not None:
                replace_norms(graph, norms, site.variant)
                site.norm_folded = changed = True
                changed |= options.grouped_heads and not site.grouped_heads and _group_heads(graph, site)
        if options.remove_copies and site.fwd is not None:
            copies = find_operand_copies(site.variant, site.fwd, site.bwds)
            if copies:
                replace_operand_copies(graph, copies, site.fwd, site.bwds)
                site.copies_removed, changed = len(copies), True
        callers = [node for node in (site.fwd, *site.bwds) if node is not None]
        if not options.remove_copies:
            site.copied_inside = not_dense(site.variant, callers)
        else:
            rows = find_dense_rows(site.variant, callers, strides_hold=strides_hold)
            if rows:
                replace_dense_rows(graph, rows, callers)
                site.rows_made, changed = len(rows), True
    before = Snapshot(graph)
    try:
        plans, left = _pack_rows(graph, sites)
        restore_order(graph)
    except CyclicGraphError as error:
        # A fault of the pass, but no reason to fail the user's compilation: the graph was right before.
        log.warning("rows are not packed in this graph: %s", error)
        before.restore()
        restore_order(graph)
        plans, left = {}, {bwd: Left("cyclic_graph", str(error)) for site in sites for bwd in site.bwds}
    report = Report(tuple(line for call in calls for line in _reports(call, plans, left, options)))
    if plans or changed:
        graph.eliminate_dead_code()
        graph.lint()
        _show(graph, "after")
    counters["graphs"] += 1
    counters["packed"] += report.packed - (len(calls) - len(sites))  # the others were packed without the passes
    counters["grouped_heads"] += sum(site.grouped_heads for site in sites)
    counters["norm_folded"] += sum(site.norm_folded for site in sites)
    counters["copies_removed"] += sum(site.copies_removed for site in sites)
    counters["rows_made"] += sum(site.rows_made for site in sites)
    counters["packed_partly"] += report.packed_partly
    counters["left"] += len(report) - report.packed - report.packed_partly
    counters["microseconds"] += round(1e6 * (time.perf_counter() - started))
    if options.strict:
        _insist(report)
    return report


def _group_heads(graph: Graph, site: CallSite) -> bool:
    group = find_grouped_heads(site.variant, site.fwd, site.bwds)
    if group is None:
        return False
    replace_grouped_heads(graph, group, site.variant)
    site.grouped_heads = True
    return True


def _pack_rows(graph: Graph, sites: list[CallSite]) -> tuple[dict[Node, RowPlan], dict[Node, Left]]:
    """Plan every call on the untouched graph, then edit; calls that share a row are planned again after that."""
    open_calls = [(site.variant, bwd) for site in sites for bwd in site.bwds]
    done: dict[Node, RowPlan] = {}
    left: dict[Node, Left] = {}
    rows: dict[Node, Node] = {}
    while open_calls:
        position = {node: index for index, node in enumerate(graph.nodes)}
        plans: list[RowPlan] = []
        for variant, bwd in open_calls:
            found = find_packed_row(variant, bwd, position)
            if isinstance(found, RowPlan):
                plans.append(found)
                rows[bwd] = found.root
            elif bwd in rows:
                left[bwd] = Left("used_elsewhere", f"another call writes its row ({rows[bwd]}): {found.detail}")
            else:
                left[bwd] = found
        chosen = choose(plans, position)
        renamed: dict[Node, Node] = {}
        for plan in chosen:
            replace_packed_row(graph, plan, renamed)
            done[plan.bwd] = plan
        open_calls = [(plan.variant, plan.bwd) for plan in plans if plan.bwd not in done]
        if open_calls:
            restore_order(graph)
    return done, left


def _plain_report(site: CallSite, reason: str) -> CallReport:
    node = site.fwd or site.bwds[0]
    return _line(site, location(node, site.variant), reason)


def _line(
    site: CallSite,
    where: str,
    reason: str,
    detail: str = "",
    saved: int = 0,
    operands: tuple[str, ...] = (),
    copied: tuple[str, ...] = (),
) -> CallReport:
    return CallReport(
        op=site.variant.fwd,
        packed=bool(operands) and not copied,
        reason=reason,
        detail=detail,
        location=where,
        saved_bytes=saved,
        operands=operands,
        copied=copied,
        grouped_heads=site.grouped_heads,
        copies_removed=site.copies_removed,
        rows_made=site.rows_made,
        copied_inside=site.copied_inside,
        norm_folded=site.norm_folded,
    )


def _norm_in_words(site: CallSite, parts: list[Left], options: Settings) -> str:
    """What to do about L2 norms in front of the op, if they are among what stands between the split and it; else ""."""
    if not any(part.reason == "computed_between" for part in parts) or not are_norms(site.variant, site.fwd):
        return ""
    own = site.variant.norm_option or f"{site.variant.norm_switch}=True"
    remedy = own if options.fold_norm else f"{own} or the setting fold_norm"
    return f"an L2 norm stands between the split and {', '.join(site.variant.norm_operands)} (remedy: {remedy})"


def _reports(
    site: CallSite | CallReport, plans: dict[Node, RowPlan], left: dict[Node, Left], options: Settings
) -> list[CallReport]:
    if isinstance(site, CallReport):
        return [site]
    if not site.bwds:
        return [_plain_report(site, "no_backward")]
    reports = []
    for bwd in site.bwds:
        where = location(site.fwd, site.variant) if site.fwd is not None else ""
        where = where or location(bwd, site.variant)
        plan = plans.get(bwd)
        if plan is None:
            why = left[bwd]
            norm = _norm_in_words(site, [why], options)
            reports.append(_line(site, where, why.reason, f"{norm}; {why.detail}" if norm else why.detail))
            continue
        outputs = outputs_of(bwd)
        indices = dict(zip(site.variant.operands, site.variant.gradients, strict=True))
        saved = saved_bytes([outputs[indices[name]] for name in plan.layouts])
        reason = "packed_partly" if plan.left else "packed"
        behind = [p for p in plan.left if p.operand in site.variant.norm_operands and p.reason == "computed_between"]
        norm = _norm_in_words(site, behind, options)
        said = [part.detail for part in plan.left if not norm or part not in behind]
        detail = "; ".join([norm, *said] if norm else said)
        operands = tuple(name for name in site.variant.operands if name in plan.layouts)
        copied = tuple(part.operand for part in plan.left)
        reports.append(_line(site, where, reason, detail, saved, operands, copied))
    return reports


def _insist(report: Report) -> None:
    missing = [c for c in report if not c.packed and c.reason not in ("no_backward", "no_gradient")]
    if missing:
        raise UnpackedCallError(f"strict mode: {len(missing)} call(s) not packed whole\n{Report(tuple(missing))}")
