"""Inverse L2 norms of queries and keys: norms = 1 / sqrt(sum(x^2) + eps), [T,2,HK].

The tiles themselves stay raw: the norms go into the gating factors (`gates`) and into `solve` and `scores` as one
number a token, which is both cheaper and more accurate than a rounded normalised copy. The norm's own derivative is
in `gradients`. Grid: one program a block of tokens and query/key head.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import L2NORM_EPS

# Letters: T tokens, HK query/key heads, K head size.

_TOKENS = 64


@triton.jit
def _norms_kernel(
    q_ptr, k_ptr, norms_ptr, T, q_stride_t, q_stride_h, k_stride_t, k_stride_h, eps,
    HK: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    offs_t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    h = tl.program_id(1)
    offs_k = tl.arange(0, K)
    mask_t = offs_t < T
    t = offs_t.to(tl.int64)
    for part in tl.static_range(2):
        if part == 0:
            x_ptr = q_ptr + t[:, None] * q_stride_t + h.to(tl.int64) * q_stride_h + offs_k[None, :]
        else:
            x_ptr = k_ptr + t[:, None] * k_stride_t + h.to(tl.int64) * k_stride_h + offs_k[None, :]
        x_TK = tl.load(x_ptr, mask=mask_t[:, None], other=0.0).to(tl.float32)
        tl.store(norms_ptr + (t * 2 + part) * HK + h, 1.0 / tl.sqrt(tl.sum(x_TK * x_TK, 1) + eps), mask=mask_t)


def norms(q: Tensor, k: Tensor, out: Tensor) -> None:
    """Fill `out` [T,2,HK] from q and k [T,HK,K]."""
    T, HK, K = q.shape
    launch(
        _norms_kernel, (triton.cdiv(T, _TOKENS), HK),
        q, k, out, T, q.stride(0), q.stride(1), k.stride(0), k.stride(1), L2NORM_EPS,
        HK=HK, K=K, TOKENS=_TOKENS, num_warps=4,
    )  # fmt: skip
