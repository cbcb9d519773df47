"""Which chunks, segments and stretches there are, worked out on the device, and zeros for tokens that no document owns.

Document n has ceil(length / C) chunks, consecutive, after those of the documents before it. Their number depends on
the values of `cu_seqlens`, which are never brought to the host: every grid is sized by an upper bound, and a program
whose chunk does not exist leaves at once. A dense batch is the same thing with equal documents. So it is with segments
and their stretches (`segments.py` says what they are for), whose lengths follow from the document's by the rule
(`shapes.segment_rule`).

Grid of the table kernel: one program a document and one more for what lies past the last chunk. Each adds up the
documents before its own, O(N) loads a program and nothing handed from one program to another.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import CHUNK, LAST_SEGMENT, MOST_PARTS, SEGMENT_UNIT, SegmentRule, part_chunks

# Letters: T tokens (all documents), N documents, C chunk length, NT rows of the chunk table, NC most cuts, NL most
# states left, P parts, NS rows of a part's table, H heads, D head size.

_DOCUMENTS_PER_STEP = 1024
_DOCUMENTS_PER_STEP_IN_PARTS = 128
_ROWS_PER_STEP = 128
_CLEARED_TOKENS = 64

_UNCUT = 2**25
"""A length that no segment exceeds: documents of one call have fewer than 2^31 tokens."""


class Part(NamedTuple):
    """What a backward goes through at once, int32: all chunks, or a part of each document's.

    table [NS,4]: what `Chunks.table` says of its chunks, each in the row of scratch that is the chunk's there; instead
    of the 0, 64 times the chunk's number and one less than its valid tokens.
    runs [N,8]: a part of each document as in `Chunks.segments`. It starts at the state that the forward has left there
    (-1: the document's start). order [2*N]: twice a row of runs, and 1 more for states and updates, 0 for the
    recurrence backwards, which takes 4/3 of the time a chunk; the longest first. used [4], of all [2]: chunks in use in
    the first place. has_all: whether the part is everything, and so a chunk's row of scratch its number.
    """

    table: Tensor
    runs: Tensor
    order: Tensor
    used: Tensor
    has_all: bool


class Chunks(NamedTuple):
    """Where every chunk, every segment and every stretch of one lies, int32.

    table [NT,4]: first token, valid tokens (0: no such chunk), document, 0.
    segments [N+NC,8], first the first one of every document, then the last ones of documents that are cut, then inner
    ones, in each group the longest first: first token, past the DOCUMENT's last token, first chunk, number of chunks,
    document (-1: no such segment), the cut it starts at (-1: the document's start), the cut it stops at (-1: the
    document's end), the row of scratch of the first chunk. Without cuts they are the documents.
    stretches [N+NC+NL,8]: the same for stretches of segments: where documents are cut, the first segments as they are,
    then stretches of the full length, then what each segment ends with, in the order of `segments`. One that starts
    inside a segment starts at the "cut" NC + l, l for the state that the forward has left there.
    cuts [N,2]: a document's first cut and its number of cuts.
    totals [2]: chunks in use, tokens that belong to a document.
    slots [P,NS,4], pieces [P,N,8], counts [P,4]: each part's table, runs and number of chunks; without a row if there
    is one part.
    order [2*N]: every part's, if documents are whole.
    """

    table: Tensor
    segments: Tensor
    stretches: Tensor
    cuts: Tensor
    totals: Tensor
    slots: Tensor
    pieces: Tensor
    counts: Tensor
    order: Tensor

    @property
    def whole(self) -> Part:
        """All chunks at once."""
        return Part(self.table, self.segments, self.order, self.totals, True)

    @property
    def parts(self) -> list[Part]:
        """The parts that a backward goes through, in the order of tokens."""
        each = zip(self.slots, self.pieces, self.counts, strict=True)
        return [Part(table, runs, self.order, count, False) for table, runs, count in each]


@triton.jit
def _span(cu_ptr, n, T, document_length, HAS_CU: tl.constexpr):
    """First token of document(s) `n` and one past the last, kept inside [0, T] whatever cu_seqlens says."""
    if HAS_CU:
        first = tl.minimum(tl.maximum(tl.load(cu_ptr + n).to(tl.int32), 0), T)
        last = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1).to(tl.int32), first), T)
    else:
        first = n * document_length
        last = first + document_length
    return first, last


@triton.jit
def _cut(num_chunks, SEGMENT_CHUNKS, FIRST, LAST: tl.constexpr, UNIT: tl.constexpr):
    """How document(s) are cut: chunks of the first segment and of an inner one, how many inner ones take one chunk
    more, and the number of segments. The last segment takes the rest."""
    # No product exceeds 2^31: neither number of chunks exceeds 2^25.
    ends = FIRST + LAST
    more = UNIT * num_chunks + SEGMENT_CHUNKS * (2 * UNIT + UNIT // 2 - ends)
    pieces = tl.maximum(more // (UNIT * SEGMENT_CHUNKS), 2)
    pieces = tl.where(UNIT * num_chunks <= SEGMENT_CHUNKS * (FIRST + UNIT // 2), 1, pieces)
    total = tl.maximum(ends + UNIT * (pieces - 2), 1)
    head = tl.where(pieces > 1, num_chunks * FIRST // total, num_chunks)
    inner = tl.maximum(pieces - 2, 1)
    between = num_chunks - head - num_chunks * LAST // total
    return head, between // inner, between % inner, pieces


@triton.jit
def _starts_at(r, head, inner, longer):
    """The chunk of its document at which segment r starts."""
    return tl.where(r > 0, head + (r - 1) * inner + tl.minimum(r - 1, longer), 0)


@triton.jit
def _boundaries(r, num_chunks, NC, STRETCH_CHUNKS):
    """Boundaries of stretches inside segment r: one after every STRETCH_CHUNKS chunks, but none in the first one of a
    document that may be cut."""
    return tl.where((r > 0) | (NC == 0), (tl.maximum(num_chunks, 1) - 1) // STRETCH_CHUNKS, 0)


@triton.jit
def _boundaries_before(r, head, inner, longer, NC, STRETCH_CHUNKS):
    """Boundaries inside the segments of a document before segment r."""
    of_longer = tl.minimum(r - 1, longer) * _boundaries(1, inner + 1, NC, STRETCH_CHUNKS)
    of_others = tl.maximum(r - 1 - longer, 0) * _boundaries(1, inner, NC, STRETCH_CHUNKS)
    return tl.where(r > 0, _boundaries(0, head, NC, STRETCH_CHUNKS) + of_longer + of_others, 0)


@triton.jit
def _part_chunks(p, num_chunks, parts):
    """How many chunks of document(s) lie in part p: the first parts have as many as one another, the last the rest."""
    each = (num_chunks + parts - 1) // parts
    return tl.maximum(tl.minimum(num_chunks - p * each, each), 0)


@triton.jit
def _store_stretch(row_ptr, first, last, chunk, num_chunks, n, start, mask):
    tl.store(row_ptr, first, mask=mask)
    tl.store(row_ptr + 1, last, mask=mask)
    tl.store(row_ptr + 2, chunk, mask=mask)
    tl.store(row_ptr + 3, num_chunks, mask=mask)
    tl.store(row_ptr + 4, n, mask=mask)
    tl.store(row_ptr + 5, start, mask=mask)
    tl.store(row_ptr + 6, -1, mask=mask)
    tl.store(row_ptr + 7, chunk, mask=mask)


@triton.jit
def _chunk_table_kernel(
    cu_ptr, table_ptr, segments_ptr, stretches_ptr, cuts_ptr, totals_ptr, slots_ptr, pieces_ptr, counts_ptr,
    order_ptr, T, N, NT, NC, NL, NS, document_length, segment_chunks, first_length, stretch_chunks, parts,
    HAS_CU: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, C: tl.constexpr, DOCS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    n = tl.program_id(0)
    mine = tl.minimum(n, N - 1)
    first, last = _span(cu_ptr, mine, T, document_length, HAS_CU)
    length = last - first
    chunks = (length + C - 1) // C
    head, inner, longer, pieces = _cut(chunks, segment_chunks, first_length, LAST, UNIT)
    tail = chunks - _starts_at(pieces - 1, head, inner, longer)
    before = 0
    cuts_before = 0
    num_cut = 0
    head_place = 0
    tail_place = 0
    inner_place = 0
    whole_before = 0
    num_whole = 0
    states_ahead = 0
    reverses_ahead = 0
    part = tl.arange(0, PARTS)
    slots_before = tl.zeros([PARTS], tl.int32)
    for m0 in range(0, N, DOCS):
        m = m0 + tl.arange(0, DOCS)
        there = m < N
        m_safe = tl.minimum(m, N - 1)
        m_first, m_last = _span(cu_ptr, m_safe, T, document_length, HAS_CU)
        m_chunks = (m_last - m_first + C - 1) // C
        m_head, m_inner, m_longer, m_pieces = _cut(m_chunks, segment_chunks, first_length, LAST, UNIT)
        m_tail = m_chunks - _starts_at(m_pieces - 1, m_head, m_inner, m_longer)
        earlier = there & (m < n)
        before += tl.sum(tl.where(earlier, m_chunks, 0))
        cuts_before += tl.sum(tl.where(earlier, m_pieces - 1, 0))
        num_cut += tl.sum(tl.where(there & (m_pieces > 1), 1, 0))
        ahead = (m_head > head) | ((m_head == head) & (m < n))
        head_place += tl.sum(tl.where(there & ahead, 1, 0))
        states_ahead += tl.sum(tl.where(there & (3 * m_chunks > 4 * chunks), 1, 0))
        reverses_ahead += tl.sum(tl.where(there & (4 * m_chunks >= 3 * chunks), 1, 0))
        ahead = (m_tail > tail) | ((m_tail == tail) & (m < n))
        tail_place += tl.sum(tl.where(there & ahead & (m_pieces > 1), 1, 0))
        ahead = (m_inner > inner) | ((m_inner == inner) & (m < n))
        inner_place += tl.sum(tl.where(there & ahead, tl.maximum(m_pieces - 2, 0), 0))
        # As many stretches of the full length as boundaries: each ends at one.
        m_whole = _boundaries_before(m_pieces - 1, m_head, m_inner, m_longer, NC, stretch_chunks)
        m_whole += _boundaries(m_pieces - 1, m_tail, NC, stretch_chunks)
        whole_before += tl.sum(tl.where(earlier, m_whole, 0))
        num_whole += tl.sum(tl.where(there, m_whole, 0))
        if PARTS > 1:
            m_in_part = _part_chunks(part[:, None], m_chunks[None, :], parts)
            slots_before += tl.sum(tl.where(earlier[None, :], m_in_part, 0), 1)
    # Boundaries that are none (overlapping documents) must not lead past any table or state.
    num_whole = tl.minimum(num_whole, NL)
    num_ahead = tl.where(NC > 0, N, 0)
    rows = tl.arange(0, ROWS)
    if n < N:
        tl.store(cuts_ptr + n * 2, tl.minimum(cuts_before, NC))
        tl.store(cuts_ptr + n * 2 + 1, tl.minimum(pieces - 1, tl.maximum(NC - cuts_before, 0)))
        if NC == 0:
            tl.store(order_ptr + head_place + states_ahead, 2 * head_place)
            tl.store(order_ptr + head_place + reverses_ahead, 2 * head_place + 1)
        for r0 in range(0, pieces, ROWS):
            r = r0 + rows
            start = _starts_at(r, head, inner, longer)
            stop = tl.where(r + 1 < pieces, _starts_at(r + 1, head, inner, longer), chunks)
            place = tl.where(r + 1 < pieces, N + num_cut + inner_place + r - 1, N + tail_place)
            place = tl.where(r == 0, head_place, place)
            mask = (r < pieces) & (place < N + NC)
            from_cut = tl.where(r > 0, tl.minimum(cuts_before + r, NC) - 1, -1)
            row_ptr = segments_ptr + place * 8
            tl.store(row_ptr, first + start * C, mask=mask)
            tl.store(row_ptr + 1, last + 0 * r, mask=mask)
            tl.store(row_ptr + 2, before + start, mask=mask)
            tl.store(row_ptr + 3, stop - start, mask=mask)
            tl.store(row_ptr + 4, n + 0 * r, mask=mask)
            tl.store(row_ptr + 5, from_cut, mask=mask)
            tl.store(row_ptr + 6, tl.where(r + 1 < pieces, tl.minimum(cuts_before + r, NC - 1), -1), mask=mask)
            tl.store(row_ptr + 7, before + start, mask=mask)
            # What the segment ends with.
            inside = _boundaries(r, stop - start, NC, stretch_chunks)
            start += inside * stretch_chunks
            left = tl.minimum((before + start) // stretch_chunks - 1, NL - 1)
            place += tl.where(place < num_ahead, 0, num_whole)
            _store_stretch(
                stretches_ptr + place * 8, first + start * C, last + 0 * r, before + start, stop - start,
                n + 0 * r, tl.where(inside > 0, NC + left, from_cut), mask,
            )  # fmt: skip
        for segment in range(pieces):
            segment_start = _starts_at(segment, head, inner, longer)
            segment_stop = tl.where(segment + 1 < pieces, _starts_at(segment + 1, head, inner, longer), chunks)
            inside = _boundaries(segment, segment_stop - segment_start, NC, stretch_chunks)
            place = whole_before + _boundaries_before(segment, head, inner, longer, NC, stretch_chunks)
            from_cut = tl.where(segment > 0, tl.minimum(cuts_before + segment, NC) - 1, -1)
            for j0 in range(0, inside, ROWS):
                j = j0 + rows
                start = segment_start + j * stretch_chunks
                left = tl.minimum((before + start) // stretch_chunks - 1, NL - 1)
                _store_stretch(
                    stretches_ptr + (num_ahead + place + j) * 8, first + start * C, last + 0 * j, before + start,
                    stretch_chunks + 0 * j, n + 0 * j, tl.where(j > 0, NC + left, from_cut),
                    (j < inside) & (place + j < num_whole),
                )  # fmt: skip
        if PARTS > 1:
            each = tl.maximum((chunks + parts - 1) // parts, 1)
            part_start = part * each
            own = _part_chunks(part, chunks, parts)
            is_run = (own > 0) | (part == 0)
            piece_ptr = pieces_ptr + (part * N + head_place) * 8
            tl.store(piece_ptr, first + part_start * C, mask=part < parts)
            tl.store(piece_ptr + 1, last + 0 * part, mask=part < parts)
            tl.store(piece_ptr + 2, before + part_start, mask=part < parts)
            # Not beyond its scratch where documents overlap.
            tl.store(piece_ptr + 3, tl.minimum(own, tl.maximum(NS - slots_before, 0)), mask=part < parts)
            tl.store(piece_ptr + 4, tl.where(is_run, n, -1), mask=part < parts)
            # The states that a document leaves are at the ends of its parts but the last one.
            left = n * (parts - 1) + part
            tl.store(piece_ptr + 5, tl.where((own > 0) & (part > 0), left - 1, -1), mask=part < parts)
            tl.store(piece_ptr + 6, tl.where((own > 0) & (part_start + own < chunks), left, -1), mask=part < parts)
            tl.store(piece_ptr + 7, slots_before, mask=part < parts)
        for r0 in range(0, chunks, ROWS):
            r = r0 + rows
            mask = (r < chunks) & (before + r < NT)
            row_ptr = table_ptr + (before + r) * 4
            valid = tl.minimum(length - r * C, C)
            tl.store(row_ptr, first + r * C, mask=mask)
            tl.store(row_ptr + 1, valid, mask=mask)
            tl.store(row_ptr + 2, n + 0 * r, mask=mask)
            tl.store(row_ptr + 3, 0 * r, mask=mask)
            if PARTS > 1:
                mine_in = r // each
                slot = r - mine_in * each
                slot += tl.sum(tl.where(part[:, None] == mine_in[None, :], slots_before[:, None], 0), 0)
                mask = mask & (slot < NS)
                slot_ptr = slots_ptr + (mine_in * NS + slot) * 4
                tl.store(slot_ptr, first + r * C, mask=mask)
                tl.store(slot_ptr + 1, valid, mask=mask)
                tl.store(slot_ptr + 2, n + 0 * r, mask=mask)
                tl.store(slot_ptr + 3, (before + r) * C + valid - 1, mask=mask)
    else:
        tl.store(totals_ptr, before)
        tl.store(totals_ptr + 1, last)
        for r0 in range(before, NT, ROWS):
            r = r0 + rows
            for field in tl.static_range(4):
                tl.store(table_ptr + r * 4 + field, 0 * r, mask=r < NT)
        if PARTS > 1:
            tl.store(counts_ptr + part * 4, tl.minimum(slots_before, NS), mask=part < parts)
            for p in range(parts):
                used = tl.sum(tl.where(part == p, slots_before, 0))
                for r0 in range(used, NS, ROWS):
                    r = r0 + rows
                    for field in tl.static_range(4):
                        tl.store(slots_ptr + (p * NS + r) * 4 + field, 0 * r, mask=r < NS)
        for r0 in range(N + cuts_before, N + NC, ROWS):
            r = r0 + rows
            for field in tl.static_range(8):
                nothing = -1 if field >= 4 else 0
                tl.store(segments_ptr + r * 8 + field, nothing + 0 * r, mask=r < N + NC)
        for r0 in range(N + tl.minimum(cuts_before, NC) + num_whole, N + NC + NL, ROWS):
            r = r0 + rows
            for field in tl.static_range(8):
                nothing = -1 if field >= 4 else 0
                tl.store(stretches_ptr + r * 8 + field, nothing + 0 * r, mask=r < N + NC + NL)


def table_shapes(num_documents: int, num_tokens: int, num_chunks: int, rule: SegmentRule) -> dict[str, tuple[int, ...]]:
    """The shape of each field of `Chunks`."""
    parts = rule.parts if rule.parts > 1 else 0
    num_left = 0 if parts else rule.num_left
    num_slots = part_chunks(num_tokens, num_documents, parts) if parts else 0
    return {
        "table": (num_chunks, 4),
        "segments": (num_documents + rule.num_cuts, 8),
        "stretches": (num_documents + rule.num_cuts + num_left, 8),
        "cuts": (num_documents, 2),
        "totals": (2,),
        "slots": (parts, num_slots, 4),
        "pieces": (parts, num_documents, 8),
        "counts": (parts, 4),
        "order": (2 * num_documents,),
    }


def chunk_table(
    cu_seqlens: Tensor | None, num_documents: int, num_tokens: int, num_chunks: int, rule: SegmentRule, like: Tensor
) -> Chunks:
    """Lay out the chunks, segments, stretches and parts of one call; `num_chunks` is the upper bound NT. One launch, no
    synchronisation."""
    shapes = table_shapes(num_documents, num_tokens, num_chunks, rule)
    chunks = Chunks(**{name: like.new_empty(shape, dtype=torch.int32) for name, shape in shapes.items()})
    parts, num_slots, _ = shapes["slots"]
    num_left = 0 if parts else rule.num_left
    launch(
        _chunk_table_kernel, (num_documents + 1,),
        cu_seqlens, *chunks, num_tokens, num_documents, num_chunks, rule.num_cuts, num_left, num_slots,
        num_tokens // num_documents if cu_seqlens is None else 0, rule.chunks if rule.num_cuts else _UNCUT, rule.first,
        rule.stretch_chunks if num_left else _UNCUT, rule.parts,
        HAS_CU=cu_seqlens is not None, LAST=LAST_SEGMENT, UNIT=SEGMENT_UNIT, C=CHUNK,
        DOCS=_DOCUMENTS_PER_STEP_IN_PARTS if parts else _DOCUMENTS_PER_STEP, ROWS=_ROWS_PER_STEP,
        PARTS=MOST_PARTS if parts else 1, num_warps=4,
    )  # fmt: skip
    return chunks


@triton.jit
def _clear_tokens(x_ptr, t, mask_t, stride_t, stride_g, stride_r, num_heads, group_len, D, BLOCK_D: tl.constexpr):
    """Write zeros to tokens t of [T,G,R,D], G * R heads."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_t[:, None] & (offs_d < D)[None, :]
    zero = tl.zeros([t.shape[0], BLOCK_D], x_ptr.dtype.element_ty)
    for h in range(num_heads):
        head = (h // group_len).to(tl.int64) * stride_g + (h % group_len).to(tl.int64) * stride_r
        tl.store(x_ptr + t.to(tl.int64)[:, None] * stride_t + head + offs_d[None, :], zero, mask=mask)


@triton.jit
def _clear_ownerless_kernel(
    totals_ptr, T,
    a_ptr, a_stride_t, a_stride_g, a_stride_r, a_heads, a_group, a_D,
    b_ptr, b_stride_t, b_stride_g, b_stride_r, b_heads, b_group, b_D,
    c_ptr, c_stride_t, c_stride_g, c_stride_r, c_heads, c_group, c_D,
    d_ptr, d_stride_t, d_stride_g, d_stride_r, d_heads, d_group, d_D,
    e_ptr, e_stride_t, e_stride_g, e_stride_r, e_heads, e_group, e_D,
    TOKENS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    end = tl.load(totals_ptr + 1)
    t0 = tl.program_id(0) * TOKENS
    if t0 + TOKENS > end:
        t = t0 + tl.arange(0, TOKENS)
        mask_t = (t >= end) & (t < T)
        _clear_tokens(a_ptr, t, mask_t, a_stride_t, a_stride_g, a_stride_r, a_heads, a_group, a_D, BLOCK_A)
        if BLOCK_B:
            _clear_tokens(b_ptr, t, mask_t, b_stride_t, b_stride_g, b_stride_r, b_heads, b_group, b_D, BLOCK_B)
        if BLOCK_C:
            _clear_tokens(c_ptr, t, mask_t, c_stride_t, c_stride_g, c_stride_r, c_heads, c_group, c_D, BLOCK_C)
        if BLOCK_D:
            _clear_tokens(d_ptr, t, mask_t, d_stride_t, d_stride_g, d_stride_r, d_heads, d_group, d_D, BLOCK_D)
        if BLOCK_E:
            _clear_tokens(e_ptr, t, mask_t, e_stride_t, e_stride_g, e_stride_r, e_heads, e_group, e_D, BLOCK_E)


_MOST_CLEARED = 5


def clear_ownerless(targets: Sequence[Tensor], chunks: Chunks) -> None:
    """Write zeros to the tokens of up to five tensors [T,G,R,D] that come after the last document's end.

    Grid: one program a block of tokens, for all tensors. Mostly nothing is to be cleared, and what costs is launching.
    """
    numbers: list[Tensor | int | None] = []
    blocks = []
    for x in targets:
        _, G, R, D = x.shape
        numbers += [x, *x.stride()[:3], G * R, R, D]
        blocks.append(triton.next_power_of_2(D))
    missing = _MOST_CLEARED - len(targets)
    T = targets[0].shape[0]
    launch(
        _clear_ownerless_kernel, (triton.cdiv(T, _CLEARED_TOKENS),),
        chunks.totals, T, *numbers, *[None] * (7 * missing), TOKENS=_CLEARED_TOKENS,
        **dict(zip(("BLOCK_A", "BLOCK_B", "BLOCK_C", "BLOCK_D", "BLOCK_E"), blocks + [0] * missing, strict=True)),
        num_warps=4,
    )  # fmt: skip
