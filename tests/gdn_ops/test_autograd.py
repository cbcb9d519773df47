"""Gradients reach any subset of inputs, whatever carries the loss; derivatives that are not there are refused."""

import itertools

import pytest
import torch
import torch.utils.checkpoint

import gdn_ops
from gdn_ops import settings
from gdn_ops.shapes import Saved

B, T, HK, HV, K, V = 2, 21, 2, 4, 6, 5
NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def problem(dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return {
        "q": (randn(B, T, HK, K) * 0.5).to(dtype),
        "k": (randn(B, T, HK, K) * 0.5).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "g": randn(B, T, HV),
        "beta": randn(B, T, HV),
        "initial_state": randn(B, HV, K, V).to(state_dtype),
        "A_log": randn(HV),
        "dt_bias": randn(HV),
    }


OPTIONS = {
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "output_final_state": True,
}


def gradients(needed, loss="both", dtype=torch.float64, seed=0):
    tensors = problem(dtype, seed)
    for name in needed:
        tensors[name].requires_grad_()
    o, state = gdn_ops.chunk_gated_delta_rule(**tensors, **OPTIONS)
    gen = torch.Generator().manual_seed(5)
    losses = {
        name: (x * torch.randn(x.shape, generator=gen).to(x.dtype)).sum()
        for name, x in (("output", o), ("state", state))
    }
    (sum(losses.values()) if loss == "both" else losses[loss]).backward()
    return {name: x.grad for name, x in tensors.items()}


def test_gradcheck_of_the_whole_contract():
    tensors = problem()
    names = list(tensors)
    inputs = [x.requires_grad_() for x in tensors.values()]

    def run(*values):
        return gdn_ops.chunk_gated_delta_rule(**dict(zip(names, values, strict=True)), **OPTIONS)

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("needed", [(name,) for name in NAMES] + list(itertools.combinations(NAMES, 7))[:3])
def test_any_subset_of_inputs_may_require_grad(needed):
    everything = gradients(NAMES)
    some = gradients(needed)
    for name in NAMES:
        if name in needed:
            assert torch.equal(some[name], everything[name]), name
        else:
            assert some[name] is None, name


def test_the_loss_may_sit_in_the_output_the_state_or_both():
    both, output, state = (gradients(NAMES, loss) for loss in ("both", "output", "state"))
    for name in NAMES:
        torch.testing.assert_close(output[name] + (0 if state[name] is None else state[name]), both[name])
    assert not state["q"].any()  # the final state does not read q
    assert state["v"].any()


def test_nothing_in_the_loss_gives_no_gradient():
    tensors = problem()
    tensors["q"].requires_grad_()
    o, _ = gdn_ops.chunk_gated_delta_rule(**tensors, **OPTIONS)
    (grad,) = torch.autograd.grad(tensors["q"].sum() + 0 * o.detach().sum(), tensors["q"])
    assert torch.equal(grad, torch.ones_like(grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_have_their_input_s_dtype(dtype):
    tensors = problem(dtype)
    tensors["g"], tensors["beta"] = tensors["g"].to(dtype), tensors["beta"].float()
    for x in tensors.values():
        x.requires_grad_()
    o, state = gdn_ops.chunk_gated_delta_rule(**tensors, **OPTIONS)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)
    (o.float().sum() + state.sum()).backward()
    for name, x in tensors.items():
        assert x.grad.dtype == x.dtype, name
        assert x.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_saved_never_changes_a_bit(dtype):
    found = []
    for save in ("inputs", "solve", "states"):
        with settings.configure(save=save):
            found.append(gradients(NAMES, dtype=dtype))
    for other in found[1:]:
        for name in NAMES:
            assert torch.equal(found[0][name], other[name]), name


def test_saved_bytes_follow_the_setting():
    kept = {}
    for save in ("inputs", "solve", "states"):
        tensors = problem(torch.float32)
        tensors["q"].requires_grad_()
        seen = []
        with (
            settings.configure(save=save),
            torch.autograd.graph.saved_tensors_hooks(lambda x, seen=seen: seen.append(x) or x, lambda x: x),
        ):
            gdn_ops.chunk_gated_delta_rule(**tensors, **OPTIONS)
        own = {x.untyped_storage()._cdata for x in tensors.values()}
        kept[save] = sum(x.numel() * x.element_size() for x in seen if x.untyped_storage()._cdata not in own)
    assert kept["inputs"] == 0
    assert 0 < kept["solve"] < kept["states"]


def test_no_gradient_keeps_nothing():
    tensors = problem(torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: pytest.fail("saved a tensor"), lambda x: x):
        o, state = gdn_ops.chunk_gated_delta_rule(**tensors, **OPTIONS)
    assert o.grad_fn is None
    assert state.grad_fn is None


@pytest.mark.parametrize("form", ["plain", "views", "packed"])
@pytest.mark.parametrize("loss", [torch.Tensor.sum, lambda o: o.square().sum()], ids=["linear", "square"])
@pytest.mark.parametrize("recompute", [False, True])
def test_double_backward_is_refused(form, loss, recompute):
    row = torch.randn(1, T, (2 * HK + HV) * K, requires_grad=True)
    gates = torch.rand(1, T, HV)
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": K}

    def call(row):
        if form == "packed":
            return gdn_ops.chunk_gated_delta_rule_packed(row, -gates, gates, **heads)[0]
        if form == "views":
            q, k, v = gdn_ops.packed_qkv_views(row, **heads)
        else:
            q, k, v = (x.unflatten(-1, (-1, K)) for x in row.split([HK * K, HK * K, HV * K], -1))
        return gdn_ops.chunk_gated_delta_rule(q, k, v, -gates, gates)[0]

    o = torch.utils.checkpoint.checkpoint(call, row, use_reentrant=False) if recompute else call(row)
    (grad,) = torch.autograd.grad(loss(o), row, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="no second derivative"):
        (loss(call(row)) + grad.square().sum()).backward()


def test_a_backward_op_called_with_inputs_that_require_grad_is_refused():
    tensors = problem(torch.float32)
    values = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    out = torch.ops.gdn.chunk_fwd(*values, scale=1.0)
    do = torch.ones_like(out[0]).requires_grad_()
    with pytest.raises(RuntimeError, match="gdn::chunk_bwd is a backward"):
        torch.ops.gdn.chunk_bwd(do, None, *values, *out[2:], scale=1.0)


def test_forward_mode_is_refused():
    tensors = problem()

    def run(q):
        return gdn_ops.chunk_gated_delta_rule(**{**tensors, "q": q}, **OPTIONS)[0]

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors["q"], torch.ones_like(tensors["q"]))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            run(dual)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(run, (tensors["q"],), (torch.ones_like(tensors["q"]),))


def _of_views(row, g, beta):
    q, k, v = gdn_ops.packed_qkv_views(row, num_qk_heads=2, num_v_heads=4, head_dim=8)
    return gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta)[0]


