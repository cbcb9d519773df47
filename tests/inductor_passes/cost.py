"""What the passes cost at compile time: `python -m tests.inductor_passes.cost --layers 48 [--dynamic]`.

Compiles a model of layers (norm, one [q | k | v | z] projection, repeated heads, the op, gate, MLP), forward and
backward, with empty caches, and prints the passes' own time beside the whole compilation's.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import inductor_passes
from tests.inductor_passes.spellings import HV, QW, VW, WIDTH, R, heads
from tests.inductor_passes.toy_attention import toy

HIDDEN = 32


class Layer(nn.Module):
    """x [B,T,HIDDEN] -> x."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.row = nn.Linear(HIDDEN, WIDTH + VW, bias=False)
        self.decay = nn.Linear(HIDDEN, HV, bias=False)
        self.out = nn.Linear(VW, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x):
        h = self.norm(x)
        q, k, v, z = self.row(h).split([QW, QW, VW, VW], dim=-1)
        q, k, v = heads(q, k, v)
        o = toy(q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v, self.decay(h).sigmoid())
        x = x + self.out(o.flatten(-2) * F.silu(z))
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def measure(layers: int, dynamic: bool) -> tuple[float, float]:
    """Seconds in the passes, and of the whole compilation (forward and backward of one step)."""
    inductor_passes.install()
    torch._dynamo.reset()
    model = nn.Sequential(*(Layer() for _ in range(layers)))
    before = dict(inductor_passes.counters)
    caches_off = torch._inductor.config.patch(fx_graph_cache=False)
    with caches_off, torch._functorch.config.patch(enable_autograd_cache=False):
        start = time.perf_counter()
        torch.compile(model, fullgraph=True, dynamic=dynamic)(torch.randn(2, 8, HIDDEN)).sum().backward()
        whole = time.perf_counter() - start
    packed, spent = (inductor_passes.counters[name] - before.get(name, 0) for name in ("packed", "microseconds"))
    assert packed == layers, f"{packed} of {layers} calls packed"
    return spent / 1e6, whole


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--dynamic", action="store_true", help="symbolic batch size and length")
    options = parser.parse_args()
    measure(1, options.dynamic)  # imports and the compiler's own start are not the model's
    passes, whole = measure(options.layers, options.dynamic)
    print(f"torch {torch.__version__}, {options.layers} layers, {'dynamic' if options.dynamic else 'static'} sizes")
    print(f"passes {passes:.2f} s of {whole:.1f} s of compilation: {passes / whole:.2%}")


if __name__ == "__main__":
    main()
