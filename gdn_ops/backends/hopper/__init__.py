"""The Hopper backend (sm_90): TMA, asynchronous tensor cores and warp specialisation, written in Gluon and Triton.

Forward: `chunks` -> `gates` -> `solve` -> `forward`; with norms, which `solve` makes, `gates` again after it. Backward:
the same preparation as far as it was not saved, then for one group of heads after the other, and in it for one part of
each document after the other, the last part first, `forward` (states and updates), `reverse`, `gradients`, `epilogue`.
A part starts from states that the op's forward has left at the parts' ends; both recurrences of a part run in one
launch (`recurrences`). Where few and long documents would leave most of the chip idle, they are cut (`segments`), and
summaries and a combination of segments come before `forward` and before `reverse`; the backward's `forward` then runs
on stretches of segments, in one launch with the summaries. Every stage's file says what it computes and what stays on
chip.

What the caller gives is read where it lies, through TMA descriptors; nothing is copied but output gradients and
gradient targets that no descriptor can describe.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops import settings, shapes
from gdn_ops.backends.hopper import tma
from gdn_ops.backends.hopper.chunks import Chunks, Part, chunk_table, clear_ownerless, table_shapes
from gdn_ops.backends.hopper.epilogue import epilogue, gate_sums
from gdn_ops.backends.hopper.forward import begin, forward
from gdn_ops.backends.hopper.gates import NUM_FACTORS, NUM_FACTORS_NORM, gates
from gdn_ops.backends.hopper.gradients import NUM_SUMS, gradients
from gdn_ops.backends.hopper.launch import is_hopper as _is_hopper
from gdn_ops.backends.hopper.launch import on_device
from gdn_ops.backends.hopper.layouts import Target, addressable_gradient, flat, merged_tokens
from gdn_ops.backends.hopper.recurrences import begin_recurrences, recurrences
from gdn_ops.backends.hopper.reverse import begin_reverse, reverse
from gdn_ops.backends.hopper.segments import combine
from gdn_ops.backends.hopper.solve import solve
from gdn_ops.backends.plans import record as record  # the third function of a backend, for repeated calls
from gdn_ops.outputs import Backward, Forward
from gdn_ops.shapes import (
    CHUNK,
    Inputs,
    Options,
    Saved,
    SegmentRule,
    Sizes,
    scratch_bytes_of,
    sizes,
)

HEAD_SIZE = 128

_CHAINED_DOCUMENTS = 16
"""Up to so many documents that begin with a state and end with a state's gradient are taken for pieces of one
(`gdn_ops.context_parallel`): all heads at once and whole. Pieces differ in length, the longest bounds a group's time,
and two groups would pay it twice."""

_SETTING_CHANGED = "the setting cut_documents or backward_bytes changed between a forward and its backward"


def unsupported_operands(inputs: Inputs) -> str | None:
    """Why these kernels take no operands of such dtypes and heads, on whatever device and at whatever strides."""
    dtype, K, V = inputs.q.dtype, inputs.k.shape[-1], inputs.v.shape[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {dtype}"
    if (K, V) != (HEAD_SIZE, HEAD_SIZE):
        return f"needs heads of {HEAD_SIZE} channels, got K = {K}, V = {V}"
    return None


def unsupported_reason(inputs: Inputs, options: Options) -> str | None:
    """Why these kernels cannot run a call (another backend then takes it), or None."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not _is_hopper(q.device):
        return f"needs an NVIDIA GPU of compute capability 9.0, got {q.device}"
    reason = unsupported_operands(inputs)
    if reason is not None:
        return reason
    if q.shape[0] * q.shape[1] == 0:
        return None
    for name, x in (("q", q), ("k", k), ("v", v)):
        tokens = merged_tokens(x)
        if tokens is None:
            return f"{name}: batch and token axes are not one evenly strided axis (strides {tuple(x.stride())})"
        reason = tma.unaddressable(tokens)
        if reason is not None:
            return f"{name} {reason}"
    return None


