"""Calls of the Triton backend with every buffer poisoned, beside the float64 recurrence; no tests of its own.

Runs on a GPU as it is, and on a CPU where TRITON_INTERPRET=1 was set before Triton was imported.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gdn_ops import reference
from gdn_ops.backends import triton as backend
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd, gradient_target
from gdn_ops.shapes import Inputs, Options, RowLayout

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias")


@dataclasses.dataclass
class Case:
    """One call. `documents`: lengths, or None for a dense batch; `unused`: tokens past the last document."""

    documents: tuple[int, ...] | None = (70,)
    unused: int = 0
    B: int = 1
    T: int = 0
    HK: int = 1
    HV: int = 2
    K: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    norm: bool = False
    gate: bool = False
    bias: bool = True
    sigmoid: bool = False
    double: bool = False
    initial: bool = False
    final: bool = False
    save: str = "solve"
    g_scale: float = 1.0
    g_values: tuple[float, ...] = ()
    A_log: float | None = None
    zero_beta: bool = False
    rows: str = "dense"
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        return self.T if self.documents is None else sum(self.documents) + self.unused

    @property
    def num_documents(self) -> int:
        return self.B if self.documents is None else len(self.documents)


def layouts(case: Case) -> tuple[int, list[RowLayout]]:
    """Row width and where q, k, v lie in it: plain, or interleaved by group with columns of others in between."""
    HK, HV, K, V = case.HK, case.HV, case.K, case.V
    if case.rows == "packed":
        q, k, v = RowLayout(0, K, 1, 0), RowLayout(HK * K, K, 1, 0), RowLayout(2 * HK * K, V, 1, 0)
        return 2 * HK * K + HV * V, [q, k, v]
    R = HV // HK
    group = 2 * K + R * V + 16
    return HK * group + 32, [
        RowLayout(16, group, 1, 0), RowLayout(16 + K, group, 1, 0), RowLayout(16 + 2 * K, group, R, V),
    ]  # fmt: skip


def _place(x: Tensor, case: Case) -> Tensor:
    """The same values at other strides."""
    if case.rows == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if case.rows == "sliced":
        wide = torch.full((x.shape[0], 2 * x.shape[1], *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, ::2] = x
        return wide[:, ::2]
    if case.rows == "unaligned":
        return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)
    return x.contiguous()


def make(case: Case, device: str = "cpu") -> tuple[Inputs, Options, Tensor, Tensor | None]:
    """Inputs, options, do and dfinal_state of a case; equal seeds give equal values at any strides."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    B, T, HK, HV, K, V = case.B, case.num_tokens, case.HK, case.HV, case.K, case.V
    q, k, v = normal(B, T, HK, K), normal(B, T, HK, K), normal(B, T, HV, V)
    if not case.norm:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = normal(B, T, HV) if case.gate else torch.nn.functional.logsigmoid(normal(B, T, HV) + 3) * case.g_scale
    if case.g_values:
        picks = torch.randint(len(case.g_values), (B, T, HV), generator=generator)
        g = torch.tensor(case.g_values)[picks]
    beta = normal(B, T, HV) if case.sigmoid else torch.sigmoid(normal(B, T, HV))
    if case.zero_beta:
        beta[:, ::3] = 0
        beta[:, 1::3] *= 1e-12
    A_log = torch.rand(HV, generator=generator) if case.gate else None
    if case.A_log is not None:
        A_log = torch.full((HV,), case.A_log)
    dt_bias = normal(HV) if case.gate and case.bias else None
    N = case.num_documents
    initial_state = normal(N, HV, K, V) if case.initial else None
    do = normal(B, T, HV, V).to(case.dtype)
    dfinal_state = normal(N, HV, K, V) if case.final else None
    cu_seqlens = None
    if case.documents is not None:
        ends = torch.tensor([0, *case.documents]).cumsum(0)
        cu_seqlens = ends.to(case.index_dtype)
    moved = [
        None if x is None else x.to(device)
        for x in (
            q.to(case.dtype),
            k.to(case.dtype),
            v.to(case.dtype),
            g,
            beta,
            initial_state,
            cu_seqlens,
            A_log,
            dt_bias,
        )
    ]
    if case.rows in ("packed", "interleaved"):
        width, places = layouts(case)
        row = torch.full((B, T, width), float("nan"), dtype=case.dtype, device=device)
        for i, (layout, heads, size) in enumerate(zip(places, (HK, HK, HV), (K, K, V), strict=True)):
            view = gradient_target(row, row, layout, heads, size)
            view.copy_(moved[i].view(view.shape))
            if view.shape[3] == 1:
                moved[i] = view[:, :, :, 0]
            else:  # heads in two strides: the op's q, k, v have one, so such an operand is read from a copy
                moved[i] = moved[i].contiguous()
    else:
        moved[:3] = [_place(x, case) for x in moved[:3]]
    options = Options(K**-0.5, case.norm, case.sigmoid, case.double)
    return Inputs(*moved), options, do.to(device), None if dfinal_state is None else dfinal_state.to(device)


