import importlib.util
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next

import gdn_ops
from gdn_ops.integrations import transformers as integration

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    **LINEAR,
}


class _Calls(TorchDispatchMode):
    """The names of the `gdn` ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gdn":
            self.names.append(func.name().removeprefix("gdn::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _unpatched():
    integration.unpatch()
    yield
    integration.unpatch()


def _layer(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "qwen3_5":
        config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"], **SMALL)
        return modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    config = Qwen3NextConfig(num_hidden_layers=1, layer_types=["linear_attention"], **SMALL)
    return modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)


def _run(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    out.square().sum().backward()
    return {"out": out.detach(), "dx": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_patched_layer_equals_transformers_own(kind):
    layer = _layer(kind)
    x = torch.randn(2, 130, 32)
    with _Calls() as calls:
        expected = _run(layer, x)
    assert calls.names == []
    assert integration.patch(layer) == [f"transformers.models.{kind}.modeling_{kind}"]
    with _Calls() as calls:
        actual = _run(layer, x)
    assert calls.names == ["chunk_fwd", "chunk_bwd"]
    assert actual.keys() == expected.keys()
    layer.double()
    exact = _run(layer, x.double())
    for name, truth in exact.items():
        ours, theirs = (((result[name] - truth).norm() / truth.norm()).item() for result in (actual, expected))
        # Theirs loses digits in the decay's gradient, so it bounds how well the two can agree.
        assert theirs < 5e-3, f"{name}: {theirs:.1e} between two implementations"
        assert ours < 2 * theirs + 1e-6, f"{name}: error {ours:.1e}, theirs {theirs:.1e}"


def test_unpatch_puts_the_same_function_back():
    original, convolution = modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn
    model = _layer("qwen3_5")
    assert integration.patch(model) == integration.patch(model)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is not original
    assert integration.unpatch(model) == [modeling_qwen3_5.__name__]
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is original
    assert modeling_qwen3_5.causal_conv1d_fn is convolution
    assert integration.unpatch(model) == []


def test_patch_without_a_target_covers_every_supported_family():
    assert integration.patch() == [f"transformers.models.{name}.modeling_{name}" for name in integration.SUPPORTED]
    assert sorted(integration.unpatch()) == sorted(
        f"transformers.models.{name}.modeling_{name}" for name in integration.SUPPORTED
    )


def test_patch_takes_a_modelling_module_and_touches_no_other():
    other = modeling_qwen3_next.torch_chunk_gated_delta_rule
    assert integration.patch(modeling_qwen3_5) == [modeling_qwen3_5.__name__]
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is other


def test_cached_decode_continues_from_the_patched_prefill():
    """Prefill (ours) hands its final state to transformers' own one-token decode."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **SMALL)
    model = Qwen3_5ForCausalLM(config).eval()
    ids = torch.randint(64, (1, 70))

    def decode() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(
                ids,
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            ).logits

    expected = decode()
    integration.patch(model)
    with _Calls() as calls:
        actual = decode()
    assert calls.names == ["chunk_fwd"]
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_state_is_taken(dtype):
    """A cache may hold the state in the model's dtype; the op's own is float32."""
    integration.patch(modeling_qwen3_5)
    q, k = torch.randn(2, 1, 70, 2, 8).to(dtype)
    v = torch.randn(1, 70, 2, 8).to(dtype)
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2).to(dtype)
    state = torch.randn(1, 2, 8, 8).to(dtype)
    out, final = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, max_length_q=70
    )
    assert (out.dtype, final.dtype) == (dtype, torch.float32)