class Scratch(NamedTuple):
    """What the kernels of a call read beside what is saved, for calls that come in parts (`chunk_prepare` and others).

    factors: of `gates`; chunks: where chunks and segments lie.
    """

    factors: Tensor
    chunks: Chunks

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> "Scratch":
        """From what `tensors` gave."""
        return Scratch(tensors[0], Chunks(*tensors[1:]))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, the factors first."""
        return self.factors, *self.chunks


def _no_scratch(like: Tensor) -> Scratch:
    """Of a call without tokens."""
    return Scratch.of([like.new_empty((0,)) for _ in range(1 + len(Chunks._fields))])


def chunk_prepare(out: Forward, inputs: Inputs, options: Options) -> Scratch:
    """Fill the norms, gates, solve and scores of `out`, which no state goes into."""
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0:
        for x in (out.norms, out.gates, out.solve, out.scores):
            x.zero_()
        return _no_scratch(out.gates)
    with on_device(inputs.q):
        q, k = flat(inputs.q), flat(inputs.k)
        chunks = _chunks(inputs, s)
        return Scratch(_prepare(q, k, inputs, options, s, chunks, out.saved).factors, chunks)


def chunk_prepare_bwd(
    inputs: Inputs, saved: Saved, options: Options, tables: Sequence[Tensor] = ()
) -> tuple[Saved, Scratch]:
    """Of a backward what no state goes into: `saved` with what it lacks of norms, gates, solve and scores.

    `tables`: of the forward's scratch all but the factors, if they were kept.
    """
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0:
        return saved, _no_scratch(saved.gates)
    with on_device(inputs.q):
        q, k = flat(inputs.q), flat(inputs.k)
        chunks = Chunks(*tables) if tables else _chunks(inputs, s)
        rule = settings.segments(s)
        num_segments = s.N + rule.num_cuts
        num_stretches = num_segments + (rule.num_left if rule.parts == 1 else 0)
        num_parts = rule.parts if rule.parts > 1 else 0
        found = len(chunks.segments), len(chunks.stretches), len(chunks.slots)
        if found != (num_segments, num_stretches, num_parts):
            raise RuntimeError(_SETTING_CHANGED)
        kept = _prepare(q, k, inputs, options, s, chunks, None, saved)
        norms = saved.norms if kept.norms is None else kept.norms.view(s.B, s.T, 2, s.HK)
        filled = saved._replace(norms=norms, gates=kept.gates, solve=kept.solve, scores=kept.scores)
        return filled, Scratch(kept.factors, chunks)


def chunk_states(inputs: Inputs, saved: Saved, options: Options, scratch: Scratch) -> tuple[Tensor, Tensor] | None:
    """States and updates of all heads for a backward that comes later, with gradients of final states; or None where it
    should compute them itself.

    saved, scratch: of `chunk_prepare_bwd`.
    """
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0 or saved.states.shape[0]:
        return None
    rule = settings.segments(s)
    in_turns = len(head_groups(s, False)) > 1 or rule.parts > 1
    if in_turns and not _is_at_once(s, inputs.initial_state is not None):
        return None
    with on_device(inputs.q):
        q, k, v = (flat(x) for x in inputs[:3])
        kept = _prepared(saved, scratch)
        cuts = _checked_cuts(saved, rule)
        if rule.num_cuts > 0 and cuts.transitions is None:
            return None
        into = _empty_states(q, s, s.num_chunks, s.HV)
        whole = scratch.chunks.whole
        return _states_again(q, k, v, inputs, kept, scratch.chunks, whole, cuts, range(s.HV), into)


def chunk_fwd(out: Forward, inputs: Inputs, options: Options, save: str, scratch: Scratch | None = None) -> None:
    """Fill every tensor of `out`; `inputs` are what `unsupported_reason` accepted, scalars and states dense.

    `scratch`: what `chunk_prepare` returned when it filled a part of `out`.
    """
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0:
        _forward_without_tokens(out, inputs)
        return
    with on_device(inputs.q):
        q, k, v = (flat(x) for x in inputs[:3])
        rule = settings.segments(s)
        if scratch is None:
            chunks = _chunks(inputs, s)
            kept = _prepare(q, k, inputs, options, s, chunks, out.saved if save in ("solve", "states") else None)
        else:
            chunks, kept = scratch.chunks, _prepared(out.saved, scratch)
        cuts = _Cuts.of(out.checkpoints, rule)
        leave_every = rule.stretch_chunks if cuts.num_left > 0 else 0
        keep_states = save == "states"
        o = out.o.view(s.B * s.T, s.HV, s.V)
        results = _Results(
            o,
            final_state=out.final_state if out.final_state.numel() else None,
            states=out.states if keep_states else None,
            updates=out.updates if keep_states else None,
        )
        if rule.num_cuts > 0:
            cuts = _states_at_cuts(q, k, v, inputs, kept, s, chunks, rule, cuts, results)
        forward(
            q, k, v, kept.solve, kept.scores, kept.factors, chunks.segments,
            initial_state=inputs.initial_state, first_run=s.N if rule.num_cuts > 0 else 0, cut_states=cuts.states,
            num_cuts=rule.num_cuts, leave_every=leave_every, parts=rule.parts if cuts.num_left > 0 else 1,
            **results._asdict(),
        )  # fmt: skip
        if inputs.cu_seqlens is not None:
            clear_ownerless([o.unsqueeze(2)], chunks)


def chunk_bwd(
    out: Backward, do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, saved: Saved, options: Options,
    scratch: Scratch | None = None, states_again: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill every tensor of `out`, whose dq, dk and dv are [B,T,G,R,D] targets; what `saved` lacks is computed again.

    scratch, states_again: what `chunk_prepare_bwd`, with `saved`, and `chunk_states` returned.
    """
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0:
        _backward_without_tokens(out, dfinal_state)
        return
    with on_device(inputs.q):
        q, k, v = (flat(x) for x in inputs[:3])
        flat_do = addressable_gradient(do)
        targets = [Target(x, through_tma=i == 2) for i, x in enumerate(out[:3])]
        dq, dk, dv = (target.written for target in targets)
        dg, dbeta = (x.view(s.B * s.T, s.HV) for x in (out.dg, out.dbeta))
        rule = settings.segments(s)
        if scratch is None:
            chunks = _chunks(inputs, s)
            kept = _prepare(q, k, inputs, options, s, chunks, None, saved)
        else:
            chunks, kept = scratch.chunks, _prepared(saved, scratch)
        keep_states = saved.states.shape[0] > 0
        cuts = _checked_cuts(saved, rule)
        if rule.num_cuts > 0 and cuts.transitions is None:
            cuts = _states_at_cuts(q, k, v, inputs, kept, s, chunks, rule)
        kept_states = (saved.states, saved.updates) if keep_states else states_again
        is_chained = inputs.initial_state is not None and dfinal_state is not None
        at_once = kept_states is not None or _is_at_once(s, is_chained)
        parts = [chunks.whole] if at_once or rule.parts == 1 else chunks.parts
        if len(parts) > 1 and cuts.num_left == 0:
            cuts = _states_at_parts(q, k, v, inputs, kept, s, chunks, rule)
        shares = None
        if inputs.A_log is not None:
            # A sum of torch's also has the rows of chunks that do not exist.
            allocate = kept.gates.new_empty if settings.current().fast_calls else kept.gates.new_zeros
            shares = allocate((s.num_chunks, 2, s.HV))
        d_initial_state = None if inputs.initial_state is None else out.d_initial_state
        handed = kept.gates.new_empty((s.N, s.HV, s.K, s.V)) if len(parts) > 1 else None
        rows = max(len(part.table) for part in parts)
        for heads in head_groups(s, at_once):
            H = len(heads)
            states, updates = _empty_states(q, s, rows, H) if kept_states is None else kept_states
            dstates = q.new_empty((rows, H, s.V, s.K))
            sums = kept.gates.new_empty((rows, H, NUM_SUMS, CHUNK))
            for part in reversed(parts):
                if kept_states is None and cuts.transitions is None and not _has_stretches(chunks, cuts):
                    recurrences(
                        q, k, v, flat_do, kept.solve, kept.scores, kept.factors, part,
                        initial_state=inputs.initial_state, left=cuts.states, states=states, updates=updates,
                        dstates=dstates, dv=dv, sums=sums, dfinal_state=dfinal_state, d_initial_state=d_initial_state,
                        handed=handed, heads=heads,
                    )  # fmt: skip
                else:
                    cut_dstates = None
                    if cuts.transitions is not None:
                        cut_dstates = torch.empty_like(cuts.transitions)
                        if kept_states is None:
                            begin_recurrences(
                                q, k, v, flat_do, kept.solve, kept.scores, kept.factors, chunks,
                                chunks.stretches if _has_stretches(chunks, cuts) else part.runs,
                                initial_state=inputs.initial_state, left=cuts.states, states=states, updates=updates,
                                dfinal_state=dfinal_state, cut_dstates=cut_dstates, dstates=dstates, dv=dv, sums=sums,
                                d_initial_state=d_initial_state,
                            )  # fmt: skip
                        else:
                            begin_reverse(
                                q, k, v, flat_do, kept.solve, kept.scores, kept.factors, chunks,
                                dfinal_state=dfinal_state, cut_dstates=cut_dstates, dstates=dstates, dv=dv, sums=sums,
                                d_initial_state=d_initial_state,
                            )  # fmt: skip
                        combine(cut_dstates, cuts.transitions, chunks.cuts, backwards=True)
                    elif kept_states is None:
                        _states_again(q, k, v, inputs, kept, chunks, part, cuts, heads, (states, updates))
                    reverse(
                        q, k, v, flat_do, kept.solve, kept.scores, kept.factors, part.runs,
                        dstates=dstates, dv=dv, sums=sums, dfinal_state=dfinal_state, d_initial_state=d_initial_state,
                        heads=heads, cut_dstates=cut_dstates, handed=handed,
                    )  # fmt: skip
                gradients(
                    q, k, flat_do, dv, states, dstates, updates, kept.gates, kept.factors, kept.norms, part,
                    options.scale, dq=dq, dk=dk, sums=sums, heads=heads,
                )  # fmt: skip
                epilogue(
                    sums, kept.gates, kept.factors, kept.scores, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias,
                    part, options, dg=dg, dbeta=dbeta, parts=shares, heads=heads,
                )  # fmt: skip
            # Freed before the next group's are taken: the allocator then hands out the same memory again.
            del states, updates, dstates, sums
        if shares is not None:
            if settings.current().fast_calls:
                gate_sums(shares, chunks.totals, out.dA_log, None if inputs.dt_bias is None else out.ddt_bias)
            else:
                total = shares.sum(0)
                out.dA_log.copy_(total[0])
                if inputs.dt_bias is not None:
                    out.ddt_bias.copy_(total[1])
        if inputs.cu_seqlens is not None:
            clear_ownerless([dq, dk, dv, dg[:, None, None], dbeta[:, None, None]], chunks)
        for target in targets:
            target.finish()


