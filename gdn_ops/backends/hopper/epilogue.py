"""From row sums to the gradients of decay and write strength.

    dG_i   = q_i . dq_i + k_i . left_i - k_i . right_i,   and the same once more with - dv_i . v_i for the last two
    dg'_i  = sum of dG_j over j >= i in the chunk  +  factor_4 <S, dS> + sum over the chunk of k . right's state part
             + q_i . k_(i-1) times what dP_(i,i-1) has lost by rounding
    dbeta'_i = (1 - w_i) (dv_i . v_i + k_i . left_i) / beta'_i + w_i (dv_i . u_i) / beta'_i^2,   w_i = min(beta'_i^2, 1)

dg' is made of products of two tokens of which the second is earlier than i and the first is not. Under strong decay few
but those of neighbours are left, so for them the rounding of dP is put right (dg with g = -20 U(0,1): 2.2e-3 to 1.65e-3
in a model), in chunks that decay enough for it to matter. Their q . k comes from the score, whose own rounding matters
little here.

Under weak decay all pairs count, and with keys that are alike, k_i . k_j near 1 for all of them, most of dg's error is
the rounding of W. The other form, q_i . dq_i - dv_i . v_i, has no W in it: k . left = dv . (e - v) with e = u / beta,
and k . right = dv . e. But its errors, those of every dv, add up over the tokens. So dG takes three quarters of what it
differs by from the first form, less the mean of the chunk, since the first form's sum over a chunk has no W in it
either; and as much less as the chunk decays, since then dg is what is left when great terms of two neighbours cancel.
In a model with 6 heads and 704 tokens, rounded where the kernels round, dg's error with nearly parallel keys goes from
5.8e-3 to 4.3e-3, with almost equal ones (as in `gdn_ops.bench.accuracy`) from 7.5e-3 to 6.0e-3; with usual keys under
weak, usual and no decay it changes by less than 1 %.

Both terms of the last line are dbeta = dy . e, with dy = dv / beta the gradient of the updates before their strength is
applied and e = u / beta. In the first one e = v - e^G k S - sum Gamma (k k^T) u is written out, so that v, exact, and
sums over earlier tokens enter. The sums are short and damped unless keys are nearly parallel, where they add up what
the rounding of each u has left; the second one, with the chunk's own u and dv, has no such sum. A great write strength
goes with it, so the two are weighted by beta^2, by which the second is divided. At beta = 0 the numerator of the first
and beta vanish. So `solve` takes a beta of at least 2^-64 in magnitude (2^-14 for float16): too little to change any
result in its dtype, enough for the quotient to be exact. So is the divisor here, the factors' last row. In float16 with
norms w is 1 for a beta below 2^-6 as well: W, in which the norms are, would be too small a number for that dtype.

Then the chain to what the caller gave: the gate's A_log and dt_bias, the sigmoid of beta.

Grid: one program a chunk and block of value heads. dA_log and ddt_bias are summed over chunks afterwards, in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.early import wait_for_earlier
from gdn_ops.backends.hopper.chunks import Part
from gdn_ops.backends.hopper.gates import softplus
from gdn_ops.backends.hopper.gradients import (
    NUM_STATE_SUMS,
    NUM_SUMS,
    SUM_KEYS_LEFT,
    SUM_KEYS_RIGHT,
    SUM_KEYS_STATE,
    SUM_QUERIES,
    SUM_REST,
    SUM_STATES,
    SUM_UPDATES,
)
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.backends.hopper.reverse import NUM_VALUE_SUMS
from gdn_ops.shapes import CHUNK, Options

# Letters: T tokens, NT chunks, HV value heads, H value heads of one launch, B value heads of one program, C chunk
# length.

_HEADS = 8

_LEAST_END = 2.0**-6
"""Chunks whose whole decay is smaller get the neighbours' correction of dg.

