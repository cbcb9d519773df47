"""Every wrong argument is answered by an error that names it, what was expected and what came."""

import re
import warnings

import pytest
import torch

import gdn_ops
from gdn_ops import checks

B, T, HK, HV, D = 2, 5, 2, 4, 16


def arguments(**changes):
    values = {
        "q": torch.randn(B, T, HK, D),
        "k": torch.randn(B, T, HK, D),
        "v": torch.randn(B, T, HV, D),
        "g": -torch.rand(B, T, HV),
        "beta": torch.rand(B, T, HV),
    }
    values.update(changes)
    return values


BAD = [
    ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    ({"q": torch.randn(5, D)}, ValueError, "q: expected [B, T, HK, K] or [T, HK, K], got shape [5, 16]"),
    ({"q": torch.ones(B, T, HK, D, dtype=torch.int32)}, TypeError, "q: expected dtype bfloat16"),
    ({"k": torch.randn(B, T, HK, D).half()}, TypeError, "k: expected dtype torch.float32 (that of q)"),
    ({"v": torch.randn(T, HV, D)}, ValueError, "v: expected 4 dimensions as q has"),
    ({"k": torch.randn(B, T, HK + 1, D)}, ValueError, "k: expected shape [2, 5, 2, 16]"),
    ({"v": torch.randn(B, HV, T, D)}, ValueError, "v: expected leading sizes [2, 5]"),
    ({"v": torch.randn(B, T, 3, D)}, ValueError, "v: expected a number of heads that is a multiple of q's 2, got 3"),
    ({"v": torch.randn(B, T, HV, D, device="meta")}, ValueError, "v: expected device cpu"),
    ({"g": torch.rand(B, HV, T)}, ValueError, "g: expected shape [2, 5, 4]"),
    (
        {"g": torch.ones(B, T, HV, dtype=torch.int64)},
        TypeError,
        "g: expected dtype bfloat16, float16, float32 or float64, got torch.int64",
    ),
    ({"g": torch.ones(B, T, HV).to(torch.float8_e5m2)}, TypeError, "g: expected dtype bfloat16, float16, float32"),
    ({"beta": torch.ones(B, T, HV).to(torch.float8_e4m3fn)}, TypeError, "beta: expected dtype bfloat16, float16"),
    ({"beta": torch.rand(B, T, HK)}, ValueError, "beta: expected shape [2, 5, 4]"),
    ({"scale": "big"}, TypeError, "scale: expected a float or None, got str"),
    ({"scale": True}, TypeError, "scale: expected a float or None, got bool"),
    ({"initial_state": torch.zeros(1, HV, D, D)}, ValueError, "initial_state: expected shape [2, 4, 16, 16]"),
    ({"initial_state": torch.zeros(B, HV, D, D).bfloat16()}, TypeError, "initial_state: expected dtype torch.float32"),
    ({"output_final_state": 1}, TypeError, "output_final_state: expected a bool, got int"),
    ({"deterministic": None}, TypeError, "deterministic: expected a bool, got NoneType"),
    ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval: doubles the sigmoid"),
    ({"use_gate_in_kernel": True}, ValueError, "A_log: expected a tensor [HV] with use_gate_in_kernel=True"),
    ({"A_log": torch.zeros(HV)}, ValueError, "A_log: only used with use_gate_in_kernel=True"),
    ({"use_gate_in_kernel": True, "A_log": torch.zeros(HK)}, ValueError, "A_log: expected shape [4]"),
    (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV), "dt_bias": torch.ones(HV, dtype=torch.int32)},
        TypeError,
        "dt_bias: expected dtype bfloat16, float16, float32 or float64, got torch.int32",
    ),
    (
        {"use_gate_in_kernel": True, "A_log": torch.zeros(HV).to(torch.float8_e5m2)},
        TypeError,
        "A_log: expected dtype bfloat16, float16, float32 or float64, got torch.float8_e5m2",
    ),
    ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens: expected a torch.Tensor, got list"),
    ({"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "cu_seqlens: expected dtype int32 or int64"),
    ({"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}, ValueError, "cu_seqlens: expected shape [N + 1]"),
    (
        {"cu_seqlens": torch.tensor([0, 5])},
        ValueError,
        "cu_seqlens: documents are packed along T, so B must be 1, got 2",
    ),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_argument_is_named(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        gdn_ops.chunk_gated_delta_rule(**arguments(**changes))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 5], "expected to start at 0, got 1"),
        ([0, 4, 3], "expected never to decrease, got 4 then 3 at index 2"),
        ([0, 6], "expected to end at or before T = 5, got 6"),
    ],
)
def test_document_boundaries_are_checked_by_value_on_a_cpu(bounds, message):
    one = {name: x[:1] for name, x in arguments().items()}
    with pytest.raises(ValueError, match=f"cu_seqlens: {message}"):
        gdn_ops.chunk_gated_delta_rule(**one, cu_seqlens=torch.tensor(bounds))


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernal"):
        gdn_ops.chunk_gated_delta_rule(**arguments(), use_qk_l2norm_in_kernal=True)


@pytest.mark.parametrize(
    ("row", "heads", "error", "message"),
    [
        (torch.randn(T, 128), (2, 4, 32), ValueError, "row: expected a last axis of 256 = (2 * 2 + 4) * 32"),
        (torch.randn(128), (2, 4, 16), ValueError, "row: expected [B, T, W] or [T, W], got shape [128]"),
        (torch.randn(T, 112), (2, 3, 16), ValueError, "num_v_heads: expected a multiple of num_qk_heads = 2, got 3"),
        (torch.randn(T, 128), (2.0, 4, 16), TypeError, "num_qk_heads: expected an int, got float"),
        (torch.randn(T, 128), (2, 4, 0), ValueError, "head_dim: expected at least 1, got 0"),
        (torch.ones(T, 128, dtype=torch.uint8), (2, 4, 16), TypeError, "row: expected dtype bfloat16"),
    ],
)
def test_bad_row_is_named(row, heads, error, message):
    names = dict(zip(("num_qk_heads", "num_v_heads", "head_dim"), heads, strict=True))
    with pytest.raises(error, match=re.escape(message)):
        gdn_ops.packed_qkv_views(row, **names)
    gates = torch.rand(T, 4)
    with pytest.raises(error, match=re.escape(message)):
        gdn_ops.chunk_gated_delta_rule_packed(row, gates, gates, **names)


def in_order(num_tokens=5, num_heads=8, lead=(1,)):
    """q, k, v, g, beta with HK = HV; with the two numbers exchanged also heads first."""
    operands = [torch.randn(*lead, num_tokens, num_heads, D) for _ in range(3)]
    return [*operands, -torch.rand(*lead, num_tokens, num_heads), torch.rand(*lead, num_tokens, num_heads)]


@pytest.fixture
def not_yet_warned(monkeypatch):
    monkeypatch.setattr(checks, "_warned_heads_first", False)
    monkeypatch.setattr(checks, "_passed", set())


@pytest.mark.parametrize("lead", [(1,), (2,), ()])
def test_heads_first_is_warned_of_once(lead, not_yet_warned):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for num_tokens in (5, 5, 4):
            gdn_ops.chunk_gated_delta_rule(*in_order(num_tokens, lead=lead))
    (one,) = found
    assert one.filename == __file__
    assert "expected tokens before heads, q [B, T, HK, K] and g [B, T, HV]" in str(one.message)
    assert "fewer tokens (5) than heads (8)" in str(one.message)


def test_calls_that_cannot_be_heads_first_say_nothing(not_yet_warned):
    q, k, v, g, beta = in_order()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for num_tokens in (0, 8):
            gdn_ops.chunk_gated_delta_rule(*in_order(num_tokens))
        gdn_ops.chunk_gated_delta_rule(q[:, :, :4], k[:, :, :4], v, g, beta)
        gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=torch.zeros(1, 8, D, D))
        gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, use_gate_in_kernel=True, A_log=torch.zeros(8))


def test_no_compiler_meets_the_warning(not_yet_warned):
    class Layer(torch.nn.Module):
        def forward(self, *tensors):
            return gdn_ops.chunk_gated_delta_rule(*tensors)[0]

    tensors = tuple(in_order())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.compile(Layer(), backend="eager", fullgraph=True)(*tensors)
        for strict in (False, True):
            torch.export.export(Layer(), tensors, strict=strict)
    assert not [x for x in found if "tokens before heads" in str(x.message)]
    assert not checks._warned_heads_first
