"""Random batches, their float64 answer, and how far a float32 computation may be from it."""

import functools
import re

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gdn_ops
from gdn_ops import reference
from gdn_ops.context_parallel.emulation import RankInputs, contexts, emulate

HK, HV, D = 1, 2, 16
HEADS = (HK, HV, D)
W = (2 * HK + HV) * D

OPTIONS = {
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}
PLAIN = {"output_final_state": True}


def batch(cu_seqlens, seed=0, dtype=torch.float32, gate=True, g=None):
    """Global tensors of one batch: row [1,T,W], g, beta [1,T,HV], initial_state [N,HV,D,D], A_log, dt_bias [HV]."""
    gen = torch.Generator().manual_seed(seed)
    T, N = cu_seqlens[-1], len(cu_seqlens) - 1

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    row = randn(1, T, W) * 0.5
    if not gate:  # no norm in the op: keep k short, so that the recurrence does not grow
        row = row * (0.4 * (16 / D) ** 0.5)
    tensors = {
        "row": row.to(dtype),
        "g": randn(1, T, HV) if gate else -torch.rand(1, T, HV, generator=gen) * 0.2,
        "beta": randn(1, T, HV) if gate else torch.rand(1, T, HV, generator=gen),
        "initial_state": randn(N, HV, D, D),
    }
    if g is not None:
        tensors["g"] = torch.full((1, T, HV), float(g))
    if gate:
        tensors |= {"A_log": randn(HV) * 0.5 - 2, "dt_bias": randn(HV)}
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors["initial_state"] = tensors["initial_state"].to(state_dtype)
    return tensors


def split(row):
    q, k, v = row.split([HK * D, HK * D, HV * D], dim=-1)
    return q.unflatten(-1, (HK, D)), k.unflatten(-1, (HK, D)), v.unflatten(-1, (HV, D))


def weights(part, seed=1):
    """Fixed weights of o [1,T,HV,D] and of the final states [N,HV,D,D] in the loss."""
    gen = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, part.num_tokens, HV, D, generator=gen),
        torch.randn(part.num_documents, HV, D, D, generator=gen) * 0.3,
    )


def answer(part, tensors, options):
    """o, final states and all gradients by the float64 recurrence, on the tensors' device."""
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    gate = (
        {"use_gate_in_kernel": True, "A_log": leaves["A_log"], "dt_bias": leaves["dt_bias"]}
        if "A_log" in leaves
        else {}
    )
    o, final = reference.chunk_gated_delta_rule(
        *split(leaves["row"]), leaves["g"], leaves["beta"], initial_state=leaves["initial_state"],
        cu_seqlens=torch.tensor(part.cu_seqlens, device=leaves["row"].device), **options, **gate,
    )  # fmt: skip
    w_o, w_final = (w.to(o.device) for w in weights(part))
    loss = (o * w_o).sum() + (final * w_final).sum()
    loss.backward()
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
    return {"o": o.detach(), "final_state": final.detach(), **grads}


def checkpointed(way):
    """The three ways to call a function of tensors: "direct", "checkpoint", "selective" (keeps the exchange)."""
    if way == "direct":
        return lambda function, *args: function(*args)
    if way == "checkpoint":
        return functools.partial(checkpoint, use_reentrant=False)
    context_fn = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
    return functools.partial(checkpoint, use_reentrant=False, context_fn=context_fn)


def on_ranks(part, tensors, options, form="plain", save="solve", way="direct", hooks=False, pieces=None, ends=None):
    """The same by all ranks emulated in this process; local results put together again.

    pieces: of the largest rank's share, and how long those at a document's ends are, as for a context.
    hooks: hooks and retain_grad on each rank's q, k and v that change nothing.
    """
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    inputs, tokens, retained = [], ("row", "g", "beta"), []
    for rank in range(part.num_ranks):
        local = {n: part.shard(x, rank) if n in tokens else x for n, x in leaves.items()}
        row = local.pop("row")
        operands = (row, None, None) if form == "packed" else split(row)
        if form == "contiguous":
            operands = tuple(x.contiguous() for x in operands)
        if hooks:
            operands[0].register_hook(lambda grad: grad * 1)
            operands[1].retain_grad()
            operands[2].register_hook(lambda grad: grad.clone())
            retained.append(operands[1])
        inputs.append(
            RankInputs(
                *operands, local["g"], local["beta"], local["initial_state"], local.get("A_log"), local.get("dt_bias")
            )
        )
    widths = len(RankInputs._fields)
    cp_contexts = contexts(part, tensors["row"].device, HV, pieces, ends)

    def function(*flat):
        ranks = [RankInputs(*flat[i : i + widths]) for i in range(0, len(flat), widths)]
        heads = HEADS if form == "packed" else None
        return emulate(part, ranks, heads=heads, save=save, cp_contexts=cp_contexts, **options)

    results = checkpointed(way)(function, *(x for rank in inputs for x in rank))
    o = part.unshard([o for o, _ in results])
    final = sum(last for _, last in results)
    w_o, w_final = weights(part)
    ((o * w_o.to(o.device)).sum() + (final * w_final.to(o.device)).sum()).backward()
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
    assert all(k.grad is not None for k in retained)
    return {"o": o.detach(), "final_state": final.detach(), **grads}


def graph_text(graph):
    """The nodes of a graph; which of a host's GPUs they are on is left out, as that differs from rank to rank."""
    text = "\n".join(f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)
    return re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", text)


def distance(found, expected):
    """The largest error relative to the largest value, by name."""
    return {
        name: ((found[name].double() - x).abs().max() / x.abs().max().clamp(min=1e-6)).item() if x.numel() else 0.0
        for name, x in expected.items()
    }
