"""What a chunk's tokens alone determine, computed once for a rank's summary and for the forward that follows it.

A summary stops at states, and the forward starts from states that follow from all ranks' summaries; norms, decays and
the matrices A and P of every chunk are the same in both. Ops of a graph compute them each for itself: what a summary
returns is kept over a checkpoint, so it must not grow with the tokens, and the graph pass, which changes the heads and
norms of a forward together with those of its backward, would have to know of a third op. A call to which nothing
listens (`gdn_ops.plain`) has no graph. It computes them here, where its backend can, to the same bits, and keeps no
more for the backward.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gdn_ops.ops import _ready, _ready_options, backend_for
from gdn_ops.outputs import allocate_chunk_fwd
from gdn_ops.repeats import remembered
from gdn_ops.shapes import CHUNK, Inputs, Options


class Prepared(NamedTuple):
    """What is saved, as the ops return it with the two axes of a matrix in one; and factors, the backend's own scratch,
    which is not kept."""

    norms: Tensor
    gates: Tensor
    solve: Tensor
    scores: Tensor
    factors: Tensor

    @property
    def saved(self) -> tuple[Tensor, ...]:
        """All but the factors."""
        return self[:-1]


_KEPT = ("solve", "states")


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Nothing if the backend of the call has no kernels for it."""
    inputs, chosen = _ready(Inputs(q, k, v, g, beta, None, cu_seqlens, A_log, dt_bias)), Options(**options)
    backend = backend_for(inputs, chosen)
    if not hasattr(backend, "chunk_prepare"):
        return ()
    out = allocate_chunk_fwd(inputs, output_final_state=False, use_qk_l2norm=chosen.use_qk_l2norm, save="solve")
    factors = backend.chunk_prepare(out, inputs, chosen)
    norms, gates, solve, scores, *_ = out.returned[2:]
    return norms, gates, solve, scores, factors


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norms: Tensor, gates: Tensor, solve: Tensor, scores: Tensor,
    factors: Tensor, *, output_final_state: bool, save: str, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """o, final_state, states, updates and checkpoints, as the op returns them."""
    inputs = _ready(Inputs(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias))
    chosen = _ready_options(Options(**options))
    out = allocate_chunk_fwd(
        inputs, output_final_state=output_final_state, use_qk_l2norm=chosen.use_qk_l2norm, save=save
    )
    solve, scores = (x.unflatten(-1, (CHUNK, CHUNK)) for x in (solve, scores))
    out = out._replace(norms=norms.unflatten(-1, (2, -1)), gates=gates, solve=solve, scores=scores)
    backend_for(inputs, chosen).chunk_fwd(out, inputs, chosen, save, factors)
    o, final_state, _, _, _, _, *states = out.returned
    return o, final_state, *states


_GIVEN = ("q", "k", "v", "g", "beta")
_PREPARE_NAMES = (*_GIVEN, "cu_seqlens", "A_log", "dt_bias")
_FORWARD_NAMES = (*_GIVEN, "initial_state", "cu_seqlens", "A_log", "dt_bias", *Prepared._fields)


def _backend(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The backend of a call of the function that takes arguments of these names."""
    inputs = {name: x for name, x in zip(names, args, strict=True) if name in Inputs._fields}
    return backend_for(Inputs(**inputs), Options(**{name: x for name, x in kwargs.items() if name in Options._fields}))


def _again(run: Callable[..., tuple[Tensor, ...]], names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    return remembered(run, names, functools.partial(_backend, names), None)


_prepare_again, _forward_again = _again(_prepare, _PREPARE_NAMES), _again(_forward, _FORWARD_NAMES)


def prepare(*tensors: Any, **options: Any) -> Prepared | None:
    """What can be shared of (q, k, v, g, beta, cu_seqlens, A_log, dt_bias); None if the backend cannot."""
    found = (_prepare_again if tensors[0].is_cuda else _prepare)(*tensors, **options)
    return Prepared(*found) if found else None


def forward(*args: Any, save: str, **options: Any) -> tuple[Tensor, ...]:
    """`gdn::chunk_fwd` on its nine tensors and what `prepare` made of them; the same outputs, to the bit."""
    *tensors, prepared = args
    run = _forward_again if tensors[0].is_cuda else _forward
    o, final_state, *states = run(*tensors, *prepared, save=save, **options)
    kept = prepared.saved if save in _KEPT else [x.new_empty((0, *x.shape[1:])) for x in prepared.saved]
    return o, final_state, *kept, *states
