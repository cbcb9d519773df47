"""Backend in portable Triton: runs wherever Triton does, and is the fallback of the faster ones.

Stages, one file each: chunks (tables) -> scores (norms, gates, factors, P) -> solve (E) -> forward (o) in the forward
pass; chunks -> what was not saved of the above -> reverse (states, state gradients, dv) -> gradients (dq, dk, dg,
dbeta) in the backward pass. Every stage is one launch on the current stream; nothing waits for the device or reads a
value, so a call can be captured in a CUDA graph, the first one too.

What the saved tensors hold here (shapes: gdn_ops.shapes.Saved). Scaling the columns of the triangular system by beta,
not its rows, makes beta = 0 an ordinary case; so

    solve    E = (I + N)^-1 without its unit diagonal, N as in solve.py       (A' of docs/math.md is diag(beta) (E + I))
    scores   P diag(beta)
    updates  e^T, the update before its write strength (u = beta e)
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.backends.plans import record as record  # the third function of a backend, for repeated calls
from gdn_ops.backends.triton import chunks, forward, gradients, reverse, scores, solve
from gdn_ops.backends.triton.launch import (
    TRITON_DTYPES,
    WIDE_SHARED_MEMORY,
    is_amd,
    on_hopper,
    shared_memory_of,
    takes_tma,
)
from gdn_ops.backends.triton.primitives import INTERPRETED
from gdn_ops.outputs import Backward, Forward
from gdn_ops.shapes import CHUNK, Inputs, Options, Saved, Sizes, sizes

MIN_HEAD_DIM = 16
MAX_HEAD_DIM = 256

SCRATCH_LIMIT = 9 * 2**27
"""Bytes that states, updates and state gradients may take in a backward pass; more value heads are done in turns.

