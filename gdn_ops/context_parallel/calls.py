"""What the public functions do with a `cp_context`: check it against the call, run the op, serve the handle."""

from typing import Any

import torch
from torch import Tensor

from gdn_ops.context_parallel import ops
from gdn_ops.context_parallel.checkpointing import Received, RecomputeHandle
from gdn_ops.context_parallel.context import Context


def check_context(cp_context: Any, recompute_handle: Any, cu_seqlens: Any, batch: int, x: Tensor, dim: int) -> None:
    """Raise TypeError or ValueError for a context, handle or batch that does not fit the call."""
    if recompute_handle is not None and not isinstance(recompute_handle, RecomputeHandle):
        raise TypeError(f"recompute_handle: expected a RecomputeHandle, got {type(recompute_handle).__name__}")
    if cp_context is None:
        if recompute_handle is not None:
            raise ValueError("recompute_handle: only used with cp_context, which was not given")
        return
    if not isinstance(cp_context, Context):
        raise TypeError(f"cp_context: expected a gdn_ops.context_parallel.Context, got {type(cp_context).__name__}")
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: with cp_context the documents are those of the partition; leave it out")
    if batch != 1:
        raise ValueError(f"cp_context: documents are packed along T, so B must be 1, got {batch}")
    if cp_context.plan.cu_seqlens.device != x.device:
        raise ValueError(
            f"cp_context: expected device {x.device} (that of the operands), got {cp_context.plan.cu_seqlens.device}"
        )
    # While a graph is traced the count would become a guard that differs from rank to rank and batch to batch.
    if not torch.compiler.is_compiling() and x.shape[dim] < cp_context.num_tokens:
        raise ValueError(
            f"cp_context: this rank holds {cp_context.num_tokens} tokens, got {x.shape[dim]} (shard the inputs)"
        )


def kind(cp_context: Any) -> tuple[Any, ...]:
    """All that the checks of a call look at in its context."""
    if not isinstance(cp_context, Context):
        return (cp_context is None,)
    return cp_context.num_documents, cp_context.num_tokens, cp_context.plan.cu_seqlens.device


def run(
    op: Any,
    plain: bool,
    operands: tuple[Tensor, ...],
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cp_context: Context,
    recompute_handle: RecomputeHandle | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Call `op`, `gdn::context_fwd` or `gdn::context_packed_fwd`; returns o and the global final states (or zero rows).

    plain: without the dispatcher (`gdn_ops.plain`); not with a handle.
    """
    exchange = {
        "num_ranks": cp_context.exchange_ranks,
        "group_name": cp_context.group_name,
        "exchange": cp_context.exchange,
    }
    if plain:
        o, final_state = ops.call_plain(
            len(operands), cp_context.plan, *operands, g, beta, initial_state, A_log, dt_bias, None, None, None,
            hears=cp_context.hears, **exchange, **options,
        )  # fmt: skip
        return o, final_state
    received = None
    signature: tuple[Any, ...] = ()
    if recompute_handle is not None:
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "recompute_handle: for eager checkpointing; compiled code keeps the exchange with "
                "gdn_ops.checkpoint_policy"
            )
        if recompute_handle.is_idle():
            recompute_handle = None
    if recompute_handle is not None:
        shapes = tuple(tuple(x.shape) for x in (*operands, g))
        signature = (cp_context.serial, shapes, operands[0].dtype, *sorted(options.items()))
        received = recompute_handle.take(signature)
    states, told, moves = (None, None, None) if received is None or not received.states.shape[0] else received
    out = op(
        *operands, g, beta, initial_state, A_log, dt_bias, states, told, moves, list(cp_context.plan),
        **exchange, **options,
    )  # fmt: skip
    if recompute_handle is not None and received is None:
        recompute_handle.put(signature, Received(*(x.detach() for x in out[-3:])))
    return out[0], out[1]
