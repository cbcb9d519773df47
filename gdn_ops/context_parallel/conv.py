"""The short causal convolution before GDN, over fragments: its first tokens need rows that another rank may hold.

    forward    halo_tell (last rows of fragments that go on elsewhere) -> all-gather -> halo_place (before the
               fragments that they go on in) -> gdn::causal_conv1d_fwd
    backward   causal_conv1d_bwd_history (gradients of the rows that came) -> all-gather -> halo_return (what the
               others' tokens add to this rank's last rows) -> gdn::causal_conv1d_bwd, which adds that before it rounds

One op each way goes from the packed row to the packed row, SiLU inside. A fragment shorter than width - 1 passes on
rows of the ones before it, so rows are found by the partition's own plan. No history is a tensor with zero rows.
"""

from typing import Any

import torch
from torch import Tensor

from gdn_ops import checks, counters, settings
from gdn_ops.autograd import _needs_graph, _refuse_forward_mode
from gdn_ops.context_parallel import calls
from gdn_ops.context_parallel.context import Context
from gdn_ops.context_parallel.halo import MAX_WIDTH, Halo
from gdn_ops.context_parallel.path import gather
from gdn_ops.derivatives import first_derivative_only, refuse_transforms
from gdn_ops.ops import _dense_last, _load, _on_cpu, check_cu_seqlens_values, lib
from gdn_ops.shapes import accumulator_dtype

_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_ARGS = "Tensor x, Tensor weight, Tensor? bias, Tensor history"
SCHEMAS = {
    "causal_conv1d_fwd": f"({_ARGS}, Tensor cu_seqlens, *, bool silu) -> Tensor",
    "causal_conv1d_bwd": f"(Tensor dy, {_ARGS}, Tensor tails, Tensor cu_seqlens, *, bool silu) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias)",
    "causal_conv1d_bwd_history": f"(Tensor dy, {_ARGS}, Tensor cu_seqlens, Tensor fragments, *, bool silu, "
    "int num_ranks) -> Tensor",
    "halo_tell": "(Tensor x, Tensor tokens, *, SymInt depth, int num_ranks) -> Tensor",
    "halo_place": "(Tensor heard, Tensor sources, Tensor distances) -> Tensor",
    "halo_return": "(Tensor told, Tensor readers, Tensor positions) -> Tensor",
}
"""Argument and result lists, by name (namespace `gdn`). x is [T,W]; history, tails [F,width-1,W] or zero rows."""


KERNEL_BY_DEFAULT = True
"""Whether the backend setting "auto" takes the kernel on a GPU; for one that has passed its GPU tests in this form."""


def _backend(x: Tensor) -> Any:
    """The module that runs a convolution of `x`; every GPU backend's is the Triton kernel."""
    wanted = settings.current().backend
    if wanted == "cpu" or (wanted == "auto" and not (x.is_cuda and KERNEL_BY_DEFAULT)):
        return _load("cpu_conv")  # torch operations, right on every device
    kernels = _load("triton.conv")
    reason = kernels.unsupported_reason(x)
    if reason is None:
        return kernels
    if wanted == "auto":
        return _load("cpu_conv")
    raise NotImplementedError(f"no backend for the convolution: {wanted}: {reason}")


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, *, silu: bool) -> Tensor:
    if cu_seqlens.device.type == "cpu" or settings.current().debug:
        check_cu_seqlens_values(cu_seqlens, x.shape[0])
    x = _dense_last(x, "input_copies")
    bias = None if bias is None else bias.contiguous()
    return _backend(x).conv_fwd(x, weight.contiguous(), bias, history.contiguous(), cu_seqlens.contiguous(), silu)


def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, tails: Tensor, cu_seqlens: Tensor, *,
    silu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    x, dy = _dense_last(x, "input_copies"), _dense_last(dy, "gradient_copies")
    dx, dweight, dbias = _backend(x).conv_bwd(
        dy, x, weight.contiguous(), None if bias is None else bias.contiguous(), history.contiguous(),
        tails.contiguous(), cu_seqlens.contiguous(), silu,
    )  # fmt: skip
    return dx, dweight, weight.new_empty((0,)) if dbias is None else dbias


def _bwd_fake(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, tails: Tensor, cu_seqlens: Tensor, *,
    silu: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    dbias = weight.new_empty((0,)) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), dbias


