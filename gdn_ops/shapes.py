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
    states at cuts inside documents, those left inside segments, then each segment's transition; `segment_rule`).
    """

    norms: Tensor
    gates: Tensor
    solve: Tensor
    scores: Tensor
    states: Tensor
    updates: Tensor
    checkpoints: Tensor


class Stage(NamedTuple):
    """What steps of walks S <- M S + H read: sources (H) [blocks,rows,HV,K,V], or [blocks,rows,HV,V,K] if transposed,
    and moves (M) [blocks,rows,HV,K,K]. A row's number counts over blocks, which may be any distance apart."""

    sources: Tensor
    moves: Tensor
    num_steps: int
    sources_transposed: bool
    moves_transposed: bool

    @property
    def strides(self) -> tuple[int, ...]:
        """Of each the rows of a block, and elements from block to block and from row to row."""
        return tuple(
            number
            for x in (self.sources, self.moves)
            for number in (max(x.shape[1], 1), x.stride(0), x.stride(1))
        )  # fmt: skip


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
# are cut into segments so that there are enough of them, and segments into stretches for what the backward computes
# again; docs/experiments.md, "Segments", has the figures.

_MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM). A constant, so that a call is cut the same way wherever it runs."""

_SPLIT_CHAINS = 48
"""Most documents times value heads for which forward and backward run on all segments at once.

H200, 48 chains of 32768 tokens: forward, recomputation and `reverse` 2.75 ms whole, 2.49 in three segments that were
computed again as they are, 2.30 with stretches. 64 chains: 5 % less by the model, at 8192 tokens 1 %, of which more
launches take their part.
"""

_CHECKPOINT_CHAINS = 132
"""Most documents times value heads for which the forward leaves states for the backward to start from."""

_MOST_SEGMENTS = 16
"""Of one document where they run at once: combining their states takes time with each."""

_LEAST_SEGMENT_CHUNKS = 16
"""Shorter segments or stretches would take longer to start than to run."""

_STRETCH_ROUNDS = 3
"""About how many stretches a multiprocessor computes again, one after the other. H200, 32 and 48 chains of 32768
tokens: segments as they are 460 and 749 microseconds, 380 and 546 with three. Model: 379 and 537 with two, 373 and 546
with four, and more states to keep."""


SEGMENT_UNIT = 16
"""Lengths of a document's first and last segment are given in parts of 1 / SEGMENT_UNIT of an inner one's."""

LAST_SEGMENT = 16
"""Length of a document's last segment. Backwards it runs with outputs while the inner ones run without, but beside them
states are computed again, and the launch takes longer than its chain. No more than SEGMENT_UNIT, which the bound on
cuts rests on."""

_FIRST_SEGMENTS = (12, 16)
"""Length of a document's first segment, which the forward runs with outputs while it runs the inner segments' summaries
without: where one multiprocessor takes one summary meanwhile, and where it takes two."""

_FIRST_OF_FEW = 18
"""The same where one document becomes five segments at most: so few leave multiprocessors idle in the first launch,
whose longest chains are inner ones' summaries."""


class SegmentRule(NamedTuple):
    """How the documents of a call are cut.

    chunks: about how long an inner segment is; num_cuts: most cuts inside documents, 0 if none is cut; is_split:
    whether documents are cut into segments that run at once, forward and backward; first: how long a document's first
    segment is, in SEGMENT_UNIT. stretch_chunks: after how many chunks of a segment, each time, the forward leaves its
    state, from where the backward computes states and updates again; num_left: rows for those states, 0 if it leaves
    none. parts: in how many parts the backward goes through each document (`turns`); if more than one, the states left
    are those at the parts' ends, but a document's last one.
    """

    chunks: int
    num_cuts: int
    is_split: bool
    first: int
    stretch_chunks: int
    num_left: int
    parts: int = 1


WHOLE_DOCUMENTS = SegmentRule(0, 0, False, SEGMENT_UNIT, 0, 0)
"""No document is cut."""


