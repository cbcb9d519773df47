"""The recurrence itself, token by token in float64: what every kernel is compared with. Imports torch only.

Gated Delta Networks (arXiv 2412.06464), equation 10, per value head with the state S [K, V]:
S <- exp(g_t) S;  u_t = beta_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = scale * S^T q_t.
"""

import torch
from torch import Tensor


def _normalised(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


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
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`gdn_ops.chunk_gated_delta_rule` by its definition, in float64; its gradients are autograd's.

    Arguments as there: q, k [B,T,HK,K], v [B,T,HV,V], g, beta [B,T,HV] (or all without B), initial_state [N,HV,K,V],
    cu_seqlens [N+1] (read on the host), A_log, dt_bias [HV]; any floating dtypes. Slow: one step a token.

    Returns:
        o [B,T,HV,V] (or without B) and final_state [N,HV,K,V] or None, both float64. Tokens after the last document
        give zeros.
    """
    unbatched = q.dim() == 3
    if unbatched:
        q, k, v, g, beta = (x.unsqueeze(0) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = _normalised(q), _normalised(k)
    if use_gate_in_kernel:
        assert A_log is not None
        bias = 0 if dt_bias is None else dt_bias.double()
        g = -A_log.double().exp() * torch.nn.functional.softplus(g + bias)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    B, T, HK, K = q.shape
    HV, V = v.shape[2:]
    if scale is None:
        scale = K**-0.5
    q, k = (x.repeat_interleave(HV // HK, dim=2) for x in (q, k))
    if cu_seqlens is None:
        documents = [(b, 0, T) for b in range(B)]
    else:
        bounds = cu_seqlens.tolist()
        documents = [(0, start, end) for start, end in zip(bounds, bounds[1:], strict=False)]  # noqa: RUF007
    outputs = [[q.new_zeros(HV, V)] * T for _ in range(B)]
    states = []
    for n, (b, start, end) in enumerate(documents):
        state = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n].double()
        for t in range(start, end):
            state = g[b, t].exp()[:, None, None] * state
            u = beta[b, t][:, None] * (v[b, t] - torch.einsum("hkv,hk->hv", state, k[b, t]))
            state = state + k[b, t][:, :, None] * u[:, None, :]
            outputs[b][t] = scale * torch.einsum("hkv,hk->hv", state, q[b, t])
        states.append(state)
    o = torch.stack([torch.stack(x) if T else q.new_zeros(0, HV, V) for x in outputs])
    final = None
    if output_final_state:
        final = torch.stack(states) if states else q.new_zeros(0, HV, K, V)
    return (o[0] if unbatched else o), final
