"""From a partition to the index tensors that the ops read; all of fixed size, equal on every rank.

A document with more than one fragment is a chain. Along a chain, fragment i maps the state it gets to the state it
hands on, S <- M_i S + H_i. Who has to tell what:

- forward: every fragment but the chain's last tells H (the first one's H contains the initial state);
- backward: every fragment but the first tells its dH (the last one's contains the final state's gradient);
- both: the inner ones, neither first nor last, tell M. A chain of two needs no M at all.

Each rank has the same number of slots for these, the largest that any rank needs. Unused slots are empty segments.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.context_parallel.partition import Partition, Place


class Links(NamedTuple):
    """Slots by place, and how many of each kind a rank has; `depth`: the longest way a state comes."""

    forward: dict[Place, int]
    backward: dict[Place, int]
    transitions: dict[Place, int]
    num_forward: int
    num_backward: int
    num_transitions: int
    num_prefixes: int
    num_suffixes: int
    depth: int
    num_fragments: int


def _slots(places: list[Place], num_ranks: int) -> tuple[dict[Place, int], int]:
    """Number the places on each rank in the order of the rank's tokens."""
    used = [0] * num_ranks
    slots = {}
    for place in sorted(places):
        slots[place] = used[place.rank]
        used[place.rank] += 1
    return slots, max(used)


def link(part: Partition) -> Links:
    """Find the chains and give their fragments slots."""
    chains = [chain for chain in part.chains if len(chain) > 1]
    R = part.num_ranks
    forward, num_forward = _slots([place for chain in chains for place in chain[:-1]], R)
    backward, num_backward = _slots([place for chain in chains for place in chain[1:]], R)
    transitions, num_transitions = _slots([place for chain in chains for place in chain[1:-1]], R)
    return Links(
        forward,
        backward,
        transitions,
        num_forward,
        num_backward,
        num_transitions,
        # A fragment that receives a state is one that tells a gradient, and the other way round.
        num_prefixes=num_backward,
        num_suffixes=num_forward,
        depth=max((len(chain) - 1 for chain in chains), default=0),
        # One at least, so that a rank without tokens runs the same ops.
        num_fragments=max(1, *(len(fragments) for fragments in part.fragments)),
    )


class Plan(NamedTuple):
    """The index tensors of one rank; -1 stands for none. F fragments, N documents, R ranks.

    cu_seqlens int32 [F+1]: local fragments, padded with empty ones.
    starts, ends [F]: the document that a fragment begins, or ends. first, last [N]: the local fragment that begins a
    document, or ends it. Then for the exchange: forward_segments int32 [2A] (start, end local tokens of those who tell
    H), forward_starts [A] (document whose initial state it takes), transition_segments int32 [2M], prefix_fragments
    [B] (local fragments that receive a state), prefix_sources [B,D] and prefix_transitions [B,D] (whose H and M, in
    the order of the document), and the mirrors for the backward.
    """

    cu_seqlens: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    forward_segments: Tensor
    forward_starts: Tensor
    transition_segments: Tensor
    prefix_fragments: Tensor
    prefix_sources: Tensor
    prefix_transitions: Tensor
    backward_segments: Tensor
    backward_ends: Tensor
    suffix_fragments: Tensor
    suffix_sources: Tensor
    suffix_transitions: Tensor


