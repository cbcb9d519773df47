"""The ops on a CPU, chunk by chunk with torch ops, in the allocations and layouts that the GPU kernels fill.

Tokens are gathered into chunks [NT,H,C,D] that start at their document's first token. Everything inside a chunk is
batched over chunks and heads; only the recurrence between chunks is a loop. Computes in float32, in float64 for float64
operands. Formulas and their derivation: docs/math.md.

Per chunk, with G the running sum of log decays, Gamma_ij = exp(G_i - G_j) for i >= j, N = tril(Gamma o k k^T, -1):
  A' = (I + diag(beta) N)^-1 diag(beta)      P = scale tril(Gamma o q k^T)
  y = v - e^G (k S);  u = A' y;  o = scale e^G (q S) + P u;  S' = e^GC S + (e^(GC-G) k)^T u
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.outputs import Backward, Forward
from gdn_ops.shapes import CHUNK, L2NORM_EPS, Inputs, Options, Saved, accumulator_dtype

# A decay of exp(-1e6) is zero; -inf itself would turn the differences of running sums into NaN.
_MIN_LOG_DECAY = -1e6


def unsupported_reason(inputs: Inputs, options: Options) -> str | None:
    """Why this backend cannot take a call, or None."""
    if inputs.q.device.type != "cpu":
        return f"takes CPU tensors, got {inputs.q.device}"
    return None


class _Table(NamedTuple):
    """Where chunks lie. tokens [NT,C] index into the flattened [B*T] tokens; valid [NT,C]; steps: chunks by their
    position in their document, as (chunk numbers, document numbers)."""

    tokens: Tensor
    valid: Tensor
    steps: list[tuple[Tensor, Tensor]]


def _table(inputs: Inputs) -> _Table:
    B, T = inputs.q.shape[:2]
    if inputs.cu_seqlens is None:
        spans = [(b * T, (b + 1) * T) for b in range(B)]
    else:
        bounds = inputs.cu_seqlens.tolist()
        spans = list(zip(bounds, bounds[1:], strict=False))  # noqa: RUF007
    starts: list[int] = []
    ends: list[int] = []
    steps: list[tuple[list[int], list[int]]] = []
    for n, (start, end) in enumerate(spans):
        for step, first in enumerate(range(start, end, CHUNK)):
            if step == len(steps):
                steps.append(([], []))
            steps[step][0].append(len(starts))
            steps[step][1].append(n)
            starts.append(first)
            ends.append(end)
    tokens = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(CHUNK)
    valid = tokens < torch.tensor(ends, dtype=torch.int64)[:, None]
    tokens = torch.where(valid, tokens, 0)
    return _Table(tokens, valid, [(torch.tensor(a), torch.tensor(b)) for a, b in steps])


def _gather(x: Tensor, table: _Table, dtype: torch.dtype) -> Tensor:
    """[B,T,H,...] -> [NT,H,C,...]; rows past a document's end are zero, whatever lies there."""
    chunks = x.flatten(0, 1)[table.tokens].to(dtype)
    valid = table.valid.reshape(*table.valid.shape, *(1,) * (chunks.dim() - 2))
    return torch.where(valid, chunks, 0).transpose(1, 2).contiguous()


