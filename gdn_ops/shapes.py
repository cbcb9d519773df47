"""What the ops take, as named tuples, and the sizes that follow from it.

Letters: B batch, T tokens, N documents, HK query/key heads, HV value heads, K query/key head size,
V value head size, C chunk length, NT chunks (an upper bound that needs no value of `cu_seqlens`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""C: tokens per chunk, in every backend. Part of the saved tensors' layout, so not a tuning number."""

L2NORM_EPS = 1e-6
"""Added to the sum of squares before the root, as in transformers' and flash-linear-attention's l2norm."""

SAVE_LEVELS = ("none", "inputs", "solve", "states")
"""What the forward keeps for the backward, from nothing (no gradient will be asked) to everything."""


class Inputs(NamedTuple):
    """The tensors of one call, batch axis included.

    q, k [B,T,HK,K]; v [B,T,HV,V]; g, beta [B,T,HV]; initial_state [N,HV,K,V]; cu_seqlens [N+1] (then B == 1);
    A_log, dt_bias [HV].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


class Options(NamedTuple):
    """The numbers and switches of one call; forward and backward get the same."""

    scale: float
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    deterministic: bool = True


class Saved(NamedTuple):
    """What the forward kept for the backward; a tensor with zero rows was not kept.

    norms [B,T,2,HK] (1/|q|, 1/|k|); gates [NT,HV,C] (chunk-local cumulative log2 decay); solve, scores [NT,HV,C,C];
    states [NT,HV,V,K] (transposed state at the chunk's start); updates [NT,HV,V,C]; checkpoints [NS,HV,V,K] (transposed
    states at cuts inside documents and, where segments run at once, then each segment's transition; `segment_rule`).
    """

    norms: Tensor
    gates: Tensor
    solve: Tensor
    scores: Tensor
    states: Tensor
    updates: Tensor
    checkpoints: Tensor


class Sizes(NamedTuple):
    """Every size of one call. T, B, N may be symbolic while a graph is traced; head counts and sizes are ints."""

    B: int
    T: int
    N: int
    HK: int
    HV: int
    K: int
    V: int
    num_chunks: int


def sizes(inputs: Inputs) -> Sizes:
    """Read the sizes off the inputs without looking at a value (no synchronisation, works on fake tensors)."""
    B, T, HK, K = inputs.q.shape
    HV, V = inputs.v.shape[2:]
    if inputs.cu_seqlens is None:
        N = B
        num_chunks = B * ((T + CHUNK - 1) // CHUNK)
    else:
        N = inputs.cu_seqlens.shape[0] - 1
        # Each document wastes less than one chunk, so this bounds sum(ceil(length / C)) whatever the lengths are.
        num_chunks = (T + CHUNK - 1) // CHUNK + N
    return Sizes(B, T, N, HK, HV, K, V, num_chunks)


# ---- segments of documents
#
# A GPU runs a document's recurrence as one chain a value head, on one multiprocessor. These numbers say when documents
# are cut into segments so that there are enough of them; docs/kernels_hopper.md, "Segments", has the figures.

_MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM). A constant, so that a call is cut the same way wherever it runs."""

_SPLIT_CHAINS = 40
"""Most documents times value heads for which forward and backward run on all segments at once."""

_CHECKPOINT_CHAINS = 132
"""Most documents times value heads for which the forward leaves states at cuts for the backward to start from."""

_MOST_SEGMENTS = 16
"""Of one document where they run at once: combining their states takes time with each."""

_LEAST_SEGMENT_CHUNKS = 16
"""Shorter ones would take longer to start than to run."""


SEGMENT_UNIT = 16
"""Lengths of a document's first and last segment are given in parts of 1 / SEGMENT_UNIT of an inner one's."""

LAST_SEGMENT = 14
"""Length of a document's last segment. A chunk of it, backwards with outputs, runs while the others run without, and
takes that much longer; and no more than SEGMENT_UNIT, which the bound on cuts rests on."""

_FIRST_SEGMENTS = (12, 16)
"""Length of a document's first segment, which the forward runs with outputs while it runs the inner segments' summaries
without: where one multiprocessor takes one summary meanwhile, and where it takes two."""


class SegmentRule(NamedTuple):
    """How the documents of a call are cut.

    chunks: about how long an inner segment is; num_cuts: most cuts inside documents, 0 if none is cut; is_split:
    whether all segments run at once, forward and backward. If not, segments are equal and only what the backward
    computes again starts at the cuts. first: how long a document's first segment is, in SEGMENT_UNIT.
    """

    chunks: int
    num_cuts: int
    is_split: bool
    first: int = SEGMENT_UNIT


WHOLE_DOCUMENTS = SegmentRule(0, 0, False)
"""No document is cut."""


def segment_rule(s: Sizes) -> SegmentRule:
    """The rule of a call, from shapes alone: the lengths of its documents are known on the device only.

    Where segments do not run at once, a document of c chunks becomes round(c / chunks) equal ones, at least one. Else
    with f and l for the lengths of the first and last, in inner ones, it stays whole up to c / chunks = f + 1/2 and
    becomes round(c / chunks - f - l) + 2 segments above, at least two. So a document that is cut takes at most
    c / chunks - (f + l - 3/2) cuts, and the bracket is more than c exceeds tokens / 64 by. All cuts together are at
    most num_tokens // (64 * chunks), and at most one less than the number of segments that `chunks` was made for.
    """
    num_tokens, chains = s.B * s.T, s.N * s.HV
    if chains == 0 or chains > _CHECKPOINT_CHAINS:
        return WHOLE_DOCUMENTS
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    if chains > _SPLIT_CHAINS:
        segments = 3 * _MULTIPROCESSORS // s.HV
        chunks = torch.sym_max((num_chunks + segments - 1) // segments, _LEAST_SEGMENT_CHUNKS)
        return SegmentRule(chunks, torch.sym_min(segments, num_tokens // (CHUNK * _LEAST_SEGMENT_CHUNKS)), False)
    # All segments of a document but one run at once with outputs, and fill the chip.
    segments = torch.sym_min(_MULTIPROCESSORS // s.HV + 1, _MOST_SEGMENTS * s.N)
    segments = torch.sym_max(torch.sym_min(segments, num_chunks // _LEAST_SEGMENT_CHUNKS), 2)
    others = _MULTIPROCESSORS - chains
    rounds = torch.sym_max(torch.sym_min((2 * s.HV * (segments - 2) + others - 1) // others, 2), 1)
    # rounds is 1 or 2, perhaps a symbol.
    first = _FIRST_SEGMENTS[0] + (_FIRST_SEGMENTS[1] - _FIRST_SEGMENTS[0]) * (rounds - 1)
    lengths = first + LAST_SEGMENT + SEGMENT_UNIT * (segments - 2)
    chunks = torch.sym_max((SEGMENT_UNIT * num_chunks + lengths - 1) // lengths, _LEAST_SEGMENT_CHUNKS)
    most = torch.sym_min(segments - 1, num_tokens // (CHUNK * _LEAST_SEGMENT_CHUNKS))
    return SegmentRule(chunks, most, True, first)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states, gates and sums for operands of `dtype`: float64 stays, everything else computes in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowLayout(NamedTuple):
    """Where one operand's heads lie in a token's row, in elements.

    Head h = (h // group_len, h % group_len) starts at offset + (h // group_len) * stride_group
    + (h % group_len) * stride_in_group; its channels are dense.
    """

    offset: int
    stride_group: int
    group_len: int
    stride_in_group: int


def packed_layouts(num_qk_heads: int, num_v_heads: int, head_dim: int) -> tuple[RowLayout, RowLayout, RowLayout]:
    """The layouts of q, k and v in a [q heads | k heads | v heads] row."""
    qk_width = num_qk_heads * head_dim
    return (
        RowLayout(0, head_dim, 1, 0),
        RowLayout(qk_width, head_dim, 1, 0),
        RowLayout(2 * qk_width, head_dim, 1, 0),
    )


def packed_width(num_qk_heads: int, num_v_heads: int, head_dim: int) -> int:
    """W: elements of one [q heads | k heads | v heads] row."""
    return (2 * num_qk_heads + num_v_heads) * head_dim
