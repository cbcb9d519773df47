"""The rows before a rank's fragments, which a convolution needs: who holds them, and who reads this rank's."""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.context_parallel.partition import Partition
from gdn_ops.context_parallel.plan import link, pairs

MAX_WIDTH = 8
"""The widest causal convolution; its plan reaches MAX_WIDTH - 1 rows back."""


class Halo(NamedTuple):
    """Where the rows before a rank's fragments lie, for every width up to `MAX_WIDTH`; -1 stands for none.

    cu_seqlens int32 [F+1]: local fragments, padded with empty ones. segments int32 [2A]: (start, end) of those that
    tell rows. fragments [B]: local fragments that continue a document. sources, distances [B,P]: for the row j + 1
    before the fragment, who tells it and how far from its teller's end it is (0: the last row). tellers [A]: local
    fragments that tell rows. readers, reader_distances [A,P,P]: for each row that this rank tells, which receivers read
    it, and as their which row (0: nearest).
    """

    cu_seqlens: Tensor
    segments: Tensor
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
    bounds = list(part.local_cu_seqlens(rank))
    padded = max(1, *(len(fragments) for fragments in part.fragments)) + 1
    cu_seqlens = torch.tensor([*bounds, *[bounds[-1]] * (padded - len(bounds))], dtype=torch.int32)
    told = [(bounds[p.fragment], bounds[p.fragment + 1]) for p in sorted(links.forward) if p.rank == rank]
    segments = torch.tensor(pairs(told, A), dtype=torch.int32)
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
    found = (cu_seqlens, segments, fragments, sources, distances, tellers, readers, reader_distances)
    return Halo(*(x.to(device) for x in found))
