"""The steps of a context-parallel call, forward and backward, each a few small ops; collectives stand between them.

    forward    tell (H, M)  -> all-gather ->  states of the local pieces, then the ordinary gdn::chunk_fwd
    backward   tell (dH)    -> all-gather ->  gradients of their final states, then the ordinary gdn::chunk_bwd

A piece is a fragment, or a part of one (`pieces.py`); to the ordinary ops each is a document.

`gdn_ops.context_parallel.ops` puts one rank's steps together with real collectives, `emulation` those of all ranks in
one process. What a call has no use for (no document in parts, no initial state) is left out of the graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import packing
from gdn_ops.context_parallel import sharing
from gdn_ops.context_parallel.plan import Plan
from gdn_ops.context_parallel.segments import picked, rows
from gdn_ops.context_parallel.sharing import Prepared
from gdn_ops.ops import kernels
from gdn_ops.repeats import is_dense_last
from gdn_ops.shapes import accumulator_dtype, packed_layouts, packed_width

_ops = torch.ops.gdn
_c10d = torch.ops._c10d_functional

SWITCHES = ("use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "deterministic")


class Call(NamedTuple):
    """One rank's tensors and options. Of q, k, v and row, either the three are given or the row and its heads; if it is
    plain, its views too.

    plain: the dispatcher would only pass on (`gdn_ops.plain`), so it is left out.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    row: Tensor | None
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    plan: Plan
    num_ranks: int
    options: dict[str, Any]
    heads: tuple[int, int, int] | None = None
    plain: bool = False

    def op(self, name: str) -> Callable[..., Any]:
        """The op `name` below autograd."""
        if self.plain:
            return kernels[name, "cuda" if self.g.is_cuda else "cpu"]
        return getattr(_ops, name).default

    def rows(self, x: Tensor, index: Tensor) -> Tensor:
        """x[index] of states, zeros where the index is -1."""
        return picked(x, index) if self.plain else rows(x, index)

    @property
    def linked(self) -> bool:
        """Whether any document of the batch is in parts (on any rank)."""
        return self.plan.num_forward > 0

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, as views of the row if there is one."""
        if self.q is None:
            assert self.row is not None
            assert self.heads is not None
            return packing.split_row(self.row, *self.heads)
        assert self.k is not None
        assert self.v is not None
        return self.q, self.k, self.v

    def switches(self) -> dict[str, bool]:
        """The options that the segment ops share."""
        return {name: self.options[name] for name in SWITCHES if name in self.options}

    def sizes(self) -> tuple[int, int, int]:
        """HV, K, V."""
        if self.heads is not None:
            return self.heads[1], self.heads[2], self.heads[2]
        assert self.k is not None
        assert self.v is not None
        return self.v.shape[2], self.k.shape[3], self.v.shape[3]

    def combine(
        self, told: Tensor, transitions: Tensor, states: Tensor | None, additions: Tensor, moves: Tensor, *,
        backwards: bool,
    ) -> Tensor:  # fmt: skip
        """`gdn::segment_combine` over this call's plan."""
        HV, K, V = self.sizes()
        return self.op("segment_combine")(
            told, transitions, states, additions, moves, list(self.plan),
            num_ranks=self.num_ranks, num_heads=HV, key_dim=K, value_dim=V, transposed=backwards,
        )  # fmt: skip


