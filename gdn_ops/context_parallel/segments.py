"""The small ops between the collectives: what a rank tells about its segments, and what it makes of the others' words.

    segment_summary_fwd   per segment H [HV,K,V], the state it hands on (from its initial state if it begins a document,
                          else from zero), and, for the inner ones, M [HV,K,K], what it makes of the state it gets
    segment_summary_bwd   per segment dH [HV,K,V], the gradient of the state it got from nothing but its own outputs
                          (and the final state's gradient, if it ends a document)
    segment_combine       S <- M S + H along each document: the state of every local fragment; or, with M transposed
                          and the other way round, its final state's gradient

One rank's words are one flat tensor of fixed size, [A*HV*K*V | M*HV*K*K] elements for A segments and M transitions, so
one all-gather carries them. H and dH are computed as the op itself computes states, in the operands' dtype. M is
computed in the accumulation dtype, from operands converted to it: errors of M would be carried over all ranks. That is
the same chunked recurrence without values (v = 0) started from the identity. Products of M and S are float64.
"""

from typing import Any

import torch
from torch import Tensor

from gdn_ops import counters
from gdn_ops.ops import _on_cpu, backend_for, lib
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd, gradient_target
from gdn_ops.shapes import Inputs, Options, Saved, accumulator_dtype

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_SWITCHES = (
    "bool use_qk_l2norm=False, bool use_beta_sigmoid=False, bool allow_neg_eigval=False, bool deterministic=True"
)

SCHEMAS = {
    "segment_summary_fwd": "(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, "
    "Tensor? dt_bias, Tensor segments, Tensor documents, Tensor transition_segments, *, int num_ranks, "
    f"{_SWITCHES}) -> Tensor",
    "segment_summary_bwd": "(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor segments, Tensor documents, *, int num_ranks, float scale, "
    f"{_SWITCHES}) -> Tensor",
    "segment_combine": "(Tensor told, Tensor transitions, Tensor? states, Tensor documents, Tensor fragments, "
    "Tensor sources, Tensor transition_sources, *, int num_ranks, int num_heads, int key_dim, int value_dim, "
    "int num_forward, int num_transitions, bool transposed) -> Tensor",
}
"""Argument and result lists, by name (namespace `gdn`)."""


def rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], zeros where the index is -1."""
    if x.shape[0] == 0:
        return x.new_zeros((index.shape[0], *x.shape[1:]))
    picked = x.index_select(0, index.clamp(min=0))
    return torch.where((index >= 0).view(-1, *(1,) * (x.dim() - 1)), picked, 0)


def _between(x: Tensor) -> Tensor:
    """[A,...] at the even rows of [2A-1,...]: segments are documents, and so are the gaps between them."""
    out = x.new_zeros((2 * x.shape[0] - 1, *x.shape[1:]))
    out[::2] = x
    return out


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0 else x.contiguous()


def _stops_at_states(backend: Any, inputs: Inputs) -> bool:
    """Whether a backend has the optional functions that compute states and nothing else."""
    return hasattr(backend, "final_states") and inputs.q.shape[1] > 0


def _allocate_states(inputs: Inputs) -> Tensor:
    assert inputs.cu_seqlens is not None
    shape = (inputs.cu_seqlens.shape[0] - 1, inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3])
    return inputs.k.new_empty(shape, dtype=accumulator_dtype(inputs.k.dtype))


def _final_states(inputs: Inputs, options: Options) -> Tensor:
    """The state after each segment [A,HV,K,V], for boundaries that are pairs."""
    backend = backend_for(inputs, options)
    if _stops_at_states(backend, inputs):
        states = _allocate_states(inputs)
        backend.final_states(states, inputs, options)
        return states[::2]
    out = allocate_chunk_fwd(inputs, output_final_state=True, use_qk_l2norm=options.use_qk_l2norm, save="none")
    backend.chunk_fwd(out, inputs, options, "none")
    return out.final_state[::2]


@torch.no_grad()
def _segment_summary_fwd(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, segments: Tensor, documents: Tensor, transition_segments: Tensor, *,
    num_ranks: int, **switches: bool,
) -> Tensor:  # fmt: skip
    if num_ranks > 1:
        counters.count("context_exchanges")
    k, v, g, beta = _dense(k), _dense(v), g.contiguous(), beta.contiguous()
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    acc = accumulator_dtype(k.dtype)
    told = _allocate_summary(k, v, segments, transition_segments)
    options = Options(scale=1.0, **switches)
    split = documents.shape[0] * HV * K * V
    if documents.shape[0]:
        start = None if initial_state is None else _between(rows(initial_state, documents))
        # The queries do not matter for the state.
        found = _final_states(Inputs(k, k, v, g, beta, start, segments, A_log, dt_bias), options)
        told[:split].view(-1, HV, K, V).copy_(found)
    if transition_segments.shape[0]:
        exact = k.to(acc)
        nothing = exact.new_zeros((1, 1, 1, K)).expand(*k.shape[:2], HV, K)
        identity = torch.eye(K, dtype=acc, device=k.device).expand(transition_segments.shape[0] - 1, HV, K, K)
        inputs = Inputs(exact, exact, nothing, g, beta, identity.contiguous(), transition_segments, A_log, dt_bias)
        told[split:].view(-1, HV, K, K).copy_(_final_states(inputs, options))
    return told


def _allocate_summary(k: Tensor, v: Tensor, segments: Tensor, transition_segments: Tensor) -> Tensor:
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    words = HV * K * (segments.shape[0] // 2 * V + transition_segments.shape[0] // 2 * K)
    return k.new_empty((words,), dtype=accumulator_dtype(k.dtype))


def _segment_summary_fwd_fake(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, segments: Tensor, documents: Tensor, transition_segments: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    return _allocate_summary(k, v, segments, transition_segments)


@torch.no_grad()
def _segment_summary_bwd(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, segments: Tensor, documents: Tensor, *,
    num_ranks: int, **options: Any,
) -> Tensor:  # fmt: skip
    if num_ranks > 1:
        counters.count("context_exchanges")
    chosen = Options(**options)
    q, k, v, do = (_dense(x) for x in (q, k, v, do))
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    end = None if dfinal_state is None else _between(rows(dfinal_state, documents))
    inputs = Inputs(q, k, v, g.contiguous(), beta.contiguous(), None, segments, A_log, dt_bias)
    told = _allocate_gradient_summary(k, v, segments)
    told.view(-1, HV, K, V).copy_(_initial_state_gradients(do, end, inputs, chosen)[::2])
    return told


def _initial_state_gradients(do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, options: Options) -> Tensor:
    """The gradient of every document's initial state [N,HV,K,V]. It does not depend on that state."""
    start = _allocate_states(inputs)
    backend = backend_for(inputs, options)
    if _stops_at_states(backend, inputs):
        backend.initial_state_gradients(start, do, dfinal_state, inputs, options)
        return start
    inputs = inputs._replace(initial_state=start.zero_())
    none = start.new_empty((0,))
    out = allocate_chunk_bwd(inputs)
    targets = [
        gradient_target(grad, None, None, x.shape[2], x.shape[3]) for grad, x in zip(out[:3], inputs[:3], strict=True)
    ]
    filled = out._replace(dq=targets[0], dk=targets[1], dv=targets[2])
    backend.chunk_bwd(filled, do, dfinal_state, inputs, Saved(*(none,) * len(Saved._fields)), options)
    return out.d_initial_state


