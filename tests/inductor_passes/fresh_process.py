"""Compiles one call for each argument in a process that has loaded nothing yet, and prints what came of it.

Arguments: same (the call as it is), dropped (another pass took the slot), formula, fake (what an upgrade of the op's
package changes).
"""
# ruff: noqa: E402 (the order of the imports is what is looked at)

import dataclasses
import sys

import torch

assert "torch._inductor.config" not in sys.modules
import inductor_passes

inductor_passes.install()
assert "torch._inductor.config" not in sys.modules, "installing must not load Inductor"

from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import tests.inductor_passes.toy_attention as toy
from inductor_passes import registry


class Theirs(CustomGraphPass):
    """Another package's pass."""

    def __call__(self, graph):
        pass

    def uuid(self):
        return "theirs"


def f(row, g):
    q, k, v = row.unflatten(-1, (3, 2, 4)).unbind(2)
    return toy.toy(q, k, v, g)


for what in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    if what in ("formula", "fake"):
        registry.unregister(toy.VARIANT)
        toy.VARIANT = registry.register(dataclasses.replace(toy.VARIANT, fingerprint=what))
        toy.FACTOR, toy.SCORES_PADDING = (3, 0) if what == "formula" else (1, 2)
    options = {"joint_custom_pre_pass": Theirs()} if what == "dropped" else {}
    before = inductor_passes.counters["packed"]
    row = torch.arange(144.0).view(1, 6, 24).sin().requires_grad_()
    torch.compile(f, options=options)(row * 1, torch.ones(1, 6, 2)).sum().backward()
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    print("RESULT", what, row.grad.double().sum().item(), inductor_passes.counters["packed"] - before, hits)
