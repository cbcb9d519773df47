"""Train a small model with its sequence cut over ranks and show the same loss as on one rank.

    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example             gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example --fsdp      parameters sharded by FSDP2 as well
    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example --figure    time of a step, two GPUs against one
    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example --figure --rows op --pieces 1 2 3 5
    python -m gdn_ops.context_parallel.example --figure --emulate 2             of one GPU, the work of two ranks on it

Any number of processes will do; without torchrun it runs as one rank. The text is this package's own source, byte by
byte. Exits with 1 if a loss differs from the one-rank loss by more than rounding, or if the ranks exchange more than
they should.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gdn_ops
from gdn_ops.context_parallel import Context, Partition, causal_conv1d, emulation, partition
from gdn_ops.context_parallel.partition import LAYOUTS
from gdn_ops.context_parallel.path import gather
from gdn_ops.context_parallel.pieces import cuts_by_rule, has_inner_fragments

ROWS = ("op", "layer", "convolution", "exchange")
"""What --figure can time."""

# Relative difference of two float32 losses after a few steps; bfloat16 steps drift apart faster.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class Layer(nn.Module):
    """One GDN layer: a projection to the packed row, gate and beta; the op; a projection back; then an MLP."""

    def __init__(self, hidden: int, num_qk_heads: int, num_v_heads: int, head_dim: int, mlp: bool = True):
        super().__init__()
        self.heads = {"num_qk_heads": num_qk_heads, "num_v_heads": num_v_heads, "head_dim": head_dim}
        self.sizes = [num_qk_heads * head_dim, num_qk_heads * head_dim, num_v_heads * head_dim]
        self.norm, self.norm_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.row = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.gates = nn.Linear(hidden, 2 * num_v_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(num_v_heads))
        self.dt_bias = nn.Parameter(torch.full((num_v_heads,), -3.0))
        self.out = nn.Linear(num_v_heads * head_dim, hidden, bias=False)
        self.mlp = (
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.SiLU(), nn.Linear(2 * hidden, hidden)) if mlp else None
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x [1,T,hidden], this rank's tokens."""
        y = self.norm(x)
        dim = self.heads["head_dim"]
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in F.silu(self.row(y)).split(self.sizes, dim=-1))
        g, beta = self.gates(y).chunk(2, dim=-1)
        o, _ = gdn_ops.chunk_gated_delta_rule(
            q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_gate_in_kernel=True,
            A_log=self.A_log, dt_bias=self.dt_bias, cp_context=context,
        )  # fmt: skip
        x = x + self.out(o.flatten(-2))
        return x if self.mlp is None else x + self.mlp(self.norm_mlp(x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, hidden: int, layers: int, num_qk_heads: int, num_v_heads: int, head_dim: int):
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.layers = nn.ModuleList(Layer(hidden, num_qk_heads, num_v_heads, head_dim) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, 256, bias=False)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        """tokens [1,T] -> logits [1,T,256]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, context)
        return self.head(self.norm(x))


def loss_sum(model: nn.Module, tokens: Tensor, targets: Tensor, context: Context) -> Tensor:
    """The sum of this rank's tokens' losses; targets of -1 (padding) count nothing."""
    logits = model(tokens, context).flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parse(arguments)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    use_gpu = options.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    if options.figure and not use_gpu:
        print("--figure needs a CUDA device for every rank", file=sys.stderr)
        return 2
    if options.emulate and (ranks > 1 or not options.figure):
        print("--emulate is for --figure in one process", file=sys.stderr)
        return 2
    if ranks > 1:
        dist.init_process_group("nccl" if use_gpu else "gloo", device_id=device if use_gpu else None)
    try:
        return _figure(options, rank, ranks, device) if options.figure else _train(options, rank, ranks, device)
    finally:
        if ranks > 1:
            dist.destroy_process_group()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gdn_ops.context_parallel.example", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile each layer (fullgraph)")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters over the same ranks with FSDP2")
    parser.add_argument("--tokens", type=int, default=0, help="tokens of a batch, all ranks together")
    parser.add_argument("--figure", action="store_true", help="time steps instead of training")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of --figure")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="what --figure times")
    parser.add_argument("--pieces", nargs="+", type=int, default=[0], help="pieces of a rank's share; 0: by the rule")
    parser.add_argument("--ends", type=int, default=0, help="length of the first and last piece; 0: by the rule")
    parser.add_argument("--emulate", type=int, default=0, help="with --figure on one GPU: the work of so many ranks")
    return parser.parse_args(arguments)


# ---- the same loss


def _train(options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> int:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = (512, 4, 4, 8, 128) if device.type == "cuda" else (64, 2, 2, 4, 32)
    total = options.tokens or (8192 if device.type == "cuda" else 500)
    # One long document and short ones, nothing divisible by the number of ranks.
    part = partition([0, total // 2 + 7, total // 2 + 8, total * 3 // 4 + 1, total], ranks, options.layout)
    alone = partition(part.cu_seqlens, 1)
    text = _own_source(total * options.steps + 1)

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(*sizes).to(device, dtype))
    shared, single = models
    group: Any = None
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("context",))
        group = mesh["context"]
        if options.fsdp:
            for layer in shared.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(shared, mesh=mesh)
    if options.compile:
        for model in models:
            for layer in model.layers:
                layer.compile(fullgraph=True)
    learn = 3e-3 if dtype == torch.float32 else 5e-4
    optimizers = [torch.optim.AdamW(model.parameters(), lr=learn) for model in models]

    contexts = part.context(rank, group, device, num_v_heads=sizes[3]), alone.context(0, None, device)
    say(rank, f"{ranks} rank(s) on {device.type}, layout {options.layout}, documents end at {part.cu_seqlens[1:]}, "
              f"tokens a rank {[part.tokens(r) for r in range(ranks)]}{', FSDP2' if options.fsdp else ''}")  # fmt: skip
    head = {"num_v_heads": sizes[3], "key_dim": sizes[4], "value_dim": sizes[4]}
    say(rank, f"bytes a rank sends per layer: {part.exchange_bytes(**head)._asdict()}")
    say(rank, f"{'step':>4} {'loss, ' + str(ranks) + ' ranks':>16} {'loss, one rank':>16} {'difference':>11}")
    worst, exchanges = 0.0, 0
    for step in range(options.steps):
        window = text[step * total : (step + 1) * total + 1].to(device)
        before = gdn_ops.stats().context_exchanges
        first = _step(shared, optimizers[0], window, part, rank, contexts[0], options.fsdp)
        exchanges = gdn_ops.stats().context_exchanges - before
        second = _step(single, optimizers[1], window, alone, 0, contexts[1], False)
        difference = abs(first - second) / second
        worst = max(worst, difference)
        say(rank, f"{step + 1:>4} {first:>16.6f} {second:>16.6f} {difference:>11.1e}")
    expected = 2 * sizes[1] if part.crosses_ranks else 0
    say(rank, f"exchanges a step: {exchanges} (one a layer and direction: {expected})")
    failed = worst > TOLERANCE[dtype] or exchanges != expected
    say(rank, "FAILED" if failed else "the losses agree")
    return int(failed)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, window: Tensor, part: Partition, rank: int, context: Context,
    fsdp: bool,
) -> float:  # fmt: skip
    """One training step; returns the mean loss over all tokens of all ranks."""
    pad = part.max_tokens
    tokens = part.shard(window[None, :-1], rank, pad_to=pad)
    # Padding is no token: its target is -1.
    targets = part.shard(window[None, 1:] + 1, rank, pad_to=pad) - 1
    loss = loss_sum(model, tokens, targets, context) / part.num_tokens
    # FSDP2 averages gradients over the ranks; here they are parts of one sum.
    (loss * part.num_ranks if fsdp else loss).backward()
    loss = loss.detach()
    if part.num_ranks > 1:
        dist.all_reduce(loss)
        if not fsdp:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _own_source(count: int) -> Tensor:
    """The first `count` bytes of this package's source files, repeated as often as needed."""
    root = Path(gdn_ops.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(root.rglob("*.py")))
    return torch.frombuffer(bytearray(text * (count // len(text) + 1)), dtype=torch.uint8)[:count].long()


def say(rank: int, text: str) -> None:
    """Print on rank 0."""
    if rank == 0:
        print(text, flush=True)


# ---- the figure

HEADS = (16, 48, 128)
HIDDEN = 2048


class Times(NamedTuple):
    """Milliseconds of a step: until the device has done it, and until the host has issued it."""

    step: float
    host: float


class _Figure:
    """Times of a rank with one document over all ranks, against a rank alone with its own share of tokens."""

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int, device: torch.device):
        self.repeats, self.rank, self.ranks, self.device = options.repeats, rank, ranks, device
        self.ends = options.ends or None
        total = options.tokens or 32768 * (options.emulate or ranks)
        self.part = partition([0, total], options.emulate or ranks, options.layout)
        self.alone = partition([0, total // self.part.num_ranks], 1)
        self.single = self.alone.context(0, None, device)
        torch.manual_seed(0)
        self.width = (2 * HEADS[0] + HEADS[1]) * HEADS[2]
        self.weight = torch.randn(self.width, 4, device=device, dtype=torch.bfloat16).requires_grad_()

    def context(self, pieces: int) -> Context:
        """This rank's context; 0 pieces: by the rule."""
        group = dist.group.WORLD if self.ranks > 1 else None
        return self.part.context(
            self.rank, group, self.device, pieces=pieces or None, num_v_heads=HEADS[1], ends=self.ends
        )

    def op(self, row: Tensor, context: Context) -> Tensor:
        """The op on a packed row."""
        gates = row.new_zeros((1, row.shape[1], HEADS[1]), dtype=torch.float32)
        o, _ = gdn_ops.chunk_gated_delta_rule_packed(
            row, gates - 0.05, gates + 0.5, num_qk_heads=HEADS[0], num_v_heads=HEADS[1], head_dim=HEADS[2],
            use_qk_l2norm_in_kernel=True, cp_context=context,
        )  # fmt: skip
        return o.flatten(-2)

    def convolution(self, row: Tensor, context: Context) -> Tensor:
        """The convolution of a packed row."""
        return causal_conv1d(row, self.weight, cp_context=context)

    def step(
        self, function: Callable[[Tensor, Context], Tensor], context: Context, channels: int, out: int
    ) -> Callable[[], object]:
        """A forward and a backward of this rank's tokens, with `channels` in and `out` out."""
        tokens = context.num_tokens

        def inputs(width: int) -> Tensor:
            return torch.randn(1, tokens, width, device=self.device, dtype=torch.bfloat16)

        x, grad = inputs(channels).requires_grad_(), inputs(out)

        def step() -> None:
            x.grad = None  # a sum into an earlier gradient would be timed too
            function(x, context).backward(grad)

        return step

    def compare(
        self, name: str, function: Callable[[Tensor, Context], Tensor], context: Context, channels: int, out: int
    ) -> None:
        """One line: over the ranks, on one, and their ratio."""
        self.say(name, *self.measure(*(self.step(function, c, channels, out) for c in (context, self.single))))

    def say(self, name: str, found: Times | None, single: Times | None) -> None:
        """Print a line on rank 0."""
        both = found is not None and single is not None
        ratio = f"{found.step / single.step:>7.3f}" if both else " " * 7  # type: ignore[union-attr]
        cells = [" " * 10 if x is None else f"{x:>10.3f}" for x in (found and found.step, single and single.step)]
        hosts = [" " * 8 if x is None else f"{x.host:>8.3f}" for x in (found, single)]
        say(self.rank, f"{name:<36} {cells[0]} {cells[1]} {ratio} {hosts[0]} {hosts[1]}")

    def measure(self, *kinds: Callable[[], object]) -> list[Times]:
        """A step's time among several in a row, as in training: median over repeats of the slowest rank's.

        Of several kinds of steps, in turn, so that a clock that falls as the chip warms does so for all.
        """
        found: list[list[list[float]]] = [[] for _ in kinds]
        for repeat in range(self.repeats + 3):
            for step, times in zip(kinds, found, strict=True):
                took = self._row(step)
                if repeat >= 3:  # the first ones compile and warm up
                    times.append(took)
        return [Times(*(1e3 * statistics.median(x) for x in zip(*times, strict=True))) for times in found]

    def _row(self, step: Callable[[], object], count: int = 5) -> list[float]:
        """Seconds a step of so many in a row, and seconds of the host; of the slowest rank."""
        if self.ranks > 1:
            dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - started, issued - started], device=self.device) / count
        if self.ranks > 1:
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return took.tolist()

    def gathers(self, sizes: Sequence[int]) -> Callable[[], object]:
        """The bare all-gathers of messages of so many bytes."""
        messages = [torch.zeros(size // 4, device=self.device) for size in sizes]
        context = self.context(1)

        def step() -> None:
            for message in messages:
                gather(message, self.ranks, context.group_name, "the figure")

        return step

    def emulated(self, pieces: int) -> tuple[int, Callable[[], object]]:
        """Pieces, and a step of all ranks' work on this GPU; the exchange is a concatenation."""
        contexts = emulation.contexts(self.part, self.device, HEADS[1], pieces or None, self.ends)
        rows = [
            torch.randn(1, c.num_tokens, self.width, device=self.device, dtype=torch.bfloat16).requires_grad_()
            for c in contexts
        ]
        gates = [row.new_zeros((1, row.shape[1], HEADS[1]), dtype=torch.float32) for row in rows]
        grads = [torch.randn(*gate.shape, HEADS[2], device=self.device, dtype=torch.bfloat16) for gate in gates]
        inputs = [
            emulation.RankInputs(row, None, None, gate - 0.05, gate + 0.5)
            for row, gate in zip(rows, gates, strict=True)
        ]

        def step() -> None:
            found = emulation.emulate(
                self.part, inputs, heads=HEADS, use_qk_l2norm_in_kernel=True, cp_contexts=contexts
            )  # fmt: skip
            torch.autograd.grad([o for o, _ in found], rows, grads)

        return contexts[0].pieces, step


def _figure(options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> int:
    """Print what was asked for: step times of a rank among others, of one alone, their ratio, and the host's times."""
    figure = _Figure(options, rank, ranks, device)
    count, width = figure.part.num_ranks, figure.width
    ruled = cuts_by_rule(figure.part.max_tokens, HEADS[1], has_inner=has_inner_fragments(figure.part))
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    say(rank, f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, bfloat16, heads {HEADS}")
    say(rank, f"one document of {figure.part.num_tokens} tokens, {options.layout}, against {figure.alone.num_tokens} "
              f"on one rank; by the rule {ruled.pieces} pieces, at its ends {ruled.ends} times as long")  # fmt: skip
    title = "ms, forward + backward" + (", emulated" if options.emulate else "")
    say(rank, f"{title:<36} {str(count) + ' ranks':>10} {'one rank':>10} {'ratio':>7} {'host':>8} {'host':>8}")
    values = HEADS[1] * HEADS[2]
    if options.emulate:
        used, steps = zip(*map(figure.emulated, options.pieces), strict=True)
        single, *all_found = figure.measure(figure.step(figure.op, figure.single, width, values), *steps)
        for number, found in zip(used, all_found, strict=True):
            figure.say(f"op on packed rows, {number} pieces", Times(*(x / count for x in found)), single)
        return 0
    if "op" in options.rows:
        contexts = [figure.context(pieces) for pieces in options.pieces]
        single, *all_found = figure.measure(
            *(figure.step(figure.op, context, width, values) for context in (figure.single, *contexts))
        )
        for context, found in zip(contexts, all_found, strict=True):
            figure.say(f"op on a packed row, {context.pieces} pieces, ends {context.ends}", found, single)
    context = figure.context(options.pieces[0] if len(options.pieces) == 1 else 0)
    if "op" in options.rows:
        figure.compare(f"the same compiled, {context.pieces} pieces", compiled(figure.op), context, width, values)
    if "layer" in options.rows:
        layer = compiled(Layer(HIDDEN, *HEADS, mlp=False).to(device, torch.bfloat16))
        figure.compare(f"layer, hidden {HIDDEN}, compiled", layer, context, HIDDEN, HIDDEN)
    if "convolution" in options.rows:
        figure.compare(f"convolution of {width} channels", figure.convolution, context, width, width)
        figure.compare("the same compiled", compiled(figure.convolution), context, width, width)
        # The convolution's forward reads and writes a row; its backward reads two and writes one.
        row, other = (torch.zeros(figure.alone.num_tokens, width, device=device, dtype=torch.bfloat16) for _ in "ab")
        figure.say("the same bytes copied and added", None, figure.measure(lambda: torch.add(other.copy_(row), row))[0])
    if "exchange" in options.rows and ranks > 1:
        sizes = figure.part.exchange_bytes(num_v_heads=HEADS[1])
        figure.say(f"all-gathers of {sizes[0]} + {sizes[1]} bytes", figure.measure(figure.gathers(sizes))[0], None)
        sizes = figure.part.halo_bytes(channels=width)
        figure.say(f"all-gathers of {sizes[0]} + {sizes[1]} bytes", figure.measure(figure.gathers(sizes))[0], None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