def _scatter(x: Tensor, table: _Table, like: Sequence[int]) -> Tensor:
    """[NT,H,C,...] -> [B,T,H,...], zeros for tokens that no document has."""
    B, T = like
    rows = x.transpose(1, 2)
    out = x.new_zeros((B * T, *rows.shape[2:]))
    out[table.tokens[table.valid]] = rows[table.valid]
    return out.unflatten(0, (B, T))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Batched product over the two leading axes, whose result for one matrix does not depend on the others."""
    lead = a.shape[:2]
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    batch, enough = a.shape[0], max(2, torch.get_num_threads())
    if 0 < batch < enough:
        # MKL shares one matrix out among threads where there are fewer matrices than threads, and takes a batch of one
        # through matrix-vector routines; both add in another order, and a short document alone would then differ from
        # the same document in a pack. The added matrices run on threads that had nothing to do.
        repeat = torch.arange(enough) % batch
        return torch.bmm(a[repeat], b[repeat])[:batch].unflatten(0, lead)
    return torch.bmm(a, b).unflatten(0, lead)


def _sigmoid(x: Tensor) -> Tensor:
    # exp alone is evaluated the same at every position of a tensor; sigmoid's vector and remainder paths are not.
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + small), small / (1 + small))


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


class _Chunks(NamedTuple):
    """Operands by chunk, and what follows from them without the state. Per value head unless it says HK."""

    q: Tensor  # [NT,HK,C,K], normalised
    k: Tensor  # [NT,HK,C,K]
    v: Tensor  # [NT,HV,C,V]
    norms: Tensor | None  # [NT,2,HK,C]
    x: Tensor | None  # [NT,HV,C] softplus argument
    decay: Tensor  # [NT,HV,C] log decay
    sigmoid: Tensor | None
    beta: Tensor  # [NT,HV,C]
    sums: Tensor  # [NT,HV,C] running sum of decay, float64
    gamma: Tensor  # [NT,HV,C,C], zero above the diagonal
    e_start: Tensor  # [NT,HV,C] e^G
    e_end: Tensor  # [NT,HV,C] e^(GC-G)
    e_all: Tensor  # [NT,HV] e^GC
    kk: Tensor  # [NT,HK,C,C]
    scores: Tensor  # [NT,HV,C,C] P


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[NT,HK,...] -> [NT,HV,...]: value head h reads query/key head h // (HV // HK)."""
    return x.repeat_interleave(heads // x.shape[1], dim=1) if heads != x.shape[1] else x


def _prepare(inputs: Inputs, options: Options, table: _Table) -> _Chunks:
    acc = accumulator_dtype(inputs.q.dtype)
    heads = inputs.v.shape[2]
    q, k, v = (_gather(x, table, acc) for x in inputs[:3])
    norms = None
    if options.use_qk_l2norm:
        norms = torch.stack([torch.rsqrt(x.square().sum(-1) + L2NORM_EPS) for x in (q, k)], 1)
        q, k = q * norms[:, 0, ..., None], k * norms[:, 1, ..., None]
    decay, x = _gather(inputs.g, table, acc), None
    valid = table.valid[:, None, :]
    if inputs.A_log is not None:
        x = decay if inputs.dt_bias is None else decay + inputs.dt_bias.to(acc)[:, None]
        decay = torch.where(valid, -torch.exp(inputs.A_log.to(acc))[:, None] * _softplus(x), 0)
    decay = decay.clamp(min=_MIN_LOG_DECAY)
    beta, sigmoid = _gather(inputs.beta, table, acc), None
    if options.use_beta_sigmoid:
        sigmoid = _sigmoid(beta)
        beta = torch.where(valid, sigmoid * (2 if options.allow_neg_eigval else 1), 0)
    elif options.allow_neg_eigval:
        beta = beta * 2
    # float64: after one extreme decay a float32 running sum would have no digits left for its neighbours.
    sums = decay.double().cumsum(-1)
    last = sums[..., -1:]
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    difference = (sums[..., :, None] - sums[..., None, :]).to(acc)
    gamma = torch.where(causal, torch.exp(torch.where(causal, difference, 0)), 0)
    kk = _mm(k, k.transpose(-1, -2))
    qk = _mm(q, k.transpose(-1, -2))
    scores = options.scale * gamma * _grouped(qk, heads)
    e_end = torch.exp((last - sums).to(acc))
    e_all = torch.exp(last[..., 0].to(acc))
    e_start = torch.exp(sums.to(acc))
    return _Chunks(q, k, v, norms, x, decay, sigmoid, beta, sums, gamma, e_start, e_end, e_all, kk, scores)


def _strict(c: _Chunks) -> Tensor:
    """N = tril(Gamma o k k^T, -1)."""
    return (c.gamma * _grouped(c.kk, c.v.shape[1])).tril(-1)


def _solve(c: _Chunks) -> Tensor:
    """A' = (I + diag(beta) N)^-1 diag(beta)."""
    system = c.beta[..., None] * _strict(c)
    # The right side is diag(beta) itself, so beta = 0 needs no care.
    return torch.linalg.solve_triangular(system, torch.diag_embed(c.beta), upper=False, unitriangular=True)


def _states(c: _Chunks, solve: Tensor, state: Tensor, table: _Table) -> tuple[Tensor, Tensor, Tensor]:
    """States at the start of every chunk [NT,HV,K,V], updates u [NT,HV,C,V], and the documents' final states."""
    heads = c.v.shape[1]
    states = c.v.new_empty((*c.v.shape[:2], c.k.shape[-1], c.v.shape[-1]))
    updates = torch.empty_like(c.v)
    state = state.clone()
    for chunks, documents in table.steps:
        s = state[documents]
        states[chunks] = s
        k = _grouped(c.k[chunks], heads)
        y = c.v[chunks] - c.e_start[chunks][..., None] * _mm(k, s)
        u = _mm(solve[chunks], y)
        updates[chunks] = u
        k_end = c.e_end[chunks][..., None] * k
        state[documents] = c.e_all[chunks][..., None, None] * s + _mm(k_end.transpose(-1, -2), u)
    return states, updates, state


def _initial_state(inputs: Inputs) -> Tensor:
    acc = accumulator_dtype(inputs.q.dtype)
    if inputs.initial_state is not None:
        return inputs.initial_state.to(acc)
    documents = inputs.q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
    return torch.zeros((documents, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3]), dtype=acc)


