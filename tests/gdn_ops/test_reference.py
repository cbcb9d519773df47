"""The oracle itself, against an even plainer statement of the recurrence and against finite differences."""

import math

import torch

from gdn_ops import reference


def test_one_head_by_hand():
    gen = torch.Generator().manual_seed(0)
    T, K, V = 5, 3, 2
    q, k = (torch.randn(T, 1, K, generator=gen, dtype=torch.float64) for _ in range(2))
    v = torch.randn(T, 1, V, generator=gen, dtype=torch.float64)
    g, beta = (
        -torch.rand(T, 1, generator=gen, dtype=torch.float64),
        torch.rand(T, 1, generator=gen, dtype=torch.float64),
    )
    start = torch.randn(1, 1, K, V, generator=gen, dtype=torch.float64)
    o, final = reference.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=start, output_final_state=True)
    state = [[start[0, 0, i, j].item() for j in range(V)] for i in range(K)]
    for t in range(T):
        decay, write = math.exp(g[t, 0]), beta[t, 0].item()
        state = [[decay * x for x in row] for row in state]
        for j in range(V):
            u = write * (v[t, 0, j].item() - sum(state[i][j] * k[t, 0, i].item() for i in range(K)))
            for i in range(K):
                state[i][j] += k[t, 0, i].item() * u
            expected = K**-0.5 * sum(state[i][j] * q[t, 0, i].item() for i in range(K))
            assert math.isclose(o[t, 0, j].item(), expected, rel_tol=1e-12, abs_tol=1e-12)
    torch.testing.assert_close(final[0, 0], torch.tensor(state, dtype=torch.float64))


def test_options_say_what_they_do():
    gen = torch.Generator().manual_seed(1)
    q, k = (torch.randn(2, 6, 1, 4, generator=gen) for _ in range(2))
    v, raw, logit = (torch.randn(2, 6, 2, *s, generator=gen) for s in ((3,), (), ()))
    A_log, dt_bias = torch.randn(2, generator=gen), torch.randn(2, generator=gen)
    inside, _ = reference.chunk_gated_delta_rule(
        q, k, v, raw, logit, 0.7, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
    )  # fmt: skip
    q, k, raw, logit, A_log, dt_bias = (x.double() for x in (q, k, raw, logit, A_log, dt_bias))
    unit_q, unit_k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    decay = -A_log.exp() * torch.log1p((raw + dt_bias).exp())
    outside, _ = reference.chunk_gated_delta_rule(unit_q, unit_k, v, decay, 2 / (1 + (-logit).exp()), 0.7)
    torch.testing.assert_close(inside, outside)


def test_documents_are_separate_calls():
    gen = torch.Generator().manual_seed(2)
    q, v = torch.randn(1, 9, 1, 4, generator=gen), torch.randn(1, 9, 1, 4, generator=gen)
    g, beta = -torch.rand(1, 9, 1, generator=gen), torch.rand(1, 9, 1, generator=gen)
    cu = torch.tensor([0, 3, 3, 8])
    packed, states = reference.chunk_gated_delta_rule(q, q, v, g, beta, cu_seqlens=cu, output_final_state=True)
    for n, (start, end) in enumerate(((0, 3), (3, 3), (3, 8))):
        part = [x[:, start:end] for x in (q, q, v, g, beta)]
        alone, state = reference.chunk_gated_delta_rule(*part, output_final_state=True)
        assert torch.equal(alone, packed[:, start:end])
        assert torch.equal(state[0], states[n])
    assert not packed[:, 8:].any()


def test_gradients_are_those_of_finite_differences():
    gen = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64, requires_grad=True)

    inputs = (randn(4, 1, 3), randn(4, 1, 3), randn(4, 2, 2), randn(4, 2), randn(4, 2))
    assert torch.autograd.gradcheck(
        lambda *xs: reference.chunk_gated_delta_rule(*xs, output_final_state=True), inputs, fast_mode=True
    )
