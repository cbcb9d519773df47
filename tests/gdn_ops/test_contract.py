"""One contract: however q, k, v come, the bits are the same.

Plain views, packed views, the packed function and contiguous tensors; eager and compiled; directly and under every kind
of activation checkpointing.
"""

import functools
import itertools

import pytest
import torch
import torch._dynamo.utils
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gdn_ops
import inductor_passes
from gdn_ops import settings

HK, HV, D = 2, 4, 16
FORMS = ("plain", "packed_views", "packed", "contiguous")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def problem(dtype, varlen, D=D, device="cpu"):
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    B, T = (1, 150) if varlen else (2, 75)
    N = 4 if varlen else B
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = {
        "row": (randn(B, T, (2 * HK + HV) * D) * 0.5).to(dtype),
        "g": randn(B, T, HV) + 1,
        "beta": randn(B, T, HV),
        "initial_state": randn(N, HV, D, D).to(state_dtype),
        "A_log": randn(HV),
        "dt_bias": randn(HV),
    }
    cu_seqlens = torch.tensor([0, 66, 66, 67, T - 4], device=device) if varlen else None
    return {name: x.to(device) for name, x in tensors.items()}, cu_seqlens


def call(form, norm, cu_seqlens, row, g, beta, initial_state, A_log, dt_bias):
    """The op on a row, spelled in one of four ways."""
    D = row.shape[-1] // (2 * HK + HV)
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    options = {
        "initial_state": initial_state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": norm,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": norm,
        "cu_seqlens": cu_seqlens,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
    }
    if form == "packed":
        return gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, **heads, **options)
    if form == "packed_views":
        q, k, v = gdn_ops.packed_qkv_views(row, **heads)
    else:
        q, k, v = row.split([HK * D, HK * D, HV * D], dim=-1)
        q, k, v = q.unflatten(-1, (HK, D)), k.unflatten(-1, (HK, D)), v.unflatten(-1, (HV, D))
        if form == "contiguous":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, **options)


def results(run, tensors):
    """Outputs and every gradient of a run, by name."""
    return results_of_each(lambda leaves: [run(**leaves)], tensors)[0]


def results_of_each(run, *tensors):
    """The results of several calls that one function makes, each with leaves of its own, after one backward."""
    all_leaves = [{name: x.detach().clone().requires_grad_() for name, x in each.items()} for each in tensors]
    outputs, gradients = run(*all_leaves), []
    for pair in outputs:
        gen = torch.Generator().manual_seed(9)
        gradients += [torch.randn(x.shape, generator=gen).to(x) for x in pair]
    torch.autograd.backward([x for pair in outputs for x in pair], gradients)
    return [
        {"o": o.detach(), "state": state.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}
        for (o, state), leaves in zip(outputs, all_leaves, strict=True)
    ]


def assert_same_bits(found, expected):
    for name, x in expected.items():
        assert x.isfinite().all(), name
        assert torch.equal(found[name], x), name


def checkpointed(kind, run):
    """`run` under activation checkpointing."""
    if kind == "reentrant":
        return lambda **leaves: checkpoint(
            lambda *xs: run(**dict(zip(leaves, xs, strict=True))), *leaves.values(), use_reentrant=True
        )
    if kind == "selective":

        def policy(ctx, op, *args, **kwargs):
            kept = (torch.ops.gdn.chunk_fwd.default, torch.ops.gdn.chunk_packed_fwd.default)
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return lambda **leaves: checkpoint(run, use_reentrant=False, context_fn=contexts, **leaves)
    return lambda **leaves: checkpoint(run, use_reentrant=False, **leaves)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forms_agree_bitwise_in_eager(dtype, norm, varlen):
    tensors, cu_seqlens = problem(dtype, varlen)
    expected = results(functools.partial(call, "contiguous", norm, cu_seqlens), tensors)
    for form in FORMS:
        run = functools.partial(call, form, norm, cu_seqlens)
        assert_same_bits(results(run, tensors), expected)
        for kind in ("reentrant", "non-reentrant", "selective"):
            assert_same_bits(results(checkpointed(kind, run), tensors), expected)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "norm", "varlen"),
    [
        (torch.float32, True, True),
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, True),
        (torch.float16, True, False),
        (torch.float16, False, True),
        (torch.float64, True, False),
        (torch.float64, False, True),
    ],
    ids=str,
)
def test_forms_agree_bitwise_compiled(dtype, norm, varlen, fresh_compiler):
    """All forms in one graph; the next test compiles each by itself, checkpointed."""
    tensors, cu_seqlens = problem(dtype, varlen)
    expected = results(functools.partial(call, "contiguous", norm, cu_seqlens), tensors)

    def run(*leaves):
        return [call(form, norm, cu_seqlens, **each) for form, each in zip(FORMS, leaves, strict=True)]

    compiled = torch.compile(run, fullgraph=True)
    gdn_ops.reset_stats()
    for found in results_of_each(compiled, *[tensors] * len(FORMS)):
        assert_same_bits(found, expected)
    # Contiguous copies of the views are taken away by the pass, so every form writes one packed row.
    assert gdn_ops.stats().packed_gradients == len(FORMS)
    assert gdn_ops.stats().input_copies == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "selective"])
def test_compiled_checkpointing_agrees_bitwise(kind, form, fresh_compiler):
    tensors, cu_seqlens = problem(torch.bfloat16, True)
    expected = results(functools.partial(call, "contiguous", True, cu_seqlens), tensors)
    run = functools.partial(call, form, True, cu_seqlens)
    compiled = torch.compile(checkpointed(kind, run), fullgraph=True)
    gdn_ops.reset_stats()
    assert_same_bits(results(compiled, tensors), expected)
    assert gdn_ops.stats().packed_gradients == 1


