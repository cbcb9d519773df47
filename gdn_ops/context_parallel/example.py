"""Train a small model with its sequence cut over ranks and show the same loss as on one rank.

    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example             gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example --fsdp      parameters sharded by FSDP2 as well
    torchrun --nproc-per-node 2 -m gdn_ops.context_parallel.example --figure    time of a step, two GPUs against one
    python -m gdn_ops.context_parallel.example --figure                         of one GPU, with the convolution's floor

Any number of processes will do; without torchrun it runs as one rank. The text is this package's own source, byte by
byte. Exits with 1 if a loss differs from the one-rank loss by more than rounding, or if the ranks exchange more than
they should.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gdn_ops
from gdn_ops.context_parallel import Context, Partition, causal_conv1d, partition
from gdn_ops.context_parallel.partition import LAYOUTS

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
    if ranks > 1:
        dist.init_process_group("nccl" if use_gpu else "gloo")
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

    contexts = part.context(rank, group, device), alone.context(0, None, device)
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


def _figure(options: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> int:
    """Step time of a rank with one document over all ranks, against a rank alone with its own share of tokens."""
    if device.type != "cuda":
        print("--figure needs a CUDA device for every rank", file=sys.stderr)
        return 2
    total = options.tokens or 32768 * ranks
    hidden, heads = 2048, (16, 48, 128)
    torch.manual_seed(0)
    layer = Layer(hidden, *heads, mlp=False).to(device, torch.bfloat16)
    part, alone = partition([0, total], ranks, options.layout), partition([0, total // ranks], 1)
    group = dist.group.WORLD if ranks > 1 else None
    together, single = part.context(rank, group, device), alone.context(0, None, device)
    width = (2 * heads[0] + heads[1]) * heads[2]

    def inputs(tokens: int, channels: int) -> Tensor:
        return torch.randn(1, tokens, channels, device=device, dtype=torch.bfloat16).requires_grad_()

    def op(row: Tensor, context: Context) -> Tensor:
        gates = row.new_zeros((1, row.shape[1], heads[1]), dtype=torch.float32)
        o, _ = gdn_ops.chunk_gated_delta_rule_packed(
            row, gates - 0.05, gates + 0.5, num_qk_heads=heads[0], num_v_heads=heads[1], head_dim=heads[2],
            use_qk_l2norm_in_kernel=True, cp_context=context,
        )  # fmt: skip
        return o

    weight = torch.randn(width, 4, device=device, dtype=torch.bfloat16).requires_grad_()

    def convolution(row: Tensor, context: Context) -> Tensor:
        return causal_conv1d(row, weight, cp_context=context)

    compiled = torch.compile(layer, fullgraph=True)
    say(rank, f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, bfloat16, heads {heads}")
    say(rank, f"one document of {total} tokens, {options.layout}, against {alone.num_tokens} on one rank")
    say(rank, f"{'ms, forward + backward':<32} {str(ranks) + ' ranks':>10} {'one rank':>10} {'ratio':>7}")
    rows: tuple[tuple[str, Callable[..., Tensor], int], ...] = (
        ("op on a packed row", op, width),
        (f"layer, hidden {hidden}, compiled", compiled, hidden),
        (f"convolution of {width} channels", convolution, width),
    )
    for name, function, channels in rows:
        times = []
        for p, r, context in ((part, rank, together), (alone, 0, single)):
            x = inputs(p.tokens(r), channels)
            with torch.no_grad():
                grad = torch.randn_like(function(x, context))

            def step(f: Any = function, x: Tensor = x, c: Context = context, do: Tensor = grad) -> None:
                x.grad = None  # a sum into an earlier gradient would be timed too
                f(x, c).backward(do)

            times.append(_milliseconds(step, options.repeats, ranks))
        say(rank, f"{name:<32} {times[0]:>10.3f} {times[1]:>10.3f} {times[0] / times[1]:>7.3f}")
    row, other = (inputs(alone.num_tokens, width).detach() for _ in range(2))

    def floor() -> None:
        other.copy_(row)
        torch.add(row, other, out=other)

    # The convolution's forward reads and writes a row; its backward reads two and writes one.
    say(rank, f"{'the same bytes copied and added':<32} {'':>10} {_milliseconds(floor, options.repeats, ranks):>10.3f}")
    return 0


def _milliseconds(step: Callable[[], None], repeats: int, ranks: int) -> float:
    """A step's time among several in a row, as in training: median over repeats of the slowest rank's."""
    found, steps = [], 5
    for repeat in range(repeats + 3):
        if ranks > 1:
            dist.barrier()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        took = torch.tensor((time.perf_counter() - started) / steps, device="cuda")
        if ranks > 1:
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if repeat >= 3:  # the first ones compile and warm up
            found.append(took.item())
    return 1e3 * statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
