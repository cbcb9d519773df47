"""Documents cut into segments, against the float64 recurrence and without a GPU: the kernels' source, emulated."""

import itertools
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator
import measure
import oracle

from gdn_ops import ops, outputs, settings, shapes
from gdn_ops.backends import hopper, launching
from gdn_ops.backends.hopper.chunks import Chunks, chunk_table
from gdn_ops.backends.hopper.segments import combine
from gdn_ops.context_parallel import partition
from gdn_ops.context_parallel.emulation import RankInputs, emulate
from gdn_ops.shapes import WHOLE_DOCUMENTS, Options, SegmentRule, segment_rule, sizes

BOUND = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""As on the GPU (`test_hopper.py`)."""

RAGGED = [0, 760, 760, 761, 1230, 1430]
"""Documents of 12, 0, 1, 8 and 4 chunks."""


launched: list[str] = []
"""Names of the kernels that a test has launched, in order."""

programs: list[int] = []
"""How many programs each of them was."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches are emulated and noted, and even short documents of a CPU's tensors are cut, so that tests are quick."""
    monkeypatch.setattr(outputs, "_UNCUT_DEVICES", ())
    monkeypatch.setattr(shapes, "_LEAST_SEGMENT_CHUNKS", 2)
    launched.clear()
    programs.clear()
    with emulator.emulated(), settings.configure(cut_documents=True):
        run = launching.recording.recorder.add

        def note(kernel: Any, grid: tuple[int, ...], *launch: Any) -> None:
            launched.append(kernel.fn.__name__)
            programs.append(grid[0])
            run(kernel, grid, *launch)

        monkeypatch.setattr(launching.recording.recorder, "add", note)
        yield


def check_against_recurrence(
    save: str = "solve", packed: bool = True, doubled: bool = False, bounds: list[int] | None = None, **case: Any
) -> tuple[Tensor, ...]:
    """Compare a forward and a backward with float64; returns their results."""
    inputs, do, dfinal = oracle.make(device="cpu", bounds=bounds, **case)
    options = Options(128**-0.5, case.get("norm", False), case.get("sigmoid", False), doubled)
    want = oracle.run(inputs, options, do, dfinal, bounds)
    if bounds is not None:
        for x in (inputs.q, inputs.k, inputs.v, do):
            x[:, bounds[-1] :] = float("nan")
    out = measure.forward_once(inputs, options, save, dfinal is not None)
    grads, row = measure.backward_once(out, do, dfinal, inputs, options, packed=packed)
    if row is not None:
        assert row[..., -64:].isnan().all(), "columns of the row that are not a gradient's"
    got = {"o": out.o, "q": grads.dq, "k": grads.dk, "v": grads.dv, "g": grads.dg, "beta": grads.dbeta}
    expected = {"o": want.o} | want.grads
    if dfinal is not None:
        got |= {"final_state": out.final_state, "initial_state": grads.d_initial_state}
        expected["final_state"] = want.final_state
    if inputs.A_log is not None:
        got |= {"A_log": grads.dA_log, "dt_bias": grads.ddt_bias}
    errors = {key: oracle.relative_error(x.reshape(expected[key].shape), expected[key]) for key, x in got.items()}
    bound = BOUND[inputs.q.dtype]
    assert all(error <= bound for error in errors.values()), errors
    return (out.o, out.final_state, *grads)


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CUT: dict[str, Any] = {"HK": 1, "HV": 1, "bounds": RAGGED, "T": 1450, "initial": True}


@pytest.mark.parametrize("save", ["solve", "states", "inputs"])
def test_all_at_once(save: str) -> None:
    found = check_against_recurrence(save=save, **CUT)
    # chunk table, gates, solve, then what leads to the states at cuts
    assert launched[3:6] == ["_forward_kernel", "_combine_kernel", "_forward_kernel"]
    assert launched.count("_combine_kernel") == (3 if save == "inputs" else 2)
    if save != "solve":
        assert same_bits(found, check_against_recurrence(save="solve", **CUT))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("HV", [1, 7], ids=["16 columns a program", "32 columns a program"])
def test_combination_is_accurate_to_float32(HV: int, backwards: bool) -> None:
    """Documents with four, no, one and two cuts."""
    gen = torch.Generator().manual_seed(0)
    cuts = torch.tensor([[0, 4], [4, 0], [4, 1], [5, 2]], dtype=torch.int32)
    states = torch.randn(7, HV, 128, 128, generator=gen)
    moves = torch.randn(7, HV, 128, 128, generator=gen) * 128**-0.5
    want = states.double()
    for first, count in cuts.tolist():
        for j in range(1, count):
            row = first + count - 1 - j if backwards else first + j
            own, before = (moves[row + 1].mT, row + 1) if backwards else (moves[row], row - 1)
            want[row] += want[before] @ own.double()
    combine(states, moves, cuts, backwards=backwards)
    assert oracle.relative_error(states, want) <= 1e-6