def test_compiled_without_the_pass_agrees_bitwise_and_packs_nothing(fresh_compiler):
    tensors, cu_seqlens = problem(torch.float32, False)
    expected = results(functools.partial(call, "contiguous", False, cu_seqlens), tensors)
    with inductor_passes.disabled():
        compiled = torch.compile(functools.partial(call, "plain", False, cu_seqlens), fullgraph=True)
        gdn_ops.reset_stats()
        assert_same_bits(results(compiled, tensors), expected)
    assert gdn_ops.stats().packed_gradients == 0


def test_one_compilation_serves_every_length(fresh_compiler):
    tensors, _ = problem(torch.float32, False)
    compiled = torch.compile(functools.partial(call, "plain", True, None), fullgraph=True, dynamic=True)
    for T in (75, 64, 13):
        cut = {name: x[:, :T] if name in ("row", "g", "beta") else x for name, x in tensors.items()}
        expected = results(functools.partial(call, "contiguous", True, None), cut)
        assert_same_bits(results(compiled, cut), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_document_alone_equals_the_document_in_a_pack(form, dtype):
    tensors, cu_seqlens = problem(dtype, True)
    packed = results(functools.partial(call, form, True, cu_seqlens), tensors)
    gen = torch.Generator().manual_seed(9)
    do = torch.randn(packed["o"].shape, generator=gen).to(packed["o"].dtype)
    dstate = torch.randn(packed["state"].shape, generator=gen).to(packed["state"].dtype)
    bounds = cu_seqlens.tolist()
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone = {
            name: x[:, start:end] if name in ("row", "g", "beta") else x[n : n + 1] if name == "initial_state" else x
            for name, x in tensors.items()
        }
        leaves = {name: x.detach().clone().requires_grad_() for name, x in alone.items()}
        o, state = call(form, True, None, **leaves)
        torch.autograd.backward([o, state], [do[:, start:end], dstate[n : n + 1]])
        assert torch.equal(o, packed["o"][:, start:end])
        assert torch.equal(state, packed["state"][n : n + 1])
        for name in ("row", "g", "beta"):
            assert torch.equal(leaves[name].grad, packed[f"d{name}"][:, start:end]), (name, n)
        assert torch.equal(leaves["initial_state"].grad, packed["dinitial_state"][n : n + 1])
    for name in ("o", "drow", "dg", "dbeta"):
        assert not packed[name][:, bounds[-1] :].any(), name


# ---- the same on GPUs, through the public function


@pytest.fixture(params=["triton", "hopper"])
def gpu_backend(request, fresh_compiler):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device and there is none")
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    with settings.configure(backend=request.param):
        yield request.param


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("norm", "varlen"), [(True, True), (False, False)], ids=["norm-varlen", "dense"])
def test_forms_agree_bitwise_on_a_gpu(form, norm, varlen, gpu_backend):
    tensors, cu_seqlens = problem(torch.bfloat16, varlen, D=128, device="cuda")
    expected = results(functools.partial(call, "contiguous", norm, cu_seqlens), tensors)
    run = functools.partial(call, form, norm, cu_seqlens)
    assert_same_bits(results(run, tensors), expected)
    assert_same_bits(results(checkpointed("non-reentrant", run), tensors), expected)
    for way in (run, checkpointed("non-reentrant", run), checkpointed("selective", run)):
        compiled = torch.compile(lambda way=way, **leaves: way(**leaves), fullgraph=True)
        gdn_ops.reset_stats()
        assert_same_bits(results(compiled, tensors), expected)
        assert gdn_ops.stats().packed_gradients == 1
        assert gdn_ops.stats().input_copies == 0


@pytest.mark.gpu
def test_layers_with_convolutions_on_a_gpu(gpu_backend):
    # Inductor prefers channels-last layouts between convolutions; eager code has none of them.
    D, T = 128, 200
    W = (2 * HK + HV) * D
    torch.manual_seed(0)
    convolutions = [torch.nn.Conv1d(W, W, 4, groups=W, padding=3, device="cuda") for _ in range(2)]

    def model(x, g, beta):
        for convolution in convolutions:
            row = torch.nn.functional.silu(convolution(x.transpose(1, 2))[..., :T]).transpose(1, 2)
            q, k, v = row.bfloat16().split([HK * D, HK * D, HV * D], dim=-1)
            q, k, v = q.reshape(2, T, -1, D), k.reshape(2, T, -1, D), v.reshape(2, T, -1, D)
            o, _ = gdn_ops.chunk_gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), use_qk_l2norm_in_kernel=True)
            x = x + torch.nn.functional.pad(o.flatten(-2), (0, W - HV * D))
        return x

    x = torch.randn(2, T, W, device="cuda")
    gates = [torch.randn(2, T, HV, device="cuda", requires_grad=True) for _ in range(2)]

    def gradients(run):
        loss = run(x, *gates).square().mean()
        return torch.autograd.grad(loss, [*gates, *(c.weight for c in convolutions)])

    expected = gradients(model)
    gdn_ops.reset_stats()
    found = gradients(torch.compile(model, fullgraph=True))
    for a, b in zip(found, expected, strict=True):
        # bfloat16 rows and TF32 convolutions round otherwise in a fused kernel, and two layers add up.
        assert (a - b).norm() <= 3e-2 * b.norm()
    assert gdn_ops.stats().packed_gradients == 2
    assert gdn_ops.stats().input_copies == 0