def segment_rule(s: Sizes) -> SegmentRule:
    """The rule of a call, from shapes alone: the lengths of its documents are known on the device only.

    With f and l for the lengths of the first and last segment, in inner ones, a document of c chunks stays whole up to
    c / chunks = f + 1/2 and becomes round(c / chunks - f - l) + 2 segments above, at least two. So a document that is
    cut takes at most c / chunks - (f + l - 3/2) cuts, and the bracket is more than c exceeds tokens / 64 by. All cuts
    together are at most num_tokens // (64 * chunks), and at most one less than the number of segments that `chunks`
    was made for.

    The state before chunk x, counted through the call, is row x // stretch_chunks - 1 of those left. No two have the
    same, since they are at least stretch_chunks apart, and the last chunk's number gives the number of rows.
    """
    num_tokens, chains = s.B * s.T, s.N * s.HV
    if chains == 0 or chains > _CHECKPOINT_CHAINS:
        return WHOLE_DOCUMENTS
    num_chunks = (num_tokens + CHUNK - 1) // CHUNK
    stretches = _STRETCH_ROUNDS * _MULTIPROCESSORS // s.HV
    stretch_chunks = torch.sym_max((num_chunks + stretches - 1) // stretches, _LEAST_SEGMENT_CHUNKS)
    # The last chunk is no later than the (num_chunks + N - 1)-th, and num_chunks no more than stretches of them.
    num_left = torch.sym_min(
        (num_chunks + s.N - 1) // _LEAST_SEGMENT_CHUNKS,
        stretches - 1 + (s.N + _LEAST_SEGMENT_CHUNKS - 2) // _LEAST_SEGMENT_CHUNKS,
    )
    if chains > _SPLIT_CHAINS:
        return SegmentRule(0, 0, False, SEGMENT_UNIT, stretch_chunks, num_left)
    # All segments of a document but one run at once with outputs, and fill the chip.
    most_of_one = _MULTIPROCESSORS // s.HV + 1
    segments = torch.sym_min(most_of_one, _MOST_SEGMENTS * s.N)
    segments = torch.sym_max(torch.sym_min(segments, num_chunks // _LEAST_SEGMENT_CHUNKS), 2)
    others = _MULTIPROCESSORS - chains
    rounds = torch.sym_max(torch.sym_min((2 * s.HV * (segments - 2) + others - 1) // others, 2), 1)
    # rounds is 1 or 2, perhaps a symbol.
    first = _FIRST_SEGMENTS[0] + (_FIRST_SEGMENTS[1] - _FIRST_SEGMENTS[0]) * (rounds - 1)
    if most_of_one <= 5:
        first = _FIRST_OF_FEW
    lengths = first + LAST_SEGMENT + SEGMENT_UNIT * (segments - 2)
    chunks = torch.sym_max((SEGMENT_UNIT * num_chunks + lengths - 1) // lengths, _LEAST_SEGMENT_CHUNKS)
    most = torch.sym_min(segments - 1, num_tokens // (CHUNK * _LEAST_SEGMENT_CHUNKS))
    # Segments that all run in one round are computed again as they are: 0 instead of 1.
    has_rest = torch.sym_max(torch.sym_min(segments * s.HV - _MULTIPROCESSORS, 1), 0)
    return SegmentRule(chunks, most, True, first, stretch_chunks, has_rest * num_left)


# ---- turns of the backward
#
# Every chunk's state, its gradient and its updates are written to memory and read back by another kernel. What that
# takes is bounded by going through the heads in groups and through the documents in parts, in the same memory;
# docs/kernels_hopper.md, "Memory", and docs/experiments.md have the figures.

MOST_PARTS = 8
"""A power of two: parts lie along an axis of a kernel's tile."""

_LEAST_PART_CHUNKS = 8
"""In parts that are shorter on average, what is handed on between them would be a great share of what is moved."""

_GROUPED_CHAINS = 100
"""The fewest documents times value heads of a group of heads, so that the sequential kernels keep the multiprocessors
busy: with fewer their time is the longest document's chain, which each group pays."""


class Turns(NamedTuple):
    """In how many groups of heads, and in how many parts of documents, a backward goes through a call's chunks."""

    groups: int
    parts: int


def scratch_bytes_of(num_chunks: int, num_heads: int, key_dim: int = 128, value_dim: int = 128) -> int:
    """Bytes of states, their gradients and updates of 16-bit operands, and of float32 row sums."""
    return num_chunks * num_heads * ((2 * key_dim + CHUNK) * value_dim * 2 + 15 * CHUNK * 4)


def _is_positive(x: int) -> int:
    """1 or 0, without a branch: x may be symbolic."""
    return torch.sym_max(torch.sym_min(x, 1), 0)


def turns(s: Sizes, most_bytes: int) -> Turns:
    """The turns of a call whose documents are not cut, from shapes alone: the fewest for scratch of about `most_bytes`.

    Two groups of heads first, for nothing is handed on between them, then parts. More groups are not worth it: 256
    documents of 128 tokens took 2.36 ms a step in two and 2.59 in eight (H200, 16/32 heads).
    """
    if s.B * s.T == 0 or s.N == 0:
        return Turns(1, 1)
    whole = scratch_bytes_of(s.num_chunks, s.HV, s.K, s.V)
    has_halves = int(s.HK % 2 == 0)
    groups = 1 + has_halves * _is_positive(whole - most_bytes) * _is_positive(s.N * s.HV - 2 * _GROUPED_CHAINS + 1)
    parts = (whole + groups * most_bytes - 1) // (groups * most_bytes)
    parts = torch.sym_min(torch.sym_min(parts, s.num_chunks // (_LEAST_PART_CHUNKS * s.N)), MOST_PARTS)
    return Turns(groups, torch.sym_max(parts, 1))


def part_chunks(num_tokens: int, num_documents: int, parts: int) -> int:
    """NS: most chunks of one part. A document of n tokens has at most ceil(n / (64 * parts)) in one."""
    tokens = CHUNK * parts
    return (num_tokens + num_documents * (tokens - 1)) // tokens


def in_parts(rule: SegmentRule, s: Sizes, most_bytes: int) -> SegmentRule:
    """The rule with the parts of a call whose documents are whole, of which no state is left otherwise."""
    if rule is not WHOLE_DOCUMENTS:
        return rule
    parts = turns(s, most_bytes).parts
    return rule._replace(parts=parts, num_left=s.N * (parts - 1))


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