def row_views(row: Tensor, heads: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """As `packing.split_row`, in a third of the host's time; no compiler sees it."""
    num_qk_heads, num_v_heads, dim = heads
    B, T, _ = row.shape
    batch, token, channel = row.stride()
    start, width = row.storage_offset(), num_qk_heads * dim * channel
    strides = (batch, token, dim * channel, channel)
    return (
        row.as_strided((B, T, num_qk_heads, dim), strides, start),
        row.as_strided((B, T, num_qk_heads, dim), strides, start + width),
        row.as_strided((B, T, num_v_heads, dim), strides, start + 2 * width),
    )


class Heard(NamedTuple):
    """Of an exchange: the words of all ranks (before it, this one's), and of this rank's own pieces H or dH, and M."""

    told: Tensor
    additions: Tensor
    moves: Tensor


def prepare(call: Call) -> Prepared | None:
    """What this rank's summary and its forward both need, where one computation can serve both, else None."""
    if not (call.plain and call.linked):
        return None
    operands = call.operands()
    if not all(map(is_dense_last, operands)):  # the ops copy such operands, and count that once
        return None
    return sharing.prepare(*operands, call.g, call.beta, call.plan.cu_seqlens, call.A_log, call.dt_bias, **call.options)


def prepare_backward(call: Call, saved: tuple[Tensor, ...], tables: tuple[Tensor, ...] = ()) -> Prepared | None:
    """The same of a backward; with all that is saved, as if the forward had kept it.

    saved: what it did keep. tables: those of what was prepared for it, if anything was.
    """
    if not (call.plain and call.linked):
        return None
    operands = call.operands()
    if not all(map(is_dense_last, operands)):
        return None
    return sharing.prepare_backward(
        saved, tables, *operands, call.g, call.beta, call.plan.cu_seqlens, call.A_log, call.dt_bias, **call.options
    )


def forward_summary(call: Call, prepared: Prepared | None = None) -> Heard:
    """What this rank tells before the forward, and what it keeps."""
    _, k, v = call.operands()
    shared = {} if prepared is None else {"prepared": prepared}
    found = call.op("segment_summary_fwd")(
        k, v, call.g, call.beta, call.initial_state, call.A_log, call.dt_bias, list(call.plan),
        num_ranks=call.num_ranks, **call.switches(), **shared,
    )  # fmt: skip
    return Heard(*found)


def received_states(call: Call, heard: Heard | None) -> Tensor | None:
    """The state that each local piece starts from [F,HV,K,V], None if all start from zero."""
    if heard is not None:
        return call.combine(heard.told, heard.told, call.initial_state, heard.additions, heard.moves, backwards=False)
    return None if call.initial_state is None else call.rows(call.initial_state, call.plan.starts)


def forward(
    call: Call, states: Tensor | None, output_final_state: bool, save: str, prepared: Prepared | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o, the global final states (rows of documents that end on this rank, else zeros), and what is saved."""
    options = {**call.options, "output_final_state": output_final_state, "save": save}
    rest = (call.g, call.beta, states, call.plan.cu_seqlens, call.A_log, call.dt_bias)
    if prepared is not None:
        o, final_state, *saved = sharing.forward(*call.operands(), *rest, prepared, **options)
    elif call.row is not None:
        assert call.heads is not None
        names = dict(zip(("num_qk_heads", "num_v_heads", "head_dim"), call.heads, strict=True))
        o, final_state, *saved = call.op("chunk_packed_fwd")(call.row, *rest, **names, **options)
    else:
        o, final_state, *saved = call.op("chunk_fwd")(*call.operands(), *rest, **options)
    if output_final_state:
        final_state = call.rows(final_state, call.plan.last)
    return o, final_state, tuple(saved)


def backward_summary(
    call: Call, do: Tensor, dfinal_state: Tensor | None, saved: tuple[Tensor, ...], moves: Tensor,
    prepared: Prepared | None = None,
) -> Heard:  # fmt: skip
    """What this rank tells before the backward, and keeps; `saved`, `moves`: what the forward kept."""
    shared = {} if prepared is None else {"scratch": prepared.scratch}
    told, additions = call.op("segment_summary_bwd")(
        do, dfinal_state, *call.operands(), call.g, call.beta, *(saved if prepared is None else prepared.saved),
        call.A_log, call.dt_bias, moves, list(call.plan), num_ranks=call.num_ranks, scale=call.options["scale"],
        **call.switches(), **shared,
    )  # fmt: skip
    return Heard(told, additions, moves)


def states_ahead(call: Call, states: Tensor | None, prepared: Prepared | None) -> tuple[Tensor, ...]:
    """Of the backward what needs no words of its exchange, where that can be computed by itself: each chunk's state."""
    if prepared is None:
        return ()
    rest = (call.g, call.beta, states, call.plan.cu_seqlens, call.A_log, call.dt_bias)
    return sharing.states(prepared, *call.operands(), *rest, **call.options)


def received_gradients(
    call: Call, heard: Heard | None, transitions: Tensor | None, dfinal_state: Tensor | None
) -> Tensor | None:
    """The gradient of each local piece's final state [F,HV,K,V]; `transitions`: what was told before the forward."""
    if heard is not None:
        assert transitions is not None
        return call.combine(heard.told, transitions, dfinal_state, heard.additions, heard.moves, backwards=True)
    return None if dfinal_state is None else call.rows(dfinal_state, call.plan.ends)


def backward(
    call: Call, do: Tensor, dfinal_states: Tensor | None, states: Tensor | None, saved: tuple[Tensor, ...],
    *, into_row: bool = False, prepared: Prepared | None = None, ahead: tuple[Tensor, ...] = (),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of (q, k, v) or (row,), then of g, beta, initial_state, A_log and dt_bias.

    `into_row`: dq, dk and dv are views of one packed row (for operands that `packed_qkv_views` made). prepared, ahead:
    of `prepare_backward` and `states_ahead`.
    """
    rest = (call.g, call.beta, *saved, states, call.plan.cu_seqlens, call.A_log, call.dt_bias)
    operands: tuple[Tensor, ...]
    if prepared is not None:
        q, k, v = call.operands()
        from_row = call.row is not None or into_row
        given = (q, k, v, call.g, call.beta, states, call.plan.cu_seqlens, call.A_log, call.dt_bias, do, dfinal_states)
        found = sharing.gradients(prepared, ahead, *given, packed=from_row, **call.options)
        small = list(found[-5:])
        operands = found[:-5]
        if into_row:
            operands = packing.split_row(operands[0], q.shape[2], v.shape[2], q.shape[3])
    elif call.row is not None:
        assert call.heads is not None
        names = dict(zip(("num_qk_heads", "num_v_heads", "head_dim"), call.heads, strict=True))
        drow, *small = call.op("chunk_packed_bwd")(do, dfinal_states, call.row, *rest, **names, **call.options)
        operands = (drow,)
    elif into_row:
        q, k, v = call.operands()
        heads = (q.shape[2], v.shape[2], q.shape[3])
        layouts = dict(zip(("q_layout", "k_layout", "v_layout"), map(list, packed_layouts(*heads)), strict=True))
        drow, _, _, _, *small = call.op("chunk_bwd_row")(
            do, dfinal_states, q, k, v, *rest, row_width=packed_width(*heads), **layouts, **call.options
        )
        operands = packing.split_row(drow, *heads)
    else:
        *operands_, dg, dbeta, dinitial, dA_log, ddt_bias = call.op("chunk_bwd")(
            do, dfinal_states, *call.operands(), *rest, **call.options
        )
        operands, small = tuple(operands_), [dg, dbeta, dinitial, dA_log, ddt_bias]
    dg, dbeta, dinitial, dA_log, ddt_bias = small
    dinitial = None if call.initial_state is None else call.rows(dinitial, call.plan.first)
    return (*operands, dg, dbeta, dinitial, dA_log, ddt_bias)


def empty_states(call: Call) -> Tensor:
    """Stands for states that there are not: zero rows."""
    HV, K, V = call.sizes()
    return call.g.new_empty((0, HV, K, V), dtype=accumulator_dtype(call.operands()[0].dtype))


def zero_output_gradient(call: Call) -> Tensor:
    """For a loss that reads the final states only."""
    _, _, v = call.operands()
    return v.new_zeros(v.shape)


class Gathering(NamedTuple):
    """An all-gather on its way: every rank's words one after the other, not to be read before `wait`; and this rank's
    own, not to be freed before.

    By functional collectives, which a graph can see; with no group the words are this rank's.
    """

    told: Tensor
    words: Tensor
    num_ranks: int
    group_name: str
    what: str

    @staticmethod
    def start(told: Tensor, num_ranks: int, group_name: str, what: str) -> "Gathering":
        """Send this rank's words."""
        pending = Gathering(told, told, num_ranks, group_name, what)
        if not group_name:
            return pending
        try:
            return pending._replace(words=_c10d.all_gather_into_tensor.default(told, num_ranks, group_name))
        except RuntimeError as error:
            raise RuntimeError(pending._failure(told.numel() * told.element_size())) from error

    def wait(self) -> Tensor:
        """The words, for kernels launched from now on; with NCCL the host does not wait."""
        if not self.group_name:
            return self.words
        try:
            return _c10d.wait_tensor.default(self.words)
        except RuntimeError as error:
            num_bytes = self.words.numel() * self.words.element_size() // self.num_ranks
            raise RuntimeError(self._failure(num_bytes)) from error

    def _failure(self, num_bytes: int) -> str:
        return (
            f"context parallelism: the all-gather of {self.what} over process group {self.group_name!r} "
            f"({self.num_ranks} ranks, {num_bytes} bytes each) failed; a rank may have stopped or left the loop early"
        )


def gather(told: Tensor, num_ranks: int, group_name: str, what: str) -> Tensor:
    """`Gathering`, started and waited for."""
    return Gathering.start(told, num_ranks, group_name, what).wait()
