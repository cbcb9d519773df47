"""Into how many pieces a rank cuts its share of a long document, and where.

A GPU runs a recurrence as one chain a value head, on one multiprocessor, so one long fragment leaves most of the chip
idle, in its summaries as in the op itself. A fragment of a document that lies in parts is summarised anyway. Cut into
pieces that are summarised each by itself, all of its passes run side by side: the pieces are the op's documents, each
with an initial state and a final state's gradient of its own. What the ranks tell each other stays the same.

A document's first piece starts from a known state, so nobody needs its M, and its last piece ends with a known
gradient. Each costs one chain in one of the summaries and none in the other, where a piece between them costs three in
all. So these two may be longer than the others: their chains run as long as the others' do one after another.

Cuts lie at multiples of the chunk length from a fragment's first token. A document that lies on one rank in one
fragment is never cut here: a summary is what nobody needs of it.
"""

import functools
import heapq
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from gdn_ops.context_parallel.partition import Fragment, Partition
from gdn_ops.shapes import CHUNK


class _Pass(NamedTuple):
    """A recurrence: microseconds a chunk of a chain takes at least, and kilobytes it moves.

    H200, 2026-11-30, one document of 32768 tokens with 48 heads of 128 (docs/experiments.md, Segments).
    """

    microseconds: float
    kilobytes: float


_OUTPUTS = _Pass(1.72, 66)
_STATES = _Pass(1.75, 84)
_REVERSE = _Pass(2.35, 120)
_SUMMARY = _Pass(1.3, 29)
"""Of H and M, side by side."""
_REVERSE_SUMMARY = _Pass(1.85, 54)

_KILOBYTES_A_MICROSECOND = 4000.0
"""What all chains together move at most."""

_PROGRAM_MICROSECONDS = 2.0
"""What starting a program costs before its first chunk (estimate)."""

_STEP_MICROSECONDS = 18.0
"""What each further piece costs in the four walks from one to the next, forward and backward together."""

_MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM). A constant, so that a share is cut the same way wherever it runs."""

_NEAR_ENOUGH = 1.01
"""Each piece keeps states of its own until the backward, so the fewest are taken whose time is near the best."""

_MOST_PIECES = 16
_LONGEST_ENDS = 4
_LEAST_PIECE_CHUNKS = 16
"""Shorter ones would take longer to start than to run."""

_LENGTHS_AN_OCTAVE = 16
"""How many lengths of a share the model tells apart between one and its double: it takes the host a while for each."""

UNTOLD_PIECES = 8
"""For a number of value heads that nobody told: 16, 32, 48 or 64 heads in eight pieces fill 97 % of whole rounds."""


class Cuts(NamedTuple):
    """pieces: of a fragment as long as the largest share; ends: how many times as long as the others a document's first
    and last piece are."""

    pieces: int
    ends: int


def _run(kind: _Pass, programs: Sequence[tuple[int, float]]) -> float:
    """Microseconds of one launch of (number, chunks) programs, which start in order.

    As many as there are multiprocessors run at once, and share what can be moved.
    """
    waiting = [[number, chunks + _PROGRAM_MICROSECONDS / kind.microseconds] for number, chunks in programs if number]
    waiting.reverse()
    running: list[tuple[float, int]] = []
    """(when, in chunks of every program since the start; how many programs), a heap."""
    free, done, time = _MULTIPROCESSORS, 0.0, 0.0
    while waiting or running:
        while waiting and free:
            number = min(free, waiting[-1][0])
            heapq.heappush(running, (done + waiting[-1][1], int(number)))
            free -= int(number)
            waiting[-1][0] -= number
            if not waiting[-1][0]:
                waiting.pop()
        until, number = heapq.heappop(running)
        moved = (_MULTIPROCESSORS - free) * kind.kilobytes / _KILOBYTES_A_MICROSECOND
        time += (until - done) * max(kind.microseconds, moved)
        done = until
        free += number
    return time


def _microseconds(cuts: Cuts, num_chunks: int, num_v_heads: int, has_inner: bool) -> float:
    """The sequential passes of a step, modelled: of the slowest of the ranks that share a document.

    Each with one fragment; the first, the last and, if there are any, those between them.
    """
    pieces, ends = cuts
    unit = num_chunks / (pieces - 1 + ends)
    long, others = (num_v_heads, ends * unit), ((pieces - 1) * num_v_heads, unit)
    summaries = (2 * others[0], unit)  # H and M
    # An uncut fragment tells its H or its dH and nothing else: M of both ends is what nobody needs.
    first = _run(_SUMMARY, (long, summaries)) + _run(_REVERSE_SUMMARY, (others,))
    last = _run(_SUMMARY, (summaries,)) + _run(_REVERSE_SUMMARY, (long, others))
    passes = (_OUTPUTS, _STATES, _REVERSE)
    slowest = max(first, last) + sum(_run(kind, (long, others)) for kind in passes)
    if has_inner:
        number, unit = pieces * num_v_heads, num_chunks / pieces
        inner = sum(_run(kind, ((number, unit),)) for kind in (*passes, _REVERSE_SUMMARY))
        slowest = max(slowest, inner + _run(_SUMMARY, ((2 * number, unit),)))
    return slowest + (pieces - 1) * _STEP_MICROSECONDS


@functools.lru_cache(maxsize=4096)
def _best_ends(pieces: int, num_chunks: int, num_v_heads: int, has_inner: bool) -> tuple[float, int]:
    """The least time of so many pieces, and the ends for it."""
    most = max(1, min(_LONGEST_ENDS, num_chunks // _LEAST_PIECE_CHUNKS - pieces + 1)) if pieces > 1 else 1
    found = [(_microseconds(Cuts(pieces, x), num_chunks, num_v_heads, has_inner), x) for x in range(1, most + 1)]
    return min(found)


def _about(num_chunks: int) -> int:
    """A number of chunks that few others are rounded to as well."""
    step = max(1, 2 ** (num_chunks.bit_length() - 1) // _LENGTHS_AN_OCTAVE)
    return num_chunks // step * step


def cuts_by_rule(
    num_tokens: int, num_v_heads: int | None, *, has_inner: bool = False, pieces: int | None = None
) -> Cuts:
    """The rule: how to cut a share of `num_tokens`, from shapes alone, for a GPU of 132 multiprocessors.

    The fewest pieces for which a model of the sequential passes is within 1 % of its least time, at most 16, none
    shorter than 1024 tokens, with the ends for which it is least. If the number of heads is not known, 8 within the
    same limits, all equal.

    has_inner: whether any rank lies between others of its document; its pieces are equal. pieces: to be taken, then
    only the ends follow from the model.
    """
    num_chunks = _about(-(-num_tokens // CHUNK))
    most = max(1, min(_MOST_PIECES, num_chunks // _LEAST_PIECE_CHUNKS))
    if num_v_heads is None:
        return Cuts(min(UNTOLD_PIECES, most) if pieces is None else pieces, 1)
    if pieces is not None:
        return Cuts(pieces, _best_ends(pieces, num_chunks, num_v_heads, has_inner)[1])
    found = [_best_ends(count, num_chunks, num_v_heads, has_inner) for count in range(1, most + 1)]
    least = min(found)[0]
    return next(Cuts(i + 1, ends) for i, (time, ends) in enumerate(found) if time <= _NEAR_ENOUGH * least)


def has_inner_fragments(part: Partition) -> bool:
    """Whether any document lies in three parts or more."""
    return any(len(chain) > 2 for chain in part.chains)


def cut(length: int, pieces: int, first: int = 1, last: int = 1) -> list[int]:
    """Boundaries of a fragment's pieces, from 0 to its length: `pieces`, or fewer if it has too few chunks.

    All of equal length, but the first or the last one so many times as long as the others (one of the two at most).
    """
    num_chunks = -(-length // CHUNK)
    longer = max(first, last)
    if longer == 1 or pieces == 1:
        step = max(1, -(-num_chunks // pieces)) * CHUNK
        return [*range(0, max(length, 1), step), length]
    # What is left over makes the long one longer: the others run several after each other.
    others = num_chunks // (pieces - 1 + longer)
    if others == 0:
        return [0, length]
    start = num_chunks - (pieces - 1) * others if first > 1 else others
    return [0, *[(start + i * others) * CHUNK for i in range(pieces - 1)], length]


def cut_share(part: Partition, rank: int, pieces: int, ends: int = 1) -> list[list[tuple[int, int]]]:
    """Per fragment of `rank` its pieces, (first local token, one past the last); `pieces` of the largest share.

    Fragments get them in proportion to their length, rounded. Those of documents that lie in one fragment stay whole.
    """
    num_chunks = -(-part.max_tokens // CHUNK)
    piece_chunks = max(1, -(-num_chunks // pieces))
    found = []
    starts = part.local_cu_seqlens(rank)
    for fragment, start in zip(part.fragments[rank], starts, strict=False):
        bounds = [0, fragment.length]
        if pieces > 1 and len(part.chains[fragment.document]) > 1:
            wanted = max(1, (-(-fragment.length // CHUNK) + piece_chunks // 2) // piece_chunks)
            bounds = cut(fragment.length, wanted, *_longer(part, fragment, ends))
        found.append([(start + a, start + b) for a, b in itertools.pairwise(bounds)])
    return found


def _longer(part: Partition, fragment: Fragment, ends: int) -> tuple[int, int]:
    """How long the first and last piece of a fragment of a document in parts are."""
    length = part.cu_seqlens[fragment.document + 1] - part.cu_seqlens[fragment.document]
    return (ends if fragment.offset == 0 else 1, ends if fragment.end == length else 1)
