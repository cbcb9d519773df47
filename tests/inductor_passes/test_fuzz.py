"""Random chains of views and copies between a row and q, k, v: the passes never change a gradient."""

import itertools
import math
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_passes
from tests.inductor_passes.toy_attention import toy

PRE = ["none", "flat", "tokens_first", "expand", "pad_tokens", "extra_axis", "twice"]
CUT = ["split", "slice", "narrow", "two_steps", "tensor_split", "index"]
REPEAT = ["none", "interleave", "expand"]
POST = ["none", "contiguous", "transposed", "transposed_copy", "clone", "view_as", "flat", "chunked"]


def draw(rnd):
    """A description of one chain: sizes, the order of the parts, and how each step is spelled."""
    H, r = rnd.randint(1, 3), rnd.choice([1, 1, 2])
    sizes = {
        "B": rnd.randint(1, 3),
        "T": rnd.randint(1, 5),
        "H": H,
        "K": rnd.choice([1, 2, 4]),
        "HV": H * r,
        "V": rnd.choice([2, 4]),
    }
    parts = ["q", "k", "v", *rnd.choice([[], ["z"], ["gap"]])]
    rnd.shuffle(parts)
    return {
        "sizes": sizes,
        "order": parts,
        "per_head": rnd.choice([False, True]),
        "pre": rnd.choice(PRE),
        "cut": rnd.choice(CUT),
        "post": {name: rnd.choice(POST) for name in "qkv"},
        "repeat": rnd.choice(REPEAT),
        "extra_use": rnd.choice(["", "", "q", "v"]),
    }


def choices(chain):
    """What was chosen, each choice by name."""
    order, sizes = "".join(name for name in chain["order"] if name in "qkv"), chain["sizes"]
    others = [name for name in chain["order"] if name not in "qkv"]
    spelled = {name: chain[name] for name in ("per_head", "pre", "cut", "repeat", "extra_use")}
    values_per_head = sizes["HV"] // sizes["H"]
    return [*spelled.items(), *chain["post"].items(), ("order", order), ("others", *others),
            ("values", values_per_head), *((name, sizes[name]) for name in ("B", "T", "H", "K", "V"))]  # fmt: skip


def chains(count, candidates=4):
    """Chains drawn one by one, each the candidate in which most pairs of choices meet that have not met before."""
    rnd, met, chosen = random.Random(0), set(), []
    for _ in range(count):
        drawn = [draw(rnd) for _ in range(candidates)]
        pairs = [set(itertools.combinations(choices(chain), 2)) for chain in drawn]
        best = max(range(candidates), key=lambda i: len(pairs[i] - met))
        met |= pairs[best]
        chosen.append(drawn[best])
    return chosen, met


def before_the_cut(row, how):
    B, T, W = row.shape
    if how == "flat":
        return row.reshape(B * T, W).view(B, T, W)
    if how == "tokens_first":
        return row.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "expand":
        return row[None].expand(1, B, T, W).squeeze(0)
    if how == "pad_tokens":
        return torch.nn.functional.pad(row, (0, 0, 1, 0))[:, 1:]
    if how == "extra_axis":
        return row.unsqueeze(2).flatten(2)
    if how == "twice":
        return row.clone().view(B, T, W).contiguous()
    return row


def cut(row, widths, how):
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    if how == "split":
        return row.split(widths, dim=-1)
    if how == "tensor_split":
        return torch.tensor_split(row, ends[:-1], dim=-1)
    if how == "narrow":
        return [row.narrow(-1, end - width, width) for end, width in zip(ends, widths, strict=True)]
    if how == "two_steps":
        first, second = row.split([ends[1], sum(widths) - ends[1]], dim=-1)
        return [*first.split(widths[:2], dim=-1), *second.split(widths[2:], dim=-1)]
    if how == "index" and len(set(widths)) == 1:
        r = row.unflatten(-1, (len(widths), widths[0]))
        return [r[..., i, :] for i in range(len(widths))]
    return [row[..., end - width : end] for end, width in zip(ends, widths, strict=True)]


