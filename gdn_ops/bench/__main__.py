"""Measure the gated delta rule: `python -m gdn_ops.bench --case main --provider ours,fla,qla`.

A correctness gate against the float64 recurrence comes first; a provider that fails it gets no figure.
"""

import argparse
import dataclasses
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from gdn_ops.bench import accuracy, gate, scopes
from gdn_ops.bench.cases import CASES, Case, Data, make_data
from gdn_ops.bench.measure import Ceilings, ceilings, graph_ms, host_us, peak_bytes, time_ms, wall_ms
from gdn_ops.bench.providers import FAILURES, NAMES, Provider, provider
from gdn_ops.bench.report import Result, Skipped, aligned, as_json, cost_table, header, table, write_chart, write_json

MODES = ("eager", "compiled", "checkpointed", "compiled-checkpointed", "compiled-no-pass")
"""How the row scope runs: as it is, under torch.compile, under activation checkpointing, both, without the pass."""


Line = tuple[str, str, str]
"""Scope, form and mode."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every one of `cases` with every one of `providers`, in every combination of scope, form and mode."""

    cases: tuple[str, ...]
    providers: tuple[str, ...]
    scopes: tuple[str, ...] = ("row",)
    forms: tuple[str, ...] = ("plain",)
    modes: tuple[str, ...] = ("eager",)

    def lines(self) -> list[Line]:
        """Scope, form and mode of every line; a scope that has no forms or modes gives one line, a block two."""
        found: list[Line] = []
        for scope in self.scopes:
            if scope == "kernel":
                found.append((scope, "packed", "eager"))
            elif scope == "row":
                found += [
                    (scope, form, mode)
                    for form in self.forms
                    for mode in self.modes
                    if mode != "compiled-no-pass" or form == "plain"  # the pass concerns plain code only
                ]
            else:
                found += [(scope, "plain", mode) for mode in ("compiled", "compiled-no-pass")]
        return found


GPU_CASES = tuple(name for name in CASES if name != "cpu")
PLANS = {
    "cost": (Plan(("main", "main-norm"), ("ours",), forms=("plain", "packed"), modes=MODES),),
    "peers": (
        Plan(GPU_CASES, ("ours", "qla", "fla", "gym")),
        Plan(("main",), ("ours", "qla", "fla", "gym"), forms=("contiguous",)),
    ),
    "backends": (
        Plan(("main", "main-norm"), ("ours-hopper", "ours-triton"), scopes=("kernel", "row"), forms=("packed",)),
        Plan(("main",), ("ours-unordered",), forms=("packed",)),
        Plan(("main",), ("ours",), scopes=("block", "block-silu")),
    ),
}
"""Named sets of lines: what plain views cost, this package against others, backends and whole blocks."""


