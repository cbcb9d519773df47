"""What a chunk's tokens alone determine, computed once for a rank's summary and for the pass that follows it.

A summary stops at states, and the forward starts from states that follow from all ranks' summaries; norms, decays and
the matrices A and P of every chunk are the same in both, and so it is backwards. Ops of a graph compute them each for
itself: what a summary returns is kept over a checkpoint, so it must not grow with the tokens, and the graph pass, which
changes the heads and norms of a forward together with those of its backward, would have to know of a third op. A call
to which nothing listens (`gdn_ops.plain`) has no graph. It computes them here, where its backend can, to the same bits,
and keeps no more for the backward.

A backward in parts can also compute the states of the chunks, which need nobody's words, while these are on their way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gdn_ops import counters
from gdn_ops.ops import _ready, _ready_gradient, _ready_options, _targets, backend_for
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd, allocate_row, saved_matrices
from gdn_ops.repeats import remembered
from gdn_ops.shapes import CHUNK, Inputs, Options, Saved, packed_layouts, packed_width


class Prepared(NamedTuple):
    """What is saved (of a forward norms, gates, solve and scores, of a backward all seven), as the ops return it with
    the two axes of a matrix in one; and the backend's own scratch, factors first, which is not kept."""

    saved: tuple[Tensor, ...]
    scratch: tuple[Tensor, ...]

    @property
    def matrices(self) -> tuple[Tensor, Tensor]:
        """solve and factors."""
        return self.saved[2], self.scratch[0]

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Where chunks lie: a few KB, for the backward too."""
        return self.scratch[1:]


_KEPT = ("solve", "states")
_NUM_SHARED = 4
"""norms, gates, solve and scores are the first of `Saved`."""


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
    scratch = backend.chunk_prepare(out, inputs, chosen)
    return *out.returned[2 : 2 + _NUM_SHARED], *scratch.tensors


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, norms: Tensor, gates: Tensor, solve: Tensor, scores: Tensor,
    *scratch: Tensor, output_final_state: bool, save: str, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """o, final_state, states, updates and checkpoints, as the op returns them."""
    inputs = _ready(Inputs(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias))
    chosen = _ready_options(Options(**options))
    out = allocate_chunk_fwd(
        inputs, output_final_state=output_final_state, use_qk_l2norm=chosen.use_qk_l2norm, save=save
    )
    solve, scores = (x.unflatten(-1, (CHUNK, CHUNK)) for x in (solve, scores))
    out = out._replace(norms=norms.unflatten(-1, (2, -1)), gates=gates, solve=solve, scores=scores)
    backend = backend_for(inputs, chosen)
    backend.chunk_fwd(out, inputs, chosen, save, backend.Scratch.of(scratch))
    o, final_state, _, _, _, _, *states = out.returned
    return o, final_state, *states


def _prepare_backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, *tensors: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The scratch, or its factors if tensors have the tables after what is saved; before it norms, gates, solve and
    scores, if the forward has kept none."""
    inputs, chosen = _ready(Inputs(q, k, v, g, beta, None, cu_seqlens, A_log, dt_bias)), Options(**options)
    backend = backend_for(inputs, chosen)
    if not hasattr(backend, "chunk_prepare_bwd"):
        return ()
    saved, tables = _split(tensors)
    found, scratch = backend.chunk_prepare_bwd(inputs, saved_matrices(saved, inputs), chosen, tables)
    made = (scratch.factors,) if tables else scratch.tensors
    if saved.gates.shape[0]:
        return made
    return *(x.flatten(-2) if x.dim() == 4 else x for x in found[:_NUM_SHARED]), *made