def poison(tensors: Any) -> None:
    """Fill with NaN, so that an element that nothing writes cannot look right."""
    for x in tensors:
        if x.is_floating_point():
            x.fill_(float("nan"))


def run(case: Case, made: tuple[Inputs, Options, Tensor, Tensor | None]) -> dict[str, Tensor]:
    """Forward and backward; outputs, gradients and (for packed rows) the gradient row, by name."""
    inputs, options, do, dfinal_state = made
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # torch.empty, the backend's scratch included, gives NaN
    try:
        out = allocate_chunk_fwd(inputs, output_final_state=case.final, use_qk_l2norm=case.norm, save=case.save)
        poison(out)
        backend.chunk_fwd(out, inputs, options, case.save)
        if case.save == "none":
            return {"o": out.o, "final_state": out.final_state}
        packed = case.rows in ("packed", "interleaved")
        grads = allocate_chunk_bwd(inputs, (packed,) * 3)
        poison(grads)
        result = {"o": out.o, "final_state": out.final_state}
        sizes = zip((case.HK, case.HK, case.HV), (case.K, case.K, case.V), strict=True)
        if packed:
            width, places = layouts(case)
            row = torch.full((case.B, case.num_tokens, width), -7.0, dtype=case.dtype, device=do.device)
            targets = [gradient_target(row, row, p, h, d) for p, (h, d) in zip(places, sizes, strict=True)]
            result["row"] = row
        else:
            targets = [x.unsqueeze(3) for x in grads[:3]]
        filled = grads._replace(dq=targets[0], dk=targets[1], dv=targets[2])
        backend.chunk_bwd(filled, do, dfinal_state, inputs, out.saved, options)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    result |= zip(NAMES[2:], filled, strict=True)
    for name, x in (("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v)):
        result[name] = result[name].reshape(x.shape)
    return result


def expected(case: Case, made: tuple[Inputs, Options, Tensor, Tensor | None]) -> dict[str, Tensor]:
    """The same by the float64 recurrence and autograd."""
    inputs, options, do, dfinal_state = made
    leaves = [x if x is None or not x.is_floating_point() else x.double().requires_grad_(True) for x in inputs]
    q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias = leaves
    o, final_state = reference.chunk_gated_delta_rule(
        q, k, v, g, beta, options.scale, initial_state, case.final, case.norm, case.sigmoid, case.double, cu_seqlens,
        use_gate_in_kernel=case.gate, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    loss = (o * do.double()).sum()
    if dfinal_state is not None:
        loss = loss + (final_state * dfinal_state.double()).sum()
    loss.backward()
    result = {"o": o.detach()}
    if final_state is not None:
        result["final_state"] = final_state.detach()
    for name, x in zip(NAMES[2:], (q, k, v, g, beta, initial_state, A_log, dt_bias), strict=True):
        if x is not None:
            result[name] = x.grad
    return result


class _Rounded(torch.autograd.Function):
    """A product whose operands are rounded to a dtype, in its derivatives too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a.to(dtype).double() @ b.to(dtype).double()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = (x.to(ctx.dtype).double() for x in ctx.saved_tensors)
        d = d.to(ctx.dtype).double()
        return d @ b.mT, a.mT @ d, None


def eager(case: Case, made: tuple[Inputs, Options, Tensor, Tensor | None]) -> dict[str, Tensor]:
    """The same of one document by the chunk form as plain torch code has it, under autograd: operands of products in
    the case's dtype, everything else in float64. What an independent computation in that dtype errs by."""
    inputs, options, do, dfinal_state = made
    leaves = {
        name: x.detach().double().requires_grad_()
        for name, x in inputs._asdict().items()
        if x is not None and name != "cu_seqlens"
    }

    def product(a: Tensor, b: Tensor) -> Tensor:
        return _Rounded.apply(a, b, case.dtype)

    q, k, v, g, beta = (leaves[name] for name in ("q", "k", "v", "g", "beta"))
    if options.use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(case.HV // case.HK, 2) for x in (q, k))
    if options.use_beta_sigmoid:
        beta = beta.sigmoid() * (2 if options.allow_neg_eigval else 1)
    state = leaves["initial_state"][0]
    outputs = []
    for t in range(0, case.num_tokens, 64):
        q_c, k_c, v_c = (x[0, t : t + 64].transpose(0, 1) for x in (q, k, v))
        gate, beta_c = g[0, t : t + 64].t().cumsum(-1), beta[0, t : t + 64].t()
        decay = (gate[:, :, None] - gate[:, None, :]).tril().exp().tril()
        system = torch.eye(decay.shape[-1], dtype=torch.float64, device=q.device)
        system = system + beta_c[:, :, None] * (decay * product(k_c, k_c.mT)).tril(-1)
        solve = torch.linalg.solve_triangular(system, torch.diag_embed(beta_c), upper=False, unitriangular=True)
        read = gate.exp()[:, :, None]
        u = product(solve, v_c - read * product(k_c, state))
        scores = options.scale * decay * product(q_c, k_c.mT)
        outputs.append(options.scale * read * product(q_c, state) + product(scores, u))
        write = (gate[:, -1:] - gate).exp()[:, :, None]
        state = gate[:, -1, None, None].exp() * state + product((write * k_c).mT, u)
    o = torch.cat(outputs, 1).transpose(0, 1)[None]
    assert dfinal_state is not None
    torch.autograd.backward([o, state], [do.double(), dfinal_state[0].double()])
    result = {"o": o.detach(), "final_state": state.detach()[None]}
    names = {name: "d_" + name if name == "initial_state" else "d" + name for name in leaves}
    return result | {names[name]: x.grad for name, x in leaves.items()}


def over_eager(case: Case, made: tuple[Inputs, Options, Tensor, Tensor | None]) -> dict[str, tuple[float, float]]:
    """Errors beyond twice those of `eager` and one rounding of the result: the error, and that of `eager`."""
    got, want, other = run(case, made), expected(case, made), eager(case, made)
    wrong = {}
    for name, right in want.items():
        error = relative_error(got[name], right)
        independent = relative_error(other[name].to(got[name].dtype), right)
        if not error <= 2 * independent + torch.finfo(got[name].dtype).eps / 2:
            wrong[name] = error, independent
    return wrong


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the error over that of `want` (over 1e-30, where `want` is zero); NaN stays NaN."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def errors(case: Case, device: str = "cpu") -> dict[str, float]:
    """Relative errors of one case's outputs and gradients."""
    made = make(case, device)
    got, want = run(case, made), expected(case, made)
    return {name: relative_error(got[name], want[name]) for name in want}
