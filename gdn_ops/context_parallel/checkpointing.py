"""Activation checkpointing without a second exchange.

Two ways. Selective checkpointing, eager or compiled, with `checkpoint_policy`: what was exchanged is kept as any other
op's output can be. Or, for eager non-reentrant `torch.utils.checkpoint.checkpoint`, a `RecomputeHandle`: the first
forward puts what it received into it, the recompute takes it out.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy for `create_selective_checkpoint_contexts` of torch: keep what context parallelism exchanged.

        context_fn = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
        checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)

    Kept are what a rank tells, what it hears and the states it makes of that, all independent of the number of tokens;
    everything else is recomputed. So a recompute runs no exchange and no segment summary. A collective counts as one of
    these if it carries a one-dimensional tensor, which no activation is. To keep more, call this
    from a policy of your own and return its answer unless it is `PREFER_RECOMPUTE`.
    """
    gdn, c10d = torch.ops.gdn, torch.ops._c10d_functional
    if op in (gdn.segment_summary_fwd.default, gdn.segment_combine.default, gdn.halo_tell.default):
        return CheckpointPolicy.MUST_SAVE
    if op in (c10d.all_gather_into_tensor.default, c10d.wait_tensor.default) and args[0].dim() == 1:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Received(NamedTuple):
    """What a forward made of the exchange: states of the pieces [F,HV,K,V], all ranks' words, M of its own pieces."""

    states: Tensor
    told: Tensor
    moves: Tensor


class RecomputeHandle:
    """Carries one call's exchange from its first forward to its recompute; one per layer and micro-step.

        handle = RecomputeHandle()
        checkpoint(layer, x, handle, use_reentrant=False, context_fn=handle.context_fn)

    with `recompute_handle=handle` on the op inside `layer`. `context_fn` tells the handle which of the two forwards is
    running, so that no state is ever taken for another's:

    Without gradients torch's checkpoint runs the function and nothing else, so the call then exchanges as one without a
    handle does, and the handle stays as it is.

    Raises (when the op is called) RuntimeError for a handle that is used outside of its checkpoint, was put twice
    (two layers share it, or an earlier step's recompute never ran: stale), is taken without having been put (missing),
    or is taken twice; ValueError for one that was put by a call with another context or other shapes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase: str | None = None
        self._state = "new"
        self._received: Received | None = None
        self._signature: tuple[Any, ...] = ()

    def context_fn(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint.checkpoint(..., context_fn=handle.context_fn)`."""
        return _Phase(self, "forward"), _Phase(self, "recompute")

    def is_idle(self) -> bool:
        """Whether nothing will be recomputed: no checkpoint is running, nor would one without gradients."""
        return self._phase is None and not torch.is_grad_enabled()

    def take(self, signature: tuple[Any, ...]) -> Received | None:
        """What the first forward received, in a recompute; None in a first forward, which has to exchange and `put`."""
        with self._lock:
            if self._phase is None:
                raise RuntimeError(
                    "recompute_handle: used outside of its checkpoint; pass context_fn=handle.context_fn to "
                    "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
            if self._phase == "forward":
                if self._state != "new":
                    raise RuntimeError(
                        "recompute_handle: stale or shared: a forward has put its states into it already; make one "
                        "handle per layer and micro-step"
                    )
                return None
            if self._state == "new":
                raise RuntimeError(
                    "recompute_handle: missing: the recompute got a handle that no first forward filled; make it "
                    "outside of the checkpointed function"
                )
            if self._state == "taken":
                raise RuntimeError("recompute_handle: used twice: its states were taken by an earlier recompute")
            if signature != self._signature:
                raise ValueError(
                    f"recompute_handle: put by a call with (context, shapes, options) {self._signature}, "
                    f"taken by one with {signature}"
                )
            received, self._received, self._state = self._received, None, "taken"
            return received

    def put(self, signature: tuple[Any, ...], received: Received) -> None:
        """Keep what a first forward received."""
        with self._lock:
            self._received, self._signature, self._state = received, signature, "put"


class _Phase(AbstractContextManager[None]):
    """Tells a handle what is running; torch enters the same object again when a graph is run backward twice."""

    def __init__(self, handle: RecomputeHandle, phase: str):
        self._handle, self._name = handle, phase
        self._before: str | None = None

    def __enter__(self) -> None:
        self._before, self._handle._phase = self._handle._phase, self._name

    def __exit__(self, *error: object) -> None:
        self._handle._phase = self._before
