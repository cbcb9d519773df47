"""The short causal convolution before GDN, over fragments: its first tokens need rows that another rank may hold.

    halo       each fragment that goes on elsewhere tells its last width - 1 rows; one all-gather
    forward    gdn::causal_conv1d_fwd, one op from the packed row to the packed row, SiLU inside
    backward   gdn::causal_conv1d_bwd; the gradients of history rows go back by one all-gather

A fragment shorter than width - 1 passes on rows of the ones before it, so rows are found by the partition's own plan.
"""

from typing import Any

import torch
from torch import Tensor

from gdn_ops import checks, counters, settings
from gdn_ops.autograd import _needs_graph, _refuse_forward_mode
from gdn_ops.context_parallel import calls
from gdn_ops.context_parallel.context import Context
from gdn_ops.context_parallel.path import gather
from gdn_ops.context_parallel.plan import MAX_WIDTH, Halo
from gdn_ops.derivatives import first_derivative_only
from gdn_ops.ops import _load, _on_cpu, check_cu_seqlens_values, lib

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_ARGS = "Tensor x, Tensor weight, Tensor? bias, Tensor history, Tensor cu_seqlens, *, bool silu"
SCHEMAS = {
    "causal_conv1d_fwd": f"({_ARGS}) -> Tensor",
    "causal_conv1d_bwd": f"(Tensor dy, {_ARGS}) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dhistory)",
    "halo_tell": "(Tensor x, Tensor segments, *, int depth, int num_ranks) -> Tensor",
    "halo_return": "(Tensor dx, Tensor told, Tensor segments, Tensor rows, Tensor positions) -> Tensor",
}
"""Argument and result lists, by name (namespace `gdn`). x is [T,W], history [F,width-1,W]."""


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, *, silu: bool) -> Tensor:
    if cu_seqlens.device.type == "cpu" or settings.current().debug:
        check_cu_seqlens_values(cu_seqlens, x.shape[0])
    return _load("cpu_conv").conv_fwd(x, weight, bias, history, cu_seqlens, silu)


def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, *, silu: bool
) -> tuple[Tensor, ...]:
    dx, dweight, dbias, dhistory = _load("cpu_conv").conv_bwd(dy, x, weight, bias, history, cu_seqlens, silu)
    dbias = weight.new_zeros((0,)) if bias is None else dbias.to(bias.dtype)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias, dhistory.to(x.dtype)


def _tail_tokens(segments: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """[A,depth] the tokens 1, 2, ... before each segment's end, and whether the segment has them."""
    start, end = segments.long().view(-1, 2).unbind(1)
    token = end[:, None] - 1 - torch.arange(depth, device=segments.device)
    return token, token >= start[:, None]


@torch.no_grad()
def _halo_tell(x: Tensor, segments: Tensor, *, depth: int, num_ranks: int) -> Tensor:
    if num_ranks > 1:
        counters.count("context_exchanges")
    token, there = _tail_tokens(segments, depth)
    if x.shape[0] == 0:
        return x.new_zeros((*token.shape, x.shape[1]))
    return torch.where(there[..., None], x[token.clamp(min=0)], 0).contiguous()


@torch.no_grad()
def _halo_return(dx: Tensor, told: Tensor, segments: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """dx with what the readers of its last rows found: told [R*B,depth,W], rows and positions [A,depth,readers]."""
    out = dx.clone()
    if dx.shape[0] == 0:
        return out
    token, there = _tail_tokens(segments, rows.shape[1])
    found = told.new_zeros((*token.shape, dx.shape[1]), dtype=torch.promote_types(told.dtype, torch.float32))
    for reader in range(rows.shape[2]):
        row, position = rows[..., reader], positions[..., reader]
        # A narrower convolution reaches less far back than the plan does.
        reads = (row >= 0) & (position < told.shape[1])
        value = told[row.clamp(min=0), position.clamp(min=0, max=told.shape[1] - 1)]
        found += torch.where(reads[..., None], value, 0)
    token = torch.where(there, token, 0).flatten()
    found = torch.where(there[..., None], found, 0).flatten(0, 1)
    # Each token is in one segment once; the others add zeros.
    return out.index_add_(0, token, found.to(out.dtype))


def _bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, *, silu: bool
) -> tuple[Tensor, ...]:
    dbias = weight.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias, x.new_empty(history.shape)


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "causal_conv1d_fwd": (_fwd, lambda x, *args, **kwargs: x.new_empty(x.shape)),
    "causal_conv1d_bwd": (_bwd, _bwd_fake),
    "halo_tell": (
        _halo_tell,
        lambda x, segments, *, depth, num_ranks: x.new_empty((segments.shape[0] // 2, depth, x.shape[1])),
    ),
    "halo_return": (_halo_return, lambda dx, *args: dx.new_empty(dx.shape)),
}
for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    lib.impl(_name, _on_cpu(_run), "CPU")
    lib.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"gdn::{_name}", _fake, lib=lib)


def _history(x: Tensor, depth: int, cu_seqlens: Tensor, segments: Tensor, halo: Halo | None, ranks: Any) -> Tensor:
    """[F,depth,W], oldest first; zeros before a document's first token."""
    history = x.new_zeros((cu_seqlens.shape[0] - 1, depth, x.shape[1]))
    if halo is None or halo.fragments.shape[0] == 0:
        return history
    told = torch.ops.gdn.halo_tell.default(x, segments, depth=depth, num_ranks=ranks[0])
    heard = gather(told.view(-1), ranks[0], ranks[1], "convolution rows").view(-1, depth, x.shape[1])
    row, back = halo.sources[:, :depth], halo.distances[:, :depth]
    near = torch.where((row >= 0)[..., None], heard[row.clamp(min=0), back.clamp(min=0)], 0)
    place = torch.where(halo.fragments >= 0, halo.fragments, history.shape[0])
    padded = x.new_zeros((history.shape[0] + 1, depth, x.shape[1]))
    return padded.index_copy(0, place, near.flip(1))[:-1]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, segments: Any, silu: bool,
        ranks: tuple[int, str], *halo: Tensor,
    ) -> Tensor:  # fmt: skip
        found = Halo(*halo) if halo else None
        with torch._C._AutoDispatchBelowAutograd():
            history = _history(x, weight.shape[1] - 1, cu_seqlens, segments, found, ranks)
            y = torch.ops.gdn.causal_conv1d_fwd.default(x, weight, bias, history, cu_seqlens, silu=silu)
        ctx.save_for_backward(x, weight, bias, history, cu_seqlens, segments, *halo)
        ctx.meta = silu, ranks
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, history, cu_seqlens, segments, *halo = saved
        silu, ranks = ctx.meta
        with torch._C._AutoDispatchBelowAutograd():
            dx, dweight, dbias, dhistory = torch.ops.gdn.causal_conv1d_bwd.default(
                dy, x, weight, bias, history, cu_seqlens, silu=silu
            )
            if halo and halo[0].shape[0]:
                plan = Halo(*halo)
                there = (plan.fragments >= 0)[:, None, None]
                told = torch.where(there, dhistory[plan.fragments.clamp(min=0)].flip(1), 0).contiguous()
                if ranks[0] > 1:
                    counters.count("context_exchanges")
                depth = weight.shape[1] - 1
                heard = gather(told.view(-1), ranks[0], ranks[1], "convolution row gradients").view(
                    -1, depth, x.shape[1]
                )
                dx = torch.ops.gdn.halo_return.default(
                    dx, heard, segments, plan.readers[:, :depth], plan.reader_distances[:, :depth]
                )
        dbias = None if bias is None else dbias
        return dx, dweight, dbias, None, None, None, None, *(None,) * len(halo)


