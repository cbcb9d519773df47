"""Cutting documents into segments, so that a long document keeps more than one multiprocessor a head busy.

A document's recurrence is one chain. Over a whole segment the state's map is affine, S_out = M S_in + H, so the chain
of a cut document is shortened exactly, without an approximation:

    summarise   every segment at once: H, what a start from zero (a document's first segment: from its initial state)
                ends with, and M, what the identity becomes without values; by the ordinary kernel without outputs
    combine     S_{i+1} = M_i S_i + H_i along each document's cuts, in products accurate to float32 (TF32 in three
                parts)
    run         the ordinary kernel on every segment at once, each from its own start state

Backwards the same with dS_in = M^T dS_out + dH, from a document's end. States at cuts are float32 and transposed, as
the kernels hold them; everything else a segment does is what its document would have done.

Which documents are cut, and where, is worked out on the device from `cu_seqlens` (`chunks.chunk_table`). The host knows
shapes only: `segment_rule` says how long a segment should be, and so how many cuts there can be at most.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import CHUNK

# Letters: N documents, NC cuts (an upper bound), HV value heads, K, V head sizes (both D), BV value rows of a program.

MULTIPROCESSORS = 132
"""Programs of a sequential kernel that run at the same time on an H100 or H200 (SXM), one a multiprocessor. A constant,
so that the same call is cut the same way on every device."""

_MOST_CHAINS = 40
"""Documents are cut if documents times value heads are at most this many.

H200, one document of 32768: see docs/kernels_hopper.md, "Segments"."""

_LEAST_CHUNKS = 16
"""No segment is planned shorter: its summary, start and end would cost more than its chunks."""

_VALUE_ROWS = 16
_COMBINE_WARPS = 8


class SegmentRule(NamedTuple):
    """How a call's documents are cut: into segments of about `chunks` chunks; at most `num_cuts` cuts (0: none)."""

    chunks: int
    num_cuts: int


def segment_rule(num_tokens: int, num_documents: int, num_heads: int) -> SegmentRule:
    """Choose the segments' length from shapes alone.

    With s segments in all, the summaries are (2 s - 3 N) HV programs: every segment but a document's last has an H,
    every one but the first and last an M. s is the largest number for which they run at once.
    """
    chains = num_documents * num_heads
    num_chunks = -(-num_tokens // CHUNK)
    if chains > _MOST_CHAINS or num_documents == 0:
        return SegmentRule(num_chunks, 0)
    segments = (MULTIPROCESSORS // num_heads + 3 * num_documents) // 2
    chunks = max(-(-num_chunks // segments), _LEAST_CHUNKS)
    return SegmentRule(chunks, num_tokens // (CHUNK * chunks))


@triton.jit
def _combine_kernel(
    states_ptr, transitions_ptr, cuts_ptr, HV: tl.constexpr, D: tl.constexpr, BV: tl.constexpr, REVERSED: tl.constexpr
):
    n = tl.program_id(0) // HV
    h = tl.program_id(0) % HV
    first = tl.load(cuts_ptr + n * 2)
    count = tl.load(cuts_ptr + n * 2 + 1)
    offs_v = tl.program_id(1) * BV + tl.arange(0, BV)
    offs_k = tl.arange(0, D)
    rows_VK = offs_v[:, None] * D + offs_k[None, :]
    square = offs_k[:, None] * D + offs_k[None, :]
    if count > 1:
        start = first + count - 1 if REVERSED else first
        state_VK = tl.load(states_ptr + (start.to(tl.int64) * HV + h) * (D * D) + rows_VK)
        for j in range(1, count):
            row = start - j if REVERSED else start + j
            at = (row.to(tl.int64) * HV + h) * (D * D)
            moves_KK = tl.load(transitions_ptr + at + square)
            own_VK = tl.load(states_ptr + at + rows_VK)
            state_VK = tl.dot(state_VK, moves_KK, acc=own_VK, input_precision="tf32x3")
            tl.store(states_ptr + at + rows_VK, state_VK)


def combine(states: Tensor, transitions: Tensor, cuts: Tensor, *, backwards: bool) -> None:
    """Turn each segment's own part into the state at each cut, in place.

    states [NC,HV,V,K]: H of the segment before each cut (backwards: dH of the segment after it); transitions
    [NC,HV,K,K]: that segment's M as its rows map a state's rows; cuts [N,2]: a document's first cut, and how many.
    """
    HV, D = states.shape[1:3]
    launch(
        _combine_kernel, (cuts.shape[0] * HV, D // _VALUE_ROWS),
        states, transitions, cuts, HV=HV, D=D, BV=_VALUE_ROWS, REVERSED=backwards, num_warps=_COMBINE_WARPS,
    )  # fmt: skip
