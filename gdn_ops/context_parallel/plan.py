"""From a partition to the index tensors that the ops read; all of fixed size, equal on every rank.

A document with more than one fragment is a chain. Along a chain, fragment i maps the state it gets to the state it
hands on, S <- M_i S + H_i. Who has to tell what:

- forward: every fragment but the chain's last tells H (the first one's H contains the initial state);
- backward: every fragment but the first tells its dH (the last one's contains the final state's gradient);
- both: the inner ones, neither first nor last, tell M. A chain of two needs no M at all.

Within a rank a fragment may be cut into pieces (`pieces.py`), a chain of their own of which nobody else knows: all but
a document's last piece have H, all but the first dH, and those between M.

Each rank has the same number of slots for these, the largest that any rank needs. Unused slots are empty segments.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.context_parallel.partition import Partition, Place
from gdn_ops.context_parallel.pieces import cut_share
from gdn_ops.shapes import CHUNK


class Links(NamedTuple):
    """Slots by place, and how many of each kind a rank has; `depth`: the longest way a state comes."""

    forward: dict[Place, int]
    backward: dict[Place, int]
    transitions: dict[Place, int]
    num_forward: int
    num_backward: int
    num_transitions: int
    depth: int


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
        depth=max((len(chain) - 1 for chain in chains), default=0),
    )


class Plan(NamedTuple):
    """The index tensors of one rank; -1 stands for none. F pieces, N documents, R ranks.

    A fragment is one piece or, where `pieces.py` cuts it, several; the op's documents are the pieces.

    cu_seqlens int32 [F+1]: local pieces, padded with empty ones.
    starts, ends [F]: the document that a piece begins, or ends. first, last [N]: the local piece that begins a
    document, or ends it.

    For the forward's summary, of Q pieces whose H somebody needs: forward_segments int32 [2Q] (start, end local
    tokens), forward_starts [Q] (document whose initial state a piece takes), forward_table int32 [P+Q,8] (the same as
    a backend's kernels read it, chunks counted along forward_segments: first the P of which only H is asked for, then
    those of H and M), forward_saved_table (the same with chunks counted along cu_seqlens, as those of the op's saved
    tensors are), transitions int32 [2Q] (the pieces whose M somebody needs, the others empty; no pieces if nobody needs
    any). The backward's mirrors: backward_segments, backward_ends, backward_table [QB,8] and backward_saved_table.

    Then walks S <- M S + H, int32 [paths,steps,3], at each step the row of H, that of M, and the row that the state is
    written to: fold (the pieces of a fragment: what it tells), transition_fold (the M that it tells: H is the first
    piece's M, then row 0 of zeros) and ways (one a fragment: over the fragments before it,
    in the first num_between steps, to its first piece, and from there to its others), from the states of the documents
    way_starts [W]; backwards the mirrors.
    """

    cu_seqlens: Tensor
    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    forward_segments: Tensor
    forward_starts: Tensor
    forward_table: Tensor
    forward_saved_table: Tensor
    transitions: Tensor
    fold: Tensor
    transition_fold: Tensor
    way_starts: Tensor
    ways: Tensor
    backward_segments: Tensor
    backward_ends: Tensor
    backward_table: Tensor
    backward_saved_table: Tensor
    backward_fold: Tensor
    backward_way_ends: Tensor
    backward_ways: Tensor

    @property
    def num_forward(self) -> int:
        """A: fragments that tell H, at most."""
        return self.fold.shape[0]

    @property
    def num_backward(self) -> int:
        """B: fragments that tell dH, at most."""
        return self.backward_fold.shape[0]

    @property
    def num_transitions(self) -> int:
        """M: fragments that tell M, at most."""
        return self.transition_fold.shape[0]

    @property
    def num_between(self) -> int:
        """Steps of a way that lead over other fragments, at most."""
        return self.ways.shape[1] - (self.fold.shape[1] - 1)

    @property
    def is_cut(self) -> bool:
        """Whether any fragment of any rank is cut into pieces."""
        return self.fold.shape[1] > 1


class Hears(NamedTuple):
    """Whether a rank has a use for the exchange of the forward, and of the backward."""

    forward: bool
    backward: bool


HEARS_ALL = Hears(True, True)


def hears(part: Partition, rank: int) -> Hears:
    """The forward's tells what came before a fragment, the backward's what comes after it."""
    chains = [chain for chain in part.chains if any(place.rank == rank for place in chain)]
    return Hears(
        forward=any(place.rank == rank for chain in chains for place in chain[1:]),
        backward=any(place.rank == rank for chain in chains for place in chain[:-1]),
    )


class _Role(NamedTuple):
    """What a fragment is to its document: its number in the chain of so many."""

    document: int
    fragment: int
    number: int
    length: int


def _roles(part: Partition) -> list[list[_Role]]:
    """Per rank those of its fragments."""
    found: list[list[_Role]] = [[] for _ in part.fragments]
    for document, chain in enumerate(part.chains):
        for number, place in enumerate(chain):
            found[place.rank].append(_Role(document, place.fragment, number, len(chain)))
    return found


class _Pieces:
    """One rank's pieces: of which fragment each is, and the slots of those that are summarised."""

    def __init__(self, part: Partition, rank: int, roles: list[_Role], pieces: int, ends: int):
        self.spans = cut_share(part, rank, pieces, ends)
        """Per fragment its pieces (first token, one past the last)."""
        self.number: list[list[int]] = []
        """Per fragment its pieces' numbers."""
        count = 0
        for spans in self.spans:
            self.number.append(list(range(count, count + len(spans))))
            count += len(spans)
        self.count = count
        self.flat = [span for spans in self.spans for span in spans]
        self.starts, self.ends = [-1] * count, [-1] * count
        for role in roles:
            if role.number == 0:
                self.starts[self.number[role.fragment][0]] = role.document
            if role.number == role.length - 1:
                self.ends[self.number[role.fragment][-1]] = role.document
        self.linked = sorted(role.fragment for role in roles if role.length > 1)
        """The fragments of documents in parts."""
        chained = [piece for fragment in self.linked for piece in self.number[fragment]]
        self.forward = [piece for piece in chained if self.ends[piece] < 0]
        """The pieces whose H somebody needs: all but a document's last."""
        self.backward = [piece for piece in chained if self.starts[piece] < 0]
        self.cut = [fragment for fragment in self.linked if len(self.number[fragment]) > 1]
        own = {piece for fragment in self.cut for piece in self.number[fragment]}
        own |= {piece for role in roles if 0 < role.number < role.length - 1 for piece in self.number[role.fragment]}
        self.moves = {piece for piece in self.forward if piece in own and self.starts[piece] < 0}
        """The pieces, neither a document's first nor its last, of fragments that are cut, and of those that tell M."""

    @property
    def longest(self) -> int:
        """Pieces of the fragment that has most."""
        return max((len(self.number[fragment]) for fragment in self.linked), default=1)