def _of_a_row(row, g, beta):
    return gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, num_qk_heads=2, num_v_heads=4, head_dim=8)[0]


def _of_parts(row, g, beta):
    q, k, v = (x.unflatten(-1, (-1, 8)) for x in row.split([16, 16, 32], -1))
    return gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta)[0]


@pytest.mark.parametrize("function", [_of_parts, _of_views, _of_a_row])
def test_transforms_of_torch_func_are_refused_with_what_to_use(function):
    row, g, beta = torch.randn(1, 5, 64), -torch.rand(1, 5, 4), torch.rand(1, 5, 4)

    def run(row):
        return function(row, g, beta).square().sum()

    for transform in (torch.func.grad(run), torch.func.jacrev(run), lambda x: torch.func.vjp(run, x)):
        with pytest.raises(NotImplementedError, match=r"other than vmap .* torch\.autograd\.grad"):
            transform(row)
    expected = torch.autograd.grad(run(row.requires_grad_()), row)[0]
    assert expected.isfinite().all()
    # What torch takes is still taken: vmap, with gradients that come through autograd itself.
    batched = torch.vmap(lambda row: function(row, g, beta))(row[None])
    assert torch.equal(torch.autograd.grad(batched.square().sum(), row)[0], expected)
    shared = torch.vmap(lambda g: function(row, g, beta))(g[None])
    assert torch.equal(torch.autograd.grad(shared.square().sum(), row)[0], expected)


def test_unused_outputs_of_the_op_are_not_differentiable():
    tensors = problem(torch.float32)
    q = tensors["q"].requires_grad_()
    values = [tensors[name] for name in ("q", "k", "v", "g", "beta")]
    out = torch.ops.gdn.chunk_fwd(*values, scale=1.0, output_final_state=True, save="states")
    assert q.requires_grad
    assert [x.requires_grad for x in out] == [True, True] + [False] * len(Saved._fields)
