"""Accuracy and stage times of the Hopper backend on the GPU at hand: what docs/kernels_hopper.md quotes.

`python measure.py accuracy`, `python measure.py times`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import oracle
import torch
import triton
from torch import Tensor

from gdn_ops import settings
from gdn_ops.backends import hopper
from gdn_ops.outputs import Backward, Forward, allocate_chunk_bwd, allocate_chunk_fwd, allocate_row, gradient_target
from gdn_ops.shapes import Inputs, Options, packed_layouts, packed_width

MAIN = [9000, 3001, 8192, 5575, 7000]


def bounds_of(lengths: list[int]) -> list[int]:
    """Document boundaries from lengths."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def nan_like(x: Tensor) -> Tensor:
    """Poison an output: an element that no kernel writes shows."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    return x


def forward_once(inputs: Inputs, options: Options, save: str, final: bool) -> Forward:
    """One forward into poisoned outputs."""
    out = allocate_chunk_fwd(inputs, output_final_state=final, use_qk_l2norm=options.use_qk_l2norm, save=save)
    for x in out:
        nan_like(x)
    hopper.chunk_fwd(out, inputs, options, save)
    return out


def backward_once(
    out: Forward, do: Tensor, dfinal: Tensor | None, inputs: Inputs, options: Options, packed: bool
) -> tuple[Backward, Tensor | None]:
    """One backward into poisoned outputs, packed into a wider row if asked; returns that row too."""
    HK, HV = inputs.q.shape[2], inputs.v.shape[2]
    grads = allocate_chunk_bwd(inputs, (packed,) * 3)
    layouts: Any = packed_layouts(HK, HV, 128) if packed else (None,) * 3
    row = nan_like(allocate_row(inputs, packed_width(HK, HV, 128) + 64)) if packed else None
    targets = [
        gradient_target(nan_like(grad), row, layout, heads, 128)
        for grad, layout, heads in zip(grads[:3], layouts, (HK, HK, HV), strict=True)
    ]
    for x in grads:
        nan_like(x)
    grads = grads._replace(dq=targets[0], dk=targets[1], dv=targets[2])
    hopper.chunk_bwd(grads, do, dfinal, inputs, out.saved, options)
    return grads, row


DOCUMENTS = bounds_of([700, 1, 899, 400])
EDGES = bounds_of([200, 0, 64, 129, 1, 0, 777, 63, 65])
LONG = bounds_of([3000, 0, 1, 3500, 1537])
"""With few heads, three of these documents are cut into segments, one of them in two."""

ACCURACY: dict[str, dict[str, Any]] = {
    "base": {"HK": 4, "HV": 12, "bounds": DOCUMENTS},
    "weak": {"HK": 4, "HV": 12, "bounds": DOCUMENTS, "decay": "weak"},
    "parallel": {"HK": 4, "HV": 12, "bounds": DOCUMENTS, "decay": "weak", "parallel_keys": True},
    "strong": {"HK": 4, "HV": 12, "bounds": DOCUMENTS, "decay": "strong"},
    "g=0": {"HK": 4, "HV": 12, "bounds": DOCUMENTS, "decay": "none"},
    "extreme": {"bounds": EDGES, "decay": "extreme", "initial": True},
    "beta=0": {"bounds": EDGES, "zero_beta": True, "initial": True},
    "edges": {"bounds": EDGES, "T": EDGES[-1] + 37, "initial": True, "dense": True},
    "norm": {"bounds": EDGES, "norm": True, "initial": True},
    "gate": {"bounds": EDGES, "norm": True, "gate": True, "sigmoid": True, "initial": True},
    "neg": {"bounds": EDGES, "norm": True, "sigmoid": True, "doubled": True},
    "batch": {"B": 3, "T": 200, "initial": True, "dense": True},
    "fp16": {"bounds": EDGES, "dtype": torch.float16, "norm": True, "initial": True},
    "fp16 b0": {"bounds": EDGES, "dtype": torch.float16, "zero_beta": True},
    "R=1": {"HK": 3, "HV": 3, "bounds": EDGES},
    "R=2": {"HK": 2, "HV": 4, "T": 130},
    "cut": {"HK": 2, "HV": 4, "bounds": LONG, "T": LONG[-1] + 37, "initial": True, "dense": True},
    "cut weak": {"HK": 2, "HV": 4, "bounds": LONG, "decay": "weak", "parallel_keys": True},
    "cut g=0": {"HK": 1, "HV": 2, "bounds": LONG, "decay": "none", "initial": True},
    "cut norm": {"HK": 1, "HV": 4, "bounds": LONG, "norm": True, "gate": True, "sigmoid": True, "initial": True},
    "cut fp16": {"HK": 2, "HV": 4, "bounds": LONG, "dtype": torch.float16, "initial": True},
    "cut batch": {"HK": 2, "HV": 4, "B": 2, "T": 2500},
    "cut stretches": {"HK": 8, "HV": 16, "bounds": bounds_of([7500, 1, 3700]), "decay": "weak", "initial": True},
}


class Found(NamedTuple):
    """Relative errors of one case, and which properties did not hold."""

    errors: dict[str, float]
    broken: list[str]
    dtype: torch.dtype


def check_case(name: str) -> Found:
    """Compare one case with float64; check bits across save levels and runs, the row's other columns, isolation."""
    case = dict(ACCURACY[name])
    dense = case.pop("dense", False)
    doubled = case.pop("doubled", False)
    inputs, do, dfinal = oracle.make(**case)
    options = Options(128**-0.5, case.get("norm", False), case.get("sigmoid", False), doubled)
    bounds = case.get("bounds")
    want_all = oracle.run(inputs, options, do, dfinal, bounds)
    if bounds is not None:
        # Past the last document nothing may be read into a result, and results are zero.
        for x in (inputs.q, inputs.k, inputs.v, do):
            x[:, bounds[-1] :] = float("nan")
    results = []
    for save in ("solve", "states", "inputs", "solve"):
        out = forward_once(inputs, options, save, dfinal is not None)
        grads, row = backward_once(out, do, dfinal, inputs, options, packed=not dense)
        results.append((out.o, out.final_state, *grads))
    broken = []
    for i, which in ((1, "save='states'"), (2, "save='inputs'"), (3, "second run")):
        if not all(torch.equal(a, b) for a, b in zip(results[0], results[i], strict=True)):
            broken.append(f"{which} has other bits")
    if row is not None and not row[..., -64:].isnan().all():
        broken.append("columns of the row that are not a gradient's were written")
    if bounds is not None and not isolated(inputs, do, dfinal, options, bounds, results[0]):
        broken.append("NaN in one document reached another")
    got = {"o": out.o, "q": grads.dq, "k": grads.dk, "v": grads.dv, "g": grads.dg, "beta": grads.dbeta}
    want = {"o": want_all.o} | want_all.grads
    if dfinal is not None:
        got |= {"hT": out.final_state, "initial_state": grads.d_initial_state}
        want["hT"] = want_all.final_state
    if inputs.A_log is not None:
        got |= {"A_log": grads.dA_log, "dt_bias": grads.ddt_bias}
    errors = {key: oracle.relative_error(x.reshape(want[key].shape), want[key]) for key, x in got.items()}
    return Found(errors, broken, inputs.q.dtype)


