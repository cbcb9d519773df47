"""What a call needs to know about the other ranks: index tensors, a few ints, and the process group by its name."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from gdn_ops.context_parallel.halo import Halo, make_halo
from gdn_ops.context_parallel.partition import Partition
from gdn_ops.context_parallel.pieces import cuts_by_rule, has_inner_fragments
from gdn_ops.context_parallel.plan import HEARS_ALL, Hears, Plan, hears, make_plan

EXCHANGES = ("saved", "replay")

_serials = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Context:
    """One rank's share of a batch; made by `Partition.context`, passed to the op as `cp_context`.

    Built once per batch and used by every layer. It holds tensors, ints and words only, so a graph can be traced
    through it; all sizes are equal on every rank.

    plan, halo: index tensors on the op's device. num_ranks: R, of whom exchange_ranks (R or 1) exchange.
    num_documents: N, so initial and final states are [N,HV,K,V] on every rank. num_tokens: this rank's own tokens.
    group_name: the process group, or "" where no document crosses ranks or there is one rank. exchange: "saved" or
    "replay". pieces, ends: of the largest share of tokens (`gdn_ops.context_parallel.pieces`). hears: which exchanges
    this rank has a use for, the only field but the numbers in `plan` that differs from rank to rank. partition_hash:
    tells the contexts of one partition from another's; serial: tells one batch from another.
    """

    plan: Plan
    halo: Halo
    num_ranks: int
    exchange_ranks: int
    num_documents: int
    num_tokens: int
    group_name: str
    exchange: str = "saved"
    pieces: int = 1
    ends: int = 1
    hears: Hears = HEARS_ALL
    partition_hash: int = 0
    serial: int = field(default_factory=lambda: next(_serials))


def build(
    part: Partition, rank: int, group: Any, device: torch.device | str | None, exchange: str, pieces: int | None,
    num_v_heads: int | None, ends: int | None,
) -> Context:  # fmt: skip
    """`Partition.context`."""
    group_name = _group_name(part, rank, group)
    return build_for(part, rank, group_name if part.crosses_ranks else "", device, exchange, pieces, num_v_heads, ends)


def build_for(
    part: Partition, rank: int, group_name: str, device: torch.device | str | None, exchange: str = "saved",
    pieces: int | None = None, num_v_heads: int | None = None, ends: int | None = None,
) -> Context:  # fmt: skip
    """A context for a group that is known by name only; checks nothing about the group."""
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange: expected one of {EXCHANGES}, got {exchange!r}")
    for name, value in (("pieces", pieces), ("num_v_heads", num_v_heads), ("ends", ends)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    where = torch.get_default_device() if device is None else torch.device(device)
    if pieces is None and not (PIECES_BY_DEFAULT and _gains_by_pieces(where)):
        pieces = 1
    cuts = cuts_by_rule(part.max_tokens, num_v_heads, has_inner=has_inner_fragments(part), pieces=pieces)
    if ends is not None:
        cuts = cuts._replace(ends=ends)
    return Context(
        plan=make_plan(part, rank, where, *cuts),
        halo=make_halo(part, rank, where),
        num_ranks=part.num_ranks,
        exchange_ranks=part.num_ranks if part.crosses_ranks else 1,
        num_documents=part.num_documents,
        num_tokens=part.tokens(rank),
        group_name=group_name,
        exchange=exchange,
        pieces=cuts.pieces,
        ends=cuts.ends,
        hears=hears(part, rank),
        partition_hash=hash(part),
    )


PIECES_BY_DEFAULT = True
"""Whether a context that is not told a number takes the rule's, where that gains."""


def _gains_by_pieces(device: torch.device) -> bool:
    """Whether summaries cost less there than they save: with the kernels of the Hopper backend."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


def _group_name(part: Partition, rank: int, group: Any) -> str:
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"rank: expected an int, got {type(rank).__name__}")
    if not 0 <= rank < part.num_ranks:
        raise ValueError(f"rank: expected 0 to {part.num_ranks - 1}, got {rank}")
    if group is None:
        if part.num_ranks != 1:
            raise ValueError(f"group: expected the process group of the partition's {part.num_ranks} ranks, got None")
        return ""
    distributed = torch.distributed
    if not distributed.is_available():
        raise ValueError("group: this PyTorch was built without torch.distributed")
    if isinstance(group, distributed.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected one dimension of a DeviceMesh (mesh['name']), got {group.ndim} dimensions"
            )
        group = group.get_group()
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"group: expected a ProcessGroup, a DeviceMesh dimension or None, got {type(group).__name__}")
    size, own = distributed.get_world_size(group), distributed.get_rank(group)
    if size != part.num_ranks:
        raise ValueError(f"group: expected {part.num_ranks} ranks as the partition has, got {size}")
    if own != rank:
        raise ValueError(f"rank: this process is rank {own} of the group, got {rank}")
    return group.group_name