def _is_at_once(s: Sizes, is_chained: bool) -> bool:
    """Whether a backward goes through all heads and whole documents at once. is_chained: whether documents have initial
    states, and gradients of final ones."""
    return settings.segments(s).is_split or (is_chained and s.N <= _CHAINED_DOCUMENTS)


def head_groups(s: Sizes, at_once: bool) -> list[range]:
    """The ranges of value heads that the backward works on one after the other; whole query/key heads each."""
    groups = 1
    if not (at_once or settings.segments(s).is_split):
        groups = shapes.turns(s, settings.current().backward_bytes).groups
    heads = s.HV // groups
    return [range(i * heads, (i + 1) * heads) for i in range(groups)]


def scratch_bytes(inputs: Inputs, options: Options, *, backward: bool, save: str = "solve") -> int:
    """Bytes that a call allocates beside its inputs, outputs and saved tensors, at most, without running it.

    Reads shapes only (fake tensors will do). Not counted: an output gradient or a gradient target that TMA cannot
    address, which is copied.
    """
    s = sizes(inputs)
    if s.T * s.B == 0 or s.N == 0:
        return 0
    rule = settings.segments(s)
    shapes_of_tables = table_shapes(s.N, s.B * s.T, s.num_chunks, rule)
    tables = 4 * sum(math.prod(shape) for shape in shapes_of_tables.values())
    factors = s.num_chunks * s.HV * (NUM_FACTORS_NORM if options.use_qk_l2norm else NUM_FACTORS) * CHUNK * 4
    prepared = s.num_chunks * s.HV * (CHUNK * 4 + 2 * CHUNK * CHUNK * 2)
    if options.use_qk_l2norm:
        prepared += s.B * s.T * 2 * s.HK * 4
    at_cuts = 0
    if rule.is_split:
        # Two for states and transitions unless they are saved; backwards one for the states' gradients.
        tensors = (0 if save in ("solve", "states") else 2) + (1 if backward else 0)
        at_cuts = tensors * rule.num_cuts * s.HV * s.K * s.V * 4
    total = tables + factors + at_cuts + (0 if save in ("solve", "states") else prepared)
    if backward:
        is_chained = inputs.initial_state is not None  # and gradients of final ones, perhaps
        at_once = save == "states" or _is_at_once(s, is_chained)
        heads = len(head_groups(s, at_once)[0])
        rows = s.num_chunks
        if rule.parts > 1 and not at_once:
            rows = shapes_of_tables["slots"][1]
            total += (s.N + (0 if save == "solve" else rule.num_left)) * s.HV * s.V * s.K * 4
        kept = rows * heads * s.V * (s.K + CHUNK) * 2 if save == "states" else 0
        total += scratch_bytes_of(rows, heads, s.K, s.V) - kept
        total += s.num_chunks * 2 * s.HV * 4 if inputs.A_log is not None else 0
    return total


