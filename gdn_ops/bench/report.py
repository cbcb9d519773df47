"""Results as rows, a text table, JSON and a chart."""

import json
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gdn_ops.bench.cases import Case, work
from gdn_ops.bench.measure import Ceilings, Timing
from gdn_ops.version import __version__


@dataclass(frozen=True)
class Result:
    """One measured line. Milliseconds; peak in bytes beyond the inputs; host in microseconds for one step."""

    case: str
    provider: str
    scope: str
    form: str
    mode: str
    forward: Timing
    backward: Timing
    step: Timing
    wall_ms: float
    host_us: float | None
    peak_bytes: int | None
    graph: Timing | None = None


@dataclass(frozen=True)
class Skipped:
    """What was asked for and not measured, and why; `failed` unless the provider has no such line by nature."""

    case: str
    provider: str
    scope: str
    form: str
    mode: str
    reason: str
    failed: bool = True


def _commit() -> str:
    """The checkout's commit, with "+" if files differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def header(device: str) -> dict[str, str]:
    """Where and with what the figures were measured."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    name = torch.cuda.get_device_name() if device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": name,
        "gdn_ops": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": triton_version,
        "python": platform.python_version(),
    }


def _cell(timing: Timing) -> str:
    return f"{timing.median:.3f} ({timing.low:.3f}-{timing.high:.3f})"


def table(results: list[Result], cases: dict[str, Case], limits: Ceilings) -> str:
    """The results as text: times, peak memory, and how they stand to the measured ceilings."""
    lines: list[tuple[str, ...]] = [
        (
            "case",
            "provider",
            "scope",
            "form",
            "mode",
            "forward ms",
            "backward ms",
            "step ms",
            "graph ms",
            "wall ms",
            "host us",
        )
        + ("peak MB", "GB/s", "TFLOP/s", "floor/step")
    ]
    for r in results:
        needed = work(cases[r.case])["step"]
        floor = max(needed.bytes / limits.bytes_per_s, needed.flops / limits.flops_per_s) * 1e3
        lines.append(
            (r.case, r.provider, r.scope, r.form, r.mode)
            + tuple(_cell(x) for x in (r.forward, r.backward, r.step))
            + (
                "-" if r.graph is None else _cell(r.graph),
                f"{r.wall_ms:.3f}",
                "-" if r.host_us is None else f"{r.host_us:.0f}",
                "-" if r.peak_bytes is None else f"{r.peak_bytes / 1e6:.0f}",
                f"{needed.bytes / r.step.median / 1e6:.4g}",
                f"{needed.flops / r.step.median / 1e9:.3g}",
                f"{floor / r.step.median:.2f}",
            )
        )
    return aligned(lines)


def aligned(lines: list[tuple[str, ...]]) -> str:
    """Cells as a text table; the first line is its header."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def cost_table(results: list[Result]) -> str | None:
    """What plain split views cost against the packed function, in this package; None if both were not measured.

    A checkpointed step is two forwards and one backward. "compiled, pass off" has no packed form of its own: its
    plain code stands beside the compiled packed function.
    """
    measured = {(r.case, r.form, r.mode): r for r in results if r.provider == "ours" and r.scope == "row"}
    ways = (
        ("eager", "eager", "checkpointed", "eager"),
        ("compiled", "compiled", "compiled-checkpointed", "compiled"),
        ("compiled, pass off", "compiled-no-pass", None, "compiled"),
    )
    lines: list[tuple[str, ...]] = [("case", "run", "what", "plain ms", "packed ms", "plain/packed")]

    def add(case: str, way: str, what: str, plain: Timing, packed: Timing) -> None:
        ratio = f"{plain.median / packed.median:.3f}"
        lines.append((case, way, what, f"{plain.median:.3f}", f"{packed.median:.3f}", ratio))

    for case in dict.fromkeys(r.case for r in results):
        for way, plain_mode, checkpointed, packed_mode in ways:
            plain, packed = measured.get((case, "plain", plain_mode)), measured.get((case, "packed", packed_mode))
            if plain is not None and packed is not None:
                for what in ("forward", "backward", "step"):
                    add(case, way, what, getattr(plain, what), getattr(packed, what))
            both = [measured.get((case, form, checkpointed or "")) for form in ("plain", "packed")]
            if both[0] is not None and both[1] is not None:
                add(case, way, "checkpointed step", both[0].step, both[1].step)
    return aligned(lines) if len(lines) > 1 else None


def as_json(
    top: dict[str, str],
    limits: Ceilings,
    gates: dict[tuple[str, str], str | None],
    results: list[Result],
    skipped: list[Skipped],
    command: str,
) -> dict[str, Any]:
    """Everything, for a file. gates: by case and provider, None where the gate is green."""
    return {
        "header": top,
        "command": command,
        "ceilings": asdict(limits),
        "gates": [{"case": case, "provider": name, "reason": reason} for (case, name), reason in gates.items()],
        "results": [asdict(r) for r in results],
        "skipped": [asdict(s) for s in skipped],
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `as_json` to a file."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_chart(path: Path, results: list[Result], top: dict[str, str]) -> None:
    """Bars of forward and backward per line, one panel a case. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r.case for r in results))
    figure, panels = pyplot.subplots(
        len(names), 1, figsize=(9, 1 + 0.4 * len(results) + 0.8 * len(names)), squeeze=False, layout="constrained",
        height_ratios=[1 + sum(r.case == name for r in results) for name in names],
    )  # fmt: skip
    for name, panel in zip(names, panels[:, 0], strict=True):
        rows = [r for r in results if r.case == name][::-1]
        labels = [f"{r.provider} {r.scope} {r.form} {r.mode}" for r in rows]
        panel.barh(labels, [r.forward.median for r in rows], color="#4477aa", label="forward")
        panel.barh(
            labels, [r.backward.median for r in rows], left=[r.forward.median for r in rows], color="#ee8866",
            label="backward",
        )  # fmt: skip
        panel.set_title(name, loc="left", fontsize=10)
        panel.set_xlabel("ms")
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{top['device']}, torch {top['torch']}, triton {top['triton']}, {top['date']}", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
