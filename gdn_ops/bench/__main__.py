"""Measure the gated delta rule: `python -m gdn_ops.bench --case main --provider ours,fla,qla`.

A correctness gate against the float64 recurrence comes first; a provider that fails it gets no figure.
"""

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from gdn_ops.bench import gate, scopes
from gdn_ops.bench.cases import CASES, Case, Data, make_data
from gdn_ops.bench.measure import ceilings, host_us, peak_bytes, time_ms, wall_ms
from gdn_ops.bench.providers import NAMES, Provider, provider
from gdn_ops.bench.report import Result, Skipped, as_json, header, table, write_chart, write_json

MODES = ("eager", "compiled", "checkpointed", "compiled-checkpointed", "compiled-no-pass")
"""How the row scope runs: as it is, under torch.compile, under activation checkpointing, both, without the pass."""


def _words(allowed: Sequence[str]) -> "type[list[str]] | object":
    def parse(text: str) -> list[str]:
        words = text.split(",")
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown}; one or more of {', '.join(allowed)}")
        return words

    return parse


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="python -m gdn_ops.bench", description=(__doc__ or "").split("\n\n")[0])
    gpu = torch.cuda.is_available()
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    p.add_argument("--case", type=_words(tuple(CASES)), default=["main" if gpu else "cpu"], help=", ".join(CASES))
    p.add_argument("--provider", type=_words(NAMES), default=["ours"], help=", ".join(NAMES))
    p.add_argument("--scope", type=_words(scopes.SCOPES), default=["row"], help=", ".join(scopes.SCOPES))
    p.add_argument("--form", type=_words(scopes.FORMS), default=["plain"], help=", ".join(scopes.FORMS))
    p.add_argument("--mode", type=_words(MODES), default=["eager"], help=", ".join(MODES))
    p.add_argument("--repeats", type=int, default=20)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--json", type=Path, metavar="FILE")
    p.add_argument("--chart", type=Path, metavar="FILE", help="PNG or SVG (needs matplotlib)")
    return p


def _lines(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(scope, form, mode) of every line asked for; a scope that has no forms or modes gives one line."""
    lines = []
    for scope in args.scope:
        if scope == "kernel":
            lines.append((scope, "packed", "eager"))
        elif scope == "row":
            lines += [(scope, form, mode) for form in args.form for mode in args.mode]
        else:
            lines += [(scope, "plain", mode) for mode in ("compiled", "compiled-no-pass")]
    return lines


def _prepare(case: Case, data: Data, who: Provider, scope: str, form: str, mode: str) -> scopes.Prepared:
    if scope == "kernel":
        return scopes.kernel(case, data, who)
    if scope == "row":
        return scopes.row(
            case,
            data,
            who,
            form,
            compiled=mode.startswith("compiled"),
            recompute=mode.endswith("checkpointed"),
            packed_pass=mode != "compiled-no-pass",
        )
    return scopes.block(case, data, who, silu=scope == "block-silu", packed_pass=mode == "compiled")


def measure(case: Case, data: Data, who: Provider, line: tuple[str, str, str], args: argparse.Namespace) -> Result:
    """Measure one line."""
    scope, form, mode = line
    prepared = _prepare(case, data, who, scope, form, mode)
    device, repeats, warmup = args.device, args.repeats, args.warmup
    step = time_ms(prepared.step, device, repeats, warmup)
    forward = time_ms(prepared.forward, device, repeats, 1)
    held: list[object] = []
    backward = time_ms(
        lambda: prepared.backward(held.pop()), device, repeats, 1, prepare=lambda: held.append(prepared.forward())
    )
    return Result(
        case=case.name,
        provider=who.name,
        scope=scope,
        form=form,
        mode=mode,
        forward=forward,
        backward=backward,
        step=step,
        wall_ms=wall_ms(prepared.step, device, repeats),
        host_us=host_us(prepared.step, device),
        peak_bytes=peak_bytes(prepared.step, device),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a gate was red or something that was asked for could not be measured."""
    args = parser().parse_args(argv)
    top = header(args.device)
    print("  ".join(f"{name} {value}" for name, value in top.items()))
    limits = ceilings(args.device)
    print(
        f"measured ceilings: copy {limits.bytes_per_s / 1e9:.0f} GB/s, matmul {limits.flops_per_s / 1e12:.2f} TFLOP/s"
    )
    results: list[Result] = []
    skipped: list[Skipped] = []
    for case_name in args.case:
        case = CASES[case_name]
        data = make_data(case, args.device)
        for name in args.provider:
            who = provider(name, case)
            reason = who.missing
            if reason is None:
                try:
                    wrong = gate.check(case, who, args.device)
                    reason = None if wrong is None else f"RED GATE: {wrong}"
                    print(f"gate {case_name} {name}: {'green' if wrong is None else 'RED: ' + wrong}", flush=True)
                except (RuntimeError, ValueError, NotImplementedError, TypeError, AssertionError) as error:
                    traceback.print_exc(limit=3)
                    reason = f"gate: {type(error).__name__}: {error}"
            for line in _lines(args):
                if reason is None:
                    try:
                        results.append(measure(case, data, who, line, args))
                        continue
                    except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
                        skipped.append(Skipped(case_name, name, *line, f"{type(error).__name__}: {error}"))
                else:
                    skipped.append(Skipped(case_name, name, *line, reason))
                print(f"skipped {case_name} {name} {' '.join(line)}: {skipped[-1].reason.splitlines()[0]}", flush=True)
    if results:
        print(table(results, CASES, limits))
    command = "python -m gdn_ops.bench " + shlex.join(sys.argv[1:] if argv is None else argv)
    if args.json:
        write_json(args.json, as_json(top, limits, results, skipped, command))
    if args.chart and results:
        write_chart(args.chart, results, top)
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
