"""Depthwise causal convolution over fragments with history rows, in torch ops (any device), deterministic.

Tokens lie flat, [T,W]; `cu_seqlens` [F+1] bounds the fragments; `history` [F,P,W] holds the P = width - 1 rows before
each fragment, oldest first. Tap j of width: z_t = bias + sum_j weight[:, P-j] x_{t-j}; y = silu(z) or z.
"""

import torch
from torch import Tensor

from gdn_ops.shapes import accumulator_dtype


def _place(cu_seqlens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per token its fragment, its position in it, and whether it has one."""
    t = torch.arange(num_tokens, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    fragment = torch.searchsorted(bounds, t, right=True) - 1
    valid = fragment < cu_seqlens.shape[0] - 1
    fragment = fragment.clamp(max=cu_seqlens.shape[0] - 2)
    return fragment, t - bounds[fragment], valid


def _shifted(x: Tensor, history: Tensor, fragment: Tensor, position: Tensor, tap: int) -> Tensor:
    """x_{t-tap} of the token's own document."""
    own = x.roll(tap, 0)
    if tap == 0:
        return own
    row = (history.shape[1] + position - tap).clamp(min=0, max=history.shape[1] - 1)
    return torch.where((position >= tap)[:, None], own, history[fragment, row])


def _sum(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor) -> Tensor:
    fragment, position, _ = _place(cu_seqlens, x.shape[0])
    width = weight.shape[1]
    z = torch.zeros_like(x) if bias is None else bias.expand(x.shape).clone()
    for tap in range(width):
        z += weight[:, width - 1 - tap] * _shifted(x, history, fragment, position, tap)
    return z


@torch.no_grad()
def conv_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, silu: bool) -> Tensor:
    """y [T,W] in x's dtype; zeros for tokens past the last fragment."""
    acc = accumulator_dtype(x.dtype)
    z = _sum(x.to(acc), weight.to(acc), None if bias is None else bias.to(acc), history.to(acc), cu_seqlens)
    y = z * torch.sigmoid(z) if silu else z
    _, _, valid = _place(cu_seqlens, x.shape[0])
    return torch.where(valid[:, None], y, 0).to(x.dtype)


@torch.no_grad()
def conv_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx [T,W], dweight [W,width], dbias [W], dhistory [F,P,W], all in the accumulation dtype."""
    acc = accumulator_dtype(x.dtype)
    x, weight, history = x.to(acc), weight.to(acc), history.to(acc)
    T, width = x.shape[0], weight.shape[1]
    fragment, position, valid = _place(cu_seqlens, T)
    dz = torch.where(valid[:, None], dy.to(acc), 0)
    if silu:
        z = _sum(x, weight, None if bias is None else bias.to(acc), history, cu_seqlens)
        s = torch.sigmoid(z)
        dz = torch.where(valid[:, None], dz * s * (1 + z * (1 - s)), 0)
    dx, dweight, dhistory = torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(history)
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    P = width - 1
    later = torch.arange(T, device=x.device)
    for tap in range(width):
        # Token t + tap reads token t if it has at least `tap` tokens of its fragment before it.
        reads = (position >= tap) & valid & (later >= tap)
        dx += weight[:, P - tap] * torch.where(reads[:, None], dz, 0).roll(-tap, 0)
        there = torch.where(valid[:, None], _shifted(x, history, fragment, position, tap), 0)
        dweight[:, P - tap] = (dz * there).sum(0)
        for pos in range(min(tap, P) if T else 0):
            token = (bounds[:-1] + pos).clamp(max=T - 1)
            dhistory[:, P + pos - tap] += weight[:, P - tap] * torch.where((lengths > pos)[:, None], dz[token], 0)
    return dx, dweight, dz.sum(0), dhistory
