"""A chunked float64 recurrence under autograd, quick enough for long documents on a GPU, and seeded inputs for it."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops.shapes import Inputs, Options

CHUNK = 32


class Result(NamedTuple):
    """Outputs and gradients in float64; a gradient is None where its input is absent."""

    o: Tensor
    final_state: Tensor
    grads: dict[str, Tensor]


def run(inputs: Inputs, options: Options, do: Tensor, dfinal_state: Tensor | None, bounds: list[int] | None) -> Result:
    """Evaluate outputs and all gradients; `bounds` are cu_seqlens' values (None: every batch entry a document)."""
    leaves = {
        name: x.detach().double().requires_grad_()
        for name, x in inputs._asdict().items()
        if x is not None and name != "cu_seqlens"
    }
    B, T, HK, K = inputs.q.shape
    HV, V = inputs.v.shape[2:]
    q, k = leaves["q"], leaves["k"]
    if options.use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // HK, 2) for x in (q, k))
    g, beta = leaves["g"], leaves["beta"]
    if inputs.A_log is not None:
        shifted = g if inputs.dt_bias is None else g + leaves["dt_bias"]
        g = -leaves["A_log"].exp() * torch.nn.functional.softplus(shifted, threshold=700.0)
    if options.use_beta_sigmoid:
        beta = beta.sigmoid()
    if options.allow_neg_eigval:
        beta = 2 * beta
    documents = [(b, 0, T) for b in range(B)] if bounds is None else [(0, *x) for x in itertools.pairwise(bounds)]
    o = torch.zeros(B, T, HV, V, dtype=torch.float64, device=q.device)
    finals, pieces = [], []
    for n, (b, start, end) in enumerate(documents):
        initial = leaves.get("initial_state")
        S = torch.zeros(HV, K, V, dtype=torch.float64, device=q.device) if initial is None else initial[n]
        for t in range(start, end, CHUNK):
            piece = slice(t, min(t + CHUNK, end))
            qc, kc, vc = (x[b, piece].transpose(0, 1) for x in (q, k, leaves["v"]))
            G, bc = (x[b, piece].t() for x in (g, beta))
            G = G.cumsum(-1)
            c = G.shape[-1]
            lower = torch.ones(c, c, dtype=torch.bool, device=q.device).tril()
            decay = torch.where(lower, G[:, :, None] - G[:, None, :], 0.0).exp() * lower
            L = (bc[:, :, None] * decay * (kc @ kc.transpose(1, 2))).tril(-1)
            y = bc[:, :, None] * (vc - G.exp()[:, :, None] * (kc @ S))
            u = torch.linalg.solve_triangular(L + torch.eye(c, dtype=y.dtype, device=y.device), y, upper=False)
            pieces.append((b, piece, options.scale * (G.exp()[:, :, None] * (qc @ S) + (decay * (qc @ kc.mT)) @ u)))
            S = G[:, -1].exp()[:, None, None] * S + ((G[:, -1:] - G).exp()[:, :, None] * kc).mT @ u
        finals.append(S)
    loss = torch.zeros((), dtype=torch.float64, device=q.device)
    for b, piece, value in pieces:
        o[b, piece] = value.detach().transpose(0, 1)
        loss = loss + (value * do[b, piece].double().transpose(0, 1)).sum()
    final_state = torch.stack(finals) if finals else o.new_zeros(0, HV, K, V)
    if dfinal_state is not None:
        loss = loss + (final_state * dfinal_state.double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return Result(
        o, final_state.detach(),
        {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(leaves.items(), grads, strict=True)},
    )  # fmt: skip


def make(
    *, HK: int = 2, HV: int = 6, bounds: list[int] | None = None, T: int | None = None, B: int = 1, seed: int = 0,
    dtype: torch.dtype = torch.bfloat16, device: str = "cuda", decay: str = "base", parallel_keys: bool = False,
    zero_beta: bool = False, norm: bool = False, gate: bool = False, sigmoid: bool = False, initial: bool = False,
    spare_columns: int = 0,
) -> tuple[Inputs, Tensor, Tensor | None]:  # fmt: skip
    """Inputs, output gradient and final-state gradient. q, k, v are views of one packed row of [q | k | v] heads."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    T = T if T is not None else bounds[-1] if bounds else 0
    D, N = 128, B if bounds is None else len(bounds) - 1
    qk = normal(B, T, 2 * HK, D)
    if parallel_keys:
        qk = 0.1 * qk + normal(1, 1, 2 * HK, D)
    qk = 3.0 * qk if norm else torch.nn.functional.normalize(qk, dim=-1)
    row = torch.cat([qk.flatten(2), normal(B, T, HV * D), normal(B, T, spare_columns)], -1).to(dtype)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in row[..., : (2 * HK + HV) * D].split([HK * D, HK * D, HV * D], -1))
    g = torch.nn.functional.logsigmoid(normal(B, T, HV) + 3.0)
    if decay == "weak":
        g = 0.02 * g
    elif decay == "strong":
        g = -20.0 * torch.rand(B, T, HV, generator=generator, device=device)
    elif decay == "extreme":
        g = torch.where(torch.rand(B, T, HV, generator=generator, device=device) < 0.1, -1e4, 0.1 * g)
    elif decay == "none":
        g = torch.zeros_like(g)
    if gate:
        g = normal(B, T, HV)
    beta = normal(B, T, HV) + (3.0 if parallel_keys else 0.0)
    beta = beta if sigmoid else beta.sigmoid()
    if zero_beta:
        beta = torch.where(torch.rand(B, T, HV, generator=generator, device=device) < 0.3, 0.0, beta)
    optional: dict[str, Any] = {}
    if bounds is not None:
        optional["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    if initial:
        optional["initial_state"] = normal(N, HV, D, D)
    if gate:
        optional |= {"A_log": 0.3 * normal(HV), "dt_bias": 0.3 * normal(HV) - 2.0}
    do = normal(B, T, HV, D).to(dtype)
    return Inputs(q, k, v, g, beta, **optional), do, normal(N, HV, D, D) if initial else None


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Relative root mean square error; infinite if anything is not finite, absolute where the reference is zero."""
    difference = (value.double() - reference).norm().item()
    size = reference.norm().item()
    error = difference / size if size > 0 else difference
    return error if error == error else float("inf")
