"""The CPU backend: accuracy by error budget in every dtype, saved tensors by definition, and bits that never move."""

import itertools
import math

import pytest
import torch

import gdn_ops
from gdn_ops import reference, settings
from gdn_ops.outputs import saved_matrices
from gdn_ops.shapes import CHUNK, Inputs, Saved

OPS = torch.ops.gdn


def problem(dtype, lengths, HK=2, group=2, K=16, V=24, seed=0, kind="base", tail=0):
    """Inputs of one pack of documents: every tensor argument by name, and the boundaries."""
    gen = torch.Generator().manual_seed(seed)
    T, HV = sum(lengths) + tail, HK * group

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    k = randn(1, T, HK, K)
    if kind == "parallel":
        k = randn(1, 1, HK, K) + 0.05 * k
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (randn(1, T, HK, K), k))
    g = torch.nn.functional.logsigmoid(randn(1, T, HV) + 3)
    beta = torch.sigmoid(randn(1, T, HV))
    if kind in ("weak", "parallel"):
        g = g * 0.02
    if kind == "parallel":
        beta = torch.full_like(beta, 0.95)
    if kind == "strong":
        g = -20 * torch.rand(1, T, HV, generator=gen)
    if kind == "extreme":
        g = torch.where(torch.rand(1, T, HV, generator=gen) < 0.2, -1e4, 0.1 * g)
    if kind == "reset":
        g = torch.where(torch.rand(1, T, HV, generator=gen) < 0.2, -torch.inf, g)
    if kind == "zero":
        g = torch.zeros_like(g)
    if kind == "no-write":
        beta = torch.where(torch.rand(1, T, HV, generator=gen) < 0.5, 0.0, beta)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": randn(1, T, HV, V).to(dtype), "g": g, "beta": beta}
    tensors["initial_state"] = randn(len(lengths), HV, K, V)
    return tensors, cu


def everything(function, tensors, cu, dtype=None, **options):
    """Outputs and gradients by name, for a fixed random weighting of both outputs."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    o, state = function(**leaves, cu_seqlens=cu, output_final_state=True, **options)
    gen = torch.Generator().manual_seed(99)
    weights = [torch.randn(x.shape, generator=gen).to(dtype or x.dtype).to(x.dtype) for x in (o, state)]
    torch.autograd.backward([o, state], weights)
    return {"o": o.detach(), "state": state.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def naive(q, k, v, g, beta, initial_state, cu_seqlens, output_final_state):
    """The recurrence in the operands' own dtype with float32 states: the error that an independent eager code makes."""
    dtype = q.dtype
    q, k, v = (x.float() for x in (q, k, v))
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    outputs, states, bounds = [], [], cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = initial_state[n].float()
        for t in range(start, end):
            state = g[0, t].float().exp()[:, None, None] * state
            u = beta[0, t].float()[:, None] * (v[0, t] - (state * k[0, t][:, :, None]).sum(1))
            state = state + k[0, t][:, :, None] * u[:, None, :]
            outputs.append((state * q[0, t][:, :, None]).sum(1) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs)[None].to(dtype), torch.stack(states)


KINDS = ("base", "weak", "parallel", "strong", "extreme", "reset", "zero", "no-write")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_within_twice_that_of_an_independent_computation(dtype, kind):
    tensors, cu = problem(dtype, (70, 1, 64, 41), kind=kind)
    expected = everything(reference.chunk_gated_delta_rule, tensors, cu, dtype)
    found = everything(gdn_ops.chunk_gated_delta_rule, tensors, cu)
    other = everything(naive, tensors, cu)
    for name, right in expected.items():
        scale = right.double().norm() + 1e-30
        error = (found[name].double() - right.double()).norm() / scale
        independent = (other[name].double() - right.double()).norm() / scale
        rounding = torch.finfo(found[name].dtype).eps
        # One rounding more, and in float32 one for each of the sums that a chunk adds in another order.
        slack = rounding * (16 if found[name].dtype == torch.float32 else 1)
        assert error <= 2 * independent + slack, (name, float(error), float(independent))
        assert error < 1e-2


def test_saved_tensors_are_what_the_contract_says():
    tensors, cu = problem(torch.float64, (70, 0, 1, 128), K=5, V=3)
    tensors["initial_state"] = tensors["initial_state"].double()
    q, k, v, g, beta, h0 = tensors.values()
    out = OPS.chunk_fwd(q, k, v, g, beta, h0, cu, scale=0.5, use_qk_l2norm=True, save="states")
    saved = saved_matrices(Saved(*out[2:]), Inputs(q, k, v, g, beta, h0, cu))
    norms, gates, solve, scores, states, updates, checkpoints = saved
    assert checkpoints.shape[0] == 0
    torch.testing.assert_close(norms[..., 0, :], (q.square().sum(-1) + 1e-6).rsqrt())
    torch.testing.assert_close(norms[..., 1, :], (k.square().sum(-1) + 1e-6).rsqrt())
    q, k = q * norms[..., 0, :, None], k * norms[..., 1, :, None]
    bounds = cu.tolist()
    chunk = 0
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        state = h0[n]
        for first in range(start, end, CHUNK):
            span = slice(first, min(first + CHUNK, end))
            length = span.stop - span.start
            for h in range(v.shape[2]):
                qc, kc = q[0, span, h // 2], k[0, span, h // 2]
                sums = g[0, span, h].double().cumsum(0)
                b = beta[0, span, h].double()
                expected = torch.cat([sums, sums[-1:].expand(CHUNK - length)]) * math.log2(math.e)
                torch.testing.assert_close(gates[chunk, h], expected)
                gamma = (sums[:, None] - sums).exp().tril()
                full = torch.zeros(CHUNK, CHUNK, dtype=torch.float64)
                full[:length, :length] = 0.5 * gamma * (qc @ kc.T)
                torch.testing.assert_close(scores[chunk, h], full)
                system = torch.eye(length, dtype=torch.float64) + (b[:, None] * gamma * (kc @ kc.T)).tril(-1)
                full[:length, :length] = torch.linalg.inv(system) @ b.diag()
                torch.testing.assert_close(solve[chunk, h], full)
                torch.testing.assert_close(states[chunk, h], state[h].T)
                u = full[:length, :length] @ (v[0, span, h] - sums.exp()[:, None] * (kc @ state[h]))
                torch.testing.assert_close(updates[chunk, h, :, :length], u.T)
                assert not updates[chunk, h, :, length:].any()
                state[h] = sums[-1].exp() * state[h] + ((sums[-1] - sums).exp()[:, None] * kc).T @ u
            chunk += 1
    assert chunk == 5
    assert all(not x[chunk:].any() for x in (gates, solve, scores, states, updates))


def assert_same_bits(a, b, where=""):
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} {where}"


