"""The correctness gate: no figure of a provider whose results are wrong is printed."""

import functools

import torch
from torch import Tensor

from gdn_ops import reference
from gdn_ops.bench import scopes
from gdn_ops.bench.cases import Case, Data, make_data, reduced
from gdn_ops.bench.providers import Provider, split

RELATIVE_RMS = 1e-2
"""||found - expected|| / ||expected|| of any result, in half precision; 1e-4 in float32."""

MAX_ABS = 2e-2
"""Largest error as a part of the largest expected value, in half precision; 1e-3 in float32."""


def errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Relative root mean square error and largest error over the largest expected value; NaN never passes."""
    found, expected = found.double(), expected.double()
    difference = found - expected
    rms = (difference.norm() / expected.norm().clamp(min=1e-30)).item()
    largest = (difference.abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return rms, largest


def _parts(case: Case, o: Tensor, drow: Tensor, dg: Tensor, dbeta: Tensor) -> dict[str, Tensor]:
    # Apart: in the norm of a whole row a wrong dq would hide behind a larger dv.
    dq, dk, dv = split(case, drow)
    return {"o": o, "dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta}


def recurrence(case: Case, data: Data) -> dict[str, Tensor]:
    """Output and gradients of the float64 recurrence: o, dq, dk, dv, dg, dbeta."""
    row, g, beta = (x.detach().double().requires_grad_() for x in (data.row, data.g, data.beta))
    right, _ = reference.chunk_gated_delta_rule(
        *split(case, row), g, beta, use_qk_l2norm_in_kernel=case.use_qk_l2norm, cu_seqlens=data.cu_seqlens
    )
    gradients = torch.autograd.grad(right, (row, g, beta), data.do.double())
    return _parts(case, right.detach(), *gradients)


def results(case: Case, data: Data, provider: Provider) -> dict[str, Tensor]:
    """The same of a provider, eager, from plain split views of the row."""
    prepared = scopes.row(case, data, provider, "plain", compiled=False, recompute=False)
    o = prepared.forward()
    prepared.backward(o)
    return _parts(case, o.detach(), *prepared.gradients())


@functools.lru_cache(maxsize=4)
def expected_of(small: Case, device: str) -> dict[str, Tensor]:
    """`recurrence` of the gate's inputs, once for all providers of a case."""
    return recurrence(small, make_data(small, device, seed=11))


def check(case: Case, provider: Provider, device: str) -> str | None:
    """Compare the output and every gradient with the float64 recurrence at few tokens; None, or what is wrong."""
    small = reduced(case)
    data = make_data(small, device, seed=11)
    found = results(small, data, provider)
    strict = case.dtype in (torch.float32, torch.float64)
    bounds = (1e-4, 1e-3) if strict else (RELATIVE_RMS, MAX_ABS)
    for name, x in expected_of(small, device).items():
        rms, largest = errors(found[name], x)
        if not (rms <= bounds[0] and largest <= bounds[1]):
            return f"{name}: relative RMS {rms:.1e} (limit {bounds[0]:g}), largest {largest:.1e} (limit {bounds[1]:g})"
    return None
