"""Cutting documents into segments, so that a long document keeps more than one multiprocessor a head busy.

A document's recurrence is one chain. Over a whole segment the state's map is affine, S_out = M S_in + H, so the chain
of a cut document is shortened exactly, without an approximation:

    begin       a document's first segment, whose start is known, with its outputs; at the same time every inner
                segment's H, what a start from zero ends with, and M, what the identity becomes without values: by
                the ordinary kernel without outputs. The last segment needs neither
    combine     S_{i+1} = M_i S_i + H_i along each document's cuts, in products accurate to float32 (TF32 in three
                parts)
    run         the ordinary kernel on every other segment at once, each from its own start state

Backwards the same with dS_in = M^T dS_out + dH from a document's end: its last segment begins with dH of the inner
ones, and its first one needs none. States at cuts are float32 and transposed, as the kernels hold them; everything else
a segment does is what its document would have done. The first and the last segment have lengths of their own, so that
both launches of a direction keep the chip busy (`shapes.segment_rule`).

Which documents are cut, and where, is worked out on the device from `cu_seqlens` (`chunks.chunk_table`). The host knows
shapes only: `shapes.segment_rule` says how long a segment should be, and so how many cuts there can be at most.

What the backward computes again needs no combination: the forward leaves its running state inside segments, and every
stretch between two such states is a program of its own. No stretch runs over a cut, where the forward has started again
from the combined state: so they have the bits that the forward would have kept. Where the rule says that summaries do
not pay, segments are whole documents, and stretches all that is cut.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.launch import launch

# Letters: N documents, NC cuts (an upper bound), HV value heads, K, V head sizes (both D), BV value rows of a program.

_VALUE_ROWS = 16
_COMBINE_WARPS = 8


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
        step = -HV * D * D if REVERSED else HV * D * D
        own_VK = tl.load(states_ptr + (start.to(tl.int64) * HV + h) * (D * D) + step + rows_VK)
        for j in range(1, count):
            row = start - j if REVERSED else start + j
            at = (row.to(tl.int64) * HV + h) * (D * D)
            # Not waited for in this step.
            next_VK = tl.load(states_ptr + at + step + rows_VK, mask=(rows_VK >= 0) & (j + 1 < count), other=0.0)
            # A segment's transition lies at the cut it stops at. Its rows map a state's, its columns a gradient's.
            if REVERSED:
                moves_KK = tl.trans(tl.load(transitions_ptr + at + HV * D * D + square))
            else:
                moves_KK = tl.load(transitions_ptr + at + square)
            state_VK = tl.dot(state_VK, moves_KK, acc=own_VK, input_precision="tf32x3")
            tl.store(states_ptr + at + rows_VK, state_VK)
            own_VK = next_VK


def combine(states: Tensor, transitions: Tensor, cuts: Tensor, *, backwards: bool) -> None:
    """Turn each segment's own part into the state at each cut, in place.

    states [NC,HV,V,K]: H of the segment before each cut, but at a document's first cut the state (backwards: dH of the
    segment after it, at the last cut the state's gradient); transitions [NC,HV,K,K]: M, transposed, of the segment
    before each cut; cuts [N,2]: a document's first cut, and how many.
    """
    HV, D = states.shape[1:3]
    launch(
        _combine_kernel, (cuts.shape[0] * HV, D // _VALUE_ROWS),
        states, transitions, cuts, HV=HV, D=D, BV=_VALUE_ROWS, REVERSED=backwards, num_warps=_COMBINE_WARPS,
    )  # fmt: skip
