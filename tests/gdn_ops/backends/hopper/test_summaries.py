"""Context parallelism's summaries, walks and halo rows, without a GPU: the kernels' source, emulated."""

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
from gdn_ops.backends import hopper
from gdn_ops.backends.triton import rows
from gdn_ops.backends.triton import walk as kernel
from gdn_ops.context_parallel import conv, emulation, partition, segments
from gdn_ops.context_parallel.emulation import RankInputs, emulate
from gdn_ops.context_parallel.halo import make_halo
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
    with emulator.emulated(launched):
        yield


@pytest.mark.parametrize("save, pieces, ends", [("solve", 3, 2), ("inputs", 3, 1), ("states", 2, 1), ("solve", 1, 1)])
def test_ranks_whose_fragments_are_cut(save: str, pieces: int, ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first, an inner and a last fragment, the norm in the op, states at both ends: as the float64 recurrence.

    What a summary and the pass after it share, and states that a backward computes ahead, have the bits of what each
    computes by itself.
    """
    bounds, heads = [0, 40, 1000], {"HK": 1, "HV": 1}
    inputs, do, dfinal = oracle.make(device="cpu", bounds=bounds, norm=True, initial=True, **heads)
    want = oracle.run(inputs, Options(128**-0.5, use_qk_l2norm=True), do, dfinal, bounds)
    part = partition(bounds, 3)
    cp_contexts = emulation.contexts(part, "cpu", 1, pieces, ends)
    got = step_of_all(part, inputs, do, dfinal, save, cp_contexts)
    expected = {"o": want.o, "final_state": want.final_state} | want.grads
    errors = {name: oracle.relative_error(x, expected[name]) for name, x in got.items()}
    assert all(error <= BOUND for error in errors.values()), errors
    monkeypatch.setattr(emulation, "is_plain", lambda tensors: False)
    each = step_of_all(part, inputs, do, dfinal, save, cp_contexts, is_shared=False)
    assert [name for name, x in got.items() if not torch.equal(x, each[name])] == []


def step_of_all(
    part: Any, inputs: Any, do: torch.Tensor, dfinal: torch.Tensor, save: str, cp_contexts: Any, is_shared: bool = True
) -> dict[str, torch.Tensor]:
    """Results and gradients of three ranks in one process; what is launched is checked."""
    leaves = [x.detach().requires_grad_() for x in inputs[:6]]
    shards = [[part.shard(x, rank, dim=1) for x in leaves[:5]] for rank in range(3)]
    launched.clear()
    found = emulate(
        part, [RankInputs(*shard, leaves[5]) for shard in shards], output_final_state=True,
        use_qk_l2norm_in_kernel=True, save=save, cp_contexts=cp_contexts,
    )  # fmt: skip
    assert launched.count("_solve_kernel") == (3 if is_shared else 6)
    assert launched.count("_chunk_table_kernel") == (3 if is_shared else 6)
    o, final = part.unshard([x for x, _ in found], dim=1), sum(last for _, last in found)
    launched.clear()
    torch.autograd.backward([o, final], [do, dfinal])
    # The matrices are the op's own, where it kept them.
    again = 3 if is_shared else 6
    assert launched.count("_solve_kernel") == (again if save == "inputs" else 0)
    assert launched.count("_chunk_table_kernel") == (0 if is_shared else 6)
    assert launched.count("_gates_kernel") == again * (2 if save == "inputs" else 1)
    # Beside one for each rank's summary of gradients: both recurrences at once, unless states were computed ahead.
    at_once = launched.count("_recurrences_kernel")
    assert at_once == (0 if is_shared or save == "states" else 3)
    assert launched.count("_reverse_kernel") == 6 - at_once
    assert launched.count("_forward_kernel") == (0 if save == "states" else 3 - at_once)
    assert launched.count("_gradients_kernel") == 3
    names = ("q", "k", "v", "g", "beta", "initial_state")
    return {"o": o.detach(), "final_state": final.detach()} | {
        name: x.grad for name, x in zip(names, leaves, strict=True)
    }


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("K, V", [(32, 16), (64, 32)])
def test_walk_kernel_is_the_torch_form(transposed: bool, K: int, V: int) -> None:
    """With M at once and in quarters, with one and two blocks of value columns, in one stage and in two."""
    gen = torch.Generator().manual_seed(0)
    HV = 2
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
    starts = torch.tensor([2, 0, -1], dtype=torch.int32)
    states, out = torch.randn(3, HV, K, V, generator=gen), torch.randn(8, HV, K, V, generator=gen)
    others = torch.randn(1, 6, HV, *((K, V) if transposed else (V, K)), generator=gen)
    stages = [segments.Stage(sources, moves, 4, transposed, not transposed)]
    stages.append(segments.Stage(others, moves.mT.contiguous(), 0, not transposed, transposed))
    for first, count in ((states, 4), (None, 4), (states[:0], 4), (states, 3), (None, 1)):
        given = [stage._replace(num_steps=n) for stage, n in zip(stages, (count, 4 - count), strict=True)]
        found, expected = out.clone(), out.clone()
        kernel.walk(found, first, starts, steps, given)
        segments.walk(expected, first, starts, steps, *given)
        assert (found - expected).abs().max() < 1e-5
        assert torch.equal(found[6], torch.zeros(HV, K, V)) and torch.equal(found[7], out[7])
    found, expected = out.clone(), out.clone()
    kernel.walk(found, None, None, steps, stages[:1])
    segments.walk(expected, None, None, steps, stages[0])
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_place_kernel_is_the_torch_form(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_PLACED_ELEMENTS", 64)
    x = torch.randn(3, 1, 5, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[1] = float("nan")
    index = torch.tensor([2, -1, 0, 2, -1], dtype=torch.int32)
    found = x.new_full((5, 1, 5, 40), float("nan"))
    kernel.place(found, x, index)
    assert torch.equal(found, segments.rows(x, index))
    for nothing in (None, x[:0]):
        found.fill_(float("nan"))
        kernel.place(found, nothing, index)
        assert torch.equal(found, torch.zeros_like(found))
    kernel.place(found[:0], x, index[:0])
    assert launched == ["_place_kernel"] * 3


def test_states_of_any_strides_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_on_a_gpu", lambda x: True)
    states = torch.randn(3, 1, 16, 32, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    index = torch.tensor([2, -1, 0, 0], dtype=torch.int32)
    assert torch.equal(segments._placed(states, index, (1, 32, 16), states), segments.rows(states, index))
    assert launched == ["_place_kernel"]


def test_row_kernel_is_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told, placed and returned, for a narrow and the widest convolution; fragments of one and two rows between."""
    monkeypatch.setattr(rows, "_BLOCK_W", 8)
    bounds, W = [0, 30, 31], 20
    pieces = [[(0, 0, 9), (0, 11, 2), (1, 0, 1)], [(0, 10, 1), (0, 13, 17), (0, 9, 1)]]
    part = partition(bounds, fragments=pieces)
    halos = [make_halo(part, rank, torch.device("cpu")) for rank in range(2)]
    assert halos[0].readers.shape[2] > 1, "rows that several fragments read"
    gen = torch.Generator().manual_seed(0)
    wide = [torch.randn(part.tokens(rank), W + 9, generator=gen) for rank in range(2)]

    def run(depth: int) -> list[torch.Tensor]:
        told = [
            conv._halo_tell(x[:, 5 : 5 + W], h.tokens, depth=depth, num_ranks=1)
            for x, h in zip(wide, halos, strict=True)
        ]
        heard = torch.cat(told)
        placed = [conv._halo_place(heard, halo.sources, halo.distances) for halo in halos]
        found = torch.cat([torch.cos(x)[halo.fragments.clamp(min=0)] for x, halo in zip(placed, halos, strict=True)])
        return [*told, *placed, *(conv._halo_return(found, halo.readers, halo.reader_distances) for halo in halos)]

    for depth in (1, 3, 7):
        expected = run(depth)
        with monkeypatch.context() as patch:
            patch.setattr(conv, "_rows", lambda x: rows)
            launched.clear()
            found = run(depth)
        assert launched == ["_rows_kernel"] * 6
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert all(x.any() for x in found)