def _fill(out: Tensor, x: Tensor) -> None:
    """Rows of the chunks there are; chunks that the bound allowed for and no document has are zero."""
    if out.shape[0]:
        out[: x.shape[0]].copy_(x)
        out[x.shape[0] :].zero_()


@torch.no_grad()
def chunk_fwd(out: Forward, inputs: Inputs, options: Options, save: str) -> None:
    """Fill the outputs of `gdn::chunk_fwd`."""
    table = _table(inputs)
    heads = inputs.v.shape[2]
    c = _prepare(inputs, options, table)
    solve = _solve(c)
    states, updates, final = _states(c, solve, _initial_state(inputs), table)
    o = options.scale * c.e_start[..., None] * _mm(_grouped(c.q, heads), states) + _mm(c.scores, updates)
    out.o.copy_(_scatter(o, table, inputs.q.shape[:2]))
    if out.final_state.shape[0]:
        out.final_state.copy_(final)
    if out.norms.shape[0]:
        assert c.norms is not None
        out.norms.copy_(_scatter(c.norms.permute(0, 2, 3, 1).contiguous(), table, inputs.q.shape[:2]).transpose(2, 3))
    _fill(out.gates, (c.sums * math.log2(math.e)).to(out.gates.dtype))
    _fill(out.solve, solve)
    _fill(out.scores, c.scores)
    _fill(out.states, states.transpose(-1, -2))
    _fill(out.updates, updates.transpose(-1, -2))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _sum_group(x: Tensor, heads: int) -> Tensor:
    """[NT,HV,...] -> [NT,HK,...], added in a fixed order."""
    parts = x.unflatten(1, (heads, -1))
    total = parts[:, :, 0]
    for member in range(1, parts.shape[2]):
        total = total + parts[:, :, member]
    return total


