"""Byte questions are answered from shapes, and the answers are what a call really allocates."""

import pytest
import torch

import gdn_ops
from gdn_ops import memory, settings

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


def test_unknown_words_are_refused():
    with pytest.raises(ValueError, match="save: expected one of"):
        memory.saved_bytes(**MAIN, save="all")
    with pytest.raises(ValueError, match="backend: expected"):
        memory.scratch_bytes(**MAIN, backend="cpu")
