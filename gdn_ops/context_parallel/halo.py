"""The rows before a rank's fragments, which a convolution needs: who holds them, and who reads this rank's."""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.context_parallel.partition import Partition, Place
from gdn_ops.context_parallel.plan import link

MAX_WIDTH = 8
"""The widest causal convolution; its plan reaches MAX_WIDTH - 1 rows back."""


class Halo(NamedTuple):
    """Where the rows before a rank's fragments lie, for every width up to `MAX_WIDTH`, int32; -1 stands for none.

    F fragments, P = MAX_WIDTH - 1. cu_seqlens [F+1]: local fragments, padded with empty ones. tokens [A,P]: for each
    fragment that tells rows its last tokens, the last one first. fragments [B]: local fragments that continue a
    document. sources, distances [F,P]: of the row j + 1 before a fragment, who tells it and how far from its teller's
    end it is (0: the last row). readers, reader_distances [F,P,S]: of the row j before a fragment's end, which of the
    receivers of all ranks read it, and as their which row (0: nearest).
    """

    cu_seqlens: Tensor
    tokens: Tensor
    fragments: Tensor
    sources: Tensor
    distances: Tensor
    readers: Tensor
    reader_distances: Tensor


class _Read(NamedTuple):
    """A row before the fragment at `reader` that the fragment at `teller` holds."""

    reader: Place
    row: int
    teller: Place
    distance: int


def _reads(part: Partition) -> list[_Read]:
    """Everything that anybody reads."""
    found = []
    for chain in part.chains:
        for i, place in enumerate(chain[1:], start=1):
            # The rows before this fragment, nearest first; a short fragment in front leaves room for one before it.
            behind = [
                (other, distance)
                for other in reversed(chain[:i])
                for distance in range(min(MAX_WIDTH - 1, part.fragments[other.rank][other.fragment].length))
            ]
            found += [_Read(place, row, *held) for row, held in enumerate(behind[: MAX_WIDTH - 1])]
    return found


def make_halo(part: Partition, rank: int, device: torch.device) -> Halo:
    """The halo plan of `rank`."""
    links, P = link(part), MAX_WIDTH - 1
    A, B = links.num_forward, links.num_backward
    bounds = list(part.local_cu_seqlens(rank))
    F = max(1, *(len(fragments) for fragments in part.fragments))
    cu_seqlens = torch.tensor([*bounds, *[bounds[-1]] * (F + 1 - len(bounds))])
    tokens, fragments = torch.full((A, P), -1), torch.full((B,), -1)
    for place, slot in links.forward.items():
        if place.rank == rank:
            start, end = bounds[place.fragment : place.fragment + 2]
            count = min(P, end - start)
            tokens[slot, :count] = torch.arange(end - 1, end - 1 - count, -1)
    for place, slot in links.backward.items():
        if place.rank == rank:
            fragments[slot] = place.fragment
    reads = _reads(part)
    counts: dict[tuple[Place, int], int] = {}
    numbered = []
    for read in reads:
        number = counts.get((read.teller, read.distance), 0)
        counts[read.teller, read.distance] = number + 1
        numbered.append(number)
    S = max(counts.values(), default=1)
    sources, distances = torch.full((F, P), -1), torch.full((F, P), -1)
    readers, reader_distances = torch.full((F, P, S), -1), torch.full((F, P, S), -1)
    for read, number in zip(reads, numbered, strict=True):
        # Where no document crosses ranks, each rank hears itself only.
        blocks = (read.teller.rank, read.reader.rank) if part.crosses_ranks else (0, 0)
        if read.reader.rank == rank:
            sources[read.reader.fragment, read.row] = blocks[0] * A + links.forward[read.teller]
            distances[read.reader.fragment, read.row] = read.distance
        if read.teller.rank == rank:
            at = read.teller.fragment, read.distance, number
            readers[at] = blocks[1] * B + links.backward[read.reader]
            reader_distances[at] = read.row
    found = (cu_seqlens, tokens, fragments, sources, distances, readers, reader_distances)
    return Halo(*(x.to(torch.int32).to(device) for x in found))