def after_the_cut(x, how):
    if how == "contiguous":
        return x.contiguous()
    if how == "transposed":
        return x.transpose(1, 2).transpose(1, 2)
    if how == "transposed_copy":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "clone":
        return x.clone()
    if how == "view_as":
        return x.view_as(x)
    if how == "flat":
        return x.reshape(-1, *x.shape[2:]).unflatten(0, x.shape[:2])
    if how == "chunked" and x.shape[2] > 1:
        return torch.cat(x.split(1, dim=2), dim=2)
    return x


def build(chain):
    s = chain["sizes"]
    shapes = {"q": (s["H"], s["K"]), "k": (s["H"], s["K"]), "v": (s["HV"], s["V"])}
    widths = {name: math.prod(shape) for name, shape in shapes.items()} | {"z": 2 * s["H"], "gap": s["H"]}

    def f(row, g):
        x = before_the_cut(row, chain["pre"])
        mine = [widths[name] for name in chain["order"]]
        if chain["per_head"]:
            x = x.unflatten(-1, (s["H"], -1))
            mine = [width // s["H"] for width in mine]
        found = dict(zip(chain["order"], cut(x, mine, chain["cut"]), strict=True))
        qkv = {
            name: after_the_cut(found[name].reshape(s["B"], s["T"], *shapes[name]), chain["post"][name])
            for name in shapes
        }
        q, k, r = qkv["q"], qkv["k"], s["HV"] // s["H"]
        if chain["repeat"] == "interleave":
            q, k = q.repeat_interleave(r, dim=2), k.repeat_interleave(r, dim=2)
        elif chain["repeat"] == "expand":
            q, k = (y.unsqueeze(3).expand(-1, -1, -1, r, -1).flatten(2, 3) for y in (q, k))
        o = toy(q, k, qkv["v"], g)
        total = (o * (torch.arange(o.numel()) % 5 - 2).view_as(o)).sum()
        if "z" in found:
            total = total + (found["z"] * 3).sum()
        if chain["extra_use"]:
            total = total + (qkv[chain["extra_use"]] * 2).sum()
        return total

    return f, sum(widths[name] for name in chain["order"])


def traced_gradient(f, row, g):
    """The graph of the gradient of f (forward and backward in one, as AOTAutograd would have it)."""

    def gradient(row, g):
        leaf = (row * 1).requires_grad_()
        return torch.autograd.grad(f(leaf, g), leaf)[0]

    return make_fx(gradient, tracing_mode="fake")(row, g)


def check_chain(chain):
    """The call's line of the report."""
    f, width = build(chain)
    s = chain["sizes"]
    torch.manual_seed(0)
    row = torch.randint(-2, 3, (s["B"], s["T"], width)).double()
    g = torch.randint(-2, 3, (s["B"], s["T"], s["HV"])).double()
    graph = traced_gradient(f, row, g)
    expected = graph(row, g)
    report = inductor_passes.rewrite_graph(graph.graph)
    graph.recompile()
    found = graph(row, g)
    assert torch.equal(expected, found), f"gradient changed\n{report}\n{chain}"
    (call,) = report.calls
    return call


@pytest.mark.slow
def test_random_chains():
    drawn, met = chains(200)
    # Every two choices that can stand together do, in some chain: sizes, order and each step's spelling.
    rnd = random.Random(1)
    assert all(set(itertools.combinations(choices(draw(rnd)), 2)) <= met for _ in range(5000))
    calls = [check_chain(chain) for chain in drawn]
    # The test would prove nothing if most chains were left alone.
    assert sum(bool(call.operands) for call in calls) > 0.9 * len(calls)
    used_once = [call.packed for chain, call in zip(drawn, calls, strict=True) if not chain["extra_use"]]
    assert len(used_once) > 0.4 * len(calls)
    assert sum(used_once) > 0.7 * len(used_once)
