"""The public functions against the float64 recurrence, over shapes, documents and options; ranks, T = 0, defaults."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import gdn_ops
from gdn_ops import reference


@st.composite
def calls(draw):
    """Shapes and switches of one call."""
    varlen = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4)) if varlen else None
    tail = draw(st.integers(0, 3)) if varlen else 0
    return {
        "lengths": lengths,
        "T": sum(lengths) + tail if varlen else draw(st.sampled_from([0, 1, 15, 17, 63, 64, 65, 127, 130])),
        "B": 1 if varlen else draw(st.integers(1, 2)),
        "HK": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 3)),
        "K": draw(st.sampled_from([1, 5, 16])),
        "V": draw(st.sampled_from([1, 7, 16])),
        "state": draw(st.booleans()),
        "final": draw(st.booleans()),
        "norm": draw(st.booleans()),
        "gate": draw(st.sampled_from([None, "A_log", "dt_bias"])),
        "sigmoid": draw(st.sampled_from([None, "sigmoid", "negative"])),
        "scale": draw(st.sampled_from([None, 0.25])),
        "batch_axis": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**16)),
    }


def build(c):
    gen = torch.Generator().manual_seed(c["seed"])

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    B, T, HK, K, V = c["B"], c["T"], c["HK"], c["K"], c["V"]
    HV = HK * c["group"]
    tensors = {
        "q": randn(B, T, HK, K) * 0.5,
        "k": randn(B, T, HK, K) * (1.0 if c["norm"] else K**-0.5),
        "v": randn(B, T, HV, V),
        "g": randn(B, T, HV) if c["gate"] else -randn(B, T, HV).abs(),
        "beta": randn(B, T, HV) if c["sigmoid"] else torch.rand(B, T, HV, generator=gen, dtype=torch.float64),
    }
    options = {
        "scale": c["scale"],
        "output_final_state": c["final"],
        "use_qk_l2norm_in_kernel": c["norm"],
        "use_beta_sigmoid_in_kernel": c["sigmoid"] is not None,
        "allow_neg_eigval": c["sigmoid"] == "negative",
        "use_gate_in_kernel": c["gate"] is not None,
    }
    if c["lengths"] is not None:
        options["cu_seqlens"] = torch.tensor([0, *torch.tensor(c["lengths"]).cumsum(0).tolist()], dtype=torch.int32)
    N = len(c["lengths"]) if c["lengths"] is not None else B
    if c["state"]:
        tensors["initial_state"] = randn(N, HV, K, V)
    if c["gate"]:
        tensors["A_log"] = randn(HV)
    if c["gate"] == "dt_bias":
        tensors["dt_bias"] = randn(HV)
    if B == 1 and not c["batch_axis"]:
        for name in ("q", "k", "v", "g", "beta"):
            tensors[name] = tensors[name][0]
    return tensors, options


def run(function, tensors, options, dtype):
    leaves = {
        name: x.to(dtype if name in ("q", "k", "v") or dtype == torch.float64 else torch.float32).requires_grad_()
        for name, x in tensors.items()
    }
    o, state = function(**leaves, **options)
    gen = torch.Generator().manual_seed(1)
    loss = (o.double() * torch.randn(o.shape, generator=gen, dtype=torch.float64)).sum()
    if state is not None:
        loss = loss + (state.double() * torch.randn(state.shape, generator=gen, dtype=torch.float64)).sum()
    if loss.requires_grad:
        loss.backward()
    return o, state, {name: x.grad for name, x in leaves.items()}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(calls())
def test_float64_equals_the_recurrence(c):
    tensors, options = build(c)
    o, state, grads = run(gdn_ops.chunk_gated_delta_rule, tensors, options, torch.float64)
    right_o, right_state, right = run(reference.chunk_gated_delta_rule, tensors, options, torch.float64)
    assert o.shape == tensors["v"].shape
    torch.testing.assert_close(o, right_o, rtol=1e-9, atol=1e-9)
    assert (state is None) == (not c["final"])
    if state is not None:
        torch.testing.assert_close(state, right_state, rtol=1e-9, atol=1e-9)
    for name, x in right.items():
        expected = torch.zeros_like(tensors[name]) if x is None else x
        found = torch.zeros_like(tensors[name]) if grads[name] is None else grads[name]
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_unbatched_equals_batched(dtype):
    gen = torch.Generator().manual_seed(3)
    q, k = (torch.randn(70, 2, 16, generator=gen).to(dtype) * 0.25 for _ in range(2))
    v, g, beta = torch.randn(70, 4, 8, generator=gen).to(dtype), -torch.rand(70, 4), torch.rand(70, 4)
    o, state = gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    batched = [x.unsqueeze(0) for x in (q, k, v, g, beta)]
    o2, state2 = gdn_ops.chunk_gated_delta_rule(*batched, output_final_state=True)
    assert o.shape == v.shape
    assert torch.equal(o, o2[0])
    assert torch.equal(state, state2)
    assert state.shape == (1, 4, 16, 8)


def test_defaults_and_alias():
    assert gdn_ops.chunk_gdn is gdn_ops.chunk_gated_delta_rule
    q = torch.randn(1, 9, 1, 16)
    gates = -torch.rand(1, 9, 1), torch.rand(1, 9, 1)
    o, state = gdn_ops.chunk_gated_delta_rule(q, q, q, *gates)
    assert state is None
    assert torch.equal(o, gdn_ops.chunk_gated_delta_rule(q, q, q, *gates, 0.25)[0])


@pytest.mark.parametrize("name", ["cp_context", "recompute_handle"])
def test_no_argument_is_silently_ignored(name):
    q = torch.randn(1, 4, 1, 8)
    gates = torch.rand(1, 4, 1)
    with pytest.raises((NotImplementedError, TypeError), match=name):
        gdn_ops.chunk_gated_delta_rule(q, q, q, -gates, gates, **{name: object()})


def test_exchanging_empty_documents_changes_nothing():
    gen = torch.Generator().manual_seed(4)
    q = torch.randn(1, 100, 2, 8, generator=gen) * 0.3
    g, beta = -torch.rand(1, 100, 2, generator=gen), torch.rand(1, 100, 2, generator=gen)
    plain, _ = gdn_ops.chunk_gated_delta_rule(q, q, q, g, beta, cu_seqlens=torch.tensor([0, 40, 100]))
    empty, state = gdn_ops.chunk_gated_delta_rule(
        q, q, q, g, beta, cu_seqlens=torch.tensor([0, 0, 40, 40, 40, 100, 100]), output_final_state=True
    )
    assert torch.equal(plain, empty)
    assert not state[[0, 2, 3, 5]].any()
    nothing, state = gdn_ops.chunk_gated_delta_rule(
        q, q, q, g, beta, cu_seqlens=torch.tensor([0]), output_final_state=True
    )
    assert not nothing.any()
    assert state.shape[0] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_document_reaches_no_other(value):
    gen = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 150, 2, 8, generator=gen) * 0.3 for _ in range(3))
    g, beta = -torch.rand(1, 150, 2, generator=gen), torch.rand(1, 150, 2, generator=gen)
    cu = torch.tensor([0, 50, 53, 150])

    def everything(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o, state = gdn_ops.chunk_gated_delta_rule(*leaves, cu_seqlens=cu, output_final_state=True)
        (o.sum() + state.sum()).backward()
        return [o, state, *(x.grad for x in leaves)]

    right = everything(q, k, v, g, beta)
    for spoilt in range(5):
        inputs = [x.clone() for x in (q, k, v, g, beta)]
        inputs[spoilt][:, 50:53] = value
        found = everything(*inputs)
        assert torch.equal(found[1][[0, 2]], right[1][[0, 2]])
        for a, b in zip(found[:1] + found[2:], right[:1] + right[2:], strict=True):
            assert torch.equal(a[:, :50], b[:, :50])
            assert torch.equal(a[:, 53:], b[:, 53:])
