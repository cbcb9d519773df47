"""Context parallelism's summaries and walks, without a GPU: the kernels' source, emulated."""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator
import oracle

from gdn_ops import ops
from gdn_ops.backends import hopper, launching
from gdn_ops.backends.triton import walk as kernel
from gdn_ops.context_parallel import partition, segments
from gdn_ops.context_parallel.emulation import RankInputs, emulate
from gdn_ops.shapes import Options

BOUND = 8e-3
"""As on the GPU (`test_hopper.py`), bfloat16."""

launched: list[str] = []
"""Names of the kernels that a test has launched, in order."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU's tensors go to the Hopper backend, whose launches are emulated and noted."""
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setitem(ops._AUTO, "cpu", ("hopper", "cpu"))
    launched.clear()
    with emulator.emulated():
        run = launching.recording.recorder.add

        def note(kernel: Any, *launch: Any) -> None:
            launched.append(kernel.fn.__name__)
            run(kernel, *launch)

        monkeypatch.setattr(launching.recording.recorder, "add", note)
        yield


@pytest.mark.parametrize("save, pieces", [("solve", 3), ("inputs", 3), ("solve", 1)])
def test_ranks_whose_fragments_are_cut(save: str, pieces: int) -> None:
    """A first, an inner and a last fragment, the norm in the op, states at both ends: as the float64 recurrence."""
    bounds, heads = [0, 40, 1000], {"HK": 1, "HV": 1}
    inputs, do, dfinal = oracle.make(device="cpu", bounds=bounds, norm=True, initial=True, **heads)
    want = oracle.run(inputs, Options(128**-0.5, use_qk_l2norm=True), do, dfinal, bounds)
    part = partition(bounds, 3)
    leaves = [x.detach().requires_grad_() for x in inputs[:6]]
    shards = [[part.shard(x, rank, dim=1) for x in leaves[:5]] for rank in range(3)]
    launched.clear()
    found = emulate(
        part, [RankInputs(*shard, leaves[5]) for shard in shards], output_final_state=True,
        use_qk_l2norm_in_kernel=True, save=save, pieces=pieces,
    )  # fmt: skip
    o, final = part.unshard([x for x, _ in found], dim=1), sum(last for _, last in found)
    launched.clear()
    torch.autograd.backward([o, final], [do, dfinal])
    # One for each rank's summary of gradients; the matrices are the op's own, where it kept them.
    assert launched.count("_solve_kernel") == (0 if save == "solve" else 6)
    assert launched.count("_reverse_kernel") == 6
    assert launched.count("_gradients_kernel") == 3
    got = {
        "o": o,
        "final_state": final,
        **dict(zip(("q", "k", "v", "g", "beta", "initial_state"), leaves, strict=True)),
    }
    expected = {"o": want.o, "final_state": want.final_state} | want.grads
    errors = {n: oracle.relative_error(x if n in ("o", "final_state") else x.grad, expected[n]) for n, x in got.items()}
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.parametrize("transposed", [True, False])
def test_walk_kernel_is_the_torch_form(transposed: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    HV, K, V = 2, 32, 16
    # Rows lie in two blocks with something else between them; a step that does not exist stands anywhere.
    sources = torch.randn(2, 5, HV, *((V, K) if transposed else (K, V)), generator=gen)[:, 1:4]
    moves = torch.randn(2, 4, HV, K, K, generator=gen)[:, :3] * K**-0.5
    steps = torch.tensor(
        [
            [(0, -1, -1), (5, 4, 2), (-1, -1, -1), (1, 0, 3)],
            [(4, 2, 5), (-1, -1, -1), (2, -1, 0), (3, 5, 1)],
            [(-1, -1, -1), (-1, -1, -1), (-1, -1, -1), (-1, -1, 6)],
        ],
        dtype=torch.int32,
    )
    starts = torch.tensor([4, 7, -1], dtype=torch.int32)
    out = torch.randn(8, HV, K, V, generator=gen)
    for first in (starts, None):
        found, expected = out.clone(), out.clone()
        how = {"sources_transposed": transposed, "moves_transposed": not transposed}
        kernel.walk(found, first, sources, moves, steps, **how)
        segments.walk(expected, first, sources, moves, steps, **how)
        assert (found - expected).abs().max() < 1e-5
        assert torch.equal(found[6], torch.zeros(HV, K, V)) and torch.equal(found[7], out[7])