By the emulated kernels, 620 tokens and 6 heads, what the correction does to dg's error is below 0.3 % where a chunk
decays by no more than 4.2 = -ln(this), and 29 % with strong decay.
"""


_OTHER_FORM = tl.constexpr(0.75)
"""Share of dG's other form, - dv . v for what the keys add, in a chunk without decay."""


@triton.jit
def _sum_rows(at, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, C: tl.constexpr):
    total = tl.load(at + FIRST * C, mask=mask, other=0.0)
    for i in tl.static_range(1, COUNT):
        total += tl.load(at + (FIRST + i) * C, mask=mask, other=0.0)
    return total


# Not specialised for the first head, on which the layout that Triton chooses for the sums depends, and so their order.
@triton.jit(do_not_specialize=["first_head"])
def _epilogue_kernel(
    sums_ptr, factors_ptr, decays_ptr, scores_ptr, g_ptr, beta_ptr, A_log_ptr, dt_bias_ptr,
    dg_ptr, dbeta_ptr, parts_ptr, table_ptr, inverse_scale, first_head,
    HV: tl.constexpr, H: tl.constexpr, B: tl.constexpr, C: tl.constexpr, SUMS: tl.constexpr, FACTORS: tl.constexpr,
    DECAYS: tl.constexpr, QUERY_DECAY: tl.constexpr, KEY_DECAY: tl.constexpr,
    VALUES: tl.constexpr, LEFT: tl.constexpr, QUERIES: tl.constexpr, RIGHT: tl.constexpr, STATE: tl.constexpr,
    UPDATES: tl.constexpr, REST: tl.constexpr, DOT: tl.constexpr, DOTS: tl.constexpr,
    SIGMOID: tl.constexpr, DOUBLED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    SMALL_W: tl.constexpr, LEAST_END: tl.constexpr, IN_PARTS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    slot = tl.program_id(0)
    first = tl.load(table_ptr + slot * 4)
    valid = tl.load(table_ptr + slot * 4 + 1)
    i_c = slot
    if IN_PARTS:
        i_c = tl.load(table_ptr + slot * 4 + 3) // C
    local = tl.program_id(1) * B + tl.arange(0, B)
    offs_h = first_head + local
    offs_c = tl.arange(0, C)
    is_head = local < H
    mask_h = is_head & (valid > 0)
    mask = mask_h[:, None] & (offs_c < valid)[None, :]
    row_B = i_c.to(tl.int64) * HV + offs_h
    sums_at = sums_ptr + (slot.to(tl.int64) * H + local)[:, None] * (SUMS * C) + offs_c[None, :]
    factors_at = factors_ptr + row_B * (FACTORS * C)
    # All that is read is asked for here, before the first sum over threads: what comes after such a sum waits for it.
    # Rows are read whole, four numbers at a time, and what they hold past the document's end is dropped afterwards.
    end_B = tl.load(factors_at + 4 * C, mask=mask_h, other=1.0)
    mask_rows = mask_h[:, None] & (offs_c >= 0)[None, :]
    left_BC = tl.load(sums_at + LEFT * C, mask=mask_rows, other=0.0)
    queries_BC = tl.load(sums_at + QUERIES * C, mask=mask_rows, other=0.0)
    right_BC = tl.load(sums_at + RIGHT * C, mask=mask_rows, other=0.0)
    state_BC = tl.load(sums_at + STATE * C, mask=mask_rows, other=0.0)
    dot_BC = tl.load(sums_at + DOT * C, mask=mask_h[:, None] & (offs_c < DOTS)[None, :], other=0.0)
    updates_BC = tl.load(sums_at + UPDATES * C, mask=mask_rows, other=0.0)
    beta_BC = tl.load(factors_at[:, None] + (FACTORS - 1) * C + offs_c[None, :], mask=mask_rows, other=1.0)
    values_BC = _sum_rows(sums_at, mask_rows, 0, VALUES, C)
    left_BC = tl.where(mask, left_BC, 0.0)
    other_BC = tl.where(mask, right_BC - left_BC - values_BC, 0.0)
    other_BC -= tl.sum(other_BC, 1)[:, None] / tl.maximum(valid, 1).to(tl.float32)
    gates_BC = left_BC + queries_BC - right_BC + (_OTHER_FORM * end_B)[:, None] * other_BC
    gates_BC = tl.where(mask, gates_BC, 0.0)
    chunk_B = tl.sum(tl.where(mask, state_BC, 0.0), 1) + end_B * tl.sum(dot_BC, 1)
    dlog_BC = tl.cumsum(gates_BC, 1, reverse=True) + chunk_B[:, None]
    is_near = mask_h & (end_B < LEAST_END)
    mask_pair = is_near[:, None] & (offs_c < valid)[None, :] & (offs_c > 0)[None, :]
    decay_at = decays_ptr + row_B[:, None] * (DECAYS * C) + offs_c[None, :]
    decay_BC = tl.load(decay_at + QUERY_DECAY * C, mask=mask_pair, other=0.0)
    decay_BC -= tl.load(decay_at + (KEY_DECAY * C - 1), mask=mask_pair, other=0.0)
    score_at = scores_ptr + row_B[:, None] * (C * C) + (offs_c * (C + 1) - 1)[None, :]
    score_BC = tl.load(score_at, mask=mask_pair, other=0.0).to(tl.float32)
    rest_BC = tl.load(sums_at + REST * C, mask=mask_pair, other=0.0)
    # A pair that decays by more than 2^-60 adds nothing; its score may have become zero, and the quotient not a number.
    rest_BC *= score_BC * tl.exp2(tl.where(decay_BC > -60.0, -decay_BC, 0.0)) * inverse_scale
    dlog_BC += tl.where(decay_BC > -60.0, rest_BC, 0.0)
    at = (first + offs_c).to(tl.int64)[None, :] * HV + offs_h[:, None]
    if HAS_GATE:
        raw_BC = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            raw_BC += tl.load(dt_bias_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)[:, None]
        # The rate e^A_log goes in as its root, before and after: the whole may overflow where what it multiplies is 0.
        root_B = tl.exp(0.5 * tl.load(A_log_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32))
        dlog_BC = tl.where(mask, -dlog_BC * root_B[:, None], 0.0)
        parts_at = parts_ptr + i_c.to(tl.int64) * (2 * HV) + offs_h
        tl.store(parts_at, tl.sum(dlog_BC * softplus(raw_BC) * root_B[:, None], 1), mask=mask_h)
        dlog_BC = dlog_BC * tl.sigmoid(raw_BC) * root_B[:, None]
        tl.store(parts_at + HV, tl.sum(dlog_BC, 1), mask=mask_h)
    tl.store(dg_ptr + at, dlog_BC.to(dg_ptr.dtype.element_ty), mask=mask)
    square_BC = beta_BC * beta_BC
    weight_BC = tl.maximum(1.0 - square_BC, 0.0)
    divisor_BC = tl.maximum(square_BC, 1.0)
    if SMALL_W:
        is_small = square_BC < 2.0**-12
        weight_BC = tl.where(is_small, 0.0, weight_BC)
        divisor_BC = tl.where(is_small, square_BC, divisor_BC)
    dbeta_BC = weight_BC * ((values_BC + left_BC) / beta_BC) + updates_BC / divisor_BC
    if DOUBLED:
        dbeta_BC *= 2.0
    if SIGMOID:
        sigmoid_BC = tl.sigmoid(tl.load(beta_ptr + at, mask=mask, other=0.0).to(tl.float32))
        dbeta_BC *= sigmoid_BC * (1.0 - sigmoid_BC)
    tl.store(dbeta_ptr + at, dbeta_BC.to(dbeta_ptr.dtype.element_ty), mask=mask)


def epilogue(
    sums: Tensor, gates: Tensor, factors: Tensor, scores: Tensor, g: Tensor, beta: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, part: Part, options: Options,
    *, dg: Tensor, dbeta: Tensor, parts: Tensor | None, heads: range,
) -> None:  # fmt: skip
    """Fill dg and dbeta [T,HV] for a part's chunks and a range of value heads from sums [NS,H,NUM_SUMS,C] and scores
    [NT,HV,C,C].

    With a gate also parts [NT,2,HV]: each chunk's share of dA_log and ddt_bias; rows past the last chunk stay as they
    are.
    """
    HV = factors.shape[1]
    H = len(heads)
    norms = options.use_qk_l2norm
    launch(
        _epilogue_kernel, (part.table.shape[0], triton.cdiv(H, _HEADS)),
        sums, factors, factors if norms else gates, scores, g, beta, A_log, dt_bias, dg, dbeta, parts, part.table,
        # Of a scale whose inverse float32 does not hold no gradient of a score is left that could be put right.
        1.0 / options.scale if abs(options.scale) >= 2.0**-126 else 0.0, heads.start,
        HV=HV, H=H, B=_HEADS, C=CHUNK, SUMS=NUM_SUMS, FACTORS=factors.shape[2],
        DECAYS=factors.shape[2] if norms else 1, QUERY_DECAY=6 if norms else 0, KEY_DECAY=7 if norms else 0,
        VALUES=NUM_VALUE_SUMS, LEFT=SUM_KEYS_LEFT.value, QUERIES=SUM_QUERIES.value,
        RIGHT=SUM_KEYS_RIGHT.value, STATE=SUM_KEYS_STATE.value, UPDATES=SUM_UPDATES.value,
        REST=SUM_REST.value, DOT=SUM_STATES.value, DOTS=NUM_STATE_SUMS,
        SIGMOID=options.use_beta_sigmoid, DOUBLED=options.allow_neg_eigval,
        HAS_GATE=A_log is not None, HAS_BIAS=dt_bias is not None,
        SMALL_W=norms and scores.dtype == torch.float16, LEAST_END=_LEAST_END,
        IN_PARTS=not part.has_all, num_warps=4,
    )  # fmt: skip


@triton.jit
def _gate_sums_kernel(
    parts_ptr, dA_log_ptr, ddt_bias_ptr, totals_ptr, HV: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr = 0,
):  # fmt: skip
    wait_for_earlier(EARLY)
    h = tl.program_id(0)
    num_chunks = tl.load(totals_ptr)
    offs = tl.arange(0, BLOCK)
    dA_log = tl.zeros([BLOCK], tl.float32)
    ddt_bias = tl.zeros([BLOCK], tl.float32)
    for c0 in range(0, num_chunks, BLOCK):
        at = parts_ptr + (c0 + offs).to(tl.int64) * (2 * HV) + h
        mask = c0 + offs < num_chunks
        dA_log += tl.load(at, mask=mask, other=0.0)
        ddt_bias += tl.load(at + HV, mask=mask, other=0.0)
    tl.store(dA_log_ptr + h, tl.sum(dA_log, 0).to(dA_log_ptr.dtype.element_ty))
    if HAS_BIAS:
        tl.store(ddt_bias_ptr + h, tl.sum(ddt_bias, 0).to(ddt_bias_ptr.dtype.element_ty))


def gate_sums(parts: Tensor, totals: Tensor, dA_log: Tensor, ddt_bias: Tensor | None) -> None:
    """Add up the chunks' shares `parts` [NT,2,HV] of dA_log and ddt_bias [HV], always in the same order.

    totals int32 [2]: first, how many chunks there are.

    Grid: one program a value head. A launch and not a sum of torch's, so that a backward consists of launches only
    and can be repeated without its host code (`plans`).
    """
    HV = parts.shape[2]
    launch(
        _gate_sums_kernel, (HV,), parts, dA_log, ddt_bias, totals,
        HV=HV, BLOCK=256, HAS_BIAS=ddt_bias is not None, num_warps=4,
    )  # fmt: skip