def _bwd_history(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor,
    fragments: Tensor, *, silu: bool, num_ranks: int,
) -> Tensor:  # fmt: skip
    """[B,P,W] in the accumulation dtype, oldest first."""
    if num_ranks > 1:
        counters.count("context_exchanges")
    x, dy = _dense_last(x, "input_copies"), _dense_last(dy, "gradient_copies")
    return _backend(x).conv_history_bwd(
        dy, x, weight.contiguous(), None if bias is None else bias.contiguous(), history.contiguous(),
        cu_seqlens.contiguous(), fragments.contiguous(), silu,
    )  # fmt: skip


def _bwd_history_fake(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor,
    fragments: Tensor, *, silu: bool, num_ranks: int,
) -> Tensor:  # fmt: skip
    shape = (fragments.shape[0], weight.shape[1] - 1, x.shape[1])
    return x.new_empty(shape, dtype=accumulator_dtype(x.dtype))


def _rows(x: Tensor) -> Any:
    """The module with the kernel that moves rows, or None: then torch operations do."""
    return _load("triton.rows") if _backend(x).__name__ == "gdn_ops.backends.triton.conv" else None


def _picked(x: Tensor, row: Tensor, position: Tensor | None, depth: int, *, reads_backwards: bool) -> Tensor:
    """[N,depth,W] the rows (or rows of groups [M,depth,W]) of x that [N,depth] say, zeros where there are none."""
    row = row.long()
    there = row >= 0
    if position is None:
        value = x[row.clamp(min=0)] if x.shape[0] else x.new_zeros((*row.shape, x.shape[-1]))
    else:
        # A narrower convolution reaches less far back than the plan does.
        there = there & (position < depth)
        position = position.long().clamp(min=0, max=depth - 1)
        value = x[row.clamp(min=0), depth - 1 - position if reads_backwards else position]
    return torch.where(there[..., None], value, 0)


@torch.no_grad()
def _halo_tell(x: Tensor, tokens: Tensor, *, depth: int, num_ranks: int) -> Tensor:
    """[A,depth,W] the last rows of each segment, nearest to its end first; zeros where it is shorter."""
    if num_ranks > 1:
        counters.count("context_exchanges")
    x, kernel = _dense_last(x, "input_copies"), _rows(x)
    if kernel is not None:
        return kernel.move_rows(x, tokens, None, depth, reads_backwards=False, writes_backwards=False)
    return _picked(x, tokens[:, :depth], None, depth, reads_backwards=False).contiguous()


@torch.no_grad()
def _halo_place(heard: Tensor, sources: Tensor, distances: Tensor) -> Tensor:
    """[F,depth,W] the rows before each fragment, oldest first; heard [R*A,depth,W]: what `halo_tell` told."""
    depth, kernel = heard.shape[1], _rows(heard)
    if kernel is not None:
        return kernel.move_rows(heard, sources, distances, depth, reads_backwards=False, writes_backwards=True)
    return _picked(heard, sources[:, :depth], distances[:, :depth], depth, reads_backwards=False).flip(1)


@torch.no_grad()
def _halo_return(told: Tensor, readers: Tensor, positions: Tensor) -> Tensor:
    """[F,depth,W] what readers found for each fragment's last rows, newest last; float32 sums in a fixed order.

    told [R*B,depth,W], oldest first, is every rank's `causal_conv1d_bwd_history`; readers, positions [F,P,S].
    """
    depth, kernel = told.shape[1], _rows(told)
    if kernel is not None:
        return kernel.move_rows(told, readers, positions, depth, reads_backwards=True, writes_backwards=True)
    found = told.new_zeros((readers.shape[0], depth, told.shape[2]))
    for reader, position in zip(readers[:, :depth].unbind(2), positions[:, :depth].unbind(2), strict=True):
        found += _picked(told, reader, position, depth, reads_backwards=True)
    return found.flip(1)


_IMPLEMENTATIONS: dict[str, tuple[Any, Any]] = {
    "causal_conv1d_fwd": (_fwd, lambda x, *args, **kwargs: x.new_empty(x.shape)),
    "causal_conv1d_bwd": (_bwd, _bwd_fake),
    "causal_conv1d_bwd_history": (_bwd_history, _bwd_history_fake),
    "halo_tell": (
        _halo_tell,
        lambda x, tokens, *, depth, num_ranks: x.new_empty((tokens.shape[0], depth, x.shape[1])),
    ),
    "halo_place": (
        _halo_place,
        lambda heard, sources, distances: heard.new_empty((sources.shape[0], *heard.shape[1:])),
    ),
    "halo_return": (
        _halo_return,
        lambda told, readers, positions: told.new_empty((readers.shape[0], *told.shape[1:])),
    ),
}
for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    lib.impl(_name, _on_cpu(_run), "CPU")
    lib.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"gdn::{_name}", _fake, lib=lib)


