"""The public functions: check, add the batch axis, call the op, take it off again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import autograd, checks, settings
from gdn_ops.context_parallel import calls
from gdn_ops.packing import packed_qkv_views
from gdn_ops.plain import is_plain

__all__ = ["chunk_gated_delta_rule", "chunk_gated_delta_rule_packed", "chunk_gdn", "packed_qkv_views"]


def _save_level(tensors: tuple[Tensor | None, ...]) -> str:
    """Nothing is kept for a backward that cannot come."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return settings.current().save
    return "none"


def _num_documents(cu_seqlens: Tensor | None, batch: int, cp_context: Any) -> int:
    if cp_context is not None:
        return cp_context.num_documents
    return batch if cu_seqlens is None else cu_seqlens.shape[0] - 1


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    deterministic: bool = True,
    recompute_handle: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule over whole sequences, in chunks: the training form of a Gated DeltaNet layer.

    Per value head, with the state S [K, V] in float32:
    S <- exp(g_t) S;  u_t = beta_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = scale * S^T q_t
    (Gated Delta Networks, arXiv 2412.06464, equation 10; value head h reads query/key head h // (HV // HK)).

    Args:
        q, k: [B,T,HK,K], or [T,HK,K]; bfloat16, float16 or float32 (float64 on a CPU), one dtype for q, k and v.
        v: [B,T,HV,V], HV a multiple of HK. q, k and v may have any strides: heads of a packed row are read in place;
            an operand whose last axis is not dense is copied (`stats().input_copies`). Plain split views of a packed
            row get a packed gradient under `torch.compile`, and in eager through `packed_qkv_views`.
        g: [B,T,HV], natural logarithm of the decay (normally <= 0), any float dtype from 16 bits up, computed in
            float32; with `use_gate_in_kernel` the raw gate, decay = -exp(A_log) * softplus(g + dt_bias).
        beta: [B,T,HV], write strength in any float dtype; with `use_beta_sigmoid_in_kernel` its logit.
        scale: factor on the output; None means K ** -0.5.
        initial_state: [N,HV,K,V] float32, N documents (or B); None means zero.
        output_final_state: also return the state after each document's last token.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6) per head, inside the op.
        use_beta_sigmoid_in_kernel: take sigmoid(beta) inside the op.
        allow_neg_eigval: double that sigmoid, so that the transition may have negative eigenvalues.
        cu_seqlens: [N+1] int32 or int64 on q's device: document boundaries along T, with B == 1. Starts at 0, never
            decreases, ends at or before T: tokens after the last document give zeros, and zero gradients. Documents
            may be empty. Values are not read on the host for a GPU (unless the debug setting is on).
        cp_context: this rank's share of a batch that lies over ranks (`gdn_ops.context_parallel`): q to beta are
            its tokens, initial_state and final_state global. A final state's row is filled on the rank that holds the
            document's last token and zero elsewhere, an initial state's gradient on the rank of its first token.
        use_gate_in_kernel: compute the decay in the op from `g`, `A_log` and `dt_bias`.
        A_log, dt_bias: [HV], any float dtype; `dt_bias` may be left out.
        deterministic: True promises bitwise equal results from run to run; False permits an unordered
            route; the one that was tried is slower (docs/kernels.md), so the same route is taken.
        recompute_handle: a `RecomputeHandle` that spares the exchange in an eager activation recompute.

    Returns:
        o [B,T,HV,V] in v's dtype (without B if the inputs had none), and final_state [N,HV,K,V] float32 or None.
        Gradients come back for any subset of inputs, each in its input's dtype; double backward is refused.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says which, what was expected and what came.
        NotImplementedError: no backend supports the call, with each one's reason.
    """
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    switches = _Switches(
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        deterministic,
        use_gate_in_kernel,
    )
    plain = _is_plain(recompute_handle, tensors)
    kind = checks.call_kind(tensors, (*switches, *calls.kind(cp_context))) if plain else ()
    if not (plain and checks.has_passed(kind)):
        checks.check_qkv(q, k, v)
        batch = 1 if q.dim() == 3 else q.shape[0]
        calls.check_context(cp_context, recompute_handle, cu_seqlens, batch, q, -3)
        checks.check_gates(g, beta, (*q.shape[:-2], v.shape[-2]), q.device)
        _check_shared(
            q,
            q.shape[-1],
            v.shape[-2],
            v.shape[-1],
            batch,
            initial_state,
            cu_seqlens,
            A_log,
            dt_bias,
            switches,
            cp_context,
        )
        if not torch.compiler.is_compiling():
            checks.warn_of_heads_first(q, v, initial_state, A_log, cp_context)
        if plain:
            checks.passed(kind)
    options = _options(scale, q.shape[-1], switches, _save_level(tensors))
    unbatched = q.dim() == 3
    if unbatched:
        q, k, v, g, beta = (x.unsqueeze(0) for x in (q, k, v, g, beta))
    if cp_context is not None:
        out: tuple[Tensor, ...] = calls.run(
            torch.ops.gdn.context_fwd, plain, (q, k, v), g, beta, initial_state, A_log, dt_bias,
            cp_context, recompute_handle, **options,
        )  # fmt: skip
    else:
        out = autograd.chunk_fwd(plain, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, **options)
    return _results(out, unbatched, output_final_state)


def chunk_gated_delta_rule_packed(
    row: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    num_qk_heads: int,
    num_v_heads: int,
    head_dim: int = 128,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_context: Any = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    deterministic: bool = True,
    recompute_handle: Any = None,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gated_delta_rule` on one packed row per token: nothing is split, copied or concatenated, in eager too.

    Args:
        row: [B,T,W] or [T,W], W = (2 * num_qk_heads + num_v_heads) * head_dim, laid out [q heads | k heads | v heads].
            Any token and batch strides with dense channels; other rows are copied (`stats().input_copies`). The
            gradient is always one dense row.
        g, beta: [B,T,HV] or [T,HV].
        num_qk_heads, num_v_heads, head_dim: HK, HV and the channels of every head (K = V).

    Every other argument, the results, the bits and the errors are those of `chunk_gated_delta_rule`.
    """
    tensors = (row, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    switches = _Switches(
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        deterministic,
        use_gate_in_kernel,
    )
    plain = _is_plain(recompute_handle, tensors)
    others = (*switches, num_qk_heads, num_v_heads, head_dim)
    kind = checks.call_kind(tensors, (*others, *calls.kind(cp_context))) if plain else ()
    if not (plain and checks.has_passed(kind)):
        checks.check_row(row, num_qk_heads, num_v_heads, head_dim)
        batch = 1 if row.dim() == 2 else row.shape[0]
        calls.check_context(cp_context, recompute_handle, cu_seqlens, batch, row, -2)
        checks.check_gates(g, beta, (*row.shape[:-1], num_v_heads), row.device)
        _check_shared(
            row, head_dim, num_v_heads, head_dim, batch, initial_state, cu_seqlens, A_log, dt_bias, switches, cp_context
        )
        if plain:
            checks.passed(kind)
    options = _options(scale, head_dim, switches, _save_level(tensors))
    options |= {"num_qk_heads": num_qk_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
    unbatched = row.dim() == 2
    if unbatched:
        row, g, beta = row.unsqueeze(0), g.unsqueeze(0), beta.unsqueeze(0)
    if cp_context is not None:
        out: tuple[Tensor, ...] = calls.run(
            torch.ops.gdn.context_packed_fwd, plain, (row,), g, beta, initial_state, A_log, dt_bias,
            cp_context, recompute_handle, **options,
        )  # fmt: skip
    else:
        out = autograd.chunk_packed_fwd(plain, row, g, beta, initial_state, cu_seqlens, A_log, dt_bias, **options)
    return _results(out, unbatched, output_final_state)


class _Switches(NamedTuple):
    """The switches that both public functions have."""

    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    deterministic: bool
    use_gate_in_kernel: bool


def _is_plain(recompute_handle: Any, tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether nothing but the call itself is to be done: checks may be remembered, the dispatcher left out."""
    return recompute_handle is None and not torch.compiler.is_compiling() and is_plain(tensors)


def _check_shared(
    q: Tensor,
    key_dim: int,
    num_v_heads: int,
    value_dim: int,
    batch: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    switches: _Switches,
    cp_context: Any,
) -> None:
    """Check what both public functions share."""
    checks.check_switches(
        output_final_state=switches.output_final_state,
        use_qk_l2norm_in_kernel=switches.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=switches.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=switches.allow_neg_eigval,
        deterministic=switches.deterministic,
    )
    checks.check_documents(cu_seqlens, batch, q.device)
    num_documents = _num_documents(cu_seqlens, batch, cp_context)
    checks.check_state(initial_state, (num_documents, num_v_heads, key_dim, value_dim), q)
    checks.check_gate_parameters(switches.use_gate_in_kernel, A_log, dt_bias, num_v_heads, q.device)


def _options(scale: float | None, key_dim: int, switches: _Switches, save: str) -> dict[str, Any]:
    """The options under the ops' names."""
    return {
        "scale": checks.check_scale(scale, key_dim),
        "output_final_state": switches.output_final_state,
        "use_qk_l2norm": switches.use_qk_l2norm_in_kernel,
        "use_beta_sigmoid": switches.use_beta_sigmoid_in_kernel,
        "allow_neg_eigval": switches.allow_neg_eigval,
        "deterministic": switches.deterministic,
        "save": save,
    }


def _results(out: Any, unbatched: bool, output_final_state: bool) -> tuple[Tensor, Tensor | None]:
    o = out[0].squeeze(0) if unbatched else out[0]
    return o, out[1] if output_final_state else None


chunk_gdn = chunk_gated_delta_rule
