"""Train a small Qwen3.5 text model on real text, compiled, and show what the graph pass did: `python -m gdn_ops.demo`.

The model is transformers' own class with its own plain split code and a random start; its GDN calls are replaced by
`gdn_ops.integrations.transformers.patch`. The text is the Python standard library's source, byte by byte, which every
machine that runs this has. The command exits with 1 if a check of its own fails.
"""

import argparse
import importlib.util
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gdn_ops
import inductor_passes


@dataclass(frozen=True)
class Size:
    """A model and a batch that suit one kind of device."""

    hidden: int
    layers: int
    attention_heads: int
    qk_heads: int
    v_heads: int
    head_dim: int
    batch: int
    tokens: int
    dtype: torch.dtype
    learning_rate: float
    tolerance: float  # of the loss, patched against unpatched, after the first few steps
    # Of a gradient, pass on against off, relative. On a GPU the backward of attention is not reproducible, and sums and
    # fusions of Inductor's follow the layouts around them: other roundings.
    gradient_tolerance: float


SIZES = {
    "cpu": Size(128, 4, 4, 2, 4, 32, 4, 256, torch.float32, 3e-3, 1e-3, 0.0),
    "cuda": Size(1024, 8, 8, 8, 16, 128, 4, 4096, torch.bfloat16, 5e-4, 5e-2, 5e-2),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status (0: every check held)."""
    options = _parse(arguments)
    missing = [
        name
        for name in ("transformers", "tqdm", *(["matplotlib"] if options.plot else []))
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        print(f"gdn_ops.demo needs {', '.join(missing)}: pip install 'gdn-ops[demo]'", file=sys.stderr)
        return 2
    return _run(options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gdn_ops.demo", description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=_positive, default=60, help="training steps (default 60)")
    parser.add_argument(
        "--compare", type=_positive, default=4, help="steps also taken by the unpatched model (default 4)"
    )
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=_positive, help="sequences in a batch")
    parser.add_argument("--tokens", type=_positive, help="tokens in a sequence")
    parser.add_argument(
        "--repeats", type=_positive, default=10, help="timed steps with the pass on and off (default 10)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss (.png, .svg or .pdf)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}")
    return value


def _run(options: argparse.Namespace) -> int:
    import transformers
    from tqdm import tqdm

    from gdn_ops.integrations import transformers as integration

    # It says at every start that its own kernels are slow here, which is what the demo is about.
    transformers.logging.set_verbosity_error()
    started = time.perf_counter()
    size = SIZES[options.device]
    device = torch.device(options.device)
    batch, tokens = options.batch or size.batch, options.tokens or size.tokens
    if device.type == "cuda":
        # cuBLAS is deterministic only with a fixed workspace; it reads this when it first starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    text = standard_library_text()
    batches = _batches(text, batch, tokens, options.seed, device)
    data = [next(batches) for _ in range(options.steps)]

    torch.manual_seed(options.seed)
    model = _model(size, tokens).to(device=device, dtype=size.dtype)
    twin = _model(size, tokens).to(device=device, dtype=size.dtype)
    twin.load_state_dict(model.state_dict())
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{type(model).__name__}: {size.layers} layers, hidden {size.hidden}, {num_parameters / 1e6:.2f} M parameters, "
        f"{size.dtype} on {_device_name(device)}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}\n"
        f"text: {len(text) / 1e6:.1f} MB of Python's standard library; batch {batch} x {tokens} bytes"
    )

    integration.unpatch()
    num_compared = min(options.compare, options.steps)
    unpatched = _train(twin, _loss, data[:num_compared], size, tqdm, "unpatched, eager")
    integration.patch(model)
    try:
        return _patched(options, size, model, data, unpatched, started, tqdm)
    finally:
        integration.unpatch(model)


def _patched(
    options: argparse.Namespace,
    size: Size,
    model: nn.Module,
    data: list[tuple[Tensor, Tensor]],
    unpatched: list[float],
    started: float,
    tqdm: Any,
) -> int:
    """Train the patched model compiled, then compare the pass on with the pass off; returns the exit status."""
    # Bits are compared below, so everything around the ops has to be reproducible too (an embedding's gradient, say).
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    step_on = torch.compile(_loss_with_pass, fullgraph=True)
    step_off = torch.compile(_loss_without_pass, fullgraph=True)
    losses = _train(model, step_on, data, size, tqdm, "patched, compiled")
    print(_comparison(unpatched, losses))

    print("compiling the same step with the pass off, to compare ...", flush=True)
    x, y = data[0]
    with inductor_passes.disabled():
        off_grads, off_count, off_copies = _gradients(model, step_off, x, y)
    on_grads, on_count, on_copies = _gradients(model, step_on, x, y)
    num_equal = sum(torch.equal(grad, off_grads[name]) for name, grad in on_grads.items())
    apart = {name: _distance(grad, off_grads[name]) for name, grad in on_grads.items()}
    differing = [f"{name} ({error:.1e})" for name, error in apart.items() if not error <= size.gradient_tolerance]
    on_ms, off_ms = _time_both(model, step_on, step_off, x, y, options.repeats)
    report = inductor_passes.explain(_loss, model, x, y)
    num_packed = report.packed
    callers = dict.fromkeys(Path(call.location).name for call in report.calls)

    rows = [
        ("GDN calls in the graph", f"{len(report.calls)}", ""),
        ("  gradient written as one packed row", f"{num_packed}", f"{off_count}"),
        ("  gradient concatenated from three", f"{len(report.calls) - num_packed}", f"{len(report.calls) - off_count}"),
        ("packed gradients counted in one step", f"{on_count}", f"{off_count}"),
        ("operands copied in one step", f"{on_copies}", f"{off_copies}"),
        ("gradient MiB no longer read and written", f"{report.saved_bytes / 2**20:.1f}", ""),
        ("forward + backward, median ms", f"{on_ms:.1f}", f"{off_ms:.1f}"),
        ("gradients bitwise equal, on and off", f"{num_equal} of {len(on_grads)}", ""),
        ("largest relative difference of one", f"{max(apart.values()):.1e}", ""),
    ]
    print("\n" + _table(("", "pass on", "pass off"), rows))
    print(f"called from {', '.join(callers)}: transformers' own file, as installed")
    if num_packed < len(report.calls):
        print(report)
    if options.plot:
        _draw(options.plot, losses, unpatched)
        print(f"loss drawn in {options.plot}")
    failures = []
    largest = max(abs(a - b) for a, b in zip(unpatched, losses, strict=False))
    if not largest <= size.tolerance:
        failures.append(f"losses of the patched and the unpatched model differ by {largest:.1e}")
    if differing:
        failures.append(f"gradients differ with the pass on and off: {', '.join(differing)}")
    if num_packed != len(report.calls) or on_count != num_packed or off_count:
        failures.append("not every GDN call was packed, or one was with the pass off")
    if not math.isfinite(losses[-1]) or (len(losses) > 10 and losses[-1] > 0.9 * losses[0]):
        failures.append(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    for failure in failures:
        print(f"FAILED: {failure}")
    seconds = time.perf_counter() - started
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte in {len(losses)} steps; {seconds:.0f} s in all")
    return 1 if failures else 0


# ---- the model, its loss and its text


def _model(size: Size, tokens: int) -> nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.attention_heads,
        num_key_value_heads=size.attention_heads // 2,
        head_dim=size.hidden // size.attention_heads,
        linear_num_key_heads=size.qk_heads,
        linear_num_value_heads=size.v_heads,
        linear_key_head_dim=size.head_dim,
        linear_value_head_dim=size.head_dim,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return Qwen3_5ForCausalLM(config)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=x, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


# Dynamo keeps compiled code by function, so the two settings of the pass are compiled as two functions.
def _loss_with_pass(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _loss(model, x, y)


def _loss_without_pass(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _loss(model, x, y)


def standard_library_text(max_bytes: int = 8_000_000) -> bytes:
    """Python's own standard library sources, joined in a fixed order and cut at `max_bytes`.

    Raises FileNotFoundError where this Python has no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python sources in {root}")
    return bytes(text[:max_bytes])


def _batches(text: bytes, batch: int, tokens: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text and the bytes that follow each of theirs."""
    if len(text) <= tokens + 1:
        raise ValueError(f"tokens: expected fewer than the {len(text)} bytes of text, got {tokens}")
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - tokens - 1, (batch,), generator=generator).tolist()
        windows = torch.stack([values[start : start + tokens + 1] for start in starts]).long().to(device)
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# ---- training and measuring


def _train(
    model: nn.Module,
    loss_function: Callable[..., Tensor],
    data: list[tuple[Tensor, Tensor]],
    size: Size,
    tqdm: Any,
    title: str,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
    losses = []
    with tqdm(data, desc=title, unit="step") as progress:
        for x, y in progress:
            loss = loss_function(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return losses


def _gradients(
    model: nn.Module, loss_function: Callable[..., Tensor], x: Tensor, y: Tensor
) -> tuple[dict[str, Tensor], int, int]:
    """Every parameter's gradient, and the packed gradients and the copies of operands that one step counted."""
    before = gdn_ops.stats()
    loss_function(model, x, y).backward()
    after = gdn_ops.stats()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads, after.packed_gradients - before.packed_gradients, after.input_copies - before.input_copies


def _distance(grad: Tensor, other: Tensor) -> float:
    """The norm of what two gradients differ by, over the norm of the second; 0 for equal ones."""
    if torch.equal(grad, other):
        return 0.0
    return ((grad.double() - other.double()).norm() / other.double().norm()).item()


def _time_both(
    model: nn.Module,
    first: Callable[..., Tensor],
    second: Callable[..., Tensor],
    x: Tensor,
    y: Tensor,
    repeats: int,
) -> tuple[float, float]:
    """Median milliseconds of forward + backward, the two taking turns so that a busy machine hits both alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for function, seconds in zip((first, second), times, strict=True):
            _synchronize(x.device)
            start = time.perf_counter()
            function(model, x, y).backward()
            _synchronize(x.device)
            if repeat:  # the first turn warms up
                seconds.append(time.perf_counter() - start)
            model.zero_grad()
    return 1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- what is printed


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({torch.get_num_threads()} threads)"


def _comparison(unpatched: list[float], patched: list[float]) -> str:
    rows = [
        (f"{step}", f"{a:.6f}", f"{b:.6f}", f"{b - a:+.1e}")
        for step, (a, b) in enumerate(zip(unpatched, patched, strict=False), start=1)
    ]
    return "\n" + _table(("step", "loss, unpatched", "loss, patched", "difference"), rows) + "\n"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = []
    for line in [header, tuple("-" * width for width in widths), *rows]:
        first, *rest = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  ".join([first, *(cell.strip().rjust(len(cell)) for cell in rest)]).rstrip())
    return "\n".join(lines)


def _draw(path: Path, losses: list[float], unpatched: list[float]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, label="gdn_ops, compiled, packed backward")
    axes.plot(range(1, len(unpatched) + 1), unpatched, "o", fillstyle="none", label="transformers, unpatched")
    axes.set(xlabel="step", ylabel="loss (nats/byte)", title="Qwen3.5 text model on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