def _states(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, *tensors: Tensor, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """States and updates, if the backend computes them before the others; tensors: saved, scratch."""
    inputs = _ready(Inputs(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias))
    chosen = _ready_options(Options(**options))
    backend = backend_for(inputs, chosen)
    saved, scratch = _split(tensors)
    return backend.chunk_states(inputs, saved_matrices(saved, inputs), chosen, backend.Scratch.of(scratch)) or ()


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, do: Tensor, dfinal_state: Tensor | None, states: Tensor | None,
    updates: Tensor | None, *tensors: Tensor, packed: bool, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As `gdn::chunk_bwd` or, packed, `gdn::chunk_packed_bwd` on views of the row; states, updates: of `_states`."""
    inputs = _ready(Inputs(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias))
    chosen = _ready_options(Options(**options))
    backend = backend_for(inputs, chosen)
    saved, scratch = _split(tensors)
    out = allocate_chunk_bwd(inputs, (packed,) * 3)
    heads = (q.shape[2], v.shape[2], q.shape[3])
    row = allocate_row(inputs, packed_width(*heads)) if packed else None
    dq, dk, dv = _targets(inputs, out, row, packed_layouts(*heads) if packed else (None,) * 3)
    backend.chunk_bwd(
        out._replace(dq=dq, dk=dk, dv=dv), _ready_gradient(do),
        None if dfinal_state is None else dfinal_state.contiguous(), inputs, saved_matrices(saved, inputs), chosen,
        backend.Scratch.of(scratch), None if states is None or updates is None else (states, updates),
    )  # fmt: skip
    return tuple(out) if row is None else (row, *out[3:])


def _split(tensors: tuple[Tensor, ...]) -> tuple[Saved, tuple[Tensor, ...]]:
    count = len(Saved._fields)
    return Saved(*tensors[:count]), tensors[count:]


_GIVEN = ("q", "k", "v", "g", "beta")
_PREPARE_NAMES = (*_GIVEN, "cu_seqlens", "A_log", "dt_bias")
_ALL_NAMES = (*_GIVEN, "initial_state", "cu_seqlens", "A_log", "dt_bias")
_GRADIENTS_NAMES = (*_ALL_NAMES, "do", "dfinal_state")


def _backend(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The backend of a call of the function whose first arguments have these names."""
    inputs = {name: x for name, x in zip(names, args, strict=False) if name in Inputs._fields}
    return backend_for(Inputs(**inputs), Options(**{name: x for name, x in kwargs.items() if name in Options._fields}))


def _again(run: Callable[..., tuple[Tensor, ...]], names: Sequence[str]) -> Callable[..., tuple[Tensor, ...]]:
    # Arguments past the names are what this package has made: dense.
    return remembered(run, names, functools.partial(_backend, names), None)


_prepare_again, _forward_again = _again(_prepare, _PREPARE_NAMES), _again(_forward, _ALL_NAMES)
_prepare_backward_again = _again(_prepare_backward, _PREPARE_NAMES)
_states_again, _gradients_again = _again(_states, _ALL_NAMES), _again(_gradients, _GRADIENTS_NAMES)


def prepare(*tensors: Any, **options: Any) -> Prepared | None:
    """What can be shared of (q, k, v, g, beta, cu_seqlens, A_log, dt_bias); None if the backend cannot."""
    found = (_prepare_again if tensors[0].is_cuda else _prepare)(*tensors, **options)
    return Prepared(found[:_NUM_SHARED], found[_NUM_SHARED:]) if found else None


def forward(*args: Any, save: str, **options: Any) -> tuple[Tensor, ...]:
    """`gdn::chunk_fwd` on its nine tensors and what `prepare` made of them; the same outputs, to the bit."""
    *tensors, prepared = args
    run = _forward_again if tensors[0].is_cuda else _forward
    o, final_state, *states = run(*tensors, *prepared.saved, *prepared.scratch, save=save, **options)
    kept = prepared.saved if save in _KEPT else [x.new_empty((0, *x.shape[1:])) for x in prepared.saved]
    return o, final_state, *kept, *states


def prepare_backward(
    saved: tuple[Tensor, ...], tables: tuple[Tensor, ...], *tensors: Any, **options: Any
) -> Prepared | None:
    """What can be shared of a backward; tensors as for `prepare`.

    saved: what the forward kept. tables: those of what it prepared, or none.
    """
    run = _prepare_backward_again if tensors[0].is_cuda else _prepare_backward
    found = run(*tensors, *saved, *tables, **options)
    if not found:
        return None
    if saved[1].shape[0]:
        return Prepared(saved, (*found, *tables))
    return Prepared((*found[:_NUM_SHARED], *saved[_NUM_SHARED:]), (*found[_NUM_SHARED:], *tables))


def states(prepared: Prepared, *tensors: Any, **options: Any) -> tuple[Tensor, ...]:
    """States and updates of a backward's chunks, if it can be ahead; tensors: as for `gdn::chunk_fwd`."""
    run = _states_again if tensors[0].is_cuda else _states
    return run(*tensors, *prepared.saved, *prepared.scratch, **options)


def gradients(
    prepared: Prepared, found: tuple[Tensor, ...], *tensors: Any, packed: bool, **options: Any
) -> tuple[Tensor, ...]:
    """`gdn::chunk_bwd`, or packed `gdn::chunk_packed_bwd`, to the bit; tensors: nine, do, dfinal_state.

    found: what `states` returned. packed: the operands are views of a row that `packed_qkv_views` or the like made.
    """
    run = _gradients_again if tensors[0].is_cuda else _gradients
    out = run(*tensors, *(found or (None, None)), *prepared.saved, *prepared.scratch, packed=packed, **options)
    if packed:
        counters.count("packed_gradients")
    return out
