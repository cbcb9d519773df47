"""Products of a chunk's queries and keys: P = scale * tril(q k^T o Gamma), Gamma_ij = 2^(G_i - G_j), and k k^T.

Both products are computed once a query/key head, norms included; P is gated once a value head, k k^T is what `solve`
starts from (float32, blocks on and below the diagonal; scratch). Rows and columns of tokens past the document's end
are zero. Grid: one program a query/key head and chunk.
"""

import triton
import triton.language as tl
from torch import Tensor

from gdn_ops.backends.hopper.chunks import Chunks
from gdn_ops.backends.hopper.launch import launch
from gdn_ops.shapes import CHUNK, Options

# Letters: NT chunks, HV value heads, HK query/key heads, C chunk length, K head size.

_NUM_WARPS = 4

SOLVED_BLOCK = 16
"""Block length in which `solve` reads k k^T: blocks above the diagonal are not written."""


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, norms_ptr, gates_ptr, scores_ptr, products_ptr, table_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, scale,
    HV: tl.constexpr, HK: tl.constexpr, C: tl.constexpr, K: tl.constexpr, HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_SCORES: tl.constexpr,
):  # fmt: skip
    h_k = tl.program_id(0) % HK
    i_c = tl.program_id(0) // HK
    first = tl.load(table_ptr + i_c * 4)
    valid = tl.load(table_ptr + i_c * 4 + 1)
    if valid > 0:
        offs_c = tl.arange(0, C)
        offs_k = tl.arange(0, K)
        token = (first + offs_c).to(tl.int64)
        mask_c = offs_c < valid
        head = h_k.to(tl.int64)
        k_CK = tl.load(
            k_ptr + head * k_stride_h + token[:, None] * k_stride_t + offs_k[None, :], mask=mask_c[:, None], other=0.0
        )
        products_CC = tl.dot(k_CK, tl.trans(k_CK))
        if HAS_NORMS:
            inv_k_C = tl.load(norms_ptr + token * (2 * HK) + HK + h_k, mask=mask_c, other=0.0)
            products_CC = products_CC * inv_k_C[:, None] * inv_k_C[None, :]
        square = offs_c[:, None] * C + offs_c[None, :]
        needed = (offs_c // BLOCK)[:, None] >= (offs_c // BLOCK)[None, :]
        tl.store(products_ptr + (i_c.to(tl.int64) * HK + h_k) * (C * C) + square, products_CC, mask=needed)
        if HAS_SCORES:
            at_CK = q_ptr + head * q_stride_h + token[:, None] * q_stride_t + offs_k[None, :]
            q_CK = tl.load(at_CK, mask=mask_c[:, None], other=0.0)
            raw_CC = tl.dot(q_CK, tl.trans(k_CK)) * scale
            if HAS_NORMS:
                inv_q_C = tl.load(norms_ptr + token * (2 * HK) + h_k, mask=mask_c, other=0.0)
                raw_CC = raw_CC * inv_q_C[:, None] * inv_k_C[None, :]
            lower = (offs_c[:, None] >= offs_c[None, :]) & mask_c[:, None]
            for r in tl.static_range(HV // HK):
                row = i_c.to(tl.int64) * HV + h_k * (HV // HK) + r
                gates_C = tl.load(gates_ptr + row * C + offs_c)
                decay_CC = tl.exp2(tl.where(lower, gates_C[:, None] - gates_C[None, :], 0.0))
                scores_CC = tl.where(lower, raw_CC * decay_CC, 0.0)
                tl.store(scores_ptr + row * (C * C) + square, scores_CC.to(scores_ptr.dtype.element_ty))


def scores(
    q: Tensor, k: Tensor, norms: Tensor | None, gates: Tensor, out: Tensor | None, products: Tensor, chunks: Chunks,
    options: Options,
) -> None:  # fmt: skip
    """Fill `out` [NT,HV,C,C], if there is one, and products [NT,HK,C,C] (k k^T) from q, k [T,HK,K], gates [NT,HV,C]."""
    NT, HV = gates.shape[:2]
    HK, K = q.shape[1:]
    launch(
        _scores_kernel, (NT * HK,),
        q, k, norms, gates, out, products, chunks.table,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), options.scale,
        HV=HV, HK=HK, C=CHUNK, K=K, HAS_NORMS=norms is not None, BLOCK=SOLVED_BLOCK,
        HAS_SCORES=out is not None,
        num_warps=_NUM_WARPS,
    )  # fmt: skip