def make_plan(part: Partition, rank: int, device: torch.device) -> Plan:
    """The plan of `rank`, moved to `device` in one copy."""
    links = link(part)
    fragments = part.fragments[rank]
    bounds = part.local_cu_seqlens(rank)
    F, N, D = links.num_fragments, part.num_documents, max(links.depth, 1)
    end = bounds[-1]

    starts, ends = [-1] * F, [-1] * F
    first, last = [-1] * N, [-1] * N
    for document, chain in enumerate(part.chains):
        if chain[0].rank == rank:
            starts[chain[0].fragment], first[document] = document, chain[0].fragment
        if chain[-1].rank == rank:
            ends[chain[-1].fragment], last[document] = document, chain[-1].fragment

    def segments(slots: dict[Place, int], count: int) -> list[int]:
        pairs = [end] * (2 * count)
        for place, slot in slots.items():
            if place.rank == rank:
                pairs[2 * slot : 2 * slot + 2] = bounds[place.fragment : place.fragment + 2]
        return pairs

    def documents(slots: dict[Place, int], count: int, of: list[int]) -> list[int]:
        found = [-1] * count
        for place, slot in slots.items():
            if place.rank == rank:
                found[slot] = of[place.fragment]
        return found

    def sources(
        slots: dict[Place, int], count: int, tells: dict[Place, int], num_told: int, backwards: bool
    ) -> tuple[list[int], list[int], list[int]]:
        """Per receiving fragment, the gathered rows of those before it (after it), nearest last."""
        receivers, rows, transitions = [-1] * count, [-1] * (count * D), [-1] * (count * D)
        for chain in part.chains:
            way = chain[::-1] if backwards else chain
            for i, place in enumerate(way):
                if i == 0 or place.rank != rank:
                    continue
                slot = slots[place]
                receivers[slot] = place.fragment
                for j, other in enumerate(way[:i]):
                    # Where no document crosses ranks, each rank hears itself only.
                    block = other.rank if part.crosses_ranks else 0
                    rows[slot * D + j] = block * num_told + tells[other]
                    if j:
                        transitions[slot * D + j] = block * links.num_transitions + links.transitions[other]
        return receivers, rows, transitions

    prefixes = sources(links.backward, links.num_prefixes, links.forward, links.num_forward, backwards=False)
    suffixes = sources(links.forward, links.num_suffixes, links.backward, links.num_backward, backwards=True)
    lists = [
        [*bounds, *[end] * (F + 1 - len(bounds))],
        *(starts, ends, first, last),
        segments(links.forward, links.num_forward),
        documents(links.forward, links.num_forward, starts),
        segments(links.transitions, links.num_transitions),
        *prefixes,
        segments(links.backward, links.num_backward),
        documents(links.backward, links.num_backward, ends),
        *suffixes,
    ]
    assert len(fragments) <= F
    flat = torch.tensor([x for numbers in lists for x in numbers], dtype=torch.int64)
    moved = flat.to(device, non_blocking=True)
    parts = moved.split([len(numbers) for numbers in lists])
    names = dict(zip(Plan._fields, parts, strict=True))
    for name in ("prefix_sources", "prefix_transitions", "suffix_sources", "suffix_transitions"):
        names[name] = names[name].view(-1, D)
    for name in ("cu_seqlens", "forward_segments", "transition_segments", "backward_segments"):
        names[name] = names[name].to(torch.int32)
    # Graph inputs that are views of one buffer would make the compiler reason about aliases.
    return Plan(**{name: x.clone() for name, x in names.items()})


MAX_WIDTH = 8
"""The widest causal convolution; its plan reaches MAX_WIDTH - 1 rows back."""


class Halo(NamedTuple):
    """Where the rows before a rank's fragments lie, for every width up to `MAX_WIDTH`; -1 stands for none.

    fragments [B]: local fragments that continue a document. sources, distances [B,P]: for the row j + 1 before the
    fragment, who tells it and how far from its teller's end it is (0: the last row). tellers [A]: local fragments that
    tell rows. readers, reader_distances [A,P,P]: for each row that this rank tells, which receivers read it, and as
    their which row (0: nearest).
    """

    fragments: Tensor
    sources: Tensor
    distances: Tensor
    tellers: Tensor
    readers: Tensor
    reader_distances: Tensor


def make_halo(part: Partition, rank: int, device: torch.device) -> Halo:
    """The halo plan of `rank`."""
    links, P = link(part), MAX_WIDTH - 1
    A, B = links.num_forward, links.num_backward
    fragments, tellers = torch.full((B,), -1), torch.full((A,), -1)
    sources, distances = torch.full((B, P), -1), torch.full((B, P), -1)
    readers, reader_distances = torch.full((A, P, P), -1), torch.full((A, P, P), -1)
    used: dict[tuple[int, int], int] = {}
    for place, slot in links.forward.items():
        if place.rank == rank:
            tellers[slot] = place.fragment
    for chain in part.chains:
        for i, place in enumerate(chain[1:], start=1):
            slot = links.backward[place]
            if place.rank == rank:
                fragments[slot] = place.fragment
            # The rows before this fragment, nearest first; a short fragment in front leaves room for one before it.
            behind = [
                (other, distance)
                for other in reversed(chain[:i])
                for distance in range(min(P, part.fragments[other.rank][other.fragment].length))
            ][:P]
            for j, (other, distance) in enumerate(behind):
                block = (other.rank, place.rank) if part.crosses_ranks else (0, 0)
                teller = links.forward[other]
                if place.rank == rank:
                    sources[slot, j], distances[slot, j] = block[0] * A + teller, distance
                if other.rank == rank:
                    count = used.get((teller, distance), 0)
                    used[teller, distance] = count + 1
                    readers[teller, distance, count] = block[1] * B + slot
                    reader_distances[teller, distance, count] = j
    return Halo(*(x.to(device) for x in (fragments, sources, distances, tellers, readers, reader_distances)))
