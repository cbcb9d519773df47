"""Convolutions of the Triton backend with every buffer poisoned, beside sums in float64; no tests of its own.

Runs on a GPU as it is, and on a CPU where TRITON_INTERPRET=1 was set before Triton was imported.
"""

import dataclasses
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from gdn_ops.backends.triton import conv

NAMES = ("y", "dx", "dweight", "dbias", "dhistory", "dtails")


@dataclasses.dataclass
class Case:
    """One call. `fragments`: lengths; `unused`: tokens past the last one; `history`: rows before each fragment."""

    fragments: tuple[int, ...] = (70,)
    unused: int = 0
    W: int = 24
    width: int = 4
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype | None = None
    bias: bool = True
    silu: bool = True
    history: bool = False
    rows: str = "dense"
    index_dtype: torch.dtype = torch.int32
    seed: int = 0

    @property
    def bounds(self) -> list[int]:
        return [0, *itertools.accumulate(self.fragments)]

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1] + self.unused


def _place(x: Tensor, rows: str) -> Tensor:
    """The same values at other strides."""
    if rows == "wider":  # columns of others on both sides, an offset that is not aligned
        wide = torch.full((x.shape[0], x.shape[1] + 40), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, 7 : 7 + x.shape[1]] = x
        return wide[:, 7 : 7 + x.shape[1]]
    if rows == "sliced":
        wide = torch.full((2 * x.shape[0], x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
        wide[::2] = x
        return wide[::2]
    return x


def make(case: Case, device: str = "cpu") -> dict[str, Tensor | None]:
    """Tensors of a case; equal seeds give equal values at any strides. `used`: the fragments whose history counts."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    T, W, P, count = case.num_tokens, case.W, case.width - 1, len(case.fragments)
    parameters = case.parameter_dtype or case.dtype
    made = {
        "dy": _place(normal(T, W).to(case.dtype).to(device), case.rows),
        "x": _place(normal(T, W).to(case.dtype).to(device), case.rows),
        "weight": (normal(W, case.width) * 0.5).to(parameters).to(device),
        "bias": normal(W).to(parameters).to(device) if case.bias else None,
        "history": normal(count if case.history else 0, P, W).to(case.dtype).to(device),
        "tails": normal(count if case.history else 0, P, W).to(device),
        "cu_seqlens": torch.tensor(case.bounds, dtype=case.index_dtype, device=device),
        "used": torch.tensor([*range(count)][:: 2 if case.history else 1] + [-1], device=device),
    }
    return made


def run(case: Case, made: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Outputs and gradients by name; uninitialised memory is NaN."""
    dy, x, weight, bias, history, tails, cu_seqlens, used = made.values()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        y = conv.conv_fwd(x, weight, bias, history, cu_seqlens, case.silu)
        dx, dweight, dbias = conv.conv_bwd(dy, x, weight, bias, history, tails, cu_seqlens, case.silu)
        dhistory = conv.conv_history_bwd(dy, x, weight, bias, history, cu_seqlens, used, case.silu)
    finally:
        torch.use_deterministic_algorithms(deterministic)
    found = {"y": y, "dx": dx, "dweight": dweight, "dhistory": dhistory}
    return found if dbias is None else found | {"dbias": dbias}


def expected(case: Case, made: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The same in float64 by shifted sums and autograd, fragment by fragment, on the tensors' own device."""
    double = {n: None if t is None else t.detach().double() for n, t in made.items()}
    x, weight = (double[n].requires_grad_() for n in ("x", "weight"))
    bias = None if double["bias"] is None else double["bias"].requires_grad_()
    P, W = case.width - 1, case.W
    before = torch.zeros(len(case.fragments), P, W, dtype=torch.float64, device=x.device)
    before = (double["history"] if case.history else before).requires_grad_()
    parts, last = [], []
    for f, (start, end) in enumerate(itertools.pairwise(case.bounds)):
        padded = torch.cat([before[f], x[start:end]])
        z = sum(weight[:, j] * padded[j : j + end - start] for j in range(case.width))
        parts.append(z if bias is None else z + bias)
        kept = min(P, end - start)
        if case.history and kept:  # what later fragments add to the last rows
            last.append((x[end - kept : end] * double["tails"][f, P - kept :]).sum())
    y = torch.cat([*parts, x[case.bounds[-1] :] * 0])
    past = torch.arange(case.num_tokens, device=x.device) >= case.bounds[-1]
    y = torch.where(past[:, None], 0, F.silu(y) if case.silu else y)
    ((y * double["dy"]).sum() + sum(last)).backward()
    used = made["used"]
    dhistory = torch.where((used >= 0)[:, None, None], before.grad[used.clamp(min=0)], 0)
    found = {"y": y.detach(), "dx": x.grad, "dweight": weight.grad, "dhistory": dhistory}
    return found if bias is None else found | {"dbias": bias.grad}


def relative_error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the error over that of `want` (over 1e-30, where `want` is zero); NaN stays NaN."""
    got = got.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def errors(case: Case, device: str = "cpu") -> dict[str, float]:
    """Relative errors of one case's outputs and gradients."""
    made = make(case, device)
    got, want = run(case, made), expected(case, made)
    assert got.keys() == want.keys()
    return {name: relative_error(got[name], want[name]) for name in want}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bitwise equality by name."""
    return all(torch.equal(a[name], b[name]) for name in a)
