"""The Hopper kernels' source, carried out on a CPU (`emulator.py`), against the float64 recurrence."""

import pathlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import emulator
import measure
import oracle

from gdn_ops import settings
from gdn_ops.bench import accuracy, gate
from gdn_ops.bench.cases import Case, make_data
from gdn_ops.bench.providers import split
from gdn_ops.shapes import Inputs, Options

BOUND = {torch.bfloat16: 6e-3, torch.float16: 2.4e-3}
"""About one and a half times the largest error of any case here (3.8e-3 and 1.6e-3)."""

CASES: dict[str, dict[str, Any]] = {
    "varlen": {"HK": 2, "HV": 4, "bounds": measure.bounds_of([70, 0, 64, 1, 65]), "T": 230, "initial": True},
    "batch": {"HK": 1, "HV": 2, "B": 2, "T": 100, "dense": True},
    "all options": {
        "HK": 2, "HV": 4, "bounds": measure.bounds_of([70, 65]), "initial": True, "norm": True, "gate": True,
        "sigmoid": True, "doubled": True,
    },
    "five heads": {"HK": 1, "HV": 5, "bounds": measure.bounds_of([70, 65]), "T": 150, "norm": True},
    "half": {"HK": 1, "HV": 3, "bounds": measure.bounds_of([70, 65]), "dtype": torch.float16, "norm": True},
    "half, beta=0": {"HK": 1, "HV": 1, "T": 129, "dtype": torch.float16, "zero_beta": True},
    "beta=0": {"HK": 1, "HV": 3, "bounds": measure.bounds_of([70, 129]), "zero_beta": True},
    "extreme": {"HK": 1, "HV": 3, "T": 129, "decay": "extreme", "initial": True},
    "weak": {"HK": 1, "HV": 3, "T": 300, "decay": "weak"},
    "parallel": {"HK": 1, "HV": 2, "bounds": measure.bounds_of([150, 70, 64]), "decay": "weak", "parallel_keys": True},
    "parallel, norm": {
        "HK": 1, "HV": 3, "bounds": measure.bounds_of([150, 70]), "decay": "weak", "parallel_keys": True, "norm": True,
        "sigmoid": True, "initial": True,
    },
    "cut": {"HK": 1, "HV": 2, "bounds": [0, 3300], "decay": "weak", "initial": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cases of `measure.check_case` on CPU tensors."""
    make = oracle.make
    monkeypatch.setattr(oracle, "make", lambda **case: make(device="cpu", **case))
    with emulator.emulated(), settings.configure(cut_documents=True):
        yield


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy, equal bits at every save level, the row's own columns untouched; isolation with three documents."""
    monkeypatch.setattr(measure, "ACCURACY", CASES)
    if len(CASES[name].get("bounds", [])) < 4:
        monkeypatch.setattr(measure, "isolated", lambda *args: True)
    found = measure.check_case(name)
    assert found.broken == []
    bound = BOUND[found.dtype] * (3 if CASES[name].get("parallel_keys") else 1)
    assert all(error <= bound for error in found.errors.values()), found.errors


@pytest.mark.parametrize(
    "case, name, bound",
    [
        # Without what dP's entries below the diagonal lose by rounding: 2.56e-3.
        ({"decay": "strong"}, "g", 2.1e-3),
        # By pairs alone, with the rounding of W: 10.6e-3.
        ({"decay": "weak", "parallel_keys": True}, "g", 9e-3),
        # Only with the residuals written out: 15.0e-3.
        ({"decay": "weak", "parallel_keys": True}, "beta", 11e-3),
        # The same, in float16 and with norms: 49e-3.
        ({"dtype": torch.float16, "norm": True, "zero_beta": True}, "beta", 11e-3),
    ],
    ids=["dg, strong decay", "dg, parallel keys", "dbeta, parallel keys", "dbeta, half, norm, beta=0"],
)
def test_gradients_where_one_form_would_err(case: dict[str, Any], name: str, bound: float) -> None:
    """Bounds: a quarter to a half more than the errors here, and less than a simpler form of the gradient errs by."""
    inputs, do, _ = oracle.make(HK=1, HV=3, bounds=[0, 200], seed=3, **case)
    options = Options(128**-0.5, case.get("norm", False))
    want = oracle.run(inputs, options, do, None, [0, 200]).grads[name]
    out = measure.forward_once(inputs, options, "solve", final=False)
    grads, _ = measure.backward_once(out, do, None, inputs, options, packed=False)
    assert oracle.relative_error({"g": grads.dg, "beta": grads.dbeta}[name], want) <= bound


def test_what_nearly_parallel_keys_leave_cancels() -> None:
    """Largest errors over the largest expected value. With y, du and the write strength unrounded in one of their two
    terms and every entry of A to nearest, dv errs by 21e-3 here, dbeta by 20e-3."""
    case = Case("few tokens", 1, 3, 400, (266, 1, 133))
    data = accuracy.INPUTS["nearly parallel keys"](case, make_data(case, "cpu", seed=5))
    q, k, v = split(case, data.row)
    assert data.cu_seqlens is not None
    inputs = Inputs(q, k, v, data.g, data.beta, None, data.cu_seqlens.int())
    out = measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
    grads, _ = measure.backward_once(out, data.do, None, inputs, Options(128**-0.5), packed=False)
    want = gate.recurrence(case, data)
    for name, bound in (("o", 14e-3), ("dq", 11e-3), ("dk", 9e-3), ("dv", 13e-3), ("dg", 9e-3), ("dbeta", 9e-3)):
        found = out.o if name == "o" else getattr(grads, name)
        assert gate.errors(found.reshape(want[name].shape), want[name])[1] <= bound, name


def test_a_rate_that_overflows_where_the_softplus_is_zero() -> None:
    inputs, do, _ = oracle.make(HK=1, HV=2, T=70, gate=True)
    A_log, dt_bias = (torch.tensor([x, 0.5]) for x in (88.7, -200.0))
    inputs = inputs._replace(A_log=A_log, dt_bias=dt_bias)
    out = measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
    grads, _ = measure.backward_once(out, do, None, inputs, Options(128**-0.5), packed=False)
    assert torch.count_nonzero(out.gates[:, 0]) == 0, "no decay"
    assert torch.count_nonzero(grads.dg[..., 0]) == 0
    assert all(x.isfinite().all() for x in grads)
    assert torch.count_nonzero(grads.dg[..., 1]) > 0


@pytest.mark.parametrize("scale", [0.0, -0.2, 1e-40])
def test_scales_that_no_model_has(scale: float) -> None:
    """Zero, less than zero, and one whose inverse is no number of float32."""
    inputs, do, dfinal = oracle.make(HK=1, HV=2, T=70, initial=True)
    options = Options(scale)
    want = oracle.run(inputs, options, do, dfinal, None).grads
    out = measure.forward_once(inputs, options, "solve", final=True)
    grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    for name in ("k", "v", "g", "beta", "initial_state"):
        found = grads.d_initial_state if name == "initial_state" else getattr(grads, f"d{name}")
        assert oracle.relative_error(found.reshape(want[name].shape), want[name]) <= BOUND[torch.bfloat16], name


def test_partitions_may_run_at_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warpgroups and producers that dawdle at random around their barriers change no bit."""
    inputs, do, dfinal = oracle.make(HK=2, HV=4, bounds=measure.bounds_of([200, 1, 70]), norm=True, initial=True)
    options = Options(128**-0.5, use_qk_l2norm=True)
    lazy = random.Random(0)

    def results() -> list[torch.Tensor]:
        out = measure.forward_once(inputs, options, "inputs", final=True)
        grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
        return [*out[:2], *grads]

    def dawdling(step: Callable[..., None]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            time.sleep(max(0.0, lazy.uniform(-0.002, 0.002)))
            step(*args, **options)

        return staticmethod(run)

    expected = results()
    for name in ("wait", "arrive", "expect"):
        monkeypatch.setattr(emulator._mbarrier, name, dawdling(getattr(emulator._mbarrier, name)))
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))


def test_a_pointer_outside_its_tensor_is_noticed() -> None:
    with pytest.raises(AssertionError, match="leaves its tensor"):
        emulator._Pointer.to_start(torch.zeros(4)).__add__(torch.tensor([3, 4])).load()


def test_partitions_that_wait_forever_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one arrival more to wait for, a barrier is never completed."""
    monkeypatch.setattr(emulator, "_DEADLOCK_SECONDS", 0.5)
    init = emulator._mbarrier.init
    monkeypatch.setattr(emulator._mbarrier, "init", staticmethod(lambda bar, count: init(bar, count + (count == 2))))
    inputs, _, _ = oracle.make(HK=1, HV=1, T=300)
    with pytest.raises(AssertionError, match="never completed"):
        measure.forward_once(inputs, Options(128**-0.5), "solve", final=False)
