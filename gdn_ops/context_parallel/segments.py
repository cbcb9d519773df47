"""The small ops between the collectives: what a rank tells about its segments, and what it makes of the others' words.

    segment_summary_fwd   per piece H [HV,K,V], the state it hands on (from its initial state if it begins a document,
                          else from zero), and, for the inner ones, M [HV,K,K], what it makes of the state it gets;
                          of these what each fragment tells
    segment_summary_bwd   per piece dH [HV,K,V], the gradient of the state it got from nothing but its own outputs
                          (and the final state's gradient, if it ends a document); of these what each fragment tells
    segment_combine       S <- M S + H along each document: the state of every local piece; or, with M transposed
                          and the other way round, its final state's gradient

One rank's words are one flat tensor of fixed size, [A*HV*K*V | M*HV*K*K] elements for A fragments and M transitions, so
one all-gather carries them. H, dH and M are computed as the op itself computes states, from operands in their own
dtype; M is what its recurrence makes of the identity without values (v = 0), on Hopper in the launch of H. What a
fragment tells follows from its pieces', in the accumulation dtype.
Where fragments are cut, H, M and dH of the pieces are returned too, transposed: [Q,HV,V,K], [Q,HV,K,K] and
[QB,HV,V,K], for the walks from piece to piece; else these have zero rows.

On a GPU calls like earlier ones repeat their launches (`repeats.py`). What can be repeated is in functions of its own
(`_own_summary` and others), which take of the plan what they read: index tensors of another batch are other addresses.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import counters
from gdn_ops.context_parallel.plan import Plan
from gdn_ops.context_parallel.sharing import Prepared
from gdn_ops.ops import _load, _on_cpu, backend_for, kernels, lib
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd, gradient_target, saved_matrices
from gdn_ops.repeats import is_gradient_ready, pinned, remembered
from gdn_ops.shapes import CHUNK, Inputs, Options, Saved, Stage, accumulator_dtype

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_SWITCHES = (
    "bool use_qk_l2norm=False, bool use_beta_sigmoid=False, bool allow_neg_eigval=False, bool deterministic=True"
)
_SAVED = "Tensor norms, Tensor gates, Tensor solve, Tensor scores, Tensor states, Tensor updates, Tensor checkpoints"

SCHEMAS = {
    "segment_summary_fwd": "(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, "
    f"Tensor? dt_bias, Tensor[] plan, *, int num_ranks, {_SWITCHES}) -> (Tensor told, Tensor additions, "
    "Tensor moves)",
    "segment_summary_bwd": "(Tensor do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    f"{_SAVED}, Tensor? A_log, Tensor? dt_bias, Tensor moves, Tensor[] plan, *, int num_ranks, float scale, "
    f"{_SWITCHES}) -> (Tensor told, Tensor additions)",
    "segment_combine": "(Tensor told, Tensor transitions, Tensor? states, Tensor additions, Tensor moves, "
    "Tensor[] plan, *, int num_ranks, int num_heads, int key_dim, int value_dim, bool transposed) -> Tensor",
}
"""Argument and result lists, by name (namespace `gdn`)."""

_STATES_ONLY = {"gdn_ops.backends.hopper": "hopper.summaries"}
"""Backends that have kernels for summaries, and the modules with them."""


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


def _summaries(inputs: Inputs, options: Options) -> Any:
    """The module that computes summaries and nothing else, or None: then an ordinary call has to."""
    name = _STATES_ONLY.get(backend_for(inputs, options).__name__)
    return None if name is None or inputs.q.shape[1] == 0 else _load(name)


class _Planner(NamedTuple):
    """Calls that no backend was chosen for are recorded as those of a backend are."""

    record: Callable[..., Any]


def _launches_only(args: Sequence[Any], kwargs: dict[str, Any]) -> _Planner:
    return _Planner(_load("plans").record)


# ---- walks


def _states_kernels(x: Tensor) -> Any:
    """The module of kernels on states like `x` [rows,HV,K,V], or None: then torch operations do it."""
    if not _on_a_gpu(x):
        return None
    kernel = _load("triton.walk")
    return kernel if kernel.supports(x.dtype, *x.shape[2:]) else None


def _on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda or pinned.backend is not None  # the stand-ins of a call on a GPU are on none


def _placed(x: Tensor | None, index: Tensor, shape: tuple[int, int, int], like: Tensor) -> Tensor:
    """x[index] [rows,HV,K,V], zeros where the index is -1 or there is no x; in `like`'s dtype, which is that of x."""
    out = like.new_empty((index.shape[0], *shape))
    kernel = _states_kernels(out)
    if kernel is not None:
        kernel.place(out, None if x is None else x.contiguous(), index)
        return out
    return out.zero_() if x is None else rows(x, index)