# ---- preparation that forward and backward share


class _Prepared(NamedTuple):
    """What the sequential kernels read, from memory or computed; norms are None without `use_qk_l2norm`."""

    norms: Tensor | None
    gates: Tensor
    factors: Tensor
    solve: Tensor
    scores: Tensor


def _prepared(saved: Saved, scratch: Scratch) -> _Prepared:
    norms = saved.norms.view(-1, *saved.norms.shape[2:]) if saved.norms.numel() else None
    return _Prepared(norms, saved.gates, scratch.factors, saved.solve, saved.scores)


def _chunks(inputs: Inputs, s: Sizes) -> Chunks:
    rule = settings.segments(s)
    return chunk_table(inputs.cu_seqlens, s.N, s.B * s.T, s.num_chunks, rule, inputs.q)


def _prepare(
    q: Tensor, k: Tensor, inputs: Inputs, options: Options, s: Sizes, chunks: Chunks,
    into: Saved | None = None, saved: Saved | None = None, has_scores: bool = True,
) -> _Prepared:  # fmt: skip
    """Compute what the sequential kernels read: `into` the saved tensors of a forward, or from those of a backward."""
    have = saved is not None and saved.gates.shape[0] > 0
    if have:
        into = saved
    if into is not None:
        kept = into
    else:
        float32 = inputs.g.new_empty((0,), dtype=torch.float32)
        kept = Saved(
            norms=float32.new_empty((s.B, s.T, 2, s.HK) if options.use_qk_l2norm else (0,)),
            gates=float32.new_empty((s.num_chunks, s.HV, CHUNK)),
            solve=q.new_empty((s.num_chunks, s.HV, CHUNK, CHUNK)),
            scores=q.new_empty((s.num_chunks if has_scores else 0, s.HV, CHUNK, CHUNK)),
            states=float32,
            updates=float32,
            checkpoints=float32,
        )
    norm = kept.norms.view(s.B * s.T, 2, s.HK) if options.use_qk_l2norm else None
    num_factors = NUM_FACTORS if norm is None else NUM_FACTORS_NORM
    factors = kept.gates.new_empty((s.num_chunks, s.HV, num_factors, CHUNK))

    def fill_factors(norm: Tensor | None, solve: Tensor | None) -> None:
        g, beta = (x.view(s.B * s.T, s.HV) for x in (inputs.g, inputs.beta))
        gates(
            g, beta, inputs.A_log, inputs.dt_bias, norm, kept.gates, factors, chunks, options, s.HK,
            solve=solve, is_half=q.dtype == torch.float16,
        )  # fmt: skip

    if not have:
        fill_factors(None, None)
        solve(
            q, k, kept.gates, factors, chunks, options,
            norms=norm, scores=kept.scores if has_scores else None, out=kept.solve,
        )  # fmt: skip
    if have or norm is not None:
        # After `solve`, which reads the write strengths among the factors and makes the norms in the others.
        fill_factors(norm, kept.solve)
    return _Prepared(norm, kept.gates, factors, kept.solve, kept.scores)


