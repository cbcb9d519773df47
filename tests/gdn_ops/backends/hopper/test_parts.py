"""Backwards that go through documents in parts, without a GPU: the kernels' source, emulated."""

import itertools
import pathlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator
import measure
import oracle

from gdn_ops import outputs, settings, shapes
from gdn_ops.backends import hopper
from gdn_ops.backends.hopper.chunks import Part, chunk_table
from gdn_ops.shapes import WHOLE_DOCUMENTS, Options, SegmentRule, Sizes, Turns, in_parts, turns

BOUND = 8e-3
"""As on the GPU (`test_hopper.py`)."""

RAGGED = [0, 760, 760, 761, 1230, 1430]
"""Documents of 12, 0, 1, 8 and 4 chunks."""

launched: list[str] = []
"""Names of the kernels that a test has launched, in order."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches are emulated and noted."""
    monkeypatch.setattr(outputs, "_UNCUT_DEVICES", ())
    # Documents with states at both ends are not taken for pieces of one.
    monkeypatch.setattr(hopper, "_CHAINED_DOCUMENTS", 0)
    launched.clear()
    with emulator.emulated(launched), settings.configure(cut_documents=False):
        yield


@pytest.fixture
def in_turns(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets in how many groups of heads and parts of documents backwards go."""
    return lambda *numbers: monkeypatch.setattr(shapes, "turns", lambda s, most_bytes: Turns(*numbers))


def results(save: str, case: dict[str, Any], packed: bool = False) -> tuple[Tensor, ...]:
    """Outputs and gradients."""
    inputs, do, dfinal = oracle.make(device="cpu", **case)
    options = Options(128**-0.5, case.get("norm", False))
    out = measure.forward_once(inputs, options, save, dfinal is not None)
    grads, row = measure.backward_once(out, do, dfinal, inputs, options, packed=packed)
    if row is not None:
        assert row[..., -64:].isnan().all(), "columns of the row that are not a gradient's"
    return (out.o, out.final_state, *grads)


def check_against_recurrence(found: tuple[Tensor, ...], case: dict[str, Any]) -> None:
    """Compare results with float64."""
    inputs, do, dfinal = oracle.make(device="cpu", **case)
    want = oracle.run(inputs, Options(128**-0.5, case.get("norm", False)), do, dfinal, case.get("bounds"))
    o, final, dq, dk, dv, dg, dbeta, dinitial, dA_log, ddt_bias = found
    got = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
    if dfinal is not None:
        got["initial_state"] = dinitial
        assert oracle.relative_error(final, want.final_state) <= BOUND
    if case.get("gate"):
        got |= {"A_log": dA_log, "dt_bias": ddt_bias}
    assert oracle.relative_error(o, want.o) <= BOUND
    errors = {name: oracle.relative_error(x.view_as(want.grads[name]), want.grads[name]) for name, x in got.items()}
    assert all(error <= BOUND for error in errors.values()), errors


def same_bits(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


CASES: dict[str, dict[str, Any]] = {
    "ragged": {"HK": 1, "HV": 2, "bounds": RAGGED, "T": 1450, "initial": True, "decay": "weak", "gate": True},
    "norm": {"HK": 2, "HV": 2, "bounds": [0, 330, 460], "norm": True, "decay": "weak", "gate": True},
    "batch": {"HK": 1, "HV": 1, "B": 2, "T": 300},
}


@pytest.mark.parametrize("name", CASES)
def test_parts_change_no_bit(name: str, in_turns: Any) -> None:
    """Whatever the forward has kept, and in groups of heads too."""
    case = CASES[name]
    in_turns(1, 1)
    want = results("solve", case)
    check_against_recurrence(want, case)
    for groups, parts, save in ((1, 3, "solve"), (case["HK"], 8, "solve"), (1, 2, "inputs"), (1, 3, "states")):
        in_turns(groups, parts)
        launched.clear()
        assert same_bits(results(save, case, packed=parts == 3), want), (groups, parts, save)
        assert launched.count("_gradients_kernel") == (1 if save == "states" else groups * parts)


def test_a_document_of_nan_reaches_no_other(in_turns: Any) -> None:
    in_turns(1, 3)
    inputs, do, _ = oracle.make(device="cpu", HK=1, HV=1, bounds=RAGGED)
    options = Options(128**-0.5)
    found = []
    for poisoned in (False, True):
        if poisoned:
            for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, do):
                x[:, : RAGGED[1]] = float("nan")
        out = measure.forward_once(inputs, options, "solve", final=False)
        grads, _ = measure.backward_once(out, do, None, inputs, options, packed=False)
        found.append(tuple(x[:, RAGGED[1] :] for x in (out.o, *grads[:5])))
    assert not any(x.isnan().any() for x in found[1])
    assert same_bits(*found)


def test_overlapping_documents_stay_within_memory(in_turns: Any) -> None:
    """Boundaries that go back are the caller's fault: results mean nothing, but no pointer leaves its tensor."""
    in_turns(1, 2)
    inputs, do, _ = oracle.make(device="cpu", HK=1, HV=1, bounds=[0, 600, 700])
    inputs.cu_seqlens.copy_(torch.tensor([600, 0, 700]))
    out = measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
    measure.backward_once(out, do, None, inputs, Options(128**-0.5), packed=False)


def test_a_setting_that_changes_before_the_backward_is_an_error(in_turns: Any) -> None:
    inputs, do, _ = oracle.make(device="cpu", HK=1, HV=1, bounds=[0, 200])
    in_turns(1, 2)
    out = measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
    in_turns(1, 3)
    with pytest.raises(RuntimeError, match="backward_bytes changed"):
        measure.backward_once(out, do, None, inputs, Options(128**-0.5), packed=False)


def test_parts_tile_every_document() -> None:
    """Any lengths: every chunk once, in rows that follow each other, and each part starts where the one before ends."""
    lots = random.Random(0)
    for _ in range(40):
        N, parts = lots.randint(1, 7), lots.randint(2, 8)
        bounds = [0, *itertools.accumulate(lots.choice([0, 1, 64, lots.randint(0, 3000)]) for _ in range(N))]
        T = bounds[-1] + lots.choice([0, 1, 300])
        if T == 0:
            continue
        rule = WHOLE_DOCUMENTS._replace(parts=parts, num_left=N * (parts - 1))
        chunks = chunk_table(torch.tensor(bounds), N, T, (T + 63) // 64 + N, rule, torch.empty(0))
        check_parts(chunks.parts, bounds, rule)
        assert [row[4] for row in chunks.stretches.tolist()] == [row[4] for row in chunks.segments.tolist()]
        check_order(chunks.order.tolist(), [row[3] for row in chunks.segments.tolist()])


def check_parts(parts: list[Part], bounds: list[int], rule: SegmentRule) -> None:
    lengths = [(b - a + 63) // 64 for a, b in itertools.pairwise(bounds)]
    first_chunk = [0, *itertools.accumulate(lengths)]
    done = [0] * len(lengths)
    for number, part in enumerate(parts):
        rows = part.table.tolist()
        count = int(part.used[0])
        assert count <= len(rows)
        assert all(row[1] == 0 for row in rows[count:])
        slot = 0
        runs = sorted(part.runs.tolist(), key=lambda run: (run[7], run[3]))
        for first, last, chunk, length, n, start, stop, slot0 in runs:
            if n < 0:
                assert length == 0
                continue
            assert (first, last) == (bounds[n] + 64 * done[n], bounds[n + 1])
            assert (chunk, slot0) == (first_chunk[n] + done[n], slot)
            left = n * (rule.parts - 1) + number
            assert start == (left - 1 if number > 0 else -1)
            done[n] += length
            assert stop == (left if done[n] < lengths[n] else -1)
            for j in range(length):
                valid = min(bounds[n + 1] - first - 64 * j, 64)
                assert rows[slot + j] == [first + 64 * j, valid, n, (chunk + j) * 64 + valid - 1]
            slot += length
        assert slot == count
    assert done == lengths


def check_order(order: list[int], lengths: list[int]) -> None:
    """Each run once in each direction, longest first."""
    assert sorted(order) == list(range(2 * len(lengths)))
    times = [lengths[x // 2] * (3 if x % 2 else 4) for x in order]
    assert times == sorted(times, reverse=True)


def test_turns_keep_to_the_bytes_where_they_can() -> None:
    def of(N: int, T: int, HK: int, HV: int, most: int) -> Turns:
        return turns(Sizes(1, T, N, HK, HV, 128, 128, (T + 63) // 64 + N), most)

    assert of(5, 32768, 16, 48, 400_000_000) == (2, 3), "the main shape"
    assert of(5, 32768, 16, 48, 1_100_000_000) == (2, 1)
    assert of(5, 32768, 16, 48, 3_000_000_000) == (1, 1)
    assert of(256, 32768, 16, 32, 400_000_000) == (2, 1), "no parts of short documents"
    assert of(8, 32768, 15, 45, 400_000_000) == (1, 6), "no halves of an odd number"
    assert of(1, 32768, 16, 48, 400_000_000) == (1, 6), "no groups of few documents"
    assert of(5, 32768, 1, 48, 400_000_000) == (1, 6), "no groups of one query/key head"
    assert of(1, 64, 16, 48, 1) == (1, 1)
    lots = random.Random(0)
    for _ in range(200):
        N, HK = lots.randint(1, 40), lots.choice([1, 2, 4, 5, 12, 16])
        T, HV = lots.randint(1, 10**6), HK * lots.choice([1, 2, 3])
        groups, parts = of(N, T, HK, HV, 10**8)
        assert groups in (1, 2)
        assert HK % groups == 0
        assert 1 <= parts <= 8
        assert groups == 1 or N * HV // groups >= 100
        assert parts == 1 or 8 * N * parts <= (T + 63) // 64 + N


def test_turns_are_symbolic_where_lengths_are() -> None:
    """A traced call has one rule for all lengths, without a guard on them."""
    environment = ShapeEnv()
    T = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(5000), static_shapes=False).shape[0]
    s = Sizes(1, T, 5, 16, 48, 128, 128, (T + 63) // 64 + 5)
    found, left = turns(s, 10**7), in_parts(WHOLE_DOCUMENTS, s, 10**7).num_left
    assert isinstance(found.parts, torch.SymInt)
    for length in (64, 5000, 300000):
        want = turns(Sizes(1, length, 5, 16, 48, 128, 128, (length + 63) // 64 + 5), 10**7)
        values = {T.node.expr: length}
        assert found.groups.node.expr.xreplace(values) == want.groups
        assert found.parts.node.expr.xreplace(values) == want.parts
        assert left.node.expr.xreplace(values) == 5 * (want.parts - 1)
    assert not [guard for guard in environment.guards if T.node.expr in guard.expr.free_symbols]
