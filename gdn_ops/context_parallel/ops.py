"""The context-parallel ops: one call over the ranks of a group, differentiable, made of small ops and collectives.

    context_fwd           as gdn::chunk_fwd, for the fragments of one rank
    context_packed_fwd    as gdn::chunk_packed_fwd

Both return `(o, final_state, <the saved>, states, told, moves)`: the states that the rank's pieces started from, what
all ranks told, and M of the rank's own pieces. Given back as `received_states`, `received_told` and `received_moves`
they spare the exchange and the summary (activation recompute).
The Autograd kernels call the small ops one by one, so a compiler's graph shows them and the collectives between them.
`call_plain` is the same for calls to which nothing listens (`gdn_ops.plain`), without the dispatcher.
"""

from typing import Any

import torch
from torch import Tensor

from gdn_ops import packing
from gdn_ops.autograd import _is_plain, _needs_graph, _refuse_forward_mode
from gdn_ops.context_parallel import path
from gdn_ops.context_parallel.path import Call, Gathering, Heard
from gdn_ops.context_parallel.plan import HEARS_ALL, Hears, Plan
from gdn_ops.context_parallel.segments import summary_sizes
from gdn_ops.context_parallel.sharing import Prepared
from gdn_ops.derivatives import first_derivative_only, refuse_transforms
from gdn_ops.ops import lib
from gdn_ops.outputs import allocate_chunk_fwd
from gdn_ops.shapes import Inputs, accumulator_dtype

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_REST = (
    "Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, Tensor? received_states, "
    "Tensor? received_told, Tensor? received_moves, Tensor[] plan, *, "
)
_OPTIONS = (
    "int num_ranks, str group_name, str exchange, float scale, bool use_qk_l2norm=False, bool use_beta_sigmoid=False, "
    'bool allow_neg_eigval=False, bool deterministic=True, bool output_final_state=False, str save="solve"'
)
_RESULTS = (
    "(Tensor o, Tensor final_state, Tensor norms, Tensor gates, Tensor solve, Tensor scores, Tensor states, "
    "Tensor updates, Tensor checkpoints, Tensor piece_states, Tensor told, Tensor moves)"
)
SCHEMAS = {
    "context_fwd": f"(Tensor q, Tensor k, Tensor v, {_REST}{_OPTIONS}) -> {_RESULTS}",
    "context_packed_fwd": f"(Tensor row, {_REST}int num_qk_heads, int num_v_heads, int head_dim, {_OPTIONS}) "
    f"-> {_RESULTS}",
}
"""Argument and result lists, by name (namespace `gdn`)."""

_FORWARD_WORDS = "segment states"
_BACKWARD_WORDS = "segment state gradients"


def _call(
    num_operands: int, tensors: tuple[Tensor | None, ...], plan: Plan, kwargs: dict[str, Any], plain: bool = False
) -> Call:
    """tensors: operands, g, beta, initial_state, A_log, dt_bias."""
    options = {name: kwargs[name] for name in ("scale", *path.SWITCHES) if name in kwargs}
    heads = None
    q, k, v, row = *tensors[:3], None
    if num_operands == 1:
        row = tensors[0]
        heads = (kwargs["num_qk_heads"], kwargs["num_v_heads"], kwargs["head_dim"])
        q, k, v = path.row_views(row, heads) if plain and row is not None else (None, None, None)
    g, beta, initial_state, A_log, dt_bias = tensors[num_operands:]
    assert g is not None
    assert beta is not None
    return Call(
        q, k, v, row, g, beta, initial_state, A_log, dt_bias, plan, kwargs["num_ranks"], options, heads, plain
    )  # fmt: skip


_Received = tuple[Tensor | None, Tensor | None, Tensor | None]


def _run(
    call: Call, kwargs: dict[str, Any], received: _Received
) -> tuple[tuple[Tensor, ...], Tensor | None, Heard | None, tuple[Tensor, ...]]:
    """The op's outputs without the last three, the pieces' states, the exchange, and tables for the backward."""
    states, told, moves = received
    heard = None if told is None or moves is None else Heard(told, moves[:0], moves)
    prepared = pending = None
    if states is None:
        prepared = path.prepare(call)
        if call.linked:
            heard, pending = _tell(call, kwargs, prepared)
        states = path.received_states(call, heard)
    o, final_state, saved = path.forward(
        call, states, kwargs.get("output_final_state", False), kwargs.get("save", "solve"), prepared
    )
    if pending is not None:
        pending.wait()
    return (o, final_state, *saved), states, heard, () if prepared is None else prepared.tables