def isolated(
    inputs: Inputs, do: Tensor, dfinal: Tensor | None, options: Options, bounds: list[int], results: tuple[Tensor, ...]
) -> bool:
    """Fill document 2 with NaN: does no other document's result change by a bit?"""
    a, b = bounds[2], bounds[3]
    poisoned = Inputs(*(x if x is None else x.clone() for x in inputs))
    poisoned_do = do.clone()
    for x in (poisoned.q, poisoned.k, poisoned.v, poisoned.g, poisoned.beta, poisoned_do):
        x[:, a:b] = float("nan")
    out = forward_once(poisoned, options, "solve", dfinal is not None)
    grads, _ = backward_once(out, poisoned_do, dfinal, poisoned, options, packed=True)
    return all(
        torch.equal(x.reshape(y.shape)[:, :a], y[:, :a]) and torch.equal(x.reshape(y.shape)[:, b:], y[:, b:])
        for x, y in zip((out.o, *grads[:5]), (results[0], *results[2:7]), strict=True)
    )


def accuracy(names: list[str]) -> None:
    """Print relative errors against float64, one case a line, and what did not hold."""
    for name in names or ACCURACY:
        found = check_case(name)
        print(f"{name:9s}", " ".join(f"{k[:4]} {x:.2e}" for k, x in found.errors.items()), *found.broken, flush=True)