def test_only_the_recomputation_has_the_bits_of_whole_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", 0)
    found = check_against_recurrence(**CUT)
    assert "_combine_kernel" not in launched
    monkeypatch.setattr(shapes, "_CHECKPOINT_CHAINS", 0)
    assert same_bits(found, check_against_recurrence(**CUT))


FEW_MULTIPROCESSORS = 8
"""With so many the segments of `RAGGED` fill more than one round, and are computed again in stretches."""

STRETCHED: dict[str, Any] = {**CUT, "decay": "weak"}
"""Weak decay, so that states depend on all that was before them."""


def results_of(save: str) -> tuple[Tensor, ...]:
    """Outputs and gradients of `STRETCHED`."""
    inputs, do, dfinal = oracle.make(device="cpu", **STRETCHED)
    out = measure.forward_once(inputs, Options(128**-0.5), save, final=True)
    grads, _ = measure.backward_once(out, do, dfinal, inputs, Options(128**-0.5), packed=False)
    return (out.o, out.final_state, *grads)


def layout_of(case: dict[str, Any]) -> tuple[Chunks, SegmentRule, int]:
    """The tables of a case, its rule and its number of documents."""
    inputs, _, _ = oracle.make(device="cpu", **case)
    s = sizes(inputs)
    rule = segment_rule(s)
    return chunk_table(inputs.cu_seqlens, s.N, s.T, s.num_chunks, rule, inputs.q), rule, s.N


def test_stretches_have_the_bits_of_kept_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the backward computes again from states that the forward left is what the forward would have kept."""
    monkeypatch.setattr(shapes, "_MULTIPROCESSORS", FEW_MULTIPROCESSORS)
    check_against_recurrence(**STRETCHED)
    chunks, rule, _ = layout_of(STRETCHED)
    assert rule.is_split
    assert (chunks.stretches[:, 5] >= rule.num_cuts).sum() >= 2, "that start inside a segment"
    launched.clear()
    programs.clear()
    found = results_of("solve")
    assert programs[launched.index("_recurrences_kernel")] == chunks.stretches.shape[0] + chunks.segments.shape[0]
    assert launched.count("_forward_kernel") == 2, "of the forward's alone"
    assert same_bits(found, results_of("states"))
    assert same_bits(found, results_of("inputs"))


def test_a_stretch_over_a_cut_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before sees the fault that it is there for: a stretch that runs on where the forward started again."""
    monkeypatch.setattr(shapes, "_MULTIPROCESSORS", FEW_MULTIPROCESSORS)
    make = hopper.chunk_table

    def over_a_cut(*args: Any) -> Chunks:
        chunks = make(*args)
        for row in chunks.stretches:
            if 0 <= row[5] < chunks.segments.shape[0] - chunks.cuts.shape[0]:
                before = chunks.stretches[:, 2] + chunks.stretches[:, 3] == row[2]
                chunks.stretches[before & (chunks.stretches[:, 4] == row[4]), 3] += row[3]
                row[3] = 0
        return chunks

    kept = results_of("states")
    monkeypatch.setattr(hopper, "chunk_table", over_a_cut)
    assert not same_bits(results_of("solve"), kept)
    assert same_bits(results_of("states"), kept), "which has no stretches"


def test_overlapping_documents_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries that go back are the caller's fault: results mean nothing, but no pointer leaves its tensor."""
    for chains, multiprocessors in ((48, FEW_MULTIPROCESSORS), (0, 132)):
        monkeypatch.setattr(shapes, "_SPLIT_CHAINS", chains)
        monkeypatch.setattr(shapes, "_MULTIPROCESSORS", multiprocessors)
        inputs, do, _ = oracle.make(device="cpu", HK=1, HV=1, bounds=[0, 600, 700])
        inputs.cu_seqlens.copy_(torch.tensor([600, 0, 700]))
        out = measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
        measure.backward_once(out, do, None, inputs, Options(128**-0.5), packed=False)


def test_norm_and_half_precision() -> None:
    case = {**CUT, "bounds": [0, 700, 701], "T": None, "norm": True, "dtype": torch.float16}
    check_against_recurrence(**case)


def test_dense_batch_without_states() -> None:
    check_against_recurrence(HK=1, HV=2, B=2, T=300)


def test_a_document_of_nan_reaches_no_other() -> None:
    inputs, do, _ = oracle.make(device="cpu", **{**CUT, "initial": False})
    options = Options(128**-0.5)
    results = []
    for poisoned in (False, True):
        if poisoned:
            for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, do):
                x[:, RAGGED[0] : RAGGED[1]] = float("nan")
        out = measure.forward_once(inputs, options, "solve", final=False)
        grads, _ = measure.backward_once(out, do, None, inputs, options, packed=False)
        results.append([x[:, RAGGED[1] :] for x in (out.o, *grads[:5])])
    assert same_bits(tuple(results[0]), tuple(results[1]))