def _allocate_gradient_summary(k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    words = segments.shape[0] // 2 * v.shape[2] * k.shape[3] * v.shape[3]
    return k.new_empty((words,), dtype=accumulator_dtype(k.dtype))


def _segment_summary_bwd_fake(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, segments: Tensor, documents: Tensor, **options: Any,
) -> Tensor:  # fmt: skip
    return _allocate_gradient_summary(k, v, segments)


@torch.no_grad()
def _segment_combine(
    told: Tensor, transitions: Tensor, states: Tensor | None, documents: Tensor, fragments: Tensor, sources: Tensor,
    transition_sources: Tensor, *, num_ranks: int, num_heads: int, key_dim: int, value_dim: int, num_forward: int,
    num_transitions: int, transposed: bool,
) -> Tensor:  # fmt: skip
    HV, K, V = num_heads, key_dim, value_dim
    summaries = told.view(num_ranks, -1)
    if not transposed:
        summaries = summaries[:, : num_forward * HV * K * V]
    summaries = summaries.reshape(-1, HV, K, V)
    inner = told.new_empty((0, HV, K, K))
    if num_transitions:
        inner = transitions.view(num_ranks, -1)[:, num_forward * HV * K * V :].reshape(-1, HV, K, K)
    # One row more than there are fragments takes what unused slots compute.
    out = told.new_zeros((documents.shape[0] + 1, HV, K, V))
    if states is not None:
        out[:-1] = rows(states, documents)
    state = rows(summaries, sources[:, 0]).double()
    for step in range(1, sources.shape[1]):
        # float64: torch may be allowed to compute float32 products in TF32.
        M = rows(inner, transition_sources[:, step]).double()
        moved = torch.matmul(M.transpose(-1, -2) if transposed else M, state)
        there = (sources[:, step] >= 0).view(-1, 1, 1, 1)
        state = torch.where(there, moved + rows(summaries, sources[:, step]).double(), state)
    place = torch.where(fragments >= 0, fragments, documents.shape[0])
    out.index_copy_(0, place, state.to(out.dtype))
    return out[:-1]


def _segment_combine_fake(
    told: Tensor, transitions: Tensor, states: Tensor | None, documents: Tensor, fragments: Tensor, sources: Tensor,
    transition_sources: Tensor, *, num_heads: int, key_dim: int, value_dim: int, **options: Any,
) -> Tensor:  # fmt: skip
    return told.new_empty((documents.shape[0], num_heads, key_dim, value_dim))


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "segment_summary_fwd": (_segment_summary_fwd, _segment_summary_fwd_fake),
    "segment_summary_bwd": (_segment_summary_bwd, _segment_summary_bwd_fake),
    "segment_combine": (_segment_combine, _segment_combine_fake),
}


for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    lib.impl(_name, _on_cpu(_run), "CPU")
    lib.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"gdn::{_name}", _fake, lib=lib)