1.125 GiB: 16/48 heads of 128 and 32768 tokens (2.0 GB in one turn) take two, which keeps the step's peak below 3 GB.
A turn costs little: reverse.py runs two recurrences side by side, so half of the heads still fill the chip.
"""


def unsupported_operands(inputs: Inputs) -> str | None:
    """Why this backend takes no operands of such dtypes and heads, on whatever device and at whatever strides."""
    dtype = inputs.q.dtype
    if dtype not in TRITON_DTYPES:
        return f"dtype {dtype} (supported: bfloat16, float16, float32)"
    for name, size in (("K", inputs.q.shape[3]), ("V", inputs.v.shape[3])):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            return f"head size {name} = {size} (supported: {MIN_HEAD_DIM} to {MAX_HEAD_DIM})"
    return None


def unsupported_reason(inputs: Inputs, options: Options) -> str | None:
    """Why this backend cannot run a call, or None."""
    q, v = inputs.q, inputs.v
    reason = unsupported_operands(inputs)
    if reason is not None:
        return reason
    for x in (q, inputs.k, v):
        if x.stride(1) * CHUNK >= 2**31:
            return f"token stride {x.stride(1)} (supported: below {2**31 // CHUNK} elements)"
    if q.is_cuda:
        if is_amd():
            return "AMD GPUs (the kernels compile for gfx942 but have not been run on one)"
        if torch.cuda.get_device_capability(q.device) < (8, 0):
            return "compute capability below 8.0"
        widest, memory = max(q.shape[3], v.shape[3]), shared_memory_of(q.device.index)
        if widest > 128 and memory < WIDE_SHARED_MEMORY:
            needed = f"(above 128: {WIDE_SHARED_MEMORY})"
            return f"head size {widest} on a GPU with {memory} bytes of shared memory a program {needed}"
        return None
    if INTERPRETED.value:
        return None
    return f"device {q.device} (without TRITON_INTERPRET=1)"


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def head_groups(s: Sizes, itemsize: int, with_states: bool) -> int:
    """How many turns a backward pass takes: a divisor of HK, so that every turn has whole groups of value heads."""
    per_head = s.num_chunks * s.V * itemsize * (2 * s.K + CHUNK if with_states else s.K)
    for turns in range(1, s.HK):
        if s.HK % turns == 0 and per_head * (s.HV // turns) <= SCRATCH_LIMIT:
            return turns
    return max(s.HK, 1)


class ScratchBytes(NamedTuple):
    """Bytes that a forward and a backward call allocate beyond their outputs and what is saved, and free again."""

    forward: int
    backward: int


def scratch_bytes(
    s: Sizes, *, itemsize: int = 2, save: str = "solve", use_qk_l2norm: bool = False, use_gate: bool = False
) -> ScratchBytes:
    """Scratch of one call of these sizes, exactly what the launchers allocate (before the allocator's rounding).

    `itemsize` is that of q, k and v; `use_gate` says whether A_log is given. Nothing is run. Where the current device
    is a Hopper GPU, the descriptors of its copy engine are counted, although strides may keep a call from using it.
    """
    if s.B == 0 or s.T == 0:
        return ScratchBytes(0, 0)
    tables = 4 * (3 * s.num_chunks + chunks.DOCUMENT_FIELDS.value * s.N)
    rows = s.num_chunks * s.HV * CHUNK
    factors = 4 * rows * scores.FACTORS.value
    intermediates = 4 * rows + 2 * rows * CHUNK * itemsize + (8 * s.B * s.T * s.HK if use_qk_l2norm else 0)
    kept = save in ("solve", "states")
    turns = head_groups(s, itemsize, with_states=save != "states")
    per_head = s.num_chunks * s.V * itemsize * (s.K if save == "states" else 2 * s.K + CHUNK)
    backward = per_head * (s.HV // turns) + (8 * s.num_chunks * s.HV if use_gate else 0)
    shared = tables + factors + (0 if kept else intermediates)
    descriptors = ScratchBytes(0, 0)
    if on_hopper() and takes_tma(s, itemsize):
        programs = s.N * (s.HV // turns)
        recompute = 0 if save == "states" else 1
        descriptors = ScratchBytes(
            s.N * s.HV * forward.TMA_BYTES, programs * (1 + recompute) * reverse.TMA_BYTES[recompute]
        )
    return ScratchBytes(
        shared + descriptors.forward, shared + backward + 4 * rows * gradients.PARTIALS.value + descriptors.backward
    )


def _intermediates(inputs: Inputs, options: Options, s: Sizes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scratch for norms, gates, solve and scores where they are not saved."""
    q = inputs.q
    return (
        q.new_empty((s.B if options.use_qk_l2norm else 0, s.T, 2, s.HK), dtype=torch.float32),
        q.new_empty((s.num_chunks, s.HV, CHUNK), dtype=torch.float32),
        q.new_empty((s.num_chunks, s.HV, CHUNK, CHUNK)),
        q.new_empty((s.num_chunks, s.HV, CHUNK, CHUNK)),
    )


def _given(x: Tensor) -> Tensor | None:
    return x if x.shape[0] else None


def chunk_fwd(out: Forward, inputs: Inputs, options: Options, save: str) -> None:
    """Fill every tensor of `out`."""
    s = sizes(inputs)
    final_state = _given(out.final_state)
    if s.B == 0 or s.T == 0 or s.N == 0:
        out.o.zero_()
        if final_state is not None:
            _copy_or_zero(final_state, inputs.initial_state)
        return
    q = inputs.q
    with _on_device(q):
        chunk_table, documents = chunks.chunk_tables(s, inputs.cu_seqlens, q.device)
        if save in ("solve", "states"):
            norms, gates, inverse, score_matrix = out.norms, out.gates, out.solve, out.scores
        else:
            norms, gates, inverse, score_matrix = _intermediates(inputs, options, s)
        factors = q.new_empty((s.num_chunks, s.HV, scores.FACTORS.value, CHUNK), dtype=torch.float32)
        scores.scores(inputs, options, s, chunk_table, norms, gates, factors, score_matrix, out.o)
        solve.solve(inputs, options, s, chunk_table, norms, gates, factors, inverse)
        forward.forward(
            inputs, s, documents, gates, factors, inverse, score_matrix, out.o, final_state,
            _given(out.states), _given(out.updates),
        )  # fmt: skip


def chunk_bwd(
    out: Backward, do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, saved: Saved, options: Options
) -> None:
    """Fill every tensor of `out`; its dq, dk, dv are [B,T,G,R,D] targets, of which every element is written."""
    s = sizes(inputs)
    dinitial = _given(out.d_initial_state)
    if s.B == 0 or s.T == 0 or s.N == 0:
        if dinitial is not None:
            _copy_or_zero(dinitial, dfinal_state)
        for grad in (out.dq, out.dk, out.dv, out.dg, out.dbeta, out.dA_log, out.ddt_bias):
            grad.zero_()
        return
    q = inputs.q
    with _on_device(q):
        chunk_table, documents = chunks.chunk_tables(s, inputs.cu_seqlens, q.device)
        factors = q.new_empty((s.num_chunks, s.HV, scores.FACTORS.value, CHUNK), dtype=torch.float32)
        if saved.gates.shape[0]:
            norms, gates, inverse, score_matrix = saved[:4]
            scores.factors_from_saved(inputs, options, s, chunk_table, norms, gates, factors)
        else:
            norms, gates, inverse, score_matrix = _intermediates(inputs, options, s)
            scores.scores(inputs, options, s, chunk_table, norms, gates, factors, score_matrix, None)
            solve.solve(inputs, options, s, chunk_table, norms, gates, factors, inverse)

        kept_states, kept_updates = _given(saved.states), _given(saved.updates)
        turns = head_groups(s, q.element_size(), with_states=kept_states is None)
        num_heads = s.HV // turns
        dstates = q.new_empty((s.num_chunks, num_heads, s.V, s.K))
        if kept_states is None or kept_updates is None:
            states, updates = (
                q.new_empty((s.num_chunks, num_heads, s.V, s.K)),
                q.new_empty((s.num_chunks, num_heads, s.V, CHUNK)),
            )
        else:
            states, updates = kept_states, kept_updates
        partials = q.new_empty((s.num_chunks, s.HV, gradients.PARTIALS.value, CHUNK), dtype=torch.float32)
        dgate_sums = None
        if inputs.A_log is not None:
            dgate_sums = q.new_empty((s.num_chunks, s.HV, 2), dtype=torch.float32)
        for turn in range(turns):
            first_head = turn * num_heads
            reverse.reverse(
                do, dfinal_state, inputs, s, documents, gates, factors, inverse, score_matrix, dinitial, dstates,
                out.dv, states if kept_states is None else None, updates if kept_states is None else None,
                first_head, num_heads,
            )  # fmt: skip
            gradients.gradients(
                do, inputs, options, s, chunk_table, norms, gates, factors, states, updates, dstates,
                out.dv, out.dq, out.dk, partials, first_head, num_heads,
            )  # fmt: skip
        gradients.gate_gradients(
            inputs, options, s, chunk_table, gates, factors, partials, out.dg, out.dbeta, dgate_sums
        )
        if dgate_sums is not None:
            ddt_bias = None if inputs.dt_bias is None else out.ddt_bias
            gradients.gate_sums(s, chunk_table, dgate_sums, out.dA_log, ddt_bias)


def _copy_or_zero(target: Tensor, source: Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)