def _tell(call: Call, kwargs: dict[str, Any], prepared: Prepared | None = None) -> tuple[Heard, Gathering | None]:
    """The forward's exchange; a rank that has a use for it waits here, another later, when its kernels are launched."""
    words = path.forward_summary(call, prepared)
    pending = _send(words, kwargs, _FORWARD_WORDS)
    if _hears(call, kwargs).forward:
        return words._replace(told=pending.wait()), None
    return words._replace(told=pending.words), pending


def _send(words: Heard, kwargs: dict[str, Any], what: str) -> Gathering:
    return Gathering.start(words.told, kwargs["num_ranks"], kwargs["group_name"], what)


def _hears(call: Call, kwargs: dict[str, Any]) -> Hears:
    """Which exchanges this rank waits for before it goes on; in a graph, which is equal on all ranks, both."""
    found = kwargs.get("hears") if call.plain else None
    return HEARS_ALL if found is None else found


def _outputs(call: Call, out: tuple[Tensor, ...], states: Tensor | None, heard: Heard | None) -> tuple[Tensor, ...]:
    none = path.empty_states(call)
    told, moves = (none.new_empty((0,)), _no_moves(call)) if heard is None else (heard.told, heard.moves)
    return (*out, none if states is None else states, told, moves)


def _no_moves(call: Call) -> Tensor:
    HV, K, _ = call.sizes()
    return path.empty_states(call).new_empty((0, HV, K, K))


class _ContextFwd(torch.autograd.Function):
    """tensors: operands, g, beta, initial_state, A_log, dt_bias; then the three that were received.

    `plain` calls have no outputs but o and the final states: nobody sees what is saved.
    """

    @staticmethod
    def forward(
        ctx: Any, num_operands: int, from_row: bool, plain: bool, kwargs: dict[str, Any], plan: Plan, *tensors: Any
    ) -> Any:
        split = num_operands + 5
        with torch._C._AutoDispatchBelowAutograd():
            call = _call(num_operands, tensors[:split], plan, kwargs, plain)
            out, states, heard, ctx.tables = _run(call, kwargs, tensors[split:])
            result = out[:2] if plain else _outputs(call, out, states, heard)
        keep = kwargs["exchange"] == "saved" or not call.linked
        told, moves = (None, None) if heard is None or not keep else (heard.told, heard.moves)
        if told is not None and plan.num_transitions == 0:
            told = None
        ctx.save_for_backward(*tensors[:split], *out[2:], states if keep else None, told, moves)
        # The plan is the context's, which outlives the step and has no gradient.
        ctx.plan, ctx.kwargs, ctx.num_operands, ctx.from_row, ctx.keep = plan, kwargs, num_operands, from_row, keep
        has_final_state = kwargs.get("output_final_state", False)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(result[2:] if has_final_state else result[1:]))
        return result

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, tensors: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        do, dfinal_state = grads[:2]
        split = ctx.num_operands + 5
        kwargs = ctx.kwargs
        *saved, states, told, moves = tensors[split:]
        plain = _is_plain((do, dfinal_state, *tensors))
        with torch._C._AutoDispatchBelowAutograd():
            call = _call(ctx.num_operands, tensors[:split], ctx.plan, kwargs, plain)
            if do is None:
                # Even a rank whose outputs no loss reads takes part: the others' fragments wait for its words.
                do = path.zero_output_gradient(call)
            found = _gradients(call, kwargs, do, dfinal_state, (states, told, moves), tuple(saved), ctx)
        wanted = [x if need else None for need, x in zip(ctx.needs_input_grad[5 : 5 + split], found, strict=True)]
        return (*(None,) * 5, *wanted, None, None, None)