@torch.no_grad()
def chunk_bwd(
    out: Backward, do: Tensor, dfinal_state: Tensor | None, inputs: Inputs, saved: Saved, options: Options
) -> None:
    """Fill the outputs of `gdn::chunk_bwd`; dq, dk, dv through the [B,T,G,R,D] targets in `out`."""
    table = _table(inputs)
    B, T, HK = inputs.q.shape[:3]
    heads = inputs.v.shape[2]
    c = _prepare(inputs, options, table)
    acc = c.v.dtype
    used = c.v.shape[0]
    # What was saved in a lower precision than the computation's would change the gradients: compute that again.
    exact = saved.solve.dtype == acc
    solve = saved.solve[:used] if exact and saved.solve.shape[0] else _solve(c)
    if exact and saved.states.shape[0]:
        states = saved.states[:used].transpose(-1, -2).contiguous()
        updates = saved.updates[:used].transpose(-1, -2).contiguous()
    else:
        states, updates, _ = _states(c, solve, _initial_state(inputs), table)
    q, k = _grouped(c.q, heads), _grouped(c.k, heads)
    do_chunks = _gather(do, table, acc)
    e_start, e_end = c.e_start[..., None], c.e_end[..., None]
    scale = options.scale

    # Backwards over the chunks: dstates is the gradient of the state at a chunk's end.
    dstate = torch.zeros_like(_initial_state(inputs)) if dfinal_state is None else dfinal_state.to(acc).clone()
    dstates = torch.empty_like(states)
    du, dv = torch.empty_like(c.v), torch.empty_like(c.v)
    for chunks, documents in reversed(table.steps):
        ds = dstate[documents]
        dstates[chunks] = ds
        do_c, k_c = do_chunks[chunks], k[chunks]
        du_c = _mm(c.scores[chunks].transpose(-1, -2), do_c) + _mm(e_end[chunks] * k_c, ds)
        dv_c = _mm(solve[chunks].transpose(-1, -2), du_c)
        du[chunks], dv[chunks] = du_c, dv_c
        q_start, k_start = e_start[chunks] * q[chunks], e_start[chunks] * k_c
        dstate[documents] = (
            c.e_all[chunks][..., None, None] * ds
            + scale * _mm(q_start.transpose(-1, -2), do_c)
            - _mm(k_start.transpose(-1, -2), dv_c)
        )
    if out.d_initial_state.shape[0]:
        out.d_initial_state.copy_(dstate)

    # Everything else is inside a chunk.
    states_t, updates_t = states.transpose(-1, -2), updates.transpose(-1, -2)
    strict = _strict(c)
    dscores = scale * c.gamma * _mm(do_chunks, updates_t)
    dkk = -(c.gamma * _mm(dv, updates_t)).tril(-1)
    dq_state = scale * e_start * _mm(do_chunks, states_t)
    dk_start = -e_start * _mm(dv, states_t)
    dk_end = e_end * _mm(updates, dstates.transpose(-1, -2))
    dq = dq_state + _mm(dscores, k)
    dk = dk_start + dk_end + _mm(dscores.transpose(-1, -2), q) + _mm(dkk, k) + _mm(dkk.transpose(-1, -2), k)

    # beta: (I + diag(beta) N) u = diag(beta) y, so u = beta e with e = y - N u, and dbeta = w.e with w = du - N^T dv.
    y = c.v - e_start * _mm(k, states)
    dbeta = _dot(du - _mm(strict.transpose(-1, -2), dv), y - _mm(strict, updates))

    # The running sum G: exp(G_i - G_j) in the scores and in N, e^G at the state, e^(GC-G) at the update, e^GC.
    # Each of these terms enters once with either sign, so the reversed sum cancels them: exactly, in float64.
    weight = dscores * _grouped(_mm(c.q, c.k.transpose(-1, -2)), heads) + dkk * _grouped(c.kk, heads)
    weight, at_end = weight.double(), _dot(dk_end, k).double()
    at_start = (_dot(dq_state, q) + _dot(dk_start, k)).double()
    dsums = weight.sum(-1) - weight.sum(-2) + at_start - at_end
    dsums[..., -1] += at_end.sum(-1) + (c.e_all * _dot(states, dstates).sum(-1)).double()
    ddecay = dsums.flip(-1).cumsum(-1).flip(-1).to(acc)

    shape = (B, T)
    dg = ddecay
    if c.x is not None:
        assert inputs.A_log is not None
        rate = -torch.exp(inputs.A_log.to(acc))[:, None]
        # The rate alone may overflow where the sigmoid is zero.
        dg = ddecay * (rate * _sigmoid(c.x))
        dg = torch.where(table.valid[:, None, :], dg, 0)
        out.dA_log.copy_((ddecay * c.decay).sum((0, 2)))
        if inputs.dt_bias is not None:
            out.ddt_bias.copy_(dg.sum((0, 2)))
    if c.sigmoid is not None:
        dbeta = dbeta * c.sigmoid * (1 - c.sigmoid)
    if options.allow_neg_eigval:
        dbeta = dbeta * 2
    out.dg.copy_(_scatter(dg, table, shape))
    out.dbeta.copy_(_scatter(dbeta, table, shape))

    dq, dk = _sum_group(dq, HK), _sum_group(dk, HK)
    if c.norms is not None:
        dq = c.norms[:, 0, ..., None] * (dq - c.q * _dot(c.q, dq)[..., None])
        dk = c.norms[:, 1, ..., None] * (dk - c.k * _dot(c.k, dk)[..., None])
    for target, grad in ((out.dq, dq), (out.dk, dk), (out.dv, dv)):
        target.copy_(_scatter(grad, table, shape).reshape(target.shape))
