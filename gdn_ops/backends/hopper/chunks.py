"""Which tokens each chunk holds, worked out on the device, and zeros for the tokens that no document owns.

Document n has ceil(length / C) chunks, consecutive, after those of the documents before it. Their number depends on
the values of `cu_seqlens`, which are never brought to the host: every grid is sized by an upper bound, and a program
whose chunk does not exist leaves at once. A dense batch is the same thing with equal documents.

Grid of the table kernel: one program a document and one more for what lies past the last chunk. Each adds up the
documents before its own, O(N) loads a program and nothing handed from one program to another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import CHUNK

# Letters: T tokens (all documents), N documents, C chunk length, NT rows of the chunk table, H heads, D head size.

_DOCUMENTS_PER_STEP = 1024
_ROWS_PER_STEP = 128
_CLEARED_TOKENS = 64


class Chunks(NamedTuple):
    """Where every chunk and every document lies, int32.

    table [NT,4]: first token, valid tokens (0: no such chunk), document, 0.
    documents [N,4]: first token, past the last token, first chunk, number of chunks.
    longest_first [N]: the documents, longest first (equal lengths in order).
    totals [2]: chunks in use, tokens that belong to a document.
    """

    table: Tensor
    documents: Tensor
    longest_first: Tensor
    totals: Tensor


@triton.jit
def _span(cu_ptr, n, T, document_length, HAS_CU: tl.constexpr):
    """First token of document(s) `n` and one past the last, kept inside [0, T] whatever cu_seqlens says."""
    if HAS_CU:
        first = tl.minimum(tl.maximum(tl.load(cu_ptr + n).to(tl.int32), 0), T)
        last = tl.minimum(tl.maximum(tl.load(cu_ptr + n + 1).to(tl.int32), first), T)
    else:
        first = n * document_length
        last = first + document_length
    return first, last


@triton.jit
def _chunk_table_kernel(
    cu_ptr, table_ptr, documents_ptr, order_ptr, totals_ptr, T, N, NT, document_length,
    HAS_CU: tl.constexpr, C: tl.constexpr, DOCS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    mine = tl.minimum(n, N - 1)
    first, last = _span(cu_ptr, mine, T, document_length, HAS_CU)
    length = last - first
    before = 0
    rank = 0
    for m0 in range(0, N, DOCS):
        m = m0 + tl.arange(0, DOCS)
        there = m < N
        m_safe = tl.minimum(m, N - 1)
        m_first, m_last = _span(cu_ptr, m_safe, T, document_length, HAS_CU)
        m_length = m_last - m_first
        before += tl.sum(tl.where(there & (m < n), (m_length + C - 1) // C, 0))
        ahead = (m_length > length) | ((m_length == length) & (m < n))
        rank += tl.sum(tl.where(there & ahead, 1, 0))
    rows = tl.arange(0, ROWS)
    if n < N:
        chunks = (length + C - 1) // C
        tl.store(documents_ptr + n * 4, first)
        tl.store(documents_ptr + n * 4 + 1, last)
        tl.store(documents_ptr + n * 4 + 2, before)
        tl.store(documents_ptr + n * 4 + 3, chunks)
        tl.store(order_ptr + rank, n)
        for r0 in range(0, chunks, ROWS):
            r = r0 + rows
            mask = (r < chunks) & (before + r < NT)
            row_ptr = table_ptr + (before + r) * 4
            tl.store(row_ptr, first + r * C, mask=mask)
            tl.store(row_ptr + 1, tl.minimum(length - r * C, C), mask=mask)
            tl.store(row_ptr + 2, n + 0 * r, mask=mask)
            tl.store(row_ptr + 3, 0 * r, mask=mask)
    else:
        tl.store(totals_ptr, before)
        tl.store(totals_ptr + 1, last)
        for r0 in range(before, NT, ROWS):
            r = r0 + rows
            for field in tl.static_range(4):
                tl.store(table_ptr + r * 4 + field, 0 * r, mask=r < NT)


def chunk_table(
    cu_seqlens: Tensor | None, num_documents: int, num_tokens: int, num_chunks: int, like: Tensor
) -> Chunks:
    """Lay out the chunks of one call; `num_chunks` is the upper bound NT. One launch, no synchronisation."""
    chunks = Chunks(
        table=like.new_empty((num_chunks, 4), dtype=torch.int32),
        documents=like.new_empty((num_documents, 4), dtype=torch.int32),
        longest_first=like.new_empty((num_documents,), dtype=torch.int32),
        totals=like.new_empty((2,), dtype=torch.int32),
    )
    launch(
        _chunk_table_kernel, (num_documents + 1,),
        cu_seqlens, *chunks, num_tokens, num_documents, num_chunks,
        num_tokens // num_documents if cu_seqlens is None else 0,
        HAS_CU=cu_seqlens is not None, C=CHUNK, DOCS=_DOCUMENTS_PER_STEP, ROWS=_ROWS_PER_STEP, num_warps=4,
    )  # fmt: skip
    return chunks


@triton.jit
def _clear_ownerless_kernel(
    x_ptr, totals_ptr, T, stride_t, stride_g, stride_r, num_heads, group_len, D,
    TOKENS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    end = tl.load(totals_ptr + 1)
    t0 = tl.program_id(0) * TOKENS
    if t0 + TOKENS > end:
        t = t0 + tl.arange(0, TOKENS)
        offs_d = tl.arange(0, BLOCK_D)
        mask = ((t >= end) & (t < T))[:, None] & (offs_d < D)[None, :]
        zero = tl.zeros([TOKENS, BLOCK_D], x_ptr.dtype.element_ty)
        for h in range(num_heads):
            head = (h // group_len).to(tl.int64) * stride_g + (h % group_len).to(tl.int64) * stride_r
            tl.store(x_ptr + t.to(tl.int64)[:, None] * stride_t + head + offs_d[None, :], zero, mask=mask)


def clear_ownerless(x: Tensor, chunks: Chunks) -> None:
    """Write zeros to the tokens of [T,G,R,D] that come after the last document's end."""
    T, G, R, D = x.shape
    launch(
        _clear_ownerless_kernel, (triton.cdiv(T, _CLEARED_TOKENS),),
        x, chunks.totals, T, x.stride(0), x.stride(1), x.stride(2), G * R, R, D,
        TOKENS=_CLEARED_TOKENS, BLOCK_D=triton.next_power_of_2(D), num_warps=4,
    )  # fmt: skip