def _gradients(
    call: Call, kwargs: dict[str, Any], do: Tensor, dfinal_state: Tensor | None, received: _Received,
    saved: tuple[Tensor, ...], ctx: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`path.backward` with its exchange, behind which a call that can computes what does not wait for it."""
    states, told, moves = received
    if not call.linked:
        dfinal_states = path.received_gradients(call, None, None, dfinal_state)
        return path.backward(call, do, dfinal_states, states, saved, into_row=ctx.from_row)
    if not ctx.keep:
        heard, pending = _tell(call, kwargs)
        if pending is not None:  # what others told of their transitions is read below
            pending.wait()
        states, told, moves = path.received_states(call, heard), heard.told, heard.moves
    assert moves is not None
    prepared = path.prepare_backward(call, saved, ctx.tables)
    words = path.backward_summary(call, do, dfinal_state, saved, moves, prepared)
    pending = _send(words, kwargs, _BACKWARD_WORDS)
    waits = _hears(call, kwargs).backward
    ahead = path.states_ahead(call, states, prepared) if waits else ()
    heard = words._replace(told=pending.wait() if waits else pending.words)
    later = None if waits else pending
    transitions = words.told.new_empty((0,)) if told is None else told
    dfinal_states = path.received_gradients(call, heard, transitions, dfinal_state)
    # Of what was told and heard nothing is kept while the largest tensors are there.
    del words, heard, pending
    if not waits:
        ahead = path.states_ahead(call, states, prepared)
    found = path.backward(call, do, dfinal_states, states, saved, into_row=ctx.from_row, prepared=prepared, ahead=ahead)
    if later is not None:
        later.wait()
    return found


def call_plain(num_operands: int, plan: Plan, *tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    """`gdn::context_fwd` (three operands) or `gdn::context_packed_fwd` (one) without the dispatcher, on all tensors.

    Returns o and the global final states only.
    """
    if _needs_graph(tensors):
        from_row = num_operands == 3 and packing.come_from_one_row(*tensors[:3])
        return _ContextFwd.apply(num_operands, from_row, True, kwargs, plan, *tensors)
    split = num_operands + 5
    with torch._C._AutoDispatchBelowAutograd():
        call = _call(num_operands, tensors[:split], plan, kwargs, True)
        return _run(call, kwargs, tensors[split:])[0][:2]  # type: ignore[arg-type]


def _autograd(num_operands: int) -> Any:
    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        *tensors, plan = args
        _refuse_forward_mode(tuple(tensors))
        if _needs_graph(tuple(tensors[: num_operands + 5])):
            refuse_transforms()
            from_row = num_operands == 3 and packing.come_from_one_row(*tensors[:3])
            return _ContextFwd.apply(num_operands, from_row, False, kwargs, Plan(*plan), *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return _below(num_operands)(*args, **kwargs)

    return run


def _below(num_operands: int) -> Any:
    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        *tensors, plan = args
        split = num_operands + 5
        call = _call(num_operands, tuple(tensors[:split]), Plan(*plan), kwargs)
        return _outputs(call, *_run(call, kwargs, tuple(tensors[split:]))[:3])  # type: ignore[arg-type]

    return run


def _fake(num_operands: int) -> Any:
    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        *tensors, indices = args
        split = num_operands + 5
        plan = Plan(*indices)
        call = _call(num_operands, tuple(tensors[:split]), plan, kwargs)
        q, k, v = call.operands()
        states = path.empty_states(call)
        F, N = plan.starts.shape[0], plan.first.shape[0]
        if call.linked or call.initial_state is not None:
            states = states.new_empty((F, *states.shape[1:]))
        inputs = Inputs(q, k, v, call.g, call.beta, states, plan.cu_seqlens, call.A_log, call.dt_bias)
        has_final_state = kwargs.get("output_final_state", False)
        out = allocate_chunk_fwd(
            inputs,
            output_final_state=has_final_state,
            use_qk_l2norm=kwargs.get("use_qk_l2norm", False),
            save=kwargs.get("save", "solve"),
        )
        if has_final_state:
            out = out._replace(final_state=out.final_state.new_empty((N, *out.final_state.shape[1:])))
        words, kept = summary_sizes(plan, *call.sizes()) if call.linked else (0, 0)
        acc = accumulator_dtype(q.dtype)
        told = q.new_empty((words * (kwargs["num_ranks"] if kwargs["group_name"] else 1),), dtype=acc)
        HV, K, _ = call.sizes()
        return (*out.returned, states, told, q.new_empty((kept, HV, K, K), dtype=acc))

    return run


for _name, _num_operands in (("context_fwd", 3), ("context_packed_fwd", 1)):
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    lib.impl(_name, _autograd(_num_operands), "Autograd")
    lib.impl(_name, _below(_num_operands), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdn::{_name}", _fake(_num_operands), lib=lib)
