"""Chunk and document tables, built on the device so that no value of `cu_seqlens` is ever read by the host.

    chunks    [NT, 3] int32: batch row, first token, tokens. 0 tokens: unused row. A negative count marks tokens past
              the last document, whose outputs and gradients are zero: they need chunks too, and there is room, because
              ceil(T / C) + N bounds the chunks of N documents and a remainder together.
    documents [N, 5] int32, longest first (the long ones start first, so the last to finish is short: 10 % of the
              sequential forward at 16/48 heads, 32768 tokens in 5 documents, H200): document, batch row, first token,
              end token, first chunk.

One program handles C chunk rows and C documents and walks over all documents for that: no program waits for another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.triton.launch import launch
from gdn_ops.backends.triton.primitives import CHUNK, trip_count
from gdn_ops.shapes import Sizes

DOCUMENT_FIELDS = tl.constexpr(5)
_DOCUMENT_BLOCK = 64


@triton.jit
def _document(cu_ptr, n, mask, T, VARLEN: tl.constexpr):
    """First and end token of documents n, forced into 0 <= first <= end <= T whatever `cu_seqlens` holds."""
    if VARLEN:
        first = tl.load(cu_ptr + n, mask=mask, other=0).to(tl.int32)
        end = tl.load(cu_ptr + n + 1, mask=mask, other=0).to(tl.int32)
        first = tl.minimum(tl.maximum(first, 0), T)
        end = tl.minimum(tl.maximum(end, first), T)
    else:
        first = tl.zeros_like(n)
        end = tl.where(mask, T, 0)
    return first, end


@triton.jit
def _chunk_table_kernel(
    cu_ptr, chunk_ptr, document_ptr, T, N, NT,
    VARLEN: tl.constexpr, BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    offs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own_first, own_end = _document(cu_ptr, offs, offs < N, T, VARLEN)
    own_length = own_end - own_first
    # Per chunk row: documents that end before it, and where the last of them ends, in chunks.
    finished = tl.zeros([CHUNK], tl.int32)
    finished_chunks = tl.zeros([CHUNK], tl.int32)
    # Per own document: its first chunk and its place in the order by length.
    own_chunk = tl.zeros([CHUNK], tl.int32)
    own_rank = tl.zeros([CHUNK], tl.int32)
    carry = tl.zeros([1], tl.int32)
    for n0 in tl.range(0, trip_count(N), BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        first, end = _document(cu_ptr, n, n < N, T, VARLEN)
        length = end - first
        num_chunks = (length + CHUNK - 1) // CHUNK
        ends = tl.cumsum(num_chunks, 0) + carry
        done = (ends[None, :] <= offs[:, None]) & (n < N)[None, :]
        finished += tl.sum(done.to(tl.int32), 1)
        finished_chunks = tl.maximum(finished_chunks, tl.max(tl.where(done, ends[None, :], 0), 1))
        before = n[None, :] < offs[:, None]
        own_chunk += tl.sum(tl.where(before, num_chunks[None, :], 0), 1)
        longer = (length[None, :] > own_length[:, None]) | ((length[None, :] == own_length[:, None]) & before)
        own_rank += tl.sum((longer & (n < N)[None, :]).to(tl.int32), 1)
        carry += tl.sum(num_chunks, 0)

    row = document_ptr + own_rank * DOCUMENT_FIELDS
    fits = own_chunk + (own_length + CHUNK - 1) // CHUNK <= NT
    tl.store(row, offs, mask=offs < N)
    tl.store(row + 1, tl.zeros_like(offs) if VARLEN else offs, mask=offs < N)
    tl.store(row + 2, own_first, mask=offs < N)
    tl.store(row + 3, tl.where(fits, own_end, own_first), mask=offs < N)
    tl.store(row + 4, own_chunk, mask=offs < N)

    first, end = _document(cu_ptr, finished, finished < N, T, VARLEN)
    past = finished >= N
    if VARLEN:
        last_end = tl.minimum(tl.maximum(tl.load(cu_ptr + N).to(tl.int32), 0), T)
        first = tl.where(past, last_end, first)
        end = tl.where(past, T, end)
    start = first + (offs - finished_chunks) * CHUNK
    length = tl.maximum(tl.minimum(end - start, CHUNK), 0)
    row = chunk_ptr + offs * 3
    tl.store(row, tl.zeros_like(offs) if VARLEN else finished, mask=offs < NT)
    tl.store(row + 1, start, mask=offs < NT)
    tl.store(row + 2, tl.where(past, -length, length), mask=offs < NT)


def chunk_tables(sizes: Sizes, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Launch the table kernel; returns the chunk and the document table."""
    T, N, NT = sizes.T, sizes.N, sizes.num_chunks
    chunks = torch.empty((NT, 3), dtype=torch.int32, device=device)
    documents = torch.empty((N, 5), dtype=torch.int32, device=device)
    grid = (max(NT, N) + 63) // 64
    launch(
        _chunk_table_kernel, grid, (cu_seqlens, chunks, documents, T, N, NT),
        dict(VARLEN=cu_seqlens is not None, BLOCK_N=_DOCUMENT_BLOCK), num_warps=4, num_stages=1,
    )  # fmt: skip
    return chunks, documents