# One head with one channel, and more threads than matrices: the shapes where a batched product of one matrix takes
# another route through BLAS than the same matrix among others.
PACKED_SHAPES = (
    (16, 24, 2, 2),
    (5, 7, 1, 1),
    (64, 64, 1, 3),
    (33, 1, 2, 1),
    (64, 1, 1, 1),
    (1, 1, 1, 1),
    (64, 64, 1, 1),
)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_documents_have_the_same_bits_in_any_pack(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        wide = ((256, 256, 1, 1),) if dtype == torch.float64 else ()
        for seed, (K, V, HK, group) in enumerate(PACKED_SHAPES + wide):
            gen = torch.Generator().manual_seed(seed)
            lengths = [*torch.randint(0, 150, (4,), generator=gen).tolist(), 1]
            tensors, cu = problem(dtype, lengths, HK, group, K, V, seed, tail=3)
            if dtype == torch.float64:
                tensors["initial_state"] = tensors["initial_state"].double()
            packed = everything(gdn_ops.chunk_gated_delta_rule, tensors, cu, use_qk_l2norm_in_kernel=True)
            weights = torch.Generator().manual_seed(99)
            do = torch.randn(packed["o"].shape, generator=weights).to(dtype)
            dstate = torch.randn(packed["state"].shape, generator=weights).to(packed["state"].dtype)
            for n, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
                leaves = {
                    name: (x[n : n + 1] if name == "initial_state" else x[:, start:end]).clone().requires_grad_()
                    for name, x in tensors.items()
                }
                o, state = gdn_ops.chunk_gated_delta_rule(
                    **leaves, output_final_state=True, use_qk_l2norm_in_kernel=True
                )
                torch.autograd.backward([o, state], [do[:, start:end], dstate[n : n + 1]])
                where = f"document {n} of {lengths}, K {K}, V {V}"
                assert torch.equal(o, packed["o"][:, start:end]), where
                assert torch.equal(state, packed["state"][n : n + 1]), where
                for name in ("q", "k", "v", "g", "beta"):
                    assert torch.equal(leaves[name].grad, packed[f"d{name}"][:, start:end]), f"{name} {where}"
                assert torch.equal(leaves["initial_state"].grad, packed["dinitial_state"][n : n + 1]), where
    finally:
        torch.set_num_threads(before)


def test_a_batch_has_the_bits_of_its_sequences():
    tensors, _ = problem(torch.float32, (75, 75, 75))
    batched = {name: x if name == "initial_state" else x.unflatten(1, (3, 75))[0] for name, x in tensors.items()}
    a = everything(gdn_ops.chunk_gated_delta_rule, batched, None)
    b = everything(gdn_ops.chunk_gated_delta_rule, tensors, torch.tensor([0, 75, 150, 225]))
    # The weights are drawn in the order of memory, which is the same for both.
    for name in a:
        assert torch.equal(a[name].flatten(), b[name].flatten()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_what_is_saved_never_changes_a_bit(dtype):
    tensors, cu = problem(dtype, (70, 1, 30))
    if dtype == torch.float64:
        tensors["initial_state"] = tensors["initial_state"].double()
    found = []
    for save in ("inputs", "solve", "states"):
        with settings.configure(save=save):
            found.append(everything(gdn_ops.chunk_gated_delta_rule, tensors, cu, use_qk_l2norm_in_kernel=True))
    for other in found[1:]:
        assert_same_bits(found[0], other)


def test_every_element_is_written(poison_memory):
    tensors, cu = problem(torch.float32, (70, 0, 1), tail=9)
    found = everything(gdn_ops.chunk_gated_delta_rule, tensors, cu)
    assert all(x.isfinite().all() for x in found.values())
    args = [*tensors.values(), cu]
    out = OPS.chunk_fwd(*args, scale=1.0, output_final_state=True, use_qk_l2norm=True, save="states")
    assert all(x.isfinite().all() for x in out)


def test_runs_are_equal():
    tensors, cu = problem(torch.bfloat16, (70, 1, 130), K=64, V=64)
    first = everything(gdn_ops.chunk_gated_delta_rule, tensors, cu)
    for _ in range(5):
        assert_same_bits(first, everything(gdn_ops.chunk_gated_delta_rule, tensors, cu))
