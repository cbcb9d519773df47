"""Where every token of a batch lives: documents cut into fragments, fragments given to ranks.

A rank holds an ordered list of fragments `(document, offset, length)`; its local tokens are these fragments one after
the other. Everything here is host arithmetic on a few integers, done once per batch and equally on every rank.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gdn_ops.context_parallel.context import Context

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")


class Fragment(NamedTuple):
    """`length` tokens of `document`, from its token `offset` on."""

    document: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset after its last token."""
        return self.offset + self.length


class Place(NamedTuple):
    """Where a fragment lies: its rank and its number among the rank's fragments."""

    rank: int
    fragment: int


@dataclass(frozen=True)
class Partition:
    """A batch of documents over ranks; made by `partition`.

    cu_seqlens: the global document boundaries. fragments: per rank, in the order of its local tokens. Fragments that
    continue each other on one rank are one fragment, and there are none of zero length but those that give an empty
    document its rank.
    """

    cu_seqlens: tuple[int, ...]
    fragments: tuple[tuple[Fragment, ...], ...]

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.fragments)

    @property
    def num_documents(self) -> int:
        """N, empty documents included."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self.cu_seqlens[-1]

    @cached_property
    def max_tokens(self) -> int:
        """Tokens of the rank that has most: pad to it for equal shapes, so equal graphs, on every rank."""
        return max(self.tokens(rank) for rank in range(self.num_ranks))

    def tokens(self, rank: int) -> int:
        """Tokens that `rank` holds."""
        return sum(fragment.length for fragment in self._of(rank))

    def local_cu_seqlens(self, rank: int) -> tuple[int, ...]:
        """Boundaries of `rank`'s fragments among its own tokens."""
        return (0, *itertools.accumulate(fragment.length for fragment in self._of(rank)))

    @cached_property
    def chains(self) -> tuple[tuple[Place, ...], ...]:
        """Per document, the places of its fragments from its first token to its last."""
        chains: list[list[tuple[int, Place]]] = [[] for _ in range(self.num_documents)]
        for rank, fragments in enumerate(self.fragments):
            for index, fragment in enumerate(fragments):
                chains[fragment.document].append((fragment.offset, Place(rank, index)))
        return tuple(tuple(place for _, place in sorted(chain)) for chain in chains)

    @cached_property
    def crosses_ranks(self) -> bool:
        """Whether any document lies on more than one rank, so that ranks have to talk."""
        return any(len({place.rank for place in chain}) > 1 for chain in self.chains)

    def positions(self, rank: int) -> Tensor:
        """The global position of each of `rank`'s tokens: int64 [tokens(rank)], on the CPU."""
        parts = [
            torch.arange(self.cu_seqlens[f.document] + f.offset, self.cu_seqlens[f.document] + f.end)
            for f in self._of(rank)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def document_positions(self, rank: int) -> Tensor:
        """Each of `rank`'s tokens' position in its document (for rotary embeddings): int64 [tokens(rank)]."""
        parts = [torch.arange(f.offset, f.end) for f in self._of(rank)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def shard(self, x: Tensor, rank: int, dim: int = 1, pad_to: int | None = None) -> Tensor:
        """`rank`'s tokens of `x`, in its local order; differentiable.

        Args:
            x: any tensor with the batch's tokens along `dim` (tokens past the last document are left out).
            rank: whose tokens.
            dim: the token axis.
            pad_to: zeros are appended up to so many tokens (`max_tokens` makes all ranks' shapes equal).

        Raises ValueError if `dim` has fewer tokens than the documents, or `pad_to` than the rank.
        """
        if x.shape[dim] < self.num_tokens:
            raise ValueError(f"x: expected at least {self.num_tokens} tokens along dim {dim}, got {x.shape[dim]}")
        count = self.tokens(rank)
        local = x.index_select(dim, self.positions(rank).to(x.device))
        if pad_to is None or pad_to == count:
            return local
        if pad_to < count:
            raise ValueError(f"pad_to: expected at least the {count} tokens of rank {rank}, got {pad_to}")
        shape = list(local.shape)
        shape[dim] = pad_to - count
        return torch.cat([local, local.new_zeros(shape)], dim)

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The global tensor of every rank's local one; the inverse of `shard`, padding dropped; differentiable.

        Raises ValueError for a wrong number of parts, or a part with fewer tokens than its rank has.
        """
        if len(parts) != self.num_ranks:
            raise ValueError(f"parts: expected one tensor a rank, {self.num_ranks}, got {len(parts)}")
        for rank, part in enumerate(parts):
            if part.shape[dim] < self.tokens(rank):
                raise ValueError(
                    f"parts[{rank}]: expected at least {self.tokens(rank)} tokens along dim {dim}, "
                    f"got {part.shape[dim]}"
                )
        held = torch.cat([part.narrow(dim, 0, self.tokens(rank)) for rank, part in enumerate(parts)], dim)
        order = torch.cat([self.positions(rank) for rank in range(self.num_ranks)]).argsort()
        return held.index_select(dim, order.to(held.device))

    def context(
        self,
        rank: int,
        group: Any = None,
        device: torch.device | str | None = None,
        *,
        exchange: str = "saved",
        pieces: int | None = None,
        num_v_heads: int | None = None,
        ends: int | None = None,
    ) -> "Context":
        """What the op needs on `rank`: pass it as `cp_context`. Build it once per batch; every layer can use it.

        Args:
            rank: this process's rank in `group`.
            group: a `torch.distributed.ProcessGroup` of `num_ranks` ranks, a one-dimensional DeviceMesh, or None for
                one rank.
            device: where q, k and v are; None means the current default device.
            exchange: "saved" keeps what the backward needs of the exchange (a few states); "replay" exchanges again
                there. Bitwise the same.
            pieces: into how many pieces the rank with most tokens cuts its share of documents that lie in parts, so
                that a GPU runs them side by side; equal on all ranks. Exact, but not bitwise the same. None: 1, but on
                a GPU of compute capability 9.0 by a rule from the number of tokens and `num_v_heads`.
            num_v_heads: HV, for rules only.
            ends: how many times as long as the other pieces a document's first and last one are; of no effect on a
                share in one piece. None: by a rule from the number of pieces, of tokens and `num_v_heads`; without the
                latter 1.

        Raises ValueError or TypeError for a rank, group or word that does not fit. Nothing is communicated here.
        """
        from gdn_ops.context_parallel.context import build

        return build(self, rank, group, device, exchange, pieces, num_v_heads, ends)

    def exchange_bytes(
        self, *, num_v_heads: int, key_dim: int = 128, value_dim: int = 128, itemsize: int = 4
    ) -> "ExchangeBytes":
        """Bytes that one rank sends per layer, forward and backward; independent of tokens and of pieces."""
        from gdn_ops.context_parallel.plan import link

        links = link(self)
        head = num_v_heads * key_dim * itemsize
        if not self.crosses_ranks:
            return ExchangeBytes(0, 0)
        return ExchangeBytes(
            head * (links.num_forward * value_dim + links.num_transitions * key_dim),
            head * links.num_backward * value_dim,
        )

    def halo_bytes(
        self, *, channels: int, width: int = 4, itemsize: int = 2, accumulator_itemsize: int = 4
    ) -> "ExchangeBytes":
        """Bytes that one rank sends per `causal_conv1d` of `channels` (W), forward and backward.

        itemsize: of the row's dtype; its gradients go back in the accumulation dtype.
        """
        from gdn_ops.context_parallel.plan import link

        links = link(self)
        if not self.crosses_ranks:
            return ExchangeBytes(0, 0)
        row = (width - 1) * channels
        return ExchangeBytes(links.num_forward * row * itemsize, links.num_backward * row * accumulator_itemsize)

    def _of(self, rank: int) -> tuple[Fragment, ...]:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank: expected 0 to {self.num_ranks - 1}, got {rank}")
        return self.fragments[rank]


class ExchangeBytes(NamedTuple):
    """Bytes that each rank contributes to the one all-gather of the forward and to that of the backward."""

    forward: int
    backward: int


def partition(
    cu_seqlens: Tensor | Sequence[int],
    num_ranks: int | None = None,
    layout: str = "contiguous",
    *,
    fragments: Iterable[Iterable[tuple[int, int, int]]] | None = None,
) -> Partition:
    """Give the tokens of packed documents to ranks.

    Args:
        cu_seqlens: [N+1] global document boundaries, any lengths (no divisibility is asked for); read on the host.
        num_ranks: R; may be left out with `fragments`.
        layout: "contiguous": each rank the next R-th of all tokens; "zigzag": all tokens cut in 2R pieces, rank r gets
            pieces r and 2R-1-r (evens out causal attention beside GDN); "zigzag_per_document": each document cut so.
        fragments: instead of a layout, per rank the `(document, offset, length)` it holds, in the order of its tokens.
            They must cover every token once. Length 0 is allowed.

    Returns:
        A `Partition`. Ranks without tokens, documents of one token and empty documents are all legal.

    Raises:
        TypeError, ValueError: with the argument, what was expected and what came.
    """
    bounds = _bounds(cu_seqlens)
    if fragments is not None:
        if layout != "contiguous":
            raise ValueError(f"layout: explicit fragments are a layout of their own, got {layout!r} too")
        given = [[_fragment(x, rank, i) for i, x in enumerate(row)] for rank, row in enumerate(fragments)]
        if num_ranks is not None and num_ranks != len(given):
            raise ValueError(f"fragments: expected one list a rank, {num_ranks}, got {len(given)}")
        if not given:
            raise ValueError("fragments: expected at least one rank, got none")
        _check_cover(bounds, given)
        return Partition(bounds, _normalised(bounds, given))
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"num_ranks: expected an int, got {type(num_ranks).__name__}")
    if num_ranks < 1:
        raise ValueError(f"num_ranks: expected at least 1, got {num_ranks}")
    if layout == "contiguous":
        pieces = _cut(0, bounds[-1], num_ranks)
        spans = [[piece] for piece in pieces]
    elif layout == "zigzag":
        spans = _zigzag(0, bounds[-1], num_ranks)
    elif layout == "zigzag_per_document":
        spans = [[] for _ in range(num_ranks)]
        for start, end in itertools.pairwise(bounds):
            for rank, pair in enumerate(_zigzag(start, end, num_ranks)):
                spans[rank] += pair
    else:
        raise ValueError(f"layout: expected one of {LAYOUTS} (or explicit fragments), got {layout!r}")
    rows = [[f for start, end in row for f in _fragments_of(bounds, start, end)] for row in spans]
    return Partition(bounds, _normalised(bounds, rows))


def _bounds(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise TypeError(
                f"cu_seqlens: expected int32 or int64 [N + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
            )
        values = cu_seqlens.tolist()
    else:
        values = [int(x) for x in cu_seqlens]
    if not values:
        raise ValueError("cu_seqlens: expected at least one boundary, got none")
    if values[0] != 0:
        raise ValueError(
            f"cu_seqlens: expected to start at 0, got {values[0]} (boundaries are those of the whole batch)"
        )
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ValueError(f"cu_seqlens: expected never to decrease, got {a} then {b} at index {i + 1}")
    return tuple(values)


def _fragment(value: Any, rank: int, index: int) -> Fragment:
    where = f"fragments[{rank}][{index}]"
    try:
        document, offset, length = value
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: expected (document, offset, length), got {value!r}") from error
    if any(isinstance(x, bool) or not isinstance(x, int) for x in (document, offset, length)):
        raise TypeError(f"{where}: expected three ints (document, offset, length), got {value!r}")
    return Fragment(document, offset, length)


def _check_cover(bounds: tuple[int, ...], rows: list[list[Fragment]]) -> None:
    """Every token of every document exactly once."""
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    found: list[list[tuple[Fragment, str]]] = [[] for _ in lengths]
    for rank, row in enumerate(rows):
        for index, fragment in enumerate(row):
            where = f"fragments[{rank}][{index}]"
            if not 0 <= fragment.document < len(lengths):
                raise ValueError(f"{where}: expected a document from 0 to {len(lengths) - 1}, got {fragment.document}")
            length = lengths[fragment.document]
            if fragment.length < 0 or fragment.offset < 0 or fragment.end > length:
                raise ValueError(
                    f"{where}: expected tokens within the {length} of document {fragment.document}, "
                    f"got offset {fragment.offset}, length {fragment.length}"
                )
            if fragment.length:
                found[fragment.document].append((fragment, where))
    for document, (length, parts) in enumerate(zip(lengths, found, strict=True)):
        reached = 0
        for fragment, where in sorted(parts):
            if fragment.offset < reached:
                raise ValueError(f"{where}: token {fragment.offset} of document {document} is held twice")
            if fragment.offset > reached:
                raise ValueError(
                    f"fragments: tokens {reached} to {fragment.offset - 1} of document {document} are missing"
                )
            reached = fragment.end
        if reached < length:
            raise ValueError(f"fragments: tokens {reached} to {length - 1} of document {document} are missing")


def _normalised(bounds: tuple[int, ...], rows: list[list[Fragment]]) -> tuple[tuple[Fragment, ...], ...]:
    """Join what continues on the same rank, drop what is empty, give every empty document one rank."""
    empty = {n for n, (a, b) in enumerate(itertools.pairwise(bounds)) if a == b}
    result = []
    for row in rows:
        kept: list[Fragment] = []
        for fragment in row:
            last = kept[-1] if kept else None
            if fragment.length == 0:
                if fragment.document in empty:
                    empty.remove(fragment.document)
                    kept.append(fragment)
            elif last is not None and last.document == fragment.document and last.end == fragment.offset:
                kept[-1] = Fragment(last.document, last.offset, last.length + fragment.length)
            else:
                kept.append(fragment)
        result.append(kept)
    # Documents without a token that nobody asked for go to rank 0: their state passes through unchanged.
    result[0] += [Fragment(document, 0, 0) for document in sorted(empty)]
    return tuple(tuple(row) for row in result)


def _cut(start: int, end: int, pieces: int) -> list[tuple[int, int]]:
    """[start, end) in `pieces` parts whose sizes differ by one at most."""
    length = end - start
    marks = [start + i * length // pieces for i in range(pieces + 1)]
    return list(itertools.pairwise(marks))


def _zigzag(start: int, end: int, num_ranks: int) -> list[list[tuple[int, int]]]:
    pieces = _cut(start, end, 2 * num_ranks)
    return [[pieces[rank], pieces[2 * num_ranks - 1 - rank]] for rank in range(num_ranks)]


def _fragments_of(bounds: tuple[int, ...], start: int, end: int) -> list[Fragment]:
    """The documents' parts in the global tokens [start, end)."""
    parts = []
    for document, (first, last) in enumerate(itertools.pairwise(bounds)):
        low, high = max(first, start), min(last, end)
        if low < high:
            parts.append(Fragment(document, low - first, high - low))
    return parts