def test_documents_stay_whole_unless_asked_otherwise() -> None:
    with settings.configure(cut_documents=False):
        check_against_recurrence(**CUT)
    assert launched.count("_forward_kernel") == launched.count("_recurrences_kernel") == 1
    assert "_combine_kernel" not in launched


def test_a_setting_that_changes_before_the_backward_is_an_error() -> None:
    inputs, do, _ = oracle.make(device="cpu", **{**CUT, "initial": False})
    options = Options(128**-0.5)
    out = measure.forward_once(inputs, options, "solve", final=False)
    with settings.configure(cut_documents=False), pytest.raises(RuntimeError, match="cut_documents or"):
        measure.backward_once(out, do, None, inputs, options, packed=False)


def test_table_tiles_every_document() -> None:
    inputs, _, _ = oracle.make(device="cpu", **CUT)
    s = sizes(inputs)
    rule = segment_rule(s)
    chunks = chunk_table(inputs.cu_seqlens, s.N, s.T, s.num_chunks, rule, inputs.q)
    rows = chunks.segments.tolist()
    assert len(rows) == s.N + rule.num_cuts
    lengths = [row[3] for row in rows if row[4] >= 0]
    assert sum(lengths) == int(chunks.totals[0])
    cuts = chunks.cuts.tolist()
    assert [count for _, count in cuts] == [3, 0, 0, 2, 1]
    for n, (first_cut, count) in enumerate(cuts):
        own = sorted((row for row in rows if row[4] == n), key=lambda row: row[2])
        assert [row[5] for row in own] == [-1, *range(first_cut, first_cut + count)]
        assert [row[6] for row in own] == [*range(first_cut, first_cut + count), -1]
        assert all(b[2] == a[2] + a[3] and b[0] == a[0] + 64 * a[3] for a, b in itertools.pairwise(own))
    whole = chunk_table(inputs.cu_seqlens, s.N, s.T, s.num_chunks, WHOLE_DOCUMENTS, inputs.q)
    for table in (whole.segments, whole.stretches):
        assert [row[4] for row in table.tolist()] == [0, 3, 4, 2, 1], "longest first"
    assert sorted(row[4] for row in rows[:5]) == list(range(5)), "first segments come first"
    assert all(row[5] >= 0 and row[6] < 0 for row in rows[5:8]), "then last ones"
    assert all(row[5] >= 0 and row[6] >= 0 for row in rows[8:11]), "then inner ones"
    assert all(row[3] == 0 and row[4] == -1 for row in rows[11:])


