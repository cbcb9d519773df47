"""Summaries of pieces of documents for context parallelism: the kernels of `forward` and `reverse` without outputs.

    segments_fwd    of each piece H, and of inner ones M, in one launch
    segments_bwd    of each piece dH

Which pieces those are says a table that the caller has made on the host, in the form of `chunks.Chunks.segments`; where
their chunks lie among those of `cu_seqlens` it says too, so that matrices which the op has saved can be read.
"""

from torch import Tensor

from gdn_ops.backends import hopper
from gdn_ops.backends.hopper.chunks import chunk_table
from gdn_ops.backends.hopper.forward import begin
from gdn_ops.backends.hopper.launch import on_device
from gdn_ops.backends.hopper.layouts import addressable_gradient, flat
from gdn_ops.backends.hopper.reverse import begin_reverse
from gdn_ops.shapes import WHOLE_DOCUMENTS, Inputs, Options, Saved, sizes


def segments_fwd(
    states: Tensor, transitions: Tensor, table: Tensor, inputs: Inputs, options: Options,
    prepared: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Fill the rows of states [Q,HV,V,K] with H and of transitions [Q,HV,K,K] with M, both transposed.

    table int32 [P+Q,8]: first those of which only H is asked for, from the initial state of their document or from
    zero, then those of H and M (if there are none, transitions may have no rows). `prepared`: solve and factors of the
    chunks that the table counts, by `hopper.chunk_prepare`; else they are computed for those of `cu_seqlens`. q is not
    read. For calls that `unsupported_reason` accepts and that have tokens.
    """
    s = sizes(inputs)
    with on_device(inputs.q):
        k, v = flat(inputs.k), flat(inputs.v)
        if prepared is None:
            chunks = chunk_table(inputs.cu_seqlens, s.N, s.B * s.T, s.num_chunks, WHOLE_DOCUMENTS, k)
            kept = hopper._prepare(k, k, inputs, options, s, chunks, has_scores=False)
            prepared = kept.solve, kept.factors
        solve, factors = prepared
        # Without outputs neither q nor scores are read.
        begin(
            k, k, v, solve, solve, factors, table,
            initial_state=inputs.initial_state, cut_states=states,
            transitions=transitions if transitions.shape[0] else states,  # then no row of the table asks for M
        )  # fmt: skip


def segments_bwd(
    dstates: Tensor, do: Tensor, dfinal_state: Tensor | None, table: Tensor, inputs: Inputs, saved: Saved,
    options: Options, scratch: hopper.Scratch | None = None,
) -> None:  # fmt: skip
    """Fill the rows of dstates [Q,HV,V,K], transposed, with dH; dfinal_state [N,HV,K,V] by the table's documents.

    `saved`: what the op kept on the same `cu_seqlens`, or tensors with zero rows; or both of what
    `hopper.chunk_prepare_bwd` returned for these. For calls that `unsupported_reason` accepts and that have tokens.
    """
    s = sizes(inputs)
    with on_device(inputs.q):
        q, k, v = (flat(x) for x in inputs[:3])
        if scratch is None:
            chunks = chunk_table(inputs.cu_seqlens, s.N, s.B * s.T, s.num_chunks, WHOLE_DOCUMENTS, q)
            kept = hopper._prepare(q, k, inputs, options, s, chunks, None, saved)
        else:
            chunks, kept = scratch.chunks, hopper._prepared(saved, scratch)
        begin_reverse(
            q, k, v, addressable_gradient(do), kept.solve, kept.scores, kept.factors,
            chunks._replace(segments=table),
            dfinal_state=dfinal_state, cut_dstates=dstates,
        )  # fmt: skip