def _history(x: Tensor, depth: int, halo: Halo | None, ranks: Any) -> Tensor:
    """[F,depth,W], oldest first, zeros before a document's first token; zero rows where no document is in parts."""
    if halo is None or halo.fragments.shape[0] == 0:
        return x.new_empty((0, depth, x.shape[1]))
    told = torch.ops.gdn.halo_tell.default(x, halo.tokens, depth=depth, num_ranks=ranks[0])
    heard = gather(told.view(-1), ranks[0], ranks[1], "convolution rows").view(-1, depth, x.shape[1])
    return torch.ops.gdn.halo_place.default(heard, halo.sources, halo.distances)


def _tails(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor, cu_seqlens: Tensor, silu: bool,
    halo: Halo | None, ranks: Any,
) -> Tensor:  # fmt: skip
    """[F,depth,W] what the tokens of later fragments add to the gradients of each fragment's last rows."""
    depth = weight.shape[1] - 1
    if halo is None or halo.fragments.shape[0] == 0:
        return x.new_empty((0, depth, x.shape[1]), dtype=accumulator_dtype(x.dtype))
    told = torch.ops.gdn.causal_conv1d_bwd_history.default(
        dy, x, weight, bias, history, cu_seqlens, halo.fragments, silu=silu, num_ranks=ranks[0]
    )
    heard = gather(told.view(-1), ranks[0], ranks[1], "convolution row gradients").view(-1, depth, x.shape[1])
    return torch.ops.gdn.halo_return.default(heard, halo.readers, halo.reader_distances)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool,
        ranks: tuple[int, str], *halo: Tensor,
    ) -> Tensor:  # fmt: skip
        found = Halo(*halo) if halo else None
        with torch._C._AutoDispatchBelowAutograd():
            history = _history(x, weight.shape[1] - 1, found, ranks)
            y = torch.ops.gdn.causal_conv1d_fwd.default(x, weight, bias, history, cu_seqlens, silu=silu)
        ctx.save_for_backward(x, weight, bias, history, cu_seqlens, *halo)
        ctx.meta = silu, ranks
        return y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, history, cu_seqlens, *halo = saved
        silu, ranks = ctx.meta
        with torch._C._AutoDispatchBelowAutograd():
            tails = _tails(dy, x, weight, bias, history, cu_seqlens, silu, Halo(*halo) if halo else None, ranks)
            dx, dweight, dbias = torch.ops.gdn.causal_conv1d_bwd.default(
                dy, x, weight, bias, history, tails, cu_seqlens, silu=silu
            )
        return dx, dweight, None if bias is None else dbias, *(None,) * (3 + len(halo))


def _direct(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, halo: list[Tensor], *,
    silu: bool, num_ranks: int, group_name: str,
) -> Tensor:  # fmt: skip
    found = Halo(*halo) if halo else None
    history = _history(x, weight.shape[1] - 1, found, (num_ranks, group_name))
    return torch.ops.gdn.causal_conv1d_fwd.default(x, weight, bias, history, bounds, silu=silu)


def _autograd(
    x: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, halo: list[Tensor], *,
    silu: bool, num_ranks: int, group_name: str,
) -> Tensor:  # fmt: skip
    _refuse_forward_mode((x, weight, bias))
    if _needs_graph((x, weight, bias)):
        refuse_transforms()
        return _Conv.apply(x, weight, bias, bounds, silu, (num_ranks, group_name), *halo)
    with torch._C._AutoDispatchBelowAutograd():
        return _direct(x, weight, bias, bounds, halo, silu=silu, num_ranks=num_ranks, group_name=group_name)


SCHEMAS["context_conv1d"] = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, Tensor[] halo, *, bool silu, "
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
    halo: tuple[Tensor, ...] = ()
    ranks = (1, "")
    if cp_context is not None:
        bounds = cp_context.halo.cu_seqlens
        halo, ranks = tuple(cp_context.halo), (cp_context.exchange_ranks, cp_context.group_name)
    elif cu_seqlens is not None:
        bounds = cu_seqlens
    else:
        bounds = torch.arange(B + 1, device=x.device) * T
    if bounds.shape[0] == 1:  # no document at all: as one empty document
        bounds = bounds.repeat(2)
    y = torch.ops.gdn.context_conv1d(
        x.reshape(B * T, W), weight, bias, bounds, list(halo),
        silu=activation == "silu", num_ranks=ranks[0], group_name=ranks[1],
    )  # fmt: skip
    return y.view(B, T, W)