@pytest.mark.parametrize("chains", [48, 0], ids=["segments", "documents"])
def test_stretches_tile_every_segment(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none runs over a cut; first those that end at a boundary, where documents are cut after first segments."""
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", chains)
    monkeypatch.setattr(shapes, "_MULTIPROCESSORS", FEW_MULTIPROCESSORS)
    chunks, rule, N = layout_of(CUT)
    assert rule.is_split == (chains > 0)
    assert len(chunks.stretches) == N + rule.num_cuts + rule.num_left
    check_stretches(chunks, rule, N)
    lengths = [row[3] for row in chunks.stretches.tolist()]
    ahead = N if rule.is_split else 0
    assert lengths[:ahead] == [row[3] for row in chunks.segments.tolist()][:ahead]
    num_whole = sum(row[5] >= rule.num_cuts for row in chunks.stretches.tolist())
    assert num_whole > 2
    assert set(lengths[ahead : ahead + num_whole]) == {rule.stretch_chunks}


def check_stretches(chunks: Chunks, rule: SegmentRule, N: int) -> None:
    """Every segment's chunks in its own stretches, each from its own state."""
    segments = [row for row in chunks.segments.tolist() if row[4] >= 0]
    stretches = [row for row in chunks.stretches.tolist() if row[4] >= 0]
    states = [row[5] for row in stretches if row[5] >= 0]
    assert len(set(states)) == len(states)
    assert all(row[5] < rule.num_cuts + rule.num_left for row in stretches)
    seen = 0
    for place, (first, last, chunk, length, n, start, _, _) in enumerate(segments):
        own = [row for row in stretches if row[4] == n and chunk <= row[2] < chunk + max(length, 1)]
        seen += len(own)
        own.sort(key=lambda row: row[2])
        every = rule.stretch_chunks if rule.num_left and not (rule.num_cuts and place < N) else max(length, 1)
        assert len(own) == max(-(-length // every), 1)
        for j, row in enumerate(own):
            x = chunk + j * every
            assert row[:3] == [first + 64 * j * every, last, x]
            assert row[3] == min(every, length - j * every)
            assert row[5] == (start if j == 0 else rule.num_cuts + x // every - 1)
    assert seen == len(stretches)


def test_cuts_stay_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any lengths: every chunk in one segment, no segment of a cut document empty, no more cuts than rows for them."""
    monkeypatch.setattr(shapes, "_LEAST_SEGMENT_CHUNKS", 16)
    lots = random.Random(0)
    for _ in range(60):
        N, HV = lots.randint(1, 6), lots.choice([1, 2, 4, 6, 12, 20, 40, 48, 66])
        scale = lots.choice([2000, 20000, 400000])
        bounds = list(itertools.accumulate([lots.choice([0, 1, 64, lots.randint(0, scale)]) for _ in range(N)]))
        T = bounds[-1] + lots.choice([0, 1, 3000])
        rule = segment_rule(shapes.Sizes(1, T, N, 1, HV, 128, 128, (T + 63) // 64 + N))
        cu_seqlens = torch.tensor([0, *bounds])
        chunks = chunk_table(cu_seqlens, N, T, (T + 63) // 64 + N, rule, cu_seqlens)
        rows = [row for row in chunks.segments.tolist() if row[4] >= 0]
        assert len(rows) == N + int(chunks.cuts[:, 1].sum())
        assert int(chunks.cuts[:, 1].sum()) <= rule.num_cuts
        assert sum(row[3] for row in rows) == sum((b - a + 63) // 64 for a, b in itertools.pairwise([0, *bounds]))
        assert all(row[3] > 0 for row in rows if row[5] >= 0 or row[6] >= 0)
        check_stretches(chunks, rule, N)


@pytest.mark.parametrize("HV", [1, 4, 8, 16, 32, 40, 48])
def test_one_long_document_fills_the_chip(HV: int) -> None:
    """As many segments as run at once with outputs; the first one as long as its launch has room for."""
    rule = segment_rule(shapes.Sizes(1, 32768, 1, HV, HV, 128, 128, 512))
    chunks = chunk_table(None, 1, 32768, 512, rule, torch.empty(0))
    lengths = [row[3] for row in chunks.segments.tolist()]
    assert len(lengths) == rule.num_cuts + 1 == min(132 // HV + 1, 16)
    assert sum(lengths) == 512
    first, last, *inner = lengths
    assert max(inner) - min(inner) <= 1
    has_one_round = 2 * HV * len(inner) <= 132 - HV
    assert abs(first - (18 / 16 if HV >= 32 else 12 / 16 if has_one_round else 1) * inner[0]) <= 3
    assert abs(last - inner[0]) <= 2
    stretches = [row[3] for row in chunks.stretches.tolist() if row[4] >= 0]
    assert sum(stretches) == 512
    if HV <= 8:
        assert stretches == lengths, "one round"
    else:
        assert stretches[0] == first
        assert 2.4 * 132 <= HV * len(stretches) <= 4 * 132
        assert rule.num_left * HV <= 3 * 132


def test_a_case_for_the_gpu_is_computed_again_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whose segments the forward leaves states inside; `test_hopper.py` runs it."""
    monkeypatch.setattr(shapes, "_LEAST_SEGMENT_CHUNKS", 16)
    chunks, rule, _ = layout_of(measure.ACCURACY["cut stretches"])
    assert rule.is_split
    assert (chunks.stretches[:, 5] >= rule.num_cuts).sum() >= 4, "that start inside a segment"


@pytest.mark.parametrize("chains", [48, 0], ids=["segments", "documents"])
def test_context_parallel_summaries_stop_at_the_states(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two documents over three ranks: summaries without outputs, results and gradients as of one rank."""
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", chains)
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setitem(ops._AUTO, "cpu", ("hopper", "cpu"))
    bounds = [0, 100, 600]
    inputs, do, _ = oracle.make(device="cpu", HK=1, HV=2, bounds=bounds)
    want = oracle.run(inputs, Options(128**-0.5), do, None, bounds)
    part = partition(inputs.cu_seqlens, 3)
    leaves = [x.detach().requires_grad_() for x in inputs[:5]]
    shards = [[part.shard(x, rank, dim=1) for x in leaves] for rank in range(3)]
    launched.clear()
    found = emulate(part, [RankInputs(*shard) for shard in shards])
    o = part.unshard([x for x, _ in found], dim=1)
    assert launched.count("_solve_kernel") == 3, "one a rank, for its summary and its forward"
    o.backward(do)
    assert launched.count("_gradients_kernel") == 3, "one backward a rank, none for its summary"
    assert oracle.relative_error(o, want.o) <= BOUND[torch.bfloat16]
    for name, x in zip(("q", "k", "v", "g", "beta"), leaves, strict=True):
        assert oracle.relative_error(x.grad, want.grads[name]) <= BOUND[torch.bfloat16], name