def pairs(spans: list[tuple[int, int]], count: int) -> list[int]:
    """(start, end) of each, then empty ones up to `count`, at the end of the last."""
    end = spans[-1][1] if spans else 0
    return [x for span in (*spans, *[(end, end)] * (count - len(spans))) for x in span]


def _chunks(start: int, end: int) -> int:
    return -(-(end - start) // CHUNK)


def _chunk_starts(bounds: list[int]) -> list[int]:
    """The first chunk of each document that `bounds` says."""
    return [0, *itertools.accumulate(_chunks(a, b) for a, b in itertools.pairwise(bounds))]


class _Run(NamedTuple):
    """A row of a kernel's table (`gdn_ops.backends.hopper.chunks`): one piece of a recurrence."""

    first: int
    last: int
    chunk: int
    num_chunks: int
    document: int
    start: int
    stop: int
    unused: int = 0


_NO_RUN = _Run(0, 0, 0, 0, -1, -1, -1)


def _table(runs: list[_Run], count: int) -> list[int]:
    """The longest first, as programs should start."""
    ordered = sorted(runs, key=lambda run: -run.num_chunks)
    return [x for run in (*ordered, *[_NO_RUN] * (count - len(runs))) for x in run]


class _Sizes(NamedTuple):
    """Equal on every rank: pieces, those summarised each way (forward: of these without M), ways (fragments, and pieces
    that there are not), pieces of one fragment."""

    pieces: int
    forward: int
    additions: int
    backward: int
    ways: int
    longest: int


def make_plan(part: Partition, rank: int, device: torch.device, pieces: int = 1, ends: int = 1) -> Plan:
    """The plan of `rank`, moved to `device` in one copy; pieces, ends: as `pieces.Cuts`."""
    links = link(part)
    everyone = [_Pieces(part, r, roles, pieces, ends) for r, roles in enumerate(_roles(part))]
    own = everyone[rank]
    # One at least, so that a rank without tokens runs the same ops.
    num_pieces = max(1, *(p.count for p in everyone))
    sizes = _Sizes(
        pieces=num_pieces,
        forward=max(len(p.forward) for p in everyone),
        additions=max(len(p.forward) - len(p.moves) for p in everyone),
        backward=max(len(p.backward) for p in everyone),
        ways=max(len(p.number) + num_pieces - p.count for p in everyone),
        longest=max(p.longest for p in everyone),
    )
    bounds = [0, *(end for _, end in own.flat)]
    F, N, D = sizes.pieces, part.num_documents, max(links.depth, 1)
    first, last = [-1] * N, [-1] * N
    for piece in range(own.count):
        if own.starts[piece] >= 0:
            first[own.starts[piece]] = piece
        if own.ends[piece] >= 0:
            last[own.ends[piece]] = piece
    forward_pairs = pairs([own.flat[piece] for piece in own.forward], sizes.forward)
    backward_pairs = pairs([own.flat[piece] for piece in own.backward], sizes.backward)

    def run(piece: int, chunk: int, document: int, start: int, stop: int) -> _Run:
        return _Run(*own.flat[piece], chunk, _chunks(*own.flat[piece]), document, start, stop)

    chunks, saved_chunks = _chunk_starts(forward_pairs), _chunk_starts(bounds)
    forward, forward_saved = (
        [run(p, chunk(slot, p), own.starts[p], 0 if p in own.moves else -1, slot) for slot, p in enumerate(own.forward)]
        for chunk in (lambda slot, p, of=chunks: of[2 * slot], lambda slot, p: saved_chunks[p])
    )
    chunks = _chunk_starts(backward_pairs)
    backward, backward_saved = (
        [
            run(p, chunk(slot, p), own.ends[p], slot, -1 if own.ends[p] >= 0 else 0)
            for slot, p in enumerate(own.backward)
        ]
        for chunk in (lambda slot, p: chunks[2 * slot], lambda slot, p: saved_chunks[p])
    )
    forward_pieces = [own.flat[p] for p in own.forward]
    moving = [
        span if p in own.moves else (span[0], span[0]) for p, span in zip(own.forward, forward_pieces, strict=True)
    ]
    has_moves = sizes.longest > 1 or links.num_transitions > 0
    forward_slots = {piece: slot for slot, piece in enumerate(own.forward)}
    backward_slots = {piece: slot for slot, piece in enumerate(own.backward)}
    walks = _Walks(part, rank, links, own, sizes, forward_slots, backward_slots)
    pad = [-1] * (F - own.count)
    fields: dict[str, tuple[list[int], tuple[int, ...]]] = {
        "cu_seqlens": ([*bounds, *[bounds[-1]] * (F + 1 - len(bounds))], (F + 1,)),
        "starts": ([*own.starts, *pad], (F,)),
        "ends": ([*own.ends, *pad], (F,)),
        "first": (first, (N,)),
        "last": (last, (N,)),
        "forward_segments": (forward_pairs, (2 * sizes.forward,)),
        "forward_starts": (
            [*(own.starts[p] for p in own.forward), *[-1] * (sizes.forward - len(own.forward))],
            (sizes.forward,),
        ),
        **{
            name: (
                [
                    *_table([run for run in runs if run.start < 0], sizes.additions),
                    *_table([run for run in runs if run.start >= 0], sizes.forward),
                ],
                (sizes.additions + sizes.forward, 8),
            )
            for name, runs in (("forward_table", forward), ("forward_saved_table", forward_saved))
        },
        "transitions": (pairs(moving, sizes.forward) if has_moves else [], (2 * sizes.forward if has_moves else 0,)),
        "fold": (walks.fold(), (links.num_forward, sizes.longest, 3)),
        "transition_fold": (walks.transition_fold(), (links.num_transitions, sizes.longest, 3)),
        "way_starts": (walks.ends_of_ways(own.starts, 0), (sizes.ways,)),
        "ways": (walks.ways(), (sizes.ways, D + sizes.longest - 1, 3)),
        "backward_segments": (backward_pairs, (2 * sizes.backward,)),
        "backward_ends": (
            [*(own.ends[p] for p in own.backward), *[-1] * (sizes.backward - len(own.backward))],
            (sizes.backward,),
        ),
        "backward_table": (_table(backward, sizes.backward), (sizes.backward, 8)),
        "backward_saved_table": (_table(backward_saved, sizes.backward), (sizes.backward, 8)),
        "backward_fold": (walks.backward_fold(), (links.num_backward, sizes.longest, 3)),
        "backward_way_ends": (walks.ends_of_ways(own.ends, -1), (sizes.ways,)),
        "backward_ways": (walks.backward_ways(), (sizes.ways, D + sizes.longest - 1, 3)),
    }
    flat = torch.tensor([x for numbers, _ in fields.values() for x in numbers], dtype=torch.int32)
    moved = flat.to(device, non_blocking=True)
    parts = moved.split([len(numbers) for numbers, _ in fields.values()])
    # Graph inputs that are views of one buffer would make the compiler reason about aliases.
    return Plan(**{name: x.view(shape).clone() for (name, (_, shape)), x in zip(fields.items(), parts, strict=True)})


_Path = list[tuple[int, int, int]]
_NO_STEP = (-1, -1, -1)


class _Walks(NamedTuple):
    """One rank's walks, each as the flat numbers of its table."""

    part: Partition
    rank: int
    links: Links
    own: _Pieces
    sizes: _Sizes
    forward_slots: dict[int, int]
    backward_slots: dict[int, int]

    def _move(self, piece: int) -> int:
        return self.forward_slots[piece] if piece in self.own.moves else -1

    def _folds(self, tells: dict[Place, int], count: int, slots: dict[int, int], *, backwards: bool) -> list[int]:
        """A path a fragment that tells; the state at its end is what it tells, zero for an unused slot."""
        paths = [[_NO_STEP] * self.sizes.longest for _ in range(count)]
        for place, slot in tells.items():
            if place.rank == self.rank:
                numbers = self.own.number[place.fragment]
                for step, piece in enumerate(numbers[::-1] if backwards else numbers):
                    paths[slot][step] = (slots[piece], self._move(piece) if step else -1, -1)
        for slot, path in enumerate(paths):
            path[-1] = (*path[-1][:2], slot)
        return _flat(paths)

    def fold(self) -> list[int]:
        return self._folds(self.links.forward, self.links.num_forward, self.forward_slots, backwards=False)

    def transition_fold(self) -> list[int]:
        """A path a fragment that tells M: from its first piece's, over those of the others."""
        paths = [[_NO_STEP] * self.sizes.longest for _ in range(self.links.num_transitions)]
        for place, slot in self.links.transitions.items():
            if place.rank == self.rank:
                for step, piece in enumerate(self.own.number[place.fragment]):
                    paths[slot][step] = (0, self._move(piece), -1) if step else (self._move(piece), -1, -1)
        for slot, path in enumerate(paths):
            path[-1] = (*path[-1][:2], slot)
        return _flat(paths)

    def backward_fold(self) -> list[int]:
        return self._folds(self.links.backward, self.links.num_backward, self.backward_slots, backwards=True)

    def _over_others(self, paths: list[_Path], tells: dict[Place, int], num_told: int, *, backwards: bool) -> None:
        """The gathered words of the fragments before each fragment (after it), the nearest last."""
        for chain in self.part.chains:
            way = chain[::-1] if backwards else chain
            for i, place in enumerate(way):
                if place.rank != self.rank:
                    continue
                for j, other in enumerate(way[:i]):
                    # Where no document crosses ranks, each rank hears itself only.
                    block = other.rank if self.part.crosses_ranks else 0
                    move = block * self.links.num_transitions + self.links.transitions[other] if j else -1
                    paths[place.fragment][j] = (block * num_told + tells[other], move, -1)

    def _ways(self, tells: dict[Place, int], num_told: int, slots: dict[int, int], *, backwards: bool) -> list[int]:
        """Rows of pieces that there are not are written by the ways after those of the fragments."""
        depth, own = max(self.links.depth, 1), self.own
        paths = [[_NO_STEP] * (depth + self.sizes.longest - 1) for _ in range(self.sizes.ways)]
        self._over_others(paths, tells, num_told, backwards=backwards)
        for path, unwritten in zip(paths[len(own.number) :], range(own.count, self.sizes.pieces), strict=False):
            path[depth - 1] = (-1, -1, unwritten)
        for path, pieces in zip(paths, own.number, strict=False):
            numbers = pieces[::-1] if backwards else pieces
            path[depth - 1] = (*path[depth - 1][:2], numbers[0])
            for step, (piece, following) in enumerate(itertools.pairwise(numbers)):
                path[depth + step] = (slots[piece], self._move(piece), following)
        return _flat(paths)

    def ends_of_ways(self, documents: list[int], end: int) -> list[int]:
        """The documents that the first (last: -1) pieces of fragments begin (end)."""
        found = [documents[pieces[end]] for pieces in self.own.number]
        return [*found, *[-1] * (self.sizes.ways - len(found))]

    def ways(self) -> list[int]:
        return self._ways(self.links.forward, self.links.num_forward, self.forward_slots, backwards=False)

    def backward_ways(self) -> list[int]:
        return self._ways(self.links.backward, self.links.num_backward, self.backward_slots, backwards=True)


def _flat(paths: list[_Path]) -> list[int]:
    return [x for path in paths for step in path for x in step]
