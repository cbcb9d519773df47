"""All ranks of a partition in one process: the same steps and small ops, with a concatenation for the all-gather.

For tests and for looking into a layout without a cluster; on a CPU or one GPU, eager. Deterministic.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import checks
from gdn_ops.context_parallel import path
from gdn_ops.context_parallel.context import Context, build_for
from gdn_ops.context_parallel.partition import Partition
from gdn_ops.context_parallel.path import Call, Heard
from gdn_ops.context_parallel.plan import Plan
from gdn_ops.derivatives import first_derivative_only
from gdn_ops.plain import is_plain
from gdn_ops.shapes import SAVE_LEVELS, Saved


class RankInputs(NamedTuple):
    """One rank's local tensors, batch axis included; the initial state is global. A row is `q`, with k and v None."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


class _Emulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plans: list[Plan],
        ranks: int,
        options: dict[str, Any],
        heads: Any,
        save: str,
        final: bool,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        plain = is_plain(tensors)
        with torch._C._AutoDispatchBelowAutograd():
            calls = _calls(plans, ranks, options, heads, tensors, plain)
            heard: list[Heard | None] = [None] * len(calls)
            prepared = [path.prepare(call) for call in calls]
            if calls[0].linked:
                words = [path.forward_summary(*x) for x in zip(calls, prepared, strict=True)]
                heard = _exchange(words, ranks)
            states = [path.received_states(call, words) for call, words in zip(calls, heard, strict=True)]
            given = zip(calls, states, prepared, strict=True)
            results = [path.forward(call, start, final, save, shared) for call, start, shared in given]
        outs = [x for o, last, _ in results for x in (o, last)]
        kept = [x for rank in heard for x in ((None, None) if rank is None else (rank.told, rank.moves))]
        ctx.save_for_backward(*tensors, *kept, *states, *(x for *_, saved in results for x in saved))
        ctx.meta = plans, ranks, options, heads
        ctx.tables = [() if x is None else x.tables for x in prepared]
        ctx.num_tensors = len(tensors)
        ctx.set_materialize_grads(False)
        if not final:
            ctx.mark_non_differentiable(*outs[1::2])
        return tuple(outs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        plans, ranks, options, heads = ctx.meta
        kept = saved
        tensors, rest = kept[: ctx.num_tensors], kept[ctx.num_tensors :]
        R = len(plans)
        words, states, saved = rest[: 2 * R], rest[2 * R : 3 * R], rest[3 * R :]
        transitions, moves = words[::2], words[1::2]
        count = len(Saved._fields)
        plain = is_plain((*tensors, *grads))
        with torch._C._AutoDispatchBelowAutograd():
            calls = _calls(plans, ranks, options, heads, tensors, plain)
            dos = [path.zero_output_gradient(c) if x is None else x for c, x in zip(calls, grads[::2], strict=True)]
            dfinals = grads[1::2]
            kept_of = [tuple(saved[count * i : count * i + count]) for i in range(R)]
            heard: list[Heard | None] = [None] * R
            prepared = [path.prepare_backward(*x) for x in zip(calls, kept_of, ctx.tables, strict=True)]
            if calls[0].linked:
                given = zip(calls, dos, dfinals, kept_of, moves, prepared, strict=True)
                told = [path.backward_summary(*x) for x in given]
                heard = _exchange(told, ranks)
            found: list[Tensor | None] = []
            for i, call in enumerate(calls):
                dlast = path.received_gradients(call, heard[i], transitions[i], dfinals[i])
                ahead = path.states_ahead(call, states[i], prepared[i])
                grad = path.backward(call, dos[i], dlast, states[i], kept_of[i], prepared=prepared[i], ahead=ahead)
                del ahead
                q_k_v, small = grad[: len(grad) - 5], grad[len(grad) - 5 :]
                found += [*q_k_v, *(None,) * (3 - len(q_k_v)), *small]
        wanted = [x if need else None for need, x in zip(ctx.needs_input_grad[6:], found, strict=True)]
        return (*(None,) * 6, *wanted)


def _exchange(words: list[Heard], ranks: int) -> list[Heard | None]:
    """What each rank hears: all words, or its own where no document crosses ranks."""
    told = torch.cat([rank.told for rank in words]) if ranks > 1 else None
    return [rank if told is None else rank._replace(told=told) for rank in words]


def _calls(
    plans: list[Plan], ranks: int, options: dict[str, Any], heads: Any, tensors: Sequence[Any], plain: bool
) -> list[Call]:
    width = len(RankInputs._fields)
    calls = []
    for i, plan in enumerate(plans):
        rank = RankInputs(*tensors[width * i : width * (i + 1)])
        rest = (rank.g, rank.beta, rank.initial_state, rank.A_log, rank.dt_bias, plan, ranks, options, heads, plain)
        if heads is None:
            calls.append(Call(rank.q, rank.k, rank.v, None, *rest))
        else:
            q, k, v = path.row_views(rank.q, heads) if plain else (None, None, None)
            calls.append(Call(q, k, v, rank.q, *rest))
    return calls


def contexts(
    part: Partition, device: torch.device | str, num_v_heads: int | None = None, pieces: int | None = None,
    ends: int | None = None,
) -> list[Context]:  # fmt: skip
    """Every rank's context without a group, for `emulate`; the arguments are those of `Partition.context`."""
    options = {"pieces": pieces, "num_v_heads": num_v_heads, "ends": ends}
    return [build_for(part, rank, "", device, **options) for rank in range(part.num_ranks)]  # type: ignore[arg-type]


def _check(part: Partition, inputs: Sequence[RankInputs], save: str, cp_contexts: Sequence[Context] | None) -> None:
    if len(inputs) != part.num_ranks:
        raise ValueError(f"inputs: expected one entry a rank, {part.num_ranks}, got {len(inputs)}")
    tokens = [part.tokens(rank) for rank in range(part.num_ranks)]
    for rank, (given, count) in enumerate(zip(inputs, tokens, strict=True)):
        if given.q.shape[1] < count:
            raise ValueError(
                f"inputs[{rank}]: this rank holds {count} tokens, got {given.q.shape[1]} (shard the inputs)"
            )
    if save not in SAVE_LEVELS:
        raise ValueError(f"save: expected one of {SAVE_LEVELS}, got {save!r}")
    if cp_contexts is not None:
        wanted = [(part.num_ranks, part.num_documents, count) for count in tokens]
        found = [(context.num_ranks, context.num_documents, context.num_tokens) for context in cp_contexts]
        if found != wanted:
            raise ValueError(
                f"cp_contexts: expected those of the partition, (ranks, documents, tokens) {wanted}, got {found}"
            )
        if any(context.partition_hash != hash(part) for context in cp_contexts):
            raise ValueError("cp_contexts: expected those of the partition, got some of another with as many tokens")


def emulate(
    part: Partition,
    inputs: Sequence[RankInputs],
    *,
    scale: float | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    heads: tuple[int, int, int] | None = None,
    save: str = "solve",
    pieces: int | None = None,
    cp_contexts: Sequence[Context] | None = None,
) -> list[tuple[Tensor, Tensor | None]]:
    """Run `chunk_gated_delta_rule` on every rank of `part` in this process; returns each rank's (o, final_state).

    Args:
        part: the partition.
        inputs: per rank its local tensors (`Partition.shard`), of one device; the initial state is global on each.
        heads: (num_qk_heads, num_v_heads, head_dim) if the inputs hold rows.
        save: what is kept for the backward, a word of `gdn_ops.settings`.
        pieces: as for `Partition.context`.
        cp_contexts: what `contexts` made of the partition before, else it is made here; `pieces` is that of these.

    The other options are the op's. Gradients flow to every rank's inputs as they do on a cluster: those of what the
    ranks share (initial states, A_log, dt_bias) add up.

    Raises ValueError for a wrong number of ranks, inputs with fewer tokens than their rank has, contexts of another
    partition, and an unknown `save`.
    """
    _check(part, inputs, save, cp_contexts)
    device = inputs[0].q.device
    q = inputs[0].q
    built = contexts(part, device, inputs[0].g.shape[-1], pieces) if cp_contexts is None else cp_contexts
    options = {
        "scale": checks.check_scale(scale, q.shape[-1] if heads is None else heads[2]),
        "use_qk_l2norm": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid": use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": allow_neg_eigval,
    }
    flat = [x for rank in inputs for x in rank]
    outs = _Emulated.apply(
        [context.plan for context in built],
        built[0].exchange_ranks,
        options,
        heads,
        save,
        output_final_state,
        *flat,
    )
    return [(o, last if output_final_state else None) for o, last in zip(outs[::2], outs[1::2], strict=True)]