# ---- segments


class _Results(NamedTuple):
    """What `forward` fills, under the names that it takes them by."""

    o: Tensor | None = None
    final_state: Tensor | None = None
    states: Tensor | None = None
    updates: Tensor | None = None


_NOTHING = _Results()


class _Cuts(NamedTuple):
    """Where segments and their stretches start: transposed states [NC+NL,HV,V,K], first those at cuts, then those left
    inside segments; transitions [NC,HV,K,K] of the segments before the cuts. None without a row."""

    states: Tensor | None
    transitions: Tensor | None
    num_left: int

    @staticmethod
    def of(checkpoints: Tensor, rule: SegmentRule) -> "_Cuts":
        """The parts of the saved tensor `checkpoints`, or of its like."""
        rows = checkpoints.shape[0]
        if rows == 0:
            return _Cuts(None, None, 0)
        num_states = rows - rule.num_cuts
        transitions = checkpoints[num_states:] if rule.num_cuts > 0 else None
        return _Cuts(checkpoints[:num_states], transitions, num_states - rule.num_cuts)


def _checked_cuts(saved: Saved, rule: SegmentRule) -> _Cuts:
    """Those that a forward has kept."""
    num_left = 0 if saved.states.shape[0] > 0 else rule.num_left
    if saved.checkpoints.shape[0] not in (0, 2 * rule.num_cuts + num_left):
        raise RuntimeError(_SETTING_CHANGED)
    return _Cuts.of(saved.checkpoints, rule)


