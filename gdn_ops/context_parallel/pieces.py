"""Into how many pieces a rank cuts its share of a long document, and where.

A GPU runs a recurrence as one chain a value head, on one multiprocessor, so one long fragment leaves most of the chip
idle, in its summaries as in the op itself. A fragment of a document that lies in parts is summarised anyway. Cut into
pieces that are summarised each by itself, all of its passes run side by side: the pieces are the op's documents, each
with an initial state and a final state's gradient of its own. What the ranks tell each other stays the same.

Cuts lie at multiples of the chunk length from a fragment's first token. A document that lies on one rank in one
fragment is never cut here: a summary is what nobody needs of it.
"""

import itertools

from gdn_ops.context_parallel.partition import Fragment, Partition
from gdn_ops.shapes import CHUNK

# Microseconds a chunk of a chain takes on an H200, of one document of 32768 tokens with 48 heads of 128 (2026-11-30):
# outputs 1.6, states and updates 1.75, the backward 2.2, its summary 2.4, H or M 1.5.
_FORWARD_MICROSECONDS = 1.6
_BACKWARD_MICROSECONDS = 1.75 + 2.2
_BACKWARD_SUMMARY_MICROSECONDS = 2.4
_FORWARD_SUMMARY_MICROSECONDS = 1.5

_ROUND_MICROSECONDS = 4.0
"""What starting a program costs before its first chunk (estimate)."""

_STEP_MICROSECONDS = 8.0
"""What each further piece costs in the products that lead from one to the next, forward and backward together."""

_MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM). A constant, so that a share is cut the same way wherever it runs."""

_GROUPED_PROGRAMS = 100
"""Programs of half the heads for which a backward takes the heads in two groups, to use half the memory."""

_NEAR_ENOUGH = 1.05
"""Each piece keeps states of its own until the backward, so the fewest are taken whose time is near the best."""

_MOST_PIECES = 16
_LEAST_PIECE_CHUNKS = 16
"""Shorter ones would take longer to start than to run."""

UNTOLD_PIECES = 8
"""For a number of value heads that nobody told: 16, 32, 48 or 64 heads in eight pieces fill 97 % of whole rounds."""


def _rounds(programs: int) -> int:
    return -(-programs // _MULTIPROCESSORS)


def _microseconds(pieces: int, num_chunks: int, num_v_heads: int) -> float:
    """The sequential passes of a step of a rank with one fragment, modelled."""
    length = -(-num_chunks // pieces)
    one = _rounds(pieces * num_v_heads)
    # H of every piece and M of all but one; an uncut fragment of a document's end needs no M.
    both = _rounds((2 * pieces - 1) * num_v_heads)
    half = pieces * (num_v_heads // 2)
    backward = one if half < _GROUPED_PROGRAMS else 2 * _rounds(half)
    chunk = one * (_FORWARD_MICROSECONDS + _BACKWARD_SUMMARY_MICROSECONDS)
    chunk += backward * _BACKWARD_MICROSECONDS + both * _FORWARD_SUMMARY_MICROSECONDS
    starts = (2 * (one + backward) + both) * _ROUND_MICROSECONDS
    return length * chunk + starts + (pieces - 1) * _STEP_MICROSECONDS


def number_of_pieces(num_tokens: int, num_v_heads: int | None) -> int:
    """The rule: pieces of a share of `num_tokens`, from shapes alone, for a GPU of 132 multiprocessors.

    The fewest for which a model of the sequential passes is within 5 % of its least time, at most 16, none shorter than
    1024 tokens; 8, within the same limits, if the number of heads is not known.
    """
    num_chunks = -(-num_tokens // CHUNK)
    most = max(1, min(_MOST_PIECES, num_chunks // _LEAST_PIECE_CHUNKS))
    if num_v_heads is None:
        return min(UNTOLD_PIECES, most)
    times = [_microseconds(pieces, num_chunks, num_v_heads) for pieces in range(1, most + 1)]
    return 1 + next(i for i, time in enumerate(times) if time <= _NEAR_ENOUGH * min(times))


def cut(fragment: Fragment, piece_chunks: int) -> list[int]:
    """Boundaries of a fragment's pieces, from 0 to its length: as many of equal length as the rounded quotient says."""
    num_chunks = -(-fragment.length // CHUNK)
    wanted = max(1, (num_chunks + piece_chunks // 2) // piece_chunks)
    step = max(1, -(-num_chunks // wanted)) * CHUNK
    return [*range(0, max(fragment.length, 1), step), fragment.length]


def cut_share(part: Partition, rank: int, pieces: int) -> list[list[tuple[int, int]]]:
    """Per fragment of `rank` its pieces, (first local token, one past the last); `pieces` of the largest share.

    Fragments of documents that lie in one fragment stay whole.
    """
    num_chunks = -(-part.max_tokens // CHUNK)
    piece_chunks = max(1, -(-num_chunks // pieces))
    found = []
    starts = part.local_cu_seqlens(rank)
    for fragment, start in zip(part.fragments[rank], starts, strict=False):
        in_parts = len(part.chains[fragment.document]) > 1
        bounds = cut(fragment, piece_chunks) if in_parts and pieces > 1 else [0, fragment.length]
        found.append([(start + a, start + b) for a, b in itertools.pairwise(bounds)])
    return found
