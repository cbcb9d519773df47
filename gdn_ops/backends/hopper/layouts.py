"""What a caller gives, as the kernels address it: tokens on one axis; and what cannot be, through a copy."""

from torch import Tensor

from gdn_ops.backends.hopper import tma


def merged_tokens(x: Tensor) -> Tensor | None:
    """[B,T,H,D] as [B*T,H,D] without copying, or None; axes of one element get harmless strides."""
    B, T, H, D = x.shape
    if B > 1 and T > 1 and x.stride(0) != T * x.stride(1):
        return None
    stride_t = x.stride(1) if T > 1 else x.stride(0) if B > 1 else H * D
    return x.as_strided((B * T, H, D), (stride_t, x.stride(2) if H > 1 else D, 1), x.storage_offset())


def flat(x: Tensor) -> Tensor:
    """[B,T,H,D] of an operand that `unsupported_reason` accepts as [B*T,H,D]."""
    tokens = merged_tokens(x)
    assert tokens is not None, "unsupported_reason() lets only such operands through"
    return tokens


def addressable_gradient(do: Tensor) -> Tensor:
    """An output gradient as [B*T,HV,V], copied if no descriptor can describe it."""
    tokens = merged_tokens(do)
    if tokens is None or tma.unaddressable(tokens) is not None:
        tokens = do.contiguous().view(-1, *do.shape[2:])
    return tokens


class Target:
    """A gradient's [B,T,G,R,D] target as [B*T,G,R,D]; one that kernels cannot write in place goes through a copy."""

    def __init__(self, x: Tensor, *, through_tma: bool):
        B, T, G, R, D = x.shape
        self._copied_to: Tensor | None = None
        strides = (x.stride(2) if G > 1 else D, x.stride(3) if R > 1 else D)
        stride_t = x.stride(1) if T > 1 else x.stride(0) if B > 1 else G * R * D
        self.written = x.as_strided((B * T, G, R, D), (stride_t, *strides, 1), x.storage_offset())
        even = B == 1 or T == 1 or x.stride(0) == T * x.stride(1)
        if not even or (through_tma and not _addressable(self.written)):
            self._copied_to = x
            self.written = x.new_empty((B * T, G, R, D))

    def finish(self) -> None:
        """Copy to the target what could not be written in place."""
        if self._copied_to is not None:
            self._copied_to.copy_(self.written.view(self._copied_to.shape))


def _addressable(x: Tensor) -> bool:
    """Whether one TMA descriptor covers [T,G,R,D]."""
    return all(tma.unaddressable(part) is None for part in (x[:, :, 0], x[:, 0]))
