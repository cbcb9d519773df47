"""What the passes did to each registered call of a graph, and why not more."""

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from inductor_passes.registry import PackedVariant

REASONS = {
    "packed": "every gradient is written into the row by the op, or the op takes the row itself",
    "packed_partly": "some gradients are written into the row by the op; the others are copied into it",
    "no_gradient": "no gradient of an operand is used in this graph",
    "no_backward": "the graph has no backward (inference, or the inputs require no gradient)",
    "disabled": "the passes are switched off",
    "split_elsewhere": "the split happened in another graph",
    "separate_rows": "the operands come from separate tensors",
    "dynamic_row_width": "the row's width is not static",
    "not_token_rows": "the row is not one dense piece per token, in the op's token order",
    "head_layout": "heads do not lie at regular places of the row",
    "overlap": "an element of the row gets more than one gradient",
    "used_elsewhere": "a gradient has another use",
    "cast_between": "the dtype changes between the split and the op",
    "computed_between": "something computes between the split and the op",
    "nothing_to_save": "one gradient alone ends in the row",
    "cyclic_graph": "rows of the graph's calls wait for each other, and the pass did not see it",
}
"""Reason codes in words; docs/passes.md has the remedies."""


class UnpackedCallError(RuntimeError):
    """Strict mode: a training call of a registered op was left, or packed in part only."""


@dataclass(frozen=True)
class CallReport:
    """One registered call in one graph.

    op: the op as users see it; packed: the op writes all its gradients into the row, or takes the row itself (then
    `operands` is empty and nothing is saved by the passes); reason: a code of `REASONS`;
    detail: the same in the words of this graph; location: "file:line" of the user's code ("" if the trace has none);
    saved_bytes: gradient bytes that are no longer read and written again; operands: whose gradients the op writes into
    the row; copied: whose gradients are copied into it or go elsewhere (then `packed` is False, `detail` says why);
    grouped_heads: repeated heads were folded; copies_removed: copies in front of the op that were dropped; rows_made:
    rows (or operands) that are made dense, once, in place of copies of the parts in every call; copied_inside: operands
    that every call copies, since their channels are not dense and `remove_copies` is off; norm_folded: an L2 norm moved
    into the op.
    """

    op: str
    packed: bool
    reason: str
    detail: str = ""
    location: str = ""
    saved_bytes: int = 0
    operands: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    grouped_heads: bool = False
    copies_removed: int = 0
    rows_made: int = 0
    copied_inside: tuple[str, ...] = ()
    norm_folded: bool = False

    @property
    def packed_partly(self) -> bool:
        """Some of the gradients are written into the row, but not all."""
        return bool(self.operands) and not self.packed


@dataclass(frozen=True)
class Report:
    """The calls of one or more graphs, in order. `print(report)` shows a table."""

    calls: tuple[CallReport, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def packed(self) -> int:
        """How many calls write all their gradients into one row."""
        return sum(call.packed for call in self.calls)

    @property
    def packed_partly(self) -> int:
        """How many calls write some of their gradients into one row."""
        return sum(call.packed_partly for call in self.calls)

    @property
    def saved_bytes(self) -> int:
        """Gradient bytes that are no longer copied, over all calls."""
        return sum(call.saved_bytes for call in self.calls)

    def __iter__(self) -> Iterator[CallReport]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __add__(self, other: "Report") -> "Report":
        return Report(self.calls + other.calls, self.notes + other.notes)

    def __str__(self) -> str:
        if not self.calls:
            return "\n".join(("no registered op in the graph", *self.notes))
        rows = [("call", "packed", "saved", "reason", "where", "detail")]
        for call in self.calls:
            extras = [
                *(["heads grouped"] if call.grouped_heads else []),
                *(["norm in the op"] if call.norm_folded else []),
                *([f"{call.copies_removed} copies removed"] if call.copies_removed else []),
                *([f"{call.rows_made} made dense before the call"] if call.rows_made else []),
                *([f"{', '.join(call.copied_inside)} copied in every call"] if call.copied_inside else []),
            ]
            detail = "; ".join(part for part in (call.detail, *extras) if part)
            saved = _in_units(call.saved_bytes) if call.operands else "-"
            how = "yes" if call.packed else ",".join(call.operands) or "no"
            rows.append((call.op, how, saved, call.reason, call.location or "?", detail))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows]
        partly = f" ({self.packed_partly} more in part)" if self.packed_partly else ""
        saved = _in_units(self.saved_bytes)
        total = f"{self.packed} of {len(self.calls)} packed{partly}, {saved} of gradient copies saved"
        return "\n".join((*lines, total, *self.notes))


def _in_units(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def saved_bytes(gradients: list[Node]) -> int:
    """Bytes that packing these gradients saves: a read and a write of each element (symbolic sizes: their hints)."""
    total = 0
    for node in gradients:
        value = node.meta["val"]
        count = value.numel()
        if isinstance(count, torch.SymInt):
            hint = count.node.hint if count.node.has_hint() else 0
            count = int(hint)
        total += 2 * count * value.element_size()
    return total


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def location(node: Node, variant: PackedVariant) -> str:
    """ "file:line" of the innermost frame of a node's stack trace that is neither torch's nor the op owner's."""
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or ""
    module = sys.modules.get(variant.package) if variant.package else None
    owner = None
    if module is not None and module.__file__ is not None:
        owner = os.path.abspath(module.__file__)
        owner = os.path.dirname(owner) + os.sep if hasattr(module, "__path__") else owner
    found = ""
    for match in _FRAME.finditer(trace):
        file = match["file"]
        if not file.startswith(_TORCH) and (owner is None or not file.startswith(owner)):
            found = f"{file}:{match['line']}"
    return found
