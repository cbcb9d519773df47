"""Gradients of the `gdn::` forward ops, on the dispatcher's Autograd key; double backward and forward mode are refused.

Registering an own Autograd kernel costs about half of what `torch.library.register_autograd` costs per call, lets a
call that needs no gradient skip the graph, and keeps torch from differentiating *through* a backward op's kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdn_ops import packing
from gdn_ops.derivatives import first_derivative_only, refuse_transforms
from gdn_ops.ops import kernels, lib
from gdn_ops.plain import is_plain
from gdn_ops.shapes import packed_layouts, packed_width

_ops = torch.ops.gdn


def _needs_graph(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _refuse_forward_mode(tensors: tuple[Tensor | None, ...]) -> None:
    """A custom kernel would return no tangent, silently; say so instead."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("gated delta rule: forward-mode derivatives (torch.func.jvp) are not supported")


def _call(name: str, plain: bool, *tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    """The op `name` below autograd; `plain`: without the dispatcher (`is_plain` says whether that may be)."""
    first = tensors[0]
    assert first is not None
    run = kernels[name, "cuda" if first.is_cuda else "cpu"] if plain else getattr(_ops, name).default
    with torch._C._AutoDispatchBelowAutograd():
        return run(*tensors, **kwargs)


def _is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    return not torch.compiler.is_compiling() and is_plain(tensors)


def _keep(
    ctx: Any, plain: bool, kwargs: dict[str, Any], tensors: tuple[Tensor | None, ...], out: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Save what the backward takes; only o and a final state that was asked for are differentiable."""
    ctx.save_for_backward(*tensors, *out[2:])
    if plain:  # nobody sees what is saved, so it need not be an output
        out = out[:2]
    ctx.kwargs = {name: x for name, x in kwargs.items() if name not in ("output_final_state", "save")}
    ctx.num_inputs = len(tensors)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*out[2 if kwargs.get("output_final_state", False) else 1 :])
    return out


class _ChunkFwd(torch.autograd.Function):
    """`gdn::chunk_fwd` with `gdn::chunk_bwd`, or with `gdn::chunk_bwd_row` for the views of `packed_qkv_views`."""

    @staticmethod
    def forward(
        ctx: Any, from_row: bool, plain: bool, kwargs: dict[str, Any], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.from_row = from_row
        return _keep(ctx, plain, kwargs, tensors, _call("chunk_fwd", plain, *tensors, **kwargs))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        do, dfinal_state = grads[:2]
        if do is None and dfinal_state is None:
            return (None,) * (3 + ctx.num_inputs)
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        q, v = inputs[0], inputs[2]
        if do is None:
            do = v.new_zeros(v.shape)
        args = (do, dfinal_state, *inputs[:5], *kept, *inputs[5:])
        plain = _is_plain(args)
        if ctx.from_row:
            heads = (q.shape[2], v.shape[2], q.shape[3])
            width, layouts = packed_width(*heads), packed_layouts(*heads)
            names = dict(zip(("q_layout", "k_layout", "v_layout"), map(list, layouts), strict=True))
            row, _, _, _, *small = _call("chunk_bwd_row", plain, *args, row_width=width, **names, **ctx.kwargs)
            found = (*packing.split_row(row, *heads), *small)
        else:
            found = _call("chunk_bwd", plain, *args, **ctx.kwargs)
        return (None, None, None, *_wanted(ctx.needs_input_grad[3:], found))


class _ChunkPackedFwd(torch.autograd.Function):
    """`gdn::chunk_packed_fwd` with `gdn::chunk_packed_bwd`: one row in, one gradient row out."""

    @staticmethod
    def forward(ctx: Any, plain: bool, kwargs: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return _keep(ctx, plain, kwargs, tensors, _call("chunk_packed_fwd", plain, *tensors, **kwargs))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        do, dfinal_state = grads[:2]
        if do is None and dfinal_state is None:
            return (None,) * (2 + ctx.num_inputs)
        inputs, kept = saved[: ctx.num_inputs], saved[ctx.num_inputs :]
        row = inputs[0]
        if do is None:
            do = row.new_zeros((*row.shape[:-1], ctx.kwargs["num_v_heads"], ctx.kwargs["head_dim"]))
        args = (do, dfinal_state, *inputs[:3], *kept, *inputs[3:])
        found = _call("chunk_packed_bwd", _is_plain(args), *args, **ctx.kwargs)
        return (None, None, *_wanted(ctx.needs_input_grad[2:], found))


def _wanted(needed: tuple[bool, ...], found: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients in the order of the op's tensors: cu_seqlens, which stands before A_log and dt_bias, has none."""
    *before, dA_log, ddt_bias = found
    return [x if need else None for need, x in zip(needed, (*before, None, dA_log, ddt_bias), strict=True)]


# The dispatcher leaves out trailing arguments that equal their default; the Functions want them all.
_NUM_TENSORS = {"chunk_fwd": 9, "chunk_packed_fwd": 7}


def _all_tensors(name: str, tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return (*tensors, *(None,) * (_NUM_TENSORS[name] - len(tensors)))


def chunk_fwd(plain: bool, *tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    """`gdn::chunk_fwd` on all its nine tensors; if it `is_plain`, without the dispatcher and without what is saved."""
    if not plain:
        return torch.ops.gdn.chunk_fwd(*tensors, **kwargs)
    if _needs_graph(tensors):
        return _ChunkFwd.apply(packing.come_from_one_row(*tensors[:3]), True, kwargs, *tensors)
    return _call("chunk_fwd", True, *tensors, **kwargs)


def chunk_packed_fwd(plain: bool, *tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    """`gdn::chunk_packed_fwd` on all its seven tensors, as `chunk_fwd`."""
    if not plain:
        return torch.ops.gdn.chunk_packed_fwd(*tensors, **kwargs)
    if _needs_graph(tensors):
        return _ChunkPackedFwd.apply(True, kwargs, *tensors)
    return _call("chunk_packed_fwd", True, *tensors, **kwargs)


def _chunk_fwd_autograd(*tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    tensors = _all_tensors("chunk_fwd", tensors)
    _refuse_forward_mode(tensors)
    if _needs_graph(tensors):
        refuse_transforms()
        return _ChunkFwd.apply(packing.come_from_one_row(*tensors[:3]), False, kwargs, *tensors)
    return _call("chunk_fwd", False, *tensors, **kwargs)


def _chunk_packed_fwd_autograd(*tensors: Tensor | None, **kwargs: Any) -> tuple[Tensor, ...]:
    tensors = _all_tensors("chunk_packed_fwd", tensors)
    _refuse_forward_mode(tensors)
    if _needs_graph(tensors):
        refuse_transforms()
        return _ChunkPackedFwd.apply(False, kwargs, *tensors)
    return _call("chunk_packed_fwd", False, *tensors, **kwargs)


def _not_differentiable(name: str) -> Callable[..., Any]:
    """Autograd kernel of a backward op: torch would otherwise record what the kernel does and give a wrong gradient."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        _refuse_forward_mode(tensors)
        if _needs_graph(tensors):
            raise RuntimeError(f"gdn::{name} is a backward: it has no derivative of its own (double backward)")
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(_ops, name).default(*args, **kwargs)

    return call


lib.impl("chunk_fwd", _chunk_fwd_autograd, "Autograd")
lib.impl("chunk_packed_fwd", _chunk_packed_fwd_autograd, "Autograd")
for _name in ("chunk_bwd", "chunk_bwd_row", "chunk_bwd_row_", "chunk_packed_bwd"):
    lib.impl(_name, _not_differentiable(_name), "Autograd")
