"""Depthwise causal convolution over fragments with history rows, in torch ops (any device), deterministic.

Tokens lie flat, [T,W]; `cu_seqlens` [F+1] bounds the fragments; `history` [F,P,W] holds the P = width - 1 rows before
each fragment, oldest first, or has zero rows for none. z_t = bias + sum_tap weight[:, P - tap] x_{t-tap}; y = silu(z)
or z. The GPU kernels of the same names are in gdn_ops/backends/triton/conv.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gdn_ops.shapes import accumulator_dtype


class _Place(NamedTuple):
    """Per token its fragment, its position in it, the tokens after it there, and whether it has a fragment."""

    fragment: Tensor
    position: Tensor
    remaining: Tensor
    valid: Tensor


def _place(cu_seqlens: Tensor, num_tokens: int) -> _Place:
    t = torch.arange(num_tokens, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    fragment = torch.searchsorted(bounds, t, right=True) - 1
    valid = fragment < cu_seqlens.shape[0] - 1
    fragment = fragment.clamp(max=cu_seqlens.shape[0] - 2)
    return _Place(fragment, t - bounds[fragment], bounds[fragment + 1] - 1 - t, valid)


def _shifted(x: Tensor, history: Tensor, place: _Place, tap: int) -> Tensor:
    """x_{t-tap} of the token's own document."""
    own = x.roll(tap, 0)
    if tap == 0:
        return own
    before: Tensor | int = 0
    if history.shape[0]:
        row = (history.shape[1] + place.position - tap).clamp(min=0, max=history.shape[1] - 1)
        before = history[place.fragment, row]
    return torch.where((place.position >= tap)[:, None], own, before)


def _sum(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, place: _Place) -> Tensor:
    width = weight.shape[1]
    z = torch.zeros_like(x) if bias is None else bias.expand(x.shape).clone()
    for tap in range(width):
        z += weight[:, width - 1 - tap] * _shifted(x, history, place, tap)
    return z


def _sum_gradient(dy: Tensor, z: Tensor, silu: bool) -> Tensor:
    """dz of dy."""
    if not silu:
        return dy
    s = torch.sigmoid(z)
    return dy * s * (1 + z * (1 - s))


@torch.no_grad()
def conv_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, silu: bool) -> Tensor:
    """y [T,W] in x's dtype; zeros for tokens past the last fragment."""
    acc = accumulator_dtype(x.dtype)
    place = _place(cu_seqlens, x.shape[0])
    z = _sum(x.to(acc), weight.to(acc), None if bias is None else bias.to(acc), history.to(acc), place)
    y = z * torch.sigmoid(z) if silu else z
    return torch.where(place.valid[:, None], y, 0).to(x.dtype)


@torch.no_grad()
def conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, tails: Tensor, cu_seqlens: Tensor,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dx [T,W], dweight [W,width], dbias [W], each in its input's dtype.

    `tails` [F,P,W]: what later fragments' tokens add to each fragment's last rows, newest last; zero rows for none.
    """
    acc = accumulator_dtype(x.dtype)
    row, taps, before = x.to(acc), weight.to(acc), history.to(acc)
    T, width = row.shape[0], weight.shape[1]
    P = width - 1
    place = _place(cu_seqlens, T)
    valid = place.valid[:, None]
    dz = torch.where(valid, dy.to(acc), 0)
    if silu:
        z = _sum(row, taps, None if bias is None else bias.to(acc), before, place)
        dz = torch.where(valid, _sum_gradient(dz, z, silu), 0)
    dx, dweight = torch.zeros_like(row), torch.zeros_like(taps)
    if tails.shape[0]:
        last = tails.to(acc)[place.fragment, (P - 1 - place.remaining).clamp(min=0, max=P - 1)]
        dx += torch.where(valid & (place.remaining < P)[:, None], last, 0)
    later = torch.arange(T, device=x.device)
    for tap in range(width):
        # Token t + tap reads token t if it has at least `tap` tokens of its fragment before it.
        reads = (place.position >= tap) & place.valid & (later >= tap)
        dx += taps[:, P - tap] * torch.where(reads[:, None], dz, 0).roll(-tap, 0)
        there = torch.where(valid, _shifted(row, before, place, tap), 0)
        dweight[:, P - tap] = (dz * there).sum(0)
    dbias = None if bias is None else dz.sum(0).to(bias.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias


@torch.no_grad()
def conv_history_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor,
    fragments: Tensor, silu: bool,
) -> Tensor:  # fmt: skip
    """Gradients of the history rows of `fragments` [B] (-1: none, zeros): [B,P,W], oldest first, accumulation dtype."""
    acc = accumulator_dtype(x.dtype)
    T, W = x.shape
    P = weight.shape[1] - 1
    out = torch.zeros((fragments.shape[0], P, W), dtype=acc, device=x.device)
    if not T or not fragments.shape[0]:
        return out
    bounds, taps, own = cu_seqlens.long(), weight.to(acc), fragments.clamp(min=0)
    # The first P tokens of each fragment behind its history, [B,2P,W]; tokens past its end do not count.
    token = bounds[own, None] + torch.arange(P, device=x.device)
    there = ((token < bounds[own + 1, None]) & (fragments >= 0)[:, None])[..., None]
    token = token.clamp(max=T - 1)
    before = history.to(acc)[own] if history.shape[0] else out
    rows = torch.cat([before, torch.where(there, x[token].to(acc), 0)], 1)
    z = torch.zeros_like(out) if bias is None else bias.to(acc).expand(out.shape).clone()
    for tap in range(P + 1):
        z += taps[:, P - tap] * rows[:, P - tap : 2 * P - tap]
    dz = torch.where(there, _sum_gradient(dy[token].to(acc), z, silu), 0)
    for position in range(P):
        for back in range(1, P + 1 - position):
            out[:, P - back] += taps[:, P - position - back] * dz[:, position]
    return out