LENGTHS = [30, 0, 1, 70, 3]
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_a_layer_keeps_packed_documents_apart(kind, activation):
    """Outputs and gradients of a pack are those of its documents one by one; nothing is copied on the way to the op."""
    layer = _layer(kind).double()
    layer.activation = activation
    integration.patch(layer)
    x = torch.randn(1, int(CU[-1]), 32, dtype=torch.float64)

    def run(pieces, **kwargs):
        layer.zero_grad()
        x.grad = None
        x.requires_grad_()
        out = torch.cat([layer(piece, **kwargs) for piece in pieces(x)], dim=1)
        (out * torch.arange(out.shape[1])[:, None]).sum().backward()
        return {"out": out.detach(), "dx": x.grad} | {name: p.grad.clone() for name, p in layer.named_parameters()}

    expected = run(lambda x: [piece for piece in x.split(LENGTHS, dim=1) if piece.shape[1]])
    before = gdn_ops.stats().input_copies
    actual = run(lambda x: [x], cu_seq_lens_q=CU)
    if kind == "qwen3_5":  # qwen3_next's own code reorders what its projection made
        assert gdn_ops.stats().input_copies == before
    for name, truth in expected.items():
        # The layer's own gate and our convolution are float32.
        assert (actual[name] - truth).norm() < 1e-5 * truth.norm(), name


def test_a_model_keeps_packed_documents_apart():
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **SMALL)
    model = Qwen3_5ForCausalLM(config).eval()
    ids = torch.randint(64, (1, int(CU[-1])))
    integration.patch(model)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    longest = max(LENGTHS)
    with torch.no_grad():
        expected = torch.cat([model(piece).logits for piece in ids.split(LENGTHS, dim=1) if piece.shape[1]], dim=1)
        actual = model(
            ids, position_ids=positions, cu_seq_lens_q=CU, cu_seq_lens_k=CU, max_length_q=longest, max_length_k=longest,
            use_cache=False,
        ).logits  # fmt: skip
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_with_a_cache_are_warned_of_once(monkeypatch, recwarn, compiled):
    torch._dynamo.reset()
    monkeypatch.setattr(integration, "_warned", False)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], **SMALL)
    model = Qwen3_5ForCausalLM(config).eval()
    integration.patch(model)
    function = torch.compile(model, backend="eager") if compiled else model
    ids = torch.randint(64, (1, int(CU[-1])))
    packed = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}

    def said(**kwargs):
        recwarn.clear()
        with torch.no_grad():
            function(ids, **kwargs)
        return [str(w.message) for w in recwarn if "packed documents" in str(w.message)]

    assert said() == []  # a prefill
    assert said(use_cache=False, **packed) == []
    (message,) = said(**packed)  # transformers' default is to make a cache
    assert "transformers then makes no document mask" in message
    assert "Pass use_cache=False" in message
    assert said(**packed) == []


@pytest.mark.skipif(importlib.util.find_spec("causal_conv1d") is not None, reason="causal_conv1d keeps documents apart")
def test_packed_documents_are_refused_where_the_convolution_would_mix_them(monkeypatch):
    layer = _layer("qwen3_5")
    convolution = modeling_qwen3_5.causal_conv1d_fn
    monkeypatch.delattr(modeling_qwen3_5, integration.CONVOLUTION)
    integration.patch(layer)
    monkeypatch.setattr(modeling_qwen3_5, integration.CONVOLUTION, convolution, raising=False)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: .*causal_conv1d"):
        layer(torch.randn(1, 70, 32), cu_seq_lens_q=torch.tensor([0, 30, 70], dtype=torch.int32))


def test_wrong_targets_are_named():
    with pytest.raises(ValueError, match=r"target: Linear has no layer"):
        integration.patch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"target: module math has no torch_chunk_gated_delta_rule"):
        integration.patch(math)
    with pytest.raises(TypeError, match=r"target: expected a model, a modelling module or None, got str"):
        integration.patch("qwen3_5")


def test_an_unknown_transformers_is_refused(monkeypatch):
    monkeypatch.delattr(modeling_qwen3_5, integration.FUNCTION)
    with pytest.raises(ValueError, match=r"has no torch_chunk_gated_delta_rule in transformers\.models\.qwen3_5\."):
        integration.patch()