def milliseconds(fn: Callable[[], Any], repeats: int = 20) -> float:
    """Median time of one call by CUDA events, after three warm-ups."""
    for _ in range(3):
        fn()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


TIMES: dict[str, dict[str, Any]] = {
    "16/48 D5": {"HK": 16, "HV": 48, "bounds": bounds_of(MAIN)},
    "16/48 D5 norm": {"HK": 16, "HV": 48, "bounds": bounds_of(MAIN), "norm": True},
    "16/32 1x32768": {"HK": 16, "HV": 32, "T": 32768},
    "16/32 1x8192": {"HK": 16, "HV": 32, "T": 8192},
    "16/32 8x4096": {"HK": 16, "HV": 32, "T": 4096, "B": 8},
    "16/48 1x32768": {"HK": 16, "HV": 48, "T": 32768},
    "4/8 1x32768": {"HK": 4, "HV": 8, "T": 32768},
    "2/4 1x32768": {"HK": 2, "HV": 4, "T": 32768},
}


def times(names: list[str], stages: bool) -> None:
    """Print forward, backward and step times, packed row to packed gradient row, and each kernel's."""
    for name, case in TIMES.items():
        if names and name not in names:
            continue
        inputs, do, _ = oracle.make(**case)
        options = Options(128**-0.5, case.get("norm", False))
        HK, HV = inputs.q.shape[2], inputs.v.shape[2]

        def fwd(save: str = "solve", inputs: Inputs = inputs, options: Options = options) -> Forward:
            norm = options.use_qk_l2norm
            out = allocate_chunk_fwd(inputs, output_final_state=False, use_qk_l2norm=norm, save=save)
            hopper.chunk_fwd(out, inputs, options, save)
            return out

        def bwd(
            out: Forward,
            inputs: Inputs = inputs,
            options: Options = options,
            do: Tensor = do,
            HK: int = HK,
            HV: int = HV,
        ) -> Backward:
            grads = allocate_chunk_bwd(inputs, (True,) * 3)
            row = allocate_row(inputs, packed_width(HK, HV, 128))
            targets = [
                gradient_target(grad, row, layout, heads, 128)
                for grad, layout, heads in zip(grads[:3], packed_layouts(HK, HV, 128), (HK, HK, HV), strict=True)
            ]
            grads = grads._replace(dq=targets[0], dk=targets[1], dv=targets[2])
            hopper.chunk_bwd(grads, do, None, inputs, out.saved, options)
            return grads

        out = fwd()
        grads = bwd(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        del out, grads
        before = torch.cuda.memory_allocated()
        out = fwd()
        grads = bwd(out)
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        del grads
        start = time.perf_counter()
        for _ in range(10):
            bwd(fwd())
        host = (time.perf_counter() - start) / 10 * 1e3
        torch.cuda.synchronize()
        line = f"{name:15s} fwd {milliseconds(fwd):.3f} bwd {milliseconds(lambda o=out: bwd(o)):.3f}"
        line += f" step {milliseconds(lambda: bwd(fwd())):.3f} host {host:.2f} peak {peak:.2f} GB"
        line += f" states-step {milliseconds(lambda: bwd(fwd('states'))):.3f}"
        print(line, flush=True)
        if stages:
            from torch.profiler import ProfilerActivity, profile

            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                for _ in range(5):
                    bwd(fwd())
                torch.cuda.synchronize()
            totals: dict[str, list[float]] = {}
            for event in profiler.events():
                if event.device_time > 0:
                    totals.setdefault(event.name, []).append(event.device_time)
            for kernel, spent in sorted(totals.items(), key=lambda x: -sum(x[1])):
                print(f"    {kernel[:40]:40s} {len(spent) // 5}x {sum(spent) / 5:.1f} us a step")
        del out
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["accuracy", "times"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--cut", action="store_true", help="with the setting cut_documents")
    chosen = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, sys.argv[1:], flush=True)
    with settings.configure(cut_documents=chosen.cut):
        if chosen.what == "accuracy":
            accuracy(chosen.names)
        else:
            times(chosen.names, chosen.stages)