def _states_again(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, kept: _Prepared, chunks: Chunks, part: Part, cuts: _Cuts,
    heads: range, into: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States and updates of a part's chunks and a range of heads, for the backward."""
    states, updates = into
    forward(
        q, k, v, kept.solve, kept.scores, kept.factors, chunks.stretches if _has_stretches(chunks, cuts) else part.runs,
        initial_state=inputs.initial_state, cut_states=cuts.states, states=states, updates=updates, heads=heads,
    )  # fmt: skip
    return into


def _has_stretches(chunks: Chunks, cuts: _Cuts) -> bool:
    """Whether the states that the forward has left are those of stretches, and not of documents' parts."""
    return cuts.num_left > 0 and chunks.slots.shape[0] == 0


def _empty_states(q: Tensor, s: Sizes, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    return q.new_empty((rows, heads, s.V, s.K)), q.new_empty((rows, heads, s.V, CHUNK))


def _states_at_parts(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, kept: _Prepared, s: Sizes, chunks: Chunks, rule: SegmentRule
) -> _Cuts:  # fmt: skip
    """What the parts of documents start from, if the forward has not kept it."""
    cuts = _Cuts.of(kept.factors.new_empty((rule.num_left, s.HV, s.V, s.K)), rule)
    forward(
        q, k, v, kept.solve, kept.scores, kept.factors, chunks.segments,
        initial_state=inputs.initial_state, cut_states=cuts.states, parts=rule.parts,
    )  # fmt: skip
    return cuts


def _states_at_cuts(
    q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, kept: _Prepared, s: Sizes, chunks: Chunks, rule: SegmentRule,
    cuts: _Cuts | None = None, results: _Results = _NOTHING,
) -> _Cuts:  # fmt: skip
    """What segments start from, in the tensor that is saved if it has rows.

    On the way there the documents' first segments run, and what `results` has of theirs is filled.
    """
    if cuts is None or cuts.states is None:
        cuts = _Cuts.of(kept.factors.new_empty((2 * rule.num_cuts, s.HV, s.V, s.K)), rule)
    states, transitions = cuts.states, cuts.transitions
    assert states is not None
    assert transitions is not None
    begin(
        q, k, v, kept.solve, kept.scores, kept.factors, chunks.segments,
        initial_state=inputs.initial_state, cut_states=states, transitions=transitions,
        **results._asdict(),
    )  # fmt: skip
    combine(states, transitions, chunks.cuts, backwards=False)
    return cuts


# ---- calls without a token


def _forward_without_tokens(out: Forward, inputs: Inputs) -> None:
    for x in out:
        x.zero_()
    if out.final_state.numel() and inputs.initial_state is not None:
        out.final_state.copy_(inputs.initial_state)


def _backward_without_tokens(out: Backward, dfinal_state: Tensor | None) -> None:
    for x in out:
        x.zero_()
    if out.d_initial_state.numel() and dfinal_state is not None:
        out.d_initial_state.copy_(dfinal_state)