def _words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        words = text.split(",")
        unknown = [word for word in words if word not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {unknown}; one or more of {', '.join(allowed)}")
        return words

    return parse


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """The command line; `arguments` fills in what has no default here."""
    p = argparse.ArgumentParser(prog="python -m gdn_ops.bench", description=(__doc__ or "").split("\n\n")[0])
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--case", type=_words(tuple(CASES)), help=", ".join(CASES))
    p.add_argument("--provider", type=_words(NAMES), help=", ".join(NAMES))
    p.add_argument("--scope", type=_words(scopes.SCOPES), help=", ".join(scopes.SCOPES))
    p.add_argument("--form", type=_words(scopes.FORMS), help=", ".join(scopes.FORMS))
    p.add_argument("--mode", type=_words(MODES), help=", ".join(MODES))
    p.add_argument("--set", type=_words(tuple(PLANS)), help=f"named sets in place of the above: {', '.join(PLANS)}")
    p.add_argument("--repeats", type=_at_least(1), help="timed calls of each line (20)")
    p.add_argument("--warmup", type=_at_least(0), help="calls before them (3)")
    p.add_argument("--quick", action="store_true", help="5 repetitions after 1 warm-up")
    p.add_argument("--graph", action="store_true", help="also time replays of a CUDA graph of the step")
    p.add_argument("--accuracy", action="store_true", help="print errors against float64 instead of times")
    p.add_argument("--gates-only", action="store_true", help="stop after the gates: checks, and compiles in advance")
    p.add_argument("--json", type=Path, metavar="FILE", help="written anew after every line")
    p.add_argument("--chart", type=Path, metavar="FILE", help="PNG or SVG (needs matplotlib)")
    return p


_LINES = ("case", "provider", "scope", "form", "mode")
_TIMES = ("repeats", "warmup", "quick", "graph", "chart")
_UNUSED = {
    "accuracy": (("case", "scope", "form", "mode", "set", *_TIMES, "gates_only"), "which has its own inputs"),
    "gates_only": (("chart",), "which measures nothing"),
    "set": (_LINES, "which names them itself"),
    "quick": (("repeats", "warmup"), "which stands for both"),
}
"""Options that say nothing beside the named one, and why."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line read and checked: what would be ignored, or fail at the end of a run, is refused."""
    p = parser()
    args = p.parse_args(argv)

    def option(name: str) -> str:
        return "--" + name.replace("_", "-")

    def is_given(name: str) -> bool:
        value = getattr(args, name)
        return value is not None and value is not False

    for name, (unused, why) in _UNUSED.items():
        wrong = [option(x) for x in unused if is_given(x)] if is_given(name) else []
        if wrong:
            p.error(f"{', '.join(wrong)}: not used with {option(name)}, {why}")
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device: cuda needs a CUDA device, and torch sees none")
    if args.graph and args.device == "cpu":
        p.error("--graph: times CUDA graphs, and the device is cpu")
    for name in ("json", "chart"):
        path = getattr(args, name)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            p.error(f"--{name}: expected a file in a folder that exists, got {path}")
    if args.chart and args.chart.suffix.lower() not in (".png", ".svg"):
        p.error(f"--chart: expected a name that ends in .png or .svg, got {args.chart}")
    if args.chart and importlib.util.find_spec("matplotlib") is None:
        p.error("--chart: needs matplotlib, which is not installed")
    usual = {
        "case": ["cpu" if args.device == "cpu" else "main"],
        "provider": ["ours"],
        "scope": ["row"],
        "form": ["plain"],
        "mode": ["eager"],
        "repeats": 5 if args.quick else 20,
        "warmup": 1 if args.quick else 3,
    }
    for name, value in usual.items():
        if not is_given(name):
            setattr(args, name, value)
    return args


def _prepare(case: Case, data: Data, who: Provider, line: Line) -> scopes.Prepared:
    scope, form, mode = line
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


def measure(case: Case, data: Data, who: Provider, line: Line, args: argparse.Namespace) -> Result:
    """Measure one line."""
    scope, form, mode = line
    prepared = _prepare(case, data, who, line)
    device, repeats, warmup = args.device, args.repeats, args.warmup
    step = time_ms(prepared.step, device, repeats, warmup)
    forward = time_ms(prepared.forward, device, repeats, 1)
    held: list[object] = []
    backward = time_ms(
        lambda: prepared.backward(held.pop()), device, repeats, 1, prepare=lambda: held.append(prepared.forward())
    )
    result = Result(
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
        peak_bytes=peak_bytes(prepared.step, device, prepared.clear),
    )
    if args.graph and mode == "eager":
        try:
            graph = graph_ms(prepared.step, device, repeats, prepared.clear)
        except RuntimeError as error:
            print(f"no graph of {case.name} {who.name} {' '.join(line)}: {error}".splitlines()[0], flush=True)
        else:
            result = dataclasses.replace(result, graph=graph)
    prepared.clear()
    return result


@dataclasses.dataclass
class Run:
    """One run of the command: what was measured, what was not, and the gates' answers."""

    args: argparse.Namespace
    top: dict[str, str]
    limits: Ceilings
    command: str
    results: list[Result] = dataclasses.field(default_factory=list)
    skipped: list[Skipped] = dataclasses.field(default_factory=list)
    gates: dict[tuple[str, str], str | None] = dataclasses.field(default_factory=dict)

    def gate(self, case: Case, who: Provider) -> str | None:
        """None if the provider may be timed on the case, else why not; asked once."""
        key = (case.name, who.name)
        if key not in self.gates:
            if who.missing is not None:
                self.gates[key] = who.missing
                print(f"gate {case.name} {who.name}: {who.missing}", flush=True)
                return who.missing
            print(f"checking {case.name} {who.name} ...", file=sys.stderr, flush=True)
            try:
                wrong = gate.check(case, who, self.args.device)
                self.gates[key] = None if wrong is None else f"RED GATE: {wrong}"
                print(f"gate {case.name} {who.name}: {'green' if wrong is None else 'RED: ' + wrong}", flush=True)
            except FAILURES as error:
                traceback.print_exc()
                self.gates[key] = f"gate failed: {type(error).__name__}: {error}"
                print(f"gate {case.name} {who.name}: failed: {type(error).__name__}", flush=True)
        return self.gates[key]

    def write(self) -> None:
        """Bring the JSON file, if there is one, up to date."""
        if self.args.json:
            found = as_json(self.top, self.limits, self.gates, self.results, self.skipped, self.command)
            write_json(self.args.json, found)

    def line(self, case: Case, data: Data, who: Provider, line: Line) -> None:
        """Measure one line, or say why not, and bring the file up to date."""
        if any((r.case, r.provider, r.scope, r.form, r.mode) == (case.name, who.name, *line) for r in self.results):
            return
        reason, failed = self.gates[case.name, who.name], True
        if not who.ours and (line[0] == "kernel" or line[1] in ("packed", "views")):
            reason, failed = "this package's own", False
        if reason is None:
            print(f"measuring {case.name} {who.name} {' '.join(line)} ...", file=sys.stderr, flush=True)
            try:
                self.results.append(measure(case, data, who, line, self.args))
                print(f"measured {case.name} {who.name} {' '.join(line)}", flush=True)
            except FAILURES as error:
                traceback.print_exc()
                reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            self.skipped.append(Skipped(case.name, who.name, *line, reason, failed))
            print(f"skipped {case.name} {who.name} {' '.join(line)}: {reason.splitlines()[0]}", flush=True)
        self.write()

    def plan(self, plan: Plan) -> None:
        """Every line of a plan, case by case, each provider after its gate."""
        for case_name in plan.cases:
            case = CASES[case_name]
            data = None if self.args.gates_only else make_data(case, self.args.device)
            for name in plan.providers:
                who = provider(name, case)
                self.gate(case, who)
                self.write()
                for line in plan.lines():
                    if data is not None:
                        self.line(case, data, who, line)


def accuracies(names: Sequence[str], device: str, target: Path | None, top: dict[str, str], command: str) -> int:
    """Print every provider's errors on every kind of inputs; 1 if one of them could not be run."""
    rows, failed = [], False
    for kind in accuracy.INPUTS:
        for name in names:
            who = provider(name, accuracy.CASE)
            if who.missing is not None:
                print(f"skipped {kind} {name}: {who.missing}", flush=True)
                failed = True
                continue
            print(f"running {kind} {name} ...", file=sys.stderr, flush=True)
            try:
                rows.append(accuracy.errors(kind, who, device, accuracy.CASE))
            except FAILURES as error:
                traceback.print_exc()
                print(f"skipped {kind} {name}: {type(error).__name__}: {error}".splitlines()[0], flush=True)
                failed = True
                continue
            for line in accuracy.table(rows[-1:])[1:]:
                print(*line, flush=True)
            if target:
                found = [dataclasses.asdict(r) for r in rows]
                write_json(target, {"header": top, "command": command, "accuracy": found})
    print(aligned(accuracy.table(rows)))
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a gate was red or something that was asked for could not be measured."""
    args = arguments(argv)
    if args.set:
        plans = [plan for name in args.set for plan in PLANS[name]]
    else:
        plans = [Plan(*(tuple(x) for x in (args.case, args.provider, args.scope, args.form, args.mode)))]
    top = header(args.device)
    print("  ".join(f"{name} {value}" for name, value in top.items()))
    command = "python -m gdn_ops.bench " + shlex.join(sys.argv[1:] if argv is None else argv)
    if args.accuracy:
        return accuracies(args.provider, args.device, args.json, top, command)
    limits = ceilings(args.device)
    print(
        f"measured ceilings: copy {limits.bytes_per_s / 1e9:.0f} GB/s, matmul {limits.flops_per_s / 1e12:.2f} TFLOP/s",
        flush=True,
    )
    run = Run(args, top, limits, command)
    try:
        for plan in plans:
            run.plan(plan)
    finally:
        # Whatever ends the run, what it has measured so far is shown.
        if run.results:
            print(table(run.results, CASES, limits))
            cost = cost_table(run.results)
            if cost is not None:
                print(f"\nplain split views against the packed function\n{cost}")
            if args.chart:
                write_chart(args.chart, run.results, top)
    red = any(reason is not None for reason in run.gates.values())
    return 1 if red or any(s.failed for s in run.skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
