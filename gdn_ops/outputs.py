"""Each op's output shapes, dtypes and strides, written once.

A fake (meta) implementation is one of these allocations and nothing else; a backend fills the same allocation. So what
the compiler plans with and what a kernel writes cannot disagree. Every output is dense, and none aliases another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gdn_ops import settings
from gdn_ops.shapes import CHUNK, Inputs, RowLayout, Saved, accumulator_dtype, sizes

_UNCUT_DEVICES = ("cpu",)
_CUT_HEAD_SIZE = 128
"""K and V of the calls whose documents a backend may cut into segments."""


class Forward(NamedTuple):
    """Outputs of `gdn::chunk_fwd`: o [B,T,HV,V]; final_state [N,HV,K,V] or zero rows; then what `Saved` names."""

    o: Tensor
    final_state: Tensor
    norms: Tensor
    gates: Tensor
    solve: Tensor
    scores: Tensor
    states: Tensor
    updates: Tensor
    checkpoints: Tensor

    @property
    def saved(self) -> Saved:
        """The tensors that the backward takes."""
        return Saved(*self[2:])

    @property
    def returned(self) -> tuple[Tensor, ...]:
        """What the op returns: o, final_state and the saved tensors with the two axes of a matrix in one.

        In a model with a convolution Inductor turns every four-dimensional tensor that waits for the backward to
        channels last; these would be transposed after the forward and back before the backward.
        """
        return (*self[:2], *(x.flatten(-2) if x.dim() == 4 else x for x in self[2:]))


def saved_matrices(returned: Saved, inputs: Inputs) -> Saved:
    """The saved tensors as backends take them, dense, from the form in which the op returned them."""
    s = sizes(inputs)
    square, state = (CHUNK, CHUNK), (s.V, s.K)
    trailing: tuple[tuple[int, int] | None, ...] = ((2, s.HK), None, square, square, state, (s.V, CHUNK), state)
    dense = (x.contiguous() for x in returned)
    return Saved(*(x if axes is None else x.unflatten(-1, axes) for x, axes in zip(dense, trailing, strict=True)))


class Backward(NamedTuple):
    """Outputs of `gdn::chunk_bwd`: dense gradients in each input's shape and dtype (zero rows if absent)."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    d_initial_state: Tensor
    dA_log: Tensor
    ddt_bias: Tensor


def allocate_chunk_fwd(inputs: Inputs, *, output_final_state: bool, use_qk_l2norm: bool, save: str) -> Forward:
    """Allocate what `gdn::chunk_fwd` returns."""
    s = sizes(inputs)
    q, v = inputs.q, inputs.v
    acc = accumulator_dtype(q.dtype)
    chunks = s.num_chunks if save in ("solve", "states") else 0
    state_chunks = s.num_chunks if save == "states" else 0
    return Forward(
        o=v.new_empty((s.B, s.T, s.HV, s.V)),
        final_state=v.new_empty((s.N if output_final_state else 0, s.HV, s.K, s.V), dtype=acc),
        norms=q.new_empty((s.B if use_qk_l2norm and save in ("solve", "states") else 0, s.T, 2, s.HK), dtype=acc),
        gates=q.new_empty((chunks, s.HV, CHUNK), dtype=acc),
        solve=q.new_empty((chunks, s.HV, CHUNK, CHUNK)),
        scores=q.new_empty((chunks, s.HV, CHUNK, CHUNK)),
        states=q.new_empty((state_chunks, s.HV, s.V, s.K)),
        updates=q.new_empty((state_chunks, s.HV, s.V, CHUNK)),
        checkpoints=q.new_empty((_checkpoint_rows(inputs, save), s.HV, s.V, s.K), dtype=acc),
    )


def _checkpoint_rows(inputs: Inputs, save: str) -> int:
    """NS: rows of `checkpoints`. What the Hopper backend supports decides, whichever GPU backend runs the call: the
    compiler plans with this number before there is a device to ask."""
    q, s = inputs.q, sizes(inputs)
    fits = q.element_size() == 2 and s.K == s.V == _CUT_HEAD_SIZE
    if q.device.type in _UNCUT_DEVICES or not fits or save not in ("solve", "states"):
        return 0
    rule = settings.segments(s)
    return 2 * rule.num_cuts + (rule.num_left if save == "solve" else 0)


def allocate_chunk_bwd(inputs: Inputs, packed: Sequence[bool] = (False, False, False)) -> Backward:
    """Allocate what `gdn::chunk_bwd` returns; a gradient that goes into a row (`packed`) has zero rows here."""

    def dense(x: Tensor, leave_out: bool = False) -> Tensor:
        return x.new_empty((0, *x.shape[1:])) if leave_out else x.new_empty(x.shape)

    def optional(x: Tensor | None, rank: int, like: Tensor) -> Tensor:
        return like.new_empty((0,) * rank) if x is None else x.new_empty(x.shape)

    s = sizes(inputs)
    h0 = inputs.initial_state
    acc = accumulator_dtype(inputs.q.dtype)
    return Backward(
        dq=dense(inputs.q, packed[0]),
        dk=dense(inputs.k, packed[1]),
        dv=dense(inputs.v, packed[2]),
        dg=dense(inputs.g),
        dbeta=dense(inputs.beta),
        d_initial_state=inputs.q.new_empty((0, s.HV, s.K, s.V), dtype=acc) if h0 is None else h0.new_empty(h0.shape),
        dA_log=optional(inputs.A_log, 1, inputs.g),
        ddt_bias=optional(inputs.dt_bias, 1, inputs.g),
    )


def allocate_row(inputs: Inputs, row_width: int) -> Tensor:
    """Allocate one packed gradient row per token: [B,T,row_width]."""
    B, T = inputs.q.shape[:2]
    return inputs.q.new_empty((B, T, row_width))


def gradient_target(
    grad: Tensor, row: Tensor | None, layout: RowLayout | None, num_heads: int, head_dim: int
) -> Tensor:
    """The [B,T,G,R,D] view that a backend writes one gradient through.

    Without a layout: the dense gradient itself, one head a group. With one: the operand's columns of `row`
    [B,T,W], whatever the row's own strides are.
    """
    if layout is None:
        return grad.unsqueeze(3)
    assert row is not None
    groups = num_heads // layout.group_len
    return row.as_strided(
        (row.shape[0], row.shape[1], groups, layout.group_len, head_dim),
        (row.stride(0), row.stride(1), layout.stride_group, layout.stride_in_group, 1),
        row.storage_offset() + layout.offset,
    )
