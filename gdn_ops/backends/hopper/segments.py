"""Cutting documents into segments, so that a long document keeps more than one multiprocessor a head busy.

A document's recurrence is one chain. Over a whole segment the state's map is affine, S_out = M S_in + H, so the chain
of a cut document is shortened exactly, without an approximation:

    begin       a document's first segment, whose start is known, with its outputs; at the same time every inner
                segment's H, what a start from zero ends with, and M, what the identity becomes without values. The
                last segment needs neither
    combine     S_{i+1} = M_i S_i + H_i along each document's cuts, in products accurate to float32 (TF32 in three
                parts), each M on its way into shared memory during the step before
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
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.tma import async_load, barrier

# Letters: N documents, NC cuts (an upper bound), HV value heads, K, V head sizes (both D), BV value rows of a program.

_COMBINE_WARPS = 8

_D = gl.constexpr(128)
_PART = gl.constexpr(32)
_SQUARE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.jit
def _tail(x):
    """What the tensor cores leave of a float32 operand, of which they take the first 19 bits."""
    return x - (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)


@gluon.jit
def _multiply(a, b, acc):
    return mma_v2(a, b, acc, input_precision="tf32")


@gluon.jit
def _combine_kernel(
    moves_desc, states_ptr, cuts_ptr, HV: gl.constexpr, BV: gl.constexpr, REVERSED: gl.constexpr,
    NUM_WARPS: gl.constexpr,
    EARLY: gl.constexpr = 0,
):  # fmt: skip
    L_VK: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[BV // 16, NUM_WARPS * 16 // BV], instr_shape=[16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L_VK, 1)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L_VK, 1)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    n = gl.program_id(0) // HV
    h = gl.program_id(0) % HV
    moves_s = gl.allocate_shared_memory(gl.float32, [2, _D, _D], TILE)
    state_s = gl.allocate_shared_memory(gl.float32, [_D, BV], FLAT)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    barrier()
    wait_for_earlier(EARLY)
    first = gl.load(cuts_ptr + n * 2)
    count = gl.load(cuts_ptr + n * 2 + 1)
    if count > 1:
        # A segment's transition lies at the cut it stops at. Its rows map a state's, its columns a gradient's.
        if REVERSED:
            start = first + count - 1
            move = start
            step = -1
        else:
            start = first
            move = start + 1
            step = 1
        mbarrier.expect(arrived.index(0), _D * _D * 4)
        async_load(moves_desc, [(move * HV + h) * _D, 0], arrived.index(0), moves_s.index(0))
        value = gl.program_id(1) * BV + gl.arange(0, BV, gl.SliceLayout(1, L_VK))
        key = gl.arange(0, _D, gl.SliceLayout(0, L_VK))
        rows_VK = value[:, None] * _D + key[None, :]
        at = (start.to(gl.int64) * HV + h) * (_D * _D)
        state_VK = gl.load(states_ptr + at + rows_VK)
        for j in range(1, count):
            buffer = (j - 1) % 2
            at += step * HV * _D * _D
            move += step
            own_VK = gl.load(states_ptr + at + rows_VK)
            state_s.permute((1, 0)).store(state_VK)
            # Behind this barrier nobody reads the buffer that the next transition goes to.
            fence_async_shared()
            barrier()
            there = j + 1 < count
            mbarrier.expect(arrived.index(1 - buffer), _D * _D * 4, pred=there)
            async_load(
                moves_desc, [(move * HV + h) * _D, 0], arrived.index(1 - buffer), moves_s.index(1 - buffer), pred=there
            )  # fmt: skip
            mbarrier.wait(arrived.index(buffer), ((j - 1) // 2) & 1)
            moves = moves_s.index(buffer)
            if REVERSED:
                moves = moves.permute((1, 0))
            # Three accumulators, for products that do not wait for each other.
            state_VK = own_VK
            left_VK = gl.full([BV, _D], 0.0, gl.float32, L_VK)
            right_VK = gl.full([BV, _D], 0.0, gl.float32, L_VK)
            for i in gl.static_range(_D // _PART):
                a = state_s.slice(i * _PART, _PART).permute((1, 0)).load(LEFT)
                b = moves.slice(i * _PART, _PART).load(RIGHT)
                state_VK = _multiply(a, b, state_VK)
                left_VK = _multiply(_tail(a), b, left_VK)
                right_VK = _multiply(a, _tail(b), right_VK)
            state_VK = state_VK + (left_VK + right_VK)
            gl.store(states_ptr + at + rows_VK, state_VK)
            barrier()


def combine(states: Tensor, transitions: Tensor, cuts: Tensor, *, backwards: bool) -> None:
    """Turn each segment's own part into the state at each cut, in place.

    states [NC,HV,V,K]: H of the segment before each cut, but at a document's first cut the state (backwards: dH of the
    segment after it, at the last cut the state's gradient); transitions [NC,HV,K,K]: M, transposed, of the segment
    before each cut; cuts [N,2]: a document's first cut, and how many.
    """
    HV, D = states.shape[1:3]
    rows = 16 if cuts.shape[0] * HV <= 16 else 32
    moves = transitions.view(-1, D)
    launch(
        _combine_kernel, (cuts.shape[0] * HV, D // rows),
        TensorDescriptor(moves, list(moves.shape), list(moves.stride()), [D, D], _SQUARE), states, cuts,
        HV=HV, BV=rows, REVERSED=backwards, NUM_WARPS=_COMBINE_WARPS, num_warps=_COMBINE_WARPS,
    )  # fmt: skip
