"""Byte questions are answered from shapes, and the answers are what a call really allocates."""

import re

import pytest
import torch

import gdn_ops
from gdn_ops import memory, settings
from gdn_ops.shapes import Options

MAIN = {"num_tokens": 32768, "num_qk_heads": 16, "num_v_heads": 48, "num_documents": 5}


def test_saved_bytes_of_the_main_shape():
    chunks = 512 + 5
    gates, square = chunks * 48 * 64 * 4, chunks * 48 * 64 * 64 * 2
    states = chunks * 48 * 128 * (128 + 64) * 2
    assert memory.saved_bytes(**MAIN, save="inputs") == 0
    # Where the parts of each document end, of which there are three.
    left = 5 * 2 * 48 * 128 * 128 * 4
    assert memory.saved_bytes(**MAIN, save="solve") == gates + 2 * square + left
    assert memory.saved_bytes(**MAIN, save="states") == gates + 2 * square + states
    norms = 32768 * 2 * 16 * 4
    assert memory.saved_bytes(**MAIN, save="solve", use_qk_l2norm=True) == gates + 2 * square + left + norms
    few = {**MAIN, "num_documents": 1}
    # Two cuts, each with a transition, and seven states left inside segments.
    cuts, left = 2 * 2 * 48 * 128 * 128 * 4, 7 * 48 * 128 * 128 * 4
    whole = (512 + 1) * 48 * (64 * 4 + 2 * 64 * 64 * 2)
    assert memory.saved_bytes(**few, save="solve") == whole + cuts + left
    assert memory.saved_bytes(**few, save="states") == whole + (512 + 1) * 48 * 128 * (128 + 64) * 2 + cuts
    with settings.configure(cut_documents=False, backward_bytes=10**10):
        assert memory.saved_bytes(**few, save="solve") == whole
    with settings.configure(save="inputs"):
        assert memory.saved_bytes(**MAIN) == 0


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
@pytest.mark.parametrize("norm", [False, True])
def test_saved_bytes_are_what_autograd_keeps(save, norm):
    q = torch.randn(1, 130, 2, 16, requires_grad=True)
    v, gates = torch.randn(1, 130, 4, 8), torch.rand(1, 130, 4)
    cu = torch.tensor([0, 60, 130])
    kept = []
    with (
        settings.configure(save=save),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        gdn_ops.chunk_gated_delta_rule(q, q, v, -gates, gates, use_qk_l2norm_in_kernel=norm, cu_seqlens=cu)
    own = {x.untyped_storage()._cdata for x in (q, v, gates, cu)}
    # -gates is made in the call above and saved as an input.
    extra = sum(x.nbytes for x in kept if x.untyped_storage()._cdata not in own) - gates.nbytes
    asked = memory.saved_bytes(130, 2, 4, 16, 8, num_documents=2, dtype=torch.float32, use_qk_l2norm=norm, save=save)
    assert extra == asked


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_scratch_bytes_are_bounded(backend):
    pytest.importorskip("triton")
    states = memory.scratch_bytes(**MAIN, backend=backend)
    # Both state tensors of every chunk at once would be 1.6 GB.
    assert 0 < states < 1.6e9
    assert memory.scratch_bytes(**MAIN, backend=backend, save="inputs") > states


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.float32), ("hopper", torch.bfloat16)])
def test_scratch_bytes_count_the_gradients_of_gate_parameters(backend, dtype, save):
    pytest.importorskip("triton")
    few = {"num_tokens": 130, "num_qk_heads": 2, "num_v_heads": 6, "num_documents": 3, "dtype": dtype, "save": save}
    without, with_gate = (
        memory.scratch_bytes(**few, backend=backend, use_gate_in_kernel=use_gate) for use_gate in (False, True)
    )
    # Two float32 sums, of dA_log and ddt_bias, for each of 3 + 3 chunks and each value head.
    assert with_gate - without == 8 * (3 + 3) * 6


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_qk_heads": 3, "num_v_heads": 5}, ValueError, "num_v_heads: expected a multiple of num_qk_heads = 3"),
        ({"num_qk_heads": 0}, ValueError, "num_qk_heads: expected at least 1, got 0"),
        ({"num_v_heads": 4.0}, TypeError, "num_v_heads: expected an int, got float"),
        ({"key_dim": 0}, ValueError, "key_dim: expected at least 1, got 0"),
        ({"value_dim": -1}, ValueError, "value_dim: expected at least 1, got -1"),
        ({"num_tokens": -5}, ValueError, "num_tokens: expected at least 0, got -5"),
        ({"num_documents": -1}, ValueError, "num_documents: expected at least 0, got -1"),
        ({"batch": 4, "num_documents": 3}, ValueError, "batch: documents are packed along T, so B must be 1"),
        ({"dtype": torch.int32}, TypeError, "dtype: expected dtype bfloat16, float16 or float32"),
    ],
)
def test_what_the_op_refuses_has_no_answer(changes, error, message):
    few = {"num_tokens": 130, "num_qk_heads": 2, "num_v_heads": 4, **changes}
    for question in (memory.saved_bytes, memory.scratch_bytes):
        with pytest.raises(error, match=message):
            question(**few)


def test_what_a_backend_refuses_has_no_answer_but_its_reason(monkeypatch):
    pytest.importorskip("triton")
    from gdn_ops.backends import hopper, triton

    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    refused = [
        (hopper, "hopper", {"dtype": torch.float32}),
        (hopper, "hopper", {"key_dim": 64}),
        (hopper, "hopper", {"key_dim": 128, "value_dim": 64}),
        (triton, "triton", {"dtype": torch.float64}),
        (triton, "triton", {"key_dim": 300}),
        (triton, "triton", {"key_dim": 64, "value_dim": 8}),
    ]
    for module, backend, changes in refused:
        few = {"num_tokens": 130, "num_qk_heads": 2, "num_v_heads": 4, "batch": 1, "num_documents": None}
        few = {**few, "key_dim": 128, "value_dim": None, "dtype": torch.bfloat16, **changes}
        reason = module.unsupported_reason(memory._inputs(**few), Options(1.0))
        with pytest.raises(ValueError, match=re.escape(f"backend: {backend} does not take such a call: {reason}")):
            memory.scratch_bytes(**few, backend=backend)
    # A CPU takes them.
    assert memory.saved_bytes(130, 2, 4, 300, dtype=torch.float64) > 0


def test_empty_calls_need_nothing():
    pytest.importorskip("triton")
    for sizes in ({"num_tokens": 0}, {"num_tokens": 130, "batch": 0}):
        assert memory.saved_bytes(**sizes, num_qk_heads=2, num_v_heads=4) == 0
        assert memory.scratch_bytes(**sizes, num_qk_heads=2, num_v_heads=4) == 0


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="save: expected one of"):
        memory.saved_bytes(**MAIN, save="all")
    with pytest.raises(ValueError, match="backend: expected"):
        memory.scratch_bytes(**MAIN, backend="cpu")
