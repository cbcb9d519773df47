"""Packed rows: q, k and v as views of one [q heads | k heads | v heads] row whose gradient is one row again."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gdn_ops import counters
from gdn_ops.checks import check_row
from gdn_ops.derivatives import first_derivative_only, transforms_active
from gdn_ops.shapes import L2NORM_EPS, packed_layouts, packed_width
from gdn_ops.version import __version__
from inductor_passes import registry


def split_row(row: Tensor, num_qk_heads: int, num_v_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a [..., W] row as plain views [..., heads, head_dim]."""
    width = num_qk_heads * head_dim
    q, k, v = row.split([width, width, num_v_heads * head_dim], dim=-1)
    return (
        q.unflatten(-1, (num_qk_heads, head_dim)),
        k.unflatten(-1, (num_qk_heads, head_dim)),
        v.unflatten(-1, (num_v_heads, head_dim)),
    )


def _row_of(grads: tuple[Tensor, ...]) -> Tensor | None:
    """The dense row that three gradients tile exactly in memory, in the packed order, or None.

    Only where the gradients lie is looked at. So a gradient that a hook replaced, that a second use added to, or that
    came from elsewhere is never taken for a part of the row.
    """
    dq, _, dv = grads
    *lead, num_qk_heads, head_dim = dq.shape
    num_v_heads = dv.shape[-2]
    width = packed_width(num_qk_heads, num_v_heads, head_dim)
    strides = [width]
    for size in reversed(lead[1:]):
        strides.insert(0, strides[0] * size)
    storage = dq.untyped_storage()._cdata
    for grad, layout in zip(grads, packed_layouts(num_qk_heads, num_v_heads, head_dim), strict=True):
        expected = (*strides, head_dim, 1)
        if (
            grad.untyped_storage()._cdata != storage
            or grad.dtype != dq.dtype
            or any(n > 1 and a != b for n, a, b in zip(grad.shape, grad.stride(), expected, strict=True))
            or grad.storage_offset() != dq.storage_offset() + layout.offset
        ):
            return None
    return dq.as_strided((*lead, width), (*strides, 1), dq.storage_offset())


class _PackedQKVViews(torch.autograd.Function):
    """Three views of a row; backward hands a row's gradient on as it is, or builds one where it has to."""

    @staticmethod
    def forward(
        ctx: Any, row: Tensor, num_qk_heads: int, num_v_heads: int, head_dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads = (num_qk_heads, num_v_heads, head_dim)
        ctx.lead = row.shape[:-1]
        ctx.like = row.dtype, row.device
        ctx.set_materialize_grads(False)
        return split_row(row, num_qk_heads, num_v_heads, head_dim)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: tuple[Any, ...], *grads: Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return None, None, None, None
        present = tuple(grad for grad in grads if grad is not None)
        row = _row_of(present) if len(present) == 3 and present[0].numel() and present[2].numel() else None
        if row is None:
            counters.count("concatenations")
            num_qk_heads, num_v_heads, head_dim = ctx.heads
            dtype, device = ctx.like
            parts = [
                torch.zeros((*ctx.lead, heads * head_dim), dtype=dtype, device=device)
                if grad is None
                else grad.flatten(-2)
                for grad, heads in zip(grads, (num_qk_heads, num_qk_heads, num_v_heads), strict=True)
            ]
            row = torch.cat(parts, dim=-1)
        return row, None, None, None


def _source(x: Tensor | None) -> Any:
    """The packed-views node that made `x`, seen through the batch axis that the public function adds; else None."""
    node = None if x is None else x.grad_fn
    if node is not None and node.name() == "UnsqueezeBackward0":
        node = node.next_functions[0][0]
    return node if isinstance(node, _PackedQKVViews._backward_cls) else None  # type: ignore[attr-defined]


def come_from_one_row(q: Tensor | None, k: Tensor | None, v: Tensor | None) -> bool:
    """Whether q, k, v are, in this order, the three views of one `packed_qkv_views` call.

    Autograd calls a hook on each of them either way; only where their gradients are written depends on it.
    """
    node = _source(q)
    if node is None or _source(k) is not node or _source(v) is not node:
        return False
    assert q is not None
    assert k is not None
    assert v is not None
    width = q.shape[2] * q.shape[3]
    start = q.storage_offset()
    return k.storage_offset() == start + width * q.stride(3) and v.storage_offset() == start + 2 * width * q.stride(3)


def packed_qkv_views(
    row: Tensor, *, num_qk_heads: int, num_v_heads: int, head_dim: int = 128
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a packed row into q, k, v so that its gradient is written as one row, without a concatenation, in eager.

    Args:
        row: [B,T,W] or [T,W], W = (2 * num_qk_heads + num_v_heads) * head_dim, laid out [q heads | k heads | v heads];
            any floating dtype, any strides.
        num_qk_heads: HK, heads of q and of k in the row.
        num_v_heads: HV, heads of v, a multiple of HK.
        head_dim: channels of every head.

    Returns:
        q, k [..., HK, head_dim] and v [..., HV, head_dim], views of `row`.

    Passed on unchanged, all three, to `chunk_gated_delta_rule`, their gradients are parts of one dense row that this
    function's autograd node returns as it is. Hooks and `retain_grad` on the views see the right gradients. Where a
    hook replaces a gradient, a view has a second use or gets no gradient, the row is concatenated
    (`stats().concatenations`), which is right and slower. The views cannot be edited in place while `row` requires
    grad. Under `torch.compile` they are plain views, which the graph pass of `inductor_passes` rewrites; in
    `torch.vmap` too.

    Raises:
        TypeError, ValueError: a wrong dtype, rank or width, with what was expected.
    """
    check_row(row, num_qk_heads, num_v_heads, head_dim)
    plain = torch.compiler.is_compiling() or transforms_active()
    if plain or not (torch.is_grad_enabled() and row.requires_grad):
        return split_row(row, num_qk_heads, num_v_heads, head_dim)
    q, k, v = _PackedQKVViews.apply(row, num_qk_heads, num_v_heads, head_dim)
    return q, k, v


def _fingerprint() -> str:
    """Version and sources of what the compile caches cannot see: fakes, layouts and autograd formulas.

    A cached graph holds the formula that was traced; PyTorch's cache key holds the op's name only.
    """
    here = Path(__file__).parent
    digest = hashlib.sha256(__version__.encode())
    for path in sorted((*here.glob("*.py"), *here.glob("context_parallel/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


registry.register(
    registry.PackedVariant(
        fwd="gdn::chunk_fwd",
        bwd="gdn::chunk_bwd",
        bwd_row="gdn::chunk_bwd_row",
        bwd_row_="gdn::chunk_bwd_row_",
        grouped_operands=("q", "k"),
        norm_switch="use_qk_l2norm",
        norm_operands=("q", "k"),
        norm_eps=L2NORM_EPS,
        norm_option="use_qk_l2norm_in_kernel=True",
        takes_row=("gdn::chunk_packed_fwd", "gdn::context_packed_fwd"),
        package="gdn_ops",
        fingerprint=_fingerprint,
    )
)
