"""On a GPU: CUDA graphs with the passes on and off, and what Inductor's own layouts cost the op."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import gdn_ops
import inductor_passes
from gdn_ops import chunk_gated_delta_rule

B, T, HIDDEN, H, HV, D = 2, 200, 128, 2, 4, 128
QW, VW = H * D, HV * D
WIDTH = 2 * QW + VW

pytestmark = pytest.mark.gpu


class Layer(nn.Module):
    """x [B,T,HIDDEN] -> row -> q, k, v -> gated delta rule -> x; subclasses say how the row is made and cut."""

    extra = 0

    def __init__(self):
        super().__init__()
        self.row = nn.Linear(HIDDEN, WIDTH + self.extra, bias=False)
        self.gates = nn.Linear(HIDDEN, 2 * HV, bias=False)
        self.out = nn.Linear(VW, HIDDEN, bias=False)
        self.taps = nn.Parameter(torch.randn(4, WIDTH, 1) * 0.3)

    def parts(self, x):
        """q, k, v [B,T,heads*D] and what the output is multiplied by."""
        return *self.row(x).split([QW, QW, VW], dim=-1), 1

    def forward(self, x):
        *qkv, z = self.parts(x)
        q, k, v = (y.unflatten(-1, (-1, D)) for y in qkv)
        b, a = self.gates(x).chunk(2, dim=-1)
        g, beta = -F.softplus(a.float()), b.float().sigmoid()
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
        return self.out(o.flatten(-2) * z)


class WithGate(Layer):
    """The row also holds z, so the backward writes into a row that others wrote to (an op that mutates it)."""

    extra = VW

    def parts(self, x):
        q, k, v, z = self.row(x).split([QW, QW, VW, VW], dim=-1)
        return q, k, v, F.silu(z)


class SequenceFirst(Layer):
    """The row is [T,B,W]."""

    def parts(self, x):
        q, k, v = self.row(x.transpose(0, 1)).split([QW, QW, VW], dim=-1)
        return *(y.transpose(0, 1) for y in (q, k, v)), 1


class ChannelsFirst(Layer):
    """A causal convolution, channels first as transformers keeps it; shifted products, so that it is deterministic."""

    def parts(self, x):
        row = F.pad(self.row(x).transpose(1, 2), (3, 0))
        y = F.silu(sum(row[..., i : i + x.shape[1]] * self.taps[i] for i in range(4)))
        return *y.transpose(1, 2).split([QW, QW, VW], dim=-1), 1


class Convolution(Layer):
    """The same with torch's own convolution."""

    def parts(self, x):
        weight = self.taps.permute(1, 2, 0)
        y = F.conv1d(self.row(x).transpose(1, 2), weight, padding=3, groups=WIDTH)[..., : x.shape[1]]
        return *F.silu(y).transpose(1, 2).split([QW, QW, VW], dim=-1), 1


def make(*kinds, device="cuda", dtype=torch.bfloat16):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in kinds)).to(device=device, dtype=dtype)


def steps(model, count, *, device="cuda", dtype=torch.bfloat16, **options):
    """Outputs and gradients of `count` training steps of the compiled model, each with another input."""
    compiled = torch.compile(model, fullgraph=True, dynamic=False, **options)
    results = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(B, T, HIDDEN, generator=generator).to(device=device, dtype=dtype)
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        y = compiled(x)
        y.float().square().mean().backward()
        results.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return results


@pytest.fixture
def _no_caches():
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.fixture
def replayed(monkeypatch):
    """Every CUDA graph that is replayed, once for each replay."""
    graphs = []
    original = torch.cuda.CUDAGraph.replay

    def replay(self):
        graphs.append(self)
        return original(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replay)
    return graphs


@pytest.mark.usefixtures("_no_caches")
@pytest.mark.parametrize("kind", [WithGate, SequenceFirst, ChannelsFirst])
def test_cuda_graphs_are_captured_and_give_the_same_bits(kind, replayed):
    results = []
    for enabled in (True, False):
        replayed.clear()
        skips, packed = counters["inductor"]["cudagraph_skips"], inductor_passes.counters["packed"]
        # Bits can be compared only if a rounding does not depend on what Inductor fuses with what.
        with inductor_passes.configured(enabled=enabled), torch._inductor.config.patch(emulate_precision_casts=True):
            results.append(steps(make(kind), 5, mode="reduce-overhead"))
        assert inductor_passes.counters["packed"] - packed == int(enabled)
        assert counters["inductor"]["cudagraph_skips"] == skips, "Inductor refused to capture a graph"
        # The first step warms up, the second is captured and run, the others are replays.
        times = [replayed.count(graph) for graph in set(replayed)]
        assert len(times) == 2, f"one forward and one backward graph, got replays {times}"
        assert min(times) >= 3, f"replays {times}"
    for on, off in zip(*results, strict=True):
        assert len(on) == len(off) > 3
        for a, b in zip(on, off, strict=True):
            assert torch.isfinite(a).all()
            if a.shape == (4, WIDTH, 1):
                # The taps' gradient is Inductor's own sum over tokens, whose order follows the layout of what it reads.
                assert (a - b).float().norm() < 1e-2 * b.float().norm()
            else:
                assert torch.equal(a, b)
    assert not torch.equal(results[0][3][0], results[0][4][0]), "steps see different inputs"


@pytest.mark.usefixtures("_no_caches")
def test_no_operand_is_copied_behind_a_convolution():
    model = make(Convolution)
    (expected,) = steps(model, 1, backend="eager")
    torch._dynamo.reset()
    packed, copies = inductor_passes.counters["packed"], gdn_ops.stats().input_copies
    (found,) = steps(model, 1)
    assert inductor_passes.counters["packed"] == packed + 1
    assert gdn_ops.stats().input_copies == copies
    for a, b in zip(found, expected, strict=True):
        assert ((a - b).float().norm() / b.float().norm()).item() < 2e-2