@torch.no_grad()
def _pick(x: Tensor, index: Tensor) -> tuple[Tensor]:
    return (_placed(x, index, (x.shape[1], x.shape[2], x.shape[3]), x),)


_picked = remembered(_pick, ("x", "index"), _launches_only, None)


def picked(x: Tensor, index: Tensor) -> Tensor:
    """`rows` of states [N,HV,K,V], in one launch on a GPU; for calls that no compiler sees."""
    return _picked(x, index)[0] if x.is_cuda else rows(x, index)


def _blocks(flat: Tensor, num_blocks: int, start: int, shape: tuple[int, int, int, int]) -> Tensor:
    """[blocks,rows,HV,K,V] at `start` of each of the equal blocks of a flat tensor."""
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return flat.view(num_blocks, -1)[:, start : start + count].unflatten(1, shape)


def _matrices(stage: Stage, source: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
    """H and M of these rows, in float64: torch may be allowed to compute float32 products in TF32."""
    own, moves = rows(stage.sources.flatten(0, 1), source), rows(stage.moves.flatten(0, 1), move)
    own = own.mT if stage.sources_transposed else own
    return own.double(), (moves.mT if stage.moves_transposed else moves).double()


def _walk_kernels(out: Tensor, stages: Sequence[Stage]) -> Any:
    """The module whose kernel walks to `out`, the fastest one, or None: then torch operations do it."""
    kernel = _states_kernels(out)
    if kernel is None:
        return None
    fastest = _load("hopper.walk")
    return fastest if fastest.supports(out, stages) else kernel


def walk(out: Tensor, states: Tensor | None, starts: Tensor | None, steps: Tensor, *stages: Stage) -> None:
    """Write the states along paths S <- M S + H to rows of `out` [rows,HV,K,V].

    starts [paths]: the row of states [N,HV,K,V] that a path starts from (-1, or no states: from zero). steps int32
    [paths,steps,3], those of one stage after the other: the row of H (-1: the step does not exist), of M (-1: S becomes
    H), and of `out` (-1: not written).
    """
    if steps.numel() == 0:
        return
    kernel = _walk_kernels(out, stages)
    if kernel is not None:
        kernel.walk(out, None if states is None else states.contiguous(), starts, steps, stages)
        return
    if states is None or starts is None:
        state = out.new_zeros((steps.shape[0], *out.shape[1:])).double()
    else:
        state = rows(states, starts).double()
    # One row more takes what is not to be written.
    found = torch.cat([out, out.new_empty((1, *out.shape[1:]))])
    each = [stage for stage in stages for _ in range(stage.num_steps)]
    for stage, (source, move, output) in zip(each, steps.long().permute(1, 2, 0), strict=True):
        own, moves = _matrices(stage, source, move)
        # No M is no product: 0 times what is not finite would be.
        moved = torch.where((move >= 0).view(-1, 1, 1, 1), torch.matmul(moves, state), 0)
        state = torch.where((source >= 0).view(-1, 1, 1, 1), moved + own, state)
        found.index_copy_(0, torch.where(output >= 0, output, out.shape[0]), state.to(out.dtype))
    out.copy_(found[:-1])


# ---- forward


def _final_states(inputs: Inputs, options: Options) -> Tensor:
    """The state after each segment [A,HV,K,V], for boundaries that are pairs."""
    if inputs.q.is_cuda:  # no call of this kind is part of a recorded one
        ordinary = kernels["chunk_fwd", "cuda"]
        return ordinary(*inputs, **options._asdict(), output_final_state=True, save="none")[1][::2]
    out = allocate_chunk_fwd(inputs, output_final_state=True, use_qk_l2norm=options.use_qk_l2norm, save="none")
    backend_for(inputs, options).chunk_fwd(out, inputs, options, "none")
    return out.final_state[::2]


def _transitions(inputs: Inputs, segments: Tensor, options: Options) -> Tensor:
    """M of each segment [Q,HV,K,K], in the accumulation dtype."""
    k, HV, K = inputs.k, inputs.v.shape[2], inputs.k.shape[3]
    nothing = k.new_zeros((1, 1, 1, K)).expand(*k.shape[:2], HV, K)
    identity = torch.eye(K, dtype=accumulator_dtype(k.dtype), device=k.device)
    starts = identity.expand(segments.shape[0] - 1, HV, K, K).contiguous()
    return _final_states(inputs._replace(v=nothing, initial_state=starts, cu_seqlens=segments), options)


@torch.no_grad()
def _own_summary(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, solve: Tensor | None, factors: Tensor | None, segments: Tensor, starts: Tensor,
    table: Tensor, saved_table: Tensor, transitions: Tensor, fold: Tensor, transition_fold: Tensor,
    *, words: int, kept: int, **switches: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`segment_summary_fwd`; what it reads of the plan are the forward's tables.

    solve and factors: of all pieces' chunks, from `sharing.prepare`, or None.
    """
    k, v, g, beta = _dense(k), _dense(v), g.contiguous(), beta.contiguous()
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    told, additions, kept_moves = _allocate_summary(k, v, words, kept)
    options = Options(scale=1.0, **switches)
    count, num_told = starts.shape[0], fold.shape[0]
    if not count:
        return told, additions, kept_moves
    # The queries do not matter for the state.
    inputs = Inputs(k, k, v, g, beta, None, segments, A_log, dt_bias)
    states = additions if kept else told.new_empty((count, HV, V, K))
    has_moves = transitions.shape[0] > 0
    moves = kept_moves if kept or not has_moves else told.new_empty((count, HV, K, K))
    summaries = _summaries(inputs, options)
    if summaries is not None:
        inputs = inputs._replace(initial_state=None if initial_state is None else initial_state.contiguous())
        if solve is None or factors is None:
            summaries.segments_fwd(states, moves, table, inputs, options)
        else:
            prepared = solve.unflatten(-1, (CHUNK, CHUNK)), factors
            summaries.segments_fwd(states, moves, saved_table, inputs, options, prepared)
    else:
        start = None if initial_state is None else _between(rows(initial_state, starts))
        found = _final_states(inputs._replace(initial_state=start), options)
        states.copy_(found.transpose(-1, -2))
        if has_moves:
            moves.copy_(_transitions(inputs, transitions, options).transpose(-1, -2))
    split = num_told * HV * K * V
    walk(
        told[:split].view(-1, HV, K, V), None, None, fold,
        Stage(states[None], moves[None], fold.shape[1], sources_transposed=True, moves_transposed=True),
    )  # fmt: skip
    if transition_fold.shape[0]:
        _fold_transitions(told[split:].view(-1, HV, K, K), moves, transition_fold)
    return told, additions, kept_moves


def _fold_transitions(told: Tensor, moves: Tensor, fold: Tensor) -> None:
    """M of fragments [M,HV,K,K] from M of their pieces [Q,HV,K,K], transposed: a walk from the first one on."""
    first = Stage(moves[None], moves[None], 1, sources_transposed=True, moves_transposed=True)
    if fold.shape[1] == 1:
        walk(told, None, None, fold, first)
        return
    nothing = _placed(None, fold.view(-1)[:1], (told.shape[1], told.shape[2], told.shape[3]), told)
    walk(told, None, None, fold, first, first._replace(sources=nothing[None], num_steps=fold.shape[1] - 1))


def _own_summary_backend(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    k, v, g, beta, _, A_log, dt_bias, _, _, segments = args[:10]
    options = Options(scale=1.0, **{name: x for name, x in kwargs.items() if name in Options._fields})
    return backend_for(Inputs(k, k, v, g, beta, None, segments, A_log, dt_bias), options)


def _segment_summary_fwd(
    own_summary: Callable[..., tuple[Tensor, Tensor, Tensor]],
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, plan: Sequence[Tensor], *, num_ranks: int,
    prepared: Prepared | None = None, **switches: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The op; `prepared` is for calls without the dispatcher (`sharing.py`)."""
    if num_ranks > 1:
        counters.count("context_exchanges")
    p = Plan(*plan)
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    words, kept = summary_sizes(p, HV, K, V)
    solve, factors = (None, None) if prepared is None else prepared.matrices
    return own_summary(
        k, v, g, beta, initial_state, A_log, dt_bias, solve, factors,
        p.forward_segments, p.forward_starts, p.forward_table, p.forward_saved_table, p.transitions, p.fold,
        p.transition_fold, words=words, kept=kept, **switches,
    )  # fmt: skip


def summary_sizes(plan: Plan, HV: int, K: int, V: int) -> tuple[int, int]:
    """Elements of one rank's words before the forward, and rows of what is kept of its pieces."""
    words = HV * K * (plan.num_forward * V + plan.num_transitions * K)
    return words, plan.forward_starts.shape[0] if plan.is_cut else 0


def _allocate_summary(k: Tensor, v: Tensor, words: int, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulator_dtype(k.dtype)
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    shapes = (words,), (kept, HV, V, K), (kept, HV, K, K)
    told, additions, moves = (k.new_empty(shape, dtype=acc) for shape in shapes)
    return told, additions, moves


def _segment_summary_fwd_fake(
    k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, plan: list[Tensor], **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _allocate_summary(k, v, *summary_sizes(Plan(*plan), v.shape[2], k.shape[3], v.shape[3]))


# ---- backward


@torch.no_grad()
def _own_gradients(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    norms: Tensor, gates: Tensor, solve: Tensor, scores: Tensor, states: Tensor, updates: Tensor, checkpoints: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, moves: Tensor, cu_seqlens: Tensor, segments: Tensor, ends: Tensor,
    table: Tensor, saved_table: Tensor, fold: Tensor, *scratch: Tensor, is_cut: bool, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`segment_summary_bwd`; what it reads of the plan are the backward's tables.

    scratch: of `sharing.prepare_backward`, with all that is saved; or nothing.
    """
    chosen = Options(**options)
    q, k, v = (_dense(x) for x in (q, k, v))
    do = do if is_gradient_ready(do) else do.contiguous()
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    count = ends.shape[0]
    told, additions = _allocate_gradient_summary(k, v, fold.shape[0], count if is_cut else 0)
    if not count:
        return told, additions
    inputs = Inputs(q, k, v, g.contiguous(), beta.contiguous(), None, segments, A_log, dt_bias)
    dstates = additions if is_cut else told.new_empty((count, HV, V, K))
    summaries = _summaries(inputs, chosen)
    if summaries is not None:
        end = None if dfinal_state is None else dfinal_state.contiguous()
        # The op's own matrices, where the forward kept them: their chunks are those of the pieces too.
        inputs = inputs._replace(cu_seqlens=cu_seqlens)
        saved = saved_matrices(Saved(norms, gates, solve, scores, states, updates, checkpoints), inputs)
        if saved.gates.shape[0] == 0:
            inputs, saved_table = inputs._replace(cu_seqlens=segments), table
        ready = summaries.hopper.Scratch.of(scratch) if scratch else None
        summaries.segments_bwd(dstates, do, end, saved_table, inputs, saved, chosen, ready)
    else:
        end = None if dfinal_state is None else _between(rows(dfinal_state, ends))
        dstates.copy_(_initial_state_gradients(do, end, inputs, chosen)[::2].transpose(-1, -2))
    walk(
        told.view(-1, HV, K, V), None, None, fold,
        Stage(dstates[None], moves[None], fold.shape[1], sources_transposed=True, moves_transposed=False),
    )  # fmt: skip
    return told, additions


def _own_gradients_backend(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    q, k, v, g, beta = args[2:7]
    A_log, dt_bias, segments = args[14], args[15], args[18]
    options = Options(**{name: x for name, x in kwargs.items() if name in Options._fields})
    return backend_for(Inputs(q, k, v, g, beta, None, segments, A_log, dt_bias), options)


def _segment_summary_bwd(
    own_gradients: Callable[..., tuple[Tensor, Tensor]],
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    norms: Tensor, gates: Tensor, solve: Tensor, scores: Tensor, states: Tensor, updates: Tensor, checkpoints: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, moves: Tensor, plan: Sequence[Tensor], *, num_ranks: int,
    scratch: tuple[Tensor, ...] = (), **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op; `scratch` is for calls without the dispatcher (`sharing.py`)."""
    if num_ranks > 1:
        counters.count("context_exchanges")
    p = Plan(*plan)
    return own_gradients(
        do, dfinal_state, q, k, v, g, beta, norms, gates, solve, scores, states, updates, checkpoints, A_log, dt_bias,
        moves, p.cu_seqlens, p.backward_segments, p.backward_ends, p.backward_table, p.backward_saved_table,
        p.backward_fold, *scratch, is_cut=p.is_cut, **options,
    )  # fmt: skip


def _initial_state_gradients(do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, options: Options) -> Tensor:
    """The gradient of every document's initial state [N,HV,K,V]. It does not depend on that state."""
    assert inputs.cu_seqlens is not None
    shape = (inputs.cu_seqlens.shape[0] - 1, inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3])
    start = inputs.k.new_zeros(shape, dtype=accumulator_dtype(inputs.k.dtype))
    inputs = inputs._replace(initial_state=start)
    none = start.new_empty((0,))
    out = allocate_chunk_bwd(inputs)
    targets = [
        gradient_target(grad, None, None, x.shape[2], x.shape[3]) for grad, x in zip(out[:3], inputs[:3], strict=True)
    ]
    filled = out._replace(dq=targets[0], dk=targets[1], dv=targets[2])
    backend = backend_for(inputs, options)
    backend.chunk_bwd(filled, do, dfinal_state, inputs, Saved(*(none,) * len(Saved._fields)), options)
    return out.d_initial_state


def _allocate_gradient_summary(k: Tensor, v: Tensor, num_backward: int, kept: int) -> tuple[Tensor, Tensor]:
    acc = accumulator_dtype(k.dtype)
    HV, K, V = v.shape[2], k.shape[3], v.shape[3]
    told = k.new_empty((num_backward * HV * K * V,), dtype=acc)
    return told, k.new_empty((kept, HV, V, K), dtype=acc)


def _segment_summary_bwd_fake(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    plan = Plan(*rest[-1])
    return _allocate_gradient_summary(k, v, plan.num_backward, plan.backward_ends.shape[0] if plan.is_cut else 0)


# ---- between


@torch.no_grad()
def _combined(
    told: Tensor, transitions: Tensor, states: Tensor | None, additions: Tensor, moves: Tensor, starts: Tensor,
    ways: Tensor, *, num_ranks: int, sizes: tuple[int, int, int], num_pieces: int, num_between: int, num_told: int,
    num_transitions: int, transposed: bool,
) -> tuple[Tensor]:  # fmt: skip
    """`segment_combine`; of the plan the ways to every piece, over the fragments before its own and then within it."""
    HV, K, V = sizes
    out = told.new_empty((num_pieces, *sizes))
    if num_transitions:
        start = (transitions.shape[0] // num_ranks) - num_transitions * HV * K * K
        exact = _blocks(transitions, num_ranks, start, (num_transitions, HV, K, K))
    else:
        exact = told.new_empty((1, 0, HV, K, K))
    heard = _blocks(told, num_ranks, 0, (num_told, HV, K, V))
    within = ways.shape[1] - num_between
    walk(
        out, states, starts, ways,
        Stage(heard, exact, num_between, sources_transposed=False, moves_transposed=transposed),
        Stage(additions[None], moves[None], within, sources_transposed=True, moves_transposed=not transposed),
    )  # fmt: skip
    return (out,)


def _segment_combine(
    combined: Callable[..., tuple[Tensor]],
    told: Tensor, transitions: Tensor, states: Tensor | None, additions: Tensor, moves: Tensor,
    plan: Sequence[Tensor], *, num_ranks: int, num_heads: int, key_dim: int, value_dim: int, transposed: bool,
) -> Tensor:  # fmt: skip
    p = Plan(*plan)
    ways = (p.backward_way_ends, p.backward_ways) if transposed else (p.way_starts, p.ways)
    return combined(
        told, transitions, states, additions, moves, *ways, num_ranks=num_ranks,
        sizes=(num_heads, key_dim, value_dim), num_pieces=p.starts.shape[0], num_between=p.num_between,
        num_told=p.num_backward if transposed else p.num_forward, num_transitions=p.num_transitions,
        transposed=transposed,
    )[0]  # fmt: skip


def _segment_combine_fake(
    told: Tensor, transitions: Tensor, states: Tensor | None, additions: Tensor, moves: Tensor,
    plan: list[Tensor], *, num_heads: int, key_dim: int, value_dim: int, **options: Any,
) -> Tensor:  # fmt: skip
    return told.new_empty((Plan(*plan).starts.shape[0], num_heads, key_dim, value_dim))


class _Op(NamedTuple):
    """An op: `call(part, *args)`; `part`, of the arguments `names`, can be repeated and runs on `backend_of` a call."""

    call: Callable[..., Any]
    part: Callable[..., Any]
    names: str
    backend_of: Callable[[Sequence[Any], dict[str, Any]], Any]
    fake: Callable[..., Any]


_IMPLEMENTATIONS = {
    "segment_summary_fwd": _Op(
        _segment_summary_fwd,
        _own_summary,
        "k v g beta initial_state A_log dt_bias solve factors segments starts table saved_table transitions fold "
        "transition_fold",
        _own_summary_backend,
        _segment_summary_fwd_fake,
    ),
    "segment_summary_bwd": _Op(
        _segment_summary_bwd,
        _own_gradients,
        "do dfinal_state q k v g beta norms gates solve scores states updates checkpoints A_log dt_bias moves "
        "cu_seqlens segments ends table saved_table fold",
        _own_gradients_backend,
        _segment_summary_bwd_fake,
    ),
    "segment_combine": _Op(
        _segment_combine,
        _combined,
        "told transitions states additions moves starts ways",
        _launches_only,
        _segment_combine_fake,
    ),
}

for _name, _op in _IMPLEMENTATIONS.items():
    # The op itself counts the copies of operands that it cannot read.
    _part = remembered(_op.part, _op.names.split(), _op.backend_of, None, counts_copies=False)
    kernels[_name, "cpu"] = _on_cpu(functools.partial(_op.call, _op.part))
    kernels[_name, "cuda"] = functools.partial(_op.call, _part)
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    lib.impl(_name, kernels[_name, "cpu"], "CPU")
    lib.impl(_name, kernels[_name, "cuda"], "CUDA")
    torch.library.register_fake(f"gdn::{_name}", _op.fake, lib=lib)
