"""Cutting documents into segments, so that a long document keeps more than one multiprocessor a head busy.

A document's recurrence is one chain. Over a whole segment the state's map is affine, S_out = M S_in + H, so the chain
of a cut document is shortened exactly, without an approximation:

    begin       a document's first segment, whose start is known, with its outputs; at the same time every inner
                segment's H, what a start from zero ends with, and M, what the identity becomes without values. The
                last segment needs neither
    combine     S_{i+1} = M_i S_i + H_i along each document's cuts, in products accurate to float32 (`walk.py`), each
                M on its way into shared memory during the step before
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

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.walk import MOVES, fetch, share, step, tiles, value_columns

# Letters: N documents, NC cuts (an upper bound), HV value heads, K, V head sizes (both D), BV columns of a program.

_COMBINE_WARPS = 8

_D = gl.constexpr(128)


@gluon.jit
def _combine_kernel(
    moves_desc, states_ptr, cuts_ptr, HV: gl.constexpr, BV: gl.constexpr, REVERSED: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    """A walk (`walk.py`) whose steps follow from a document's cuts, in place."""
    L_KV: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[NUM_WARPS, 1], instr_shape=[16, BV, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L_KV, 1)
    n = gl.program_id(0) // HV
    h = gl.program_id(0) % HV
    moves_s, leading_s, rest_s, arrived = tiles(BV)
    wait_for_earlier(EARLY)
    first = gl.load(cuts_ptr + n * 2)
    num_moves = gl.load(cuts_ptr + n * 2 + 1) - 1
    if num_moves > 0:
        # A segment's transition lies at the cut it stops at. Its rows map a state's, its columns a gradient's.
        if REVERSED:
            start = first + num_moves
            move = start
            stride = -HV * _D
        else:
            start = first
            move = start + 1
            stride = HV * _D
        row = (move * HV + h) * _D
        for i in gl.static_range(2):
            fetch(moves_desc, row + i * stride, arrived.index(i), moves_s.index(i), i < num_moves)
        key = gl.arange(0, _D, gl.SliceLayout(1, L_KV))
        value = gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(0, L_KV))
        transposed_KV = value[None, :] * _D + key[:, None]
        zero_KV = gl.full([_D, BV], 0.0, gl.float32, L_KV)
        at = (start.to(gl.int64) * HV + h) * (_D * _D)
        state_KV = gl.load(states_ptr + at + transposed_KV)
        for j in range(num_moves):
            at += stride * _D
            share(state_KV, leading_s, rest_s)
            state_KV = step(
                states_ptr + at + transposed_KV, True, moves_s, leading_s, rest_s, arrived, j, zero_KV, not REVERSED,
                LEFT,
            )  # fmt: skip
            there = j + 2 < num_moves
            fetch(moves_desc, row + (j + 2) * stride, arrived.index(j % 2), moves_s.index(j % 2), there)
            gl.store(states_ptr + at + transposed_KV, state_KV)


def combine(states: Tensor, transitions: Tensor, cuts: Tensor, *, backwards: bool) -> None:
    """Turn each segment's own part into the state at each cut, in place.

    states [NC,HV,V,K]: H of the segment before each cut, but at a document's first cut the state (backwards: dH of the
    segment after it, at the last cut the state's gradient); transitions [NC,HV,K,K]: M, transposed, of the segment
    before each cut; cuts [N,2]: a document's first cut, and how many.
    """
    HV, D = states.shape[1:3]
    columns = value_columns(cuts.shape[0] * HV)
    moves = transitions.view(-1, D)
    launch(
        _combine_kernel, (cuts.shape[0] * HV, D // columns),
        TensorDescriptor(moves, list(moves.shape), list(moves.stride()), [D, D], MOVES), states, cuts,
        HV=HV, BV=columns, REVERSED=backwards, NUM_WARPS=_COMBINE_WARPS, num_warps=_COMBINE_WARPS,
    )  # fmt: skip
