"""The rewritten graphs through Inductor's own code generation: the bits of eager code, and no new cost."""

import contextlib

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.output_code import CompiledFxGraph

import inductor_passes
from inductor_passes import pipeline
from tests.inductor_passes.spellings import SPELLINGS, Layer
from tests.inductor_passes.test_semantics import BODIES, Model

inductor_passes.install()

# One of each way in which a graph is edited; all are compiled as one model.
CHOSEN = ["slicing", "per_head_with_gate", "repeat_heads_first", "contiguous_twice", "gap", "hook_on_q"]
CHOSEN_BODIES = ["selectively_checkpointed", "tokens_first_row_with_others", "tokens_first_row_with_q_used"]


class All(nn.Module):
    """The named call sites on one input; the outputs are stacked, so that none changes another's bits."""

    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(SPELLINGS[name]) if name in SPELLINGS else Model(BODIES[name][0]) for name in names
        )

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


@pytest.fixture
def mutated(monkeypatch):
    """By compiled graph, the graph's inputs that its code mutates; Inductor makes no CUDA graph where there are any."""
    found = []
    original = CompiledFxGraph.post_compile

    def post_compile(self, *args, **kwargs):
        found.append(set(self.mutated_inputs))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledFxGraph, "post_compile", post_compile)
    return found


@contextlib.contextmanager
def vector_instructions():
    """Loops in the vector instructions that the compiler here builds; everywhere else tests/conftest.py has none."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
            if not cpu_vec_isa.pick_vec_isa():
                pytest.skip("the C++ compiler here builds no vector instructions")
            yield
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()


def steps(names, sizes, *, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = All(names)
    caches_off = torch._inductor.config.patch(fx_graph_cache=False)
    with caches_off, torch._functorch.config.patch(enable_autograd_cache=False):
        run = torch.compile(model, fullgraph=True, dynamic=len(sizes) > 1) if compiled else model
        results = []
        for B, T in sizes:
            model.zero_grad(set_to_none=True)
            x = torch.randint(-2, 3, (B, T, 16)).double().requires_grad_()
            y = run(x)
            (y * (torch.arange(y.numel()) % 5 - 2).view_as(y)).sum().backward()
            results += [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, sizes, partly, instructions",
    [
        ([*CHOSEN, *CHOSEN_BODIES], [(2, 6)], 2, contextlib.nullcontext),
        (["per_head_with_gate", "tokens_first_row_with_others"], [(2, 6), (3, 9)], 0, vector_instructions),
    ],
    ids=["static", "dynamic, vectorised"],
)
def test_same_bits_through_code_generation(mutated, names, sizes, partly, instructions):
    with instructions():
        check_same_bits(mutated, names, sizes, partly)


def check_same_bits(mutated, names, sizes, partly):
    before = dict(pipeline.counters)
    on = steps(names, sizes, compiled=True)
    found = [pipeline.counters[name] - before.get(name, 0) for name in ("packed", "packed_partly", "left")]
    assert found == [len(names) - partly, partly, 0]
    assert mutated == [set(), set()], "one forward and one backward for all sizes; no graph's input is written to"
    # Whole numbers: eager code has the bits that any order of sums gives, and so has compiled code without the passes.
    for a, b in zip(on, steps(names, sizes, compiled=False), strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b)
