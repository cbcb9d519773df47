"""What is measured: shapes as data, their inputs, and the bytes and operations that no implementation can avoid."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.shapes import CHUNK


@dataclass(frozen=True)
class Case:
    """One shape. documents: lengths packed along T with B = 1; None: `batch` sequences of `tokens`."""

    name: str
    num_qk_heads: int
    num_v_heads: int
    tokens: int
    documents: tuple[int, ...] | None = None
    batch: int = 1
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    use_qk_l2norm: bool = False

    @property
    def width(self) -> int:
        """W: elements of one packed row."""
        return (2 * self.num_qk_heads + self.num_v_heads) * self.head_dim

    @property
    def total_tokens(self) -> int:
        """Tokens over the whole batch."""
        return self.batch * self.tokens

    @property
    def num_chunks(self) -> int:
        """Chunks that hold tokens."""
        lengths = self.documents or (self.tokens,) * self.batch
        return sum(-(-length // CHUNK) for length in lengths)


D5 = (9000, 3001, 8192, 5575, 7000)
SHORT = tuple(64 + (37 * i) % 129 for i in range(256))

CASES = {
    case.name: case
    for case in (
        Case("main", 16, 48, sum(D5), D5),
        Case("main-norm", 16, 48, sum(D5), D5, use_qk_l2norm=True),
        Case("one-32k", 16, 32, 32768),
        Case("one-8k", 16, 32, 8192),
        Case("heads-4-8", 4, 8, 32768),
        Case("heads-2-4", 2, 4, 32768),
        Case("batch-8", 16, 32, 4096, batch=8),
        Case("documents-8", 16, 32, 8 * 4096, (4096,) * 8),
        Case("short-256", 16, 32, sum(SHORT), SHORT),
        Case("small", 16, 32, 1024),
        Case("cpu", 4, 8, 4096, head_dim=64, dtype=torch.float32),
    )
}
"""Every case by name: many documents, few heads and long documents, many short ones, a batch, small T, and a CPU's."""


class Data(NamedTuple):
    """Inputs of one case: row [B,T,W], g, beta [B,T,HV], the output's gradient [B,T,HV,D], cu_seqlens or None."""

    row: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    cu_seqlens: Tensor | None


def make_data(case: Case, device: str, seed: int = 0) -> Data:
    """Random inputs as a trained layer has them: normalised q and k, g = logsigmoid(N(3,1)), beta = sigmoid(N(0,1))."""
    gen = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    lead = (case.batch, case.tokens)
    qk = randn(*lead, 2 * case.num_qk_heads, case.head_dim)
    if not case.use_qk_l2norm:
        qk = torch.nn.functional.normalize(qk, dim=-1)
    v = randn(*lead, case.num_v_heads, case.head_dim)
    cu_seqlens = None
    if case.documents is not None:
        ends = torch.tensor((0, *case.documents), dtype=torch.int64).cumsum(0)
        cu_seqlens = ends.to(device)
    return Data(
        row=torch.cat([qk.flatten(-2), v.flatten(-2)], dim=-1).to(case.dtype),
        g=torch.nn.functional.logsigmoid(randn(*lead, case.num_v_heads) + 3),
        beta=torch.sigmoid(randn(*lead, case.num_v_heads)),
        do=randn(*lead, case.num_v_heads, case.head_dim).to(case.dtype),
        cu_seqlens=cu_seqlens,
    )


def reduced(case: Case) -> Case:
    """The same heads, dtype and options on few tokens with ragged ends, for the correctness gate."""
    if case.documents is not None:
        documents = (130, 1, 64, 63, 75)
        return Case(**{**case.__dict__, "tokens": sum(documents), "documents": documents})
    return Case(**{**case.__dict__, "tokens": 200})


class Work(NamedTuple):
    """Fewest bytes through device memory and operations of the chunk form."""

    bytes: int
    flops: int


def work(case: Case) -> dict[str, Work]:
    """Forward and backward work of a case, from its shape alone.

    Bytes: every input read once and every output written once (row, g, beta, o; and do, drow, dg, dbeta), nothing
    saved between them. Operations: the matrix products of the chunk form with the state recomputed in backward.
    """
    element = torch.empty(0, dtype=case.dtype).element_size()
    row = case.total_tokens * case.width * element
    out = case.total_tokens * case.num_v_heads * case.head_dim * element
    gates = 2 * case.total_tokens * case.num_v_heads * 4
    wide = 2 * CHUNK * case.head_dim * case.head_dim  # one [C,K] x [K,V] product
    square = 2 * CHUNK * CHUNK * case.head_dim  # one [C,C] x [C,D] product
    value_heads = case.num_chunks * case.num_v_heads
    qk_heads = case.num_chunks * case.num_qk_heads
    forward = value_heads * (3 * wide + 2 * square) + qk_heads * 2 * square
    backward = value_heads * (8 * wide + 9 * square)
    return {
        "forward": Work(row + gates + out, forward),
        "backward": Work(2 * row + 2 * gates + out, backward),
        "step": Work(3 * row + 3 * gates + 2 * out, forward + backward),
    }