def _direct(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, segments: Any, halo: list[Tensor], *,
    silu: bool, num_ranks: int, group_name: str,
) -> Tensor:  # fmt: skip
    found = Halo(*halo) if halo else None
    history = _history(x, weight.shape[1] - 1, bounds, segments, found, (num_ranks, group_name))
    return torch.ops.gdn.causal_conv1d_fwd.default(x, weight, bias, history, bounds, silu=silu)


def _autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, segments: Any, halo: list[Tensor], *,
    silu: bool, num_ranks: int, group_name: str,
) -> Tensor:  # fmt: skip
    _refuse_forward_mode((x, weight, bias))
    if _needs_graph((x, weight, bias)):
        return _Conv.apply(x, weight, bias, bounds, segments, silu, (num_ranks, group_name), *halo)
    with torch._C._AutoDispatchBelowAutograd():
        return _direct(x, weight, bias, bounds, segments, halo, silu=silu, num_ranks=num_ranks, group_name=group_name)


SCHEMAS["context_conv1d"] = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor? segments, Tensor[] halo, *, bool silu, "
    "int num_ranks, str group_name) -> Tensor"
)
lib.define("context_conv1d" + SCHEMAS["context_conv1d"], tags=_TAGS)
lib.impl("context_conv1d", _autograd, "Autograd")
lib.impl("context_conv1d", _direct, "CompositeExplicitAutograd")
torch.library.register_fake("gdn::context_conv1d", lambda x, *args, **kwargs: x.new_empty(x.shape), lib=lib)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    cp_context: Context | None = None,
) -> Tensor:
    """Depthwise causal convolution along tokens, from a packed row to a packed row, documents kept apart.

    Args:
        x: [B,T,W], any floating dtype; computed in float32.
        weight: [W,width], width 2 to 8; the last tap is the token itself.
        bias: [W] or None.
        activation: "silu" (inside the op) or None.
        cu_seqlens: [N+1] document boundaries on x's device, B == 1; not with `cp_context`.
        cp_context: this rank's share of a batch over ranks; rows that other ranks hold are exchanged, one all-gather
            in the forward and one in the backward.

    Returns y [B,T,W] in x's dtype, zeros past the last document. Raises ValueError or TypeError for what does not fit.
    """
    if x.dim() != 3 or not x.dtype.is_floating_point:
        raise ValueError(f"x: expected a floating [B, T, W], got {x.dtype} {list(x.shape)}")
    B, T, W = x.shape
    if weight.dim() != 2 or weight.shape[0] != W or not 2 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"weight: expected [{W}, width] with width 2 to {MAX_WIDTH}, got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (W,):
        raise ValueError(f"bias: expected [{W}], got {list(bias.shape)}")
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not parameter.dtype.is_floating_point:
            raise TypeError(f"{name}: expected a floating dtype, got {parameter.dtype}")
    calls.check_context(cp_context, None, cu_seqlens, B, x, -2)
    checks.check_documents(cu_seqlens, B, x.device)
    segments: Tensor | None = None
    halo: tuple[Tensor, ...] = ()
    ranks = (1, "")
    if cp_context is not None:
        bounds, segments = cp_context.plan.cu_seqlens, cp_context.plan.forward_segments
        halo, ranks = tuple(cp_context.halo), (cp_context.exchange_ranks, cp_context.group_name)
    elif cu_seqlens is not None:
        bounds = cu_seqlens
    else:
        bounds = torch.arange(B + 1, device=x.device) * T
    if bounds.shape[0] == 1:  # no document at all: as one empty document
        bounds = bounds.repeat(2)
    y = torch.ops.gdn.context_conv1d(
        x.reshape(B * T, W), weight, bias, bounds, segments, list(halo),
        silu=activation == "silu", num_ranks=ranks[0], group_name=ranks[1],
    )  # fmt: skip
    return y.view(B, T, W)
