"""One rank of the distributed tests: runs the named cases and writes what it found as JSON.

Started by test_distributed.py as `python worker.py BACKEND RANK RANKS STORE OUTPUT CASE...`.
"""

import contextlib
import functools
import hashlib
import json
import re
import sys
import time
import traceback
from datetime import timedelta

import problems
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gdn_ops
from gdn_ops import settings
from gdn_ops.context_parallel import RecomputeHandle, causal_conv1d, partition, path

CU_SEQLENS = [0, 66, 66, 67, 131, 300]
SHARED = ("final_state", "initial_state", "A_log", "dt_bias")
# What a user says: documents cut anywhere, the pieces given to ranks in any order.
PIECES = [(4, 100, 69), (0, 0, 30), (3, 0, 64), (4, 0, 60), (0, 30, 36), (2, 0, 1), (4, 60, 40), (1, 0, 0)]
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "fragments")


def partitioned(layout, num_ranks):
    if layout == "fragments":
        return partition(CU_SEQLENS, fragments=[PIECES[rank::num_ranks] for rank in range(num_ranks)])
    return partition(CU_SEQLENS, num_ranks, layout)


@functools.cache
def expectation(device, dtype, gate):
    """The float64 answer, and by how much one rank alone misses it."""
    part = partition(CU_SEQLENS, 1)
    tensors, options = problems.batch(CU_SEQLENS, dtype=dtype, gate=gate), problems.OPTIONS if gate else problems.PLAIN
    expected = problems.answer(part, tensors, options)
    one = problems.on_ranks(part, {n: x.to(device) for n, x in tensors.items()}, options)
    return expected, problems.distance({n: x.cpu() for n, x in one.items()}, expected)


class Rank:
    """One rank's batch, and how to run it in several ways."""

    def __init__(self, device, dtype, layout="zigzag", gate=True, exchange="saved", group=None, pieces=1):
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.device, self.dtype, self.gate = device, dtype, gate
        self.retained = None
        self.options = problems.OPTIONS if gate else problems.PLAIN
        self.part = partitioned(layout, self.num_ranks)
        self.tensors = {n: x.to(device) for n, x in problems.batch(CU_SEQLENS, dtype=dtype, gate=gate).items()}
        self.context = self.part.context(
            self.rank, group or dist.group.WORLD, device, exchange=exchange, pieces=pieces, ends=2 if pieces > 1 else 1
        )

    def op(self, row, g, beta, initial_state, A_log=None, dt_bias=None, form="plain", handle=None):
        """The op on this rank's rows, spelled in one of six ways."""
        options = {
            "initial_state": initial_state, "use_gate_in_kernel": A_log is not None, "A_log": A_log,
            "dt_bias": dt_bias, "cp_context": self.context, "recompute_handle": handle, **self.options,
        }  # fmt: skip
        HK, HV, D = problems.HEADS
        heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
        if form == "packed":
            return gdn_ops.chunk_gated_delta_rule_packed(row, g, beta, **heads, **options)
        q, k, v = gdn_ops.packed_qkv_views(row, **heads) if form == "packed_views" else problems.split(row)
        if form == "contiguous":
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if form == "hooked" and q.requires_grad:
            q.register_hook(lambda grad: grad * 1)
            v.register_hook(lambda grad: grad + 0)
        if form == "retained" and q.requires_grad and self.retained is None:
            k.retain_grad()
            self.retained = k
        return gdn_ops.chunk_gated_delta_rule(q, k, v, g, beta, **options)

    def run(self, function):
        """Forward and backward; global results (equal on every rank) and the counters of this rank."""
        part, pad = self.part, self.part.max_tokens
        leaves = {}
        for name, x in self.tensors.items():
            local = part.shard(x, self.rank, pad_to=pad) if name in ("row", "g", "beta") else x.clone()
            leaves[name] = local.requires_grad_()
        gdn_ops.reset_stats()
        arguments = dict(leaves)
        # As from a projection: not a leaf.
        arguments["row"] = leaves["row"] * 1
        o, final = function(**arguments)
        w_o, w_final = (w.to(self.device) for w in problems.weights(part))
        ((o * part.shard(w_o, self.rank, pad_to=pad)).sum() + (final * w_final).sum()).backward()
        stats = gdn_ops.stats().as_dict()
        found = {"o": o.detach(), "final_state": final.detach(), **{n: x.grad for n, x in leaves.items()}}
        for name in SHARED:
            if name in found:
                dist.all_reduce(found[name])
        for name in ("o", "row", "g", "beta"):
            parts = [
                torch.empty_like(found[name], memory_format=torch.contiguous_format) for _ in range(self.num_ranks)
            ]
            dist.all_gather(parts, found[name].contiguous())
            found[name] = part.unshard(parts)
        return found, stats

    def excess(self, found):
        """By how much the worst result is beyond its error budget (at most 1 is within); looked at by rank 0.

        The global results are equal in bits on every rank, or this is infinite.
        """
        digests = [None] * self.num_ranks
        raw = b"".join(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in found.values())
        dist.all_gather_object(digests, hashlib.sha256(raw).hexdigest())
        if len(set(digests)) > 1:
            return float("inf")
        if self.rank:
            return 0.0
        expected, own = expectation(self.device, self.dtype, self.gate)
        errors = problems.distance({n: x.cpu() for n, x in found.items()}, expected)
        rounding = 8e-3 if self.dtype == torch.bfloat16 else 1e-5 if self.device.type == "cuda" else 1e-6
        return max(error / (2 * own[name] + rounding) for name, error in errors.items())


def differing(first, second):
    return [name for name, x in first.items() if not torch.equal(x, second[name])]


@contextlib.contextmanager
def sent_bytes():
    """The bytes of each message that context parallelism sends meanwhile."""
    sizes, start = [], path.Gathering.start

    def counted(told, *args):
        sizes.append(told.numel() * told.element_size())
        return start(told, *args)

    path.Gathering.start = staticmethod(counted)
    try:
        yield sizes
    finally:
        path.Gathering.start = staticmethod(start)


def case_layouts(device, dtype):
    out = {}
    for layout in LAYOUTS:
        for gate in (True, False):
            rank = Rank(device, dtype, layout, gate, pieces=1 if gate else 3)
            with sent_bytes() as sizes:
                found, stats = rank.run(rank.op)
            again, _ = rank.run(rank.op)
            said = rank.part.exchange_bytes(
                num_v_heads=problems.HV, key_dim=problems.D, value_dim=problems.D, itemsize=4
            )
            out[f"{layout} gate={gate}"] = {
                "bytes": sizes,
                "said": list(said),
                "excess": rank.excess(found),
                "differing": differing(found, again),
                "exchanges": stats["context_exchanges"],
            }
    return out


def ways(rank, forms):
    """Every way to call the op: form x (direct, checkpointed in three ways), and the exchanges it makes."""
    selective = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
    for form in forms:
        op = functools.partial(rank.op, form=form)
        yield f"{form} direct", op, 2
        yield f"{form} checkpoint", lambda op=op, **x: checkpoint(op, **x, use_reentrant=False), 3
        yield (
            f"{form} selective",
            lambda op=op, **x: checkpoint(op, **x, use_reentrant=False, context_fn=selective),
            2,
        )
        handle = RecomputeHandle()
        yield (
            f"{form} handle",
            lambda op=op, h=handle, **x: checkpoint(op, handle=h, **x, use_reentrant=False, context_fn=h.context_fn),
            2,
        )


def case_ways(device, dtype):
    out = {}
    for gate in (True, False):  # also: the L2 norm in the op, on and off
        pieces = 1 if gate else 3
        rank = Rank(device, dtype, gate=gate, pieces=pieces)
        base, _ = rank.run(rank.op)
        replaying = Rank(device, dtype, gate=gate, exchange="replay", pieces=pieces)
        forms = ("plain", "packed_views", "packed", "contiguous", "hooked", "retained")
        listed = [*ways(rank, forms if gate else forms[:4]), ("replay", replaying.op, 3)]
        for name, function, exchanges in listed:
            rank.retained = None
            found, stats = rank.run(function)
            again, _ = rank.run(function) if name.endswith("direct") else (found, None)
            out[f"{name} gate={gate}"] = {
                "differing": differing(base, found) + differing(found, again), "expected": exchanges,
                "exchanges": stats["context_exchanges"], "packed": stats["packed_gradients"],
                "concatenations": stats["concatenations"],
                "retained": rank.retained is None or bool(rank.retained.grad.isfinite().all()),
            }  # fmt: skip
    return out


def case_compiled(device, dtype):
    """fullgraph on every rank: equal bits in every mode, and the exchanges of each (the plain way: case_overlap)."""
    rank = Rank(device, dtype, pieces=3)
    base, _ = rank.run(rank.op)
    replaying = Rank(device, dtype, exchange="replay", pieces=3)
    selective = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
    inductor, traced = "inductor", "aot_eager_decomp_partition"  # the second: as the first, without code generation
    functions = {
        "selective": (lambda **x: checkpoint(rank.op, **x, use_reentrant=False, context_fn=selective), 2, inductor),
        # The backward's second exchange is the forward's in the joint graph, where equal nodes are one.
        "replay": (replaying.op, 2, inductor),
        "checkpoint": (lambda **x: checkpoint(rank.op, **x, use_reentrant=False), 3, traced),
        "packed": (functools.partial(rank.op, form="packed"), 2, traced),
    }
    out = {}
    for name, (function, exchanges, backend) in functions.items():
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        rank.run(compiled)
        found, stats = rank.run(compiled)  # counted where ops run, not where they are traced
        out[name] = {
            "differing": differing(base, found), "expected": exchanges, "exchanges": stats["context_exchanges"],
            # The graph pass packs split views in Inductor; the packed op needs no pass.
            "packed": stats["packed_gradients"], "expected_packed": int(backend == inductor or name == "packed"),
        }  # fmt: skip
    return out


OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
}


def case_overlap(device, dtype):
    """What Inductor calls between the start of an all-gather and its wait, with the user's overlap passes on."""
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    rank = Rank(device, dtype)
    # As the product of an output gate: it needs nothing of the op. (Added: one rounding, eager and compiled.)
    x = torch.ones(1, rank.part.max_tokens, 32, device=device, dtype=dtype).requires_grad_()
    weight = torch.ones(32, problems.HV * problems.D, device=device, dtype=dtype).requires_grad_()

    def layer(**tensors):
        o, final_state = rank.op(**tensors)
        return o + (x @ weight).unflatten(-1, o.shape[-2:]), final_state

    eager, _ = rank.run(layer)
    torch._dynamo.reset()
    # No caches: code that comes out of one is not seen here.
    with config.patch({**OVERLAP, "fx_graph_cache": False}), aot_config.patch(enable_autograd_cache=False):
        (found, stats), codes = run_and_get_code(rank.run, torch.compile(layer, fullgraph=True))
    calls = re.compile(r"(all_gather_into_tensor|wait_tensor|extern_kernels\.\w*mm|gdn\.\w+)(?:\.default)?\(")
    return {
        "orders": [[found.split(".")[-1] for found in calls.findall(code)] for code in codes],
        "differing": differing(eager, found),
        "exchanges": stats["context_exchanges"],
        "packed": stats["packed_gradients"],
    }


def case_graphs(device, dtype):
    """The text of the joint graph, which must be the same on every rank, and the collectives in it."""
    from torch._dynamo.backends.common import aot_autograd

    rank = Rank(device, dtype, pieces=3)
    texts = []

    def keep(graph, inputs):
        texts.append(problems.graph_text(graph.graph))
        return graph

    torch._dynamo.reset()
    rank.run(torch.compile(rank.op, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True))
    collected = [None] * rank.num_ranks
    dist.all_gather_object(collected, texts)
    return {
        "equal": all(text == texts for text in collected),
        "gathers": [text.count("_c10d_functional.all_gather_into_tensor") for text in texts],
        "backwards": [text.count("gdn.chunk_bwd.default") for text in texts],
    }


def case_conv(device, dtype):
    """On a GPU in the kernel, whatever the setting takes by itself."""
    with settings.configure(backend="triton" if device.type == "cuda" else "auto"):
        return convolutions(device, dtype)


def case_conv_direct(device, dtype):
    """The same without a compilation, which every rank would pay for."""
    return convolutions(device, dtype, compiled=False)


def convolutions(device, dtype, compiled=True):
    """The convolution over ranks and on one: bits of the forward, gradients, exchanges; checkpointed and compiled."""
    rank = dist.get_rank()
    # Fragments shorter than the convolution reaches: rows come from several ranks back.
    cu_seqlens, out = [0, 3, 4, 9, 40], {}
    for layout in ("contiguous", "zigzag", "zigzag_per_document"):
        part = partition(cu_seqlens, dist.get_world_size(), layout)
        context = part.context(rank, dist.group.WORLD, device)
        gen = torch.Generator().manual_seed(0)
        x, grad, weight, bias = (
            torch.randn(*s, generator=gen).to(device, dtype) for s in ((1, 40, 8), (1, 40, 8), (8, 8), (8,))
        )
        cu = torch.tensor(cu_seqlens, device=device)

        def run(function, x, grad, weight, bias):
            leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
            y = function(*leaves)
            y.backward(grad)
            return [y.detach(), *(t.grad for t in leaves)]

        one = run(lambda *t, cu=cu: causal_conv1d(*t, cu_seqlens=cu), x, grad, weight, bias)
        direct = functools.partial(causal_conv1d, cp_context=context)
        selective = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
        ways = {
            "direct": direct,
            "selective": functools.partial(checkpoint, direct, use_reentrant=False, context_fn=selective),
        }
        if compiled and layout == "zigzag":
            ways["compiled"] = torch.compile(direct, fullgraph=True)
        for name, function in ways.items():
            gdn_ops.reset_stats()
            with sent_bytes() as sizes:
                found = run(function, part.shard(x, rank), part.shard(grad, rank), weight, bias)
            exchanges = gdn_ops.stats().context_exchanges
            expected = [part.shard(one[0], rank), part.shard(one[1], rank), *one[2:]]
            for t in found[2:]:
                dist.all_reduce(t)
            out[f"{layout} {name}"] = {
                "error": max(
                    ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)
                ),
                "exchanges": exchanges,
                # On a CPU torch's sigmoid rounds by where an element lies in its tensor.
                "forward_bits": torch.equal(found[0], expected[0]) or device.type == "cpu",
                "bytes": sizes if name == "direct" else None,
                "said": list(part.halo_bytes(channels=8, width=8, itemsize=dtype.itemsize)),
            }
    return out


def case_mesh(device, dtype):
    mesh = dist.device_mesh.init_device_mesh(
        device.type, (1, dist.get_world_size()), mesh_dim_names=("data", "context")
    )
    rank = Rank(device, dtype, group=mesh["context"])
    found, stats = rank.run(rank.op)
    errors = {}
    for name, call in {
        "two dimensions": lambda: rank.part.context(rank.rank, mesh, device),
        "wrong rank": lambda: rank.part.context((rank.rank + 1) % rank.num_ranks, dist.group.WORLD, device),
        "wrong size": lambda: partition([0, 9], rank.num_ranks + 1).context(rank.rank, dist.group.WORLD, device),
        "no group": lambda: rank.part.context(rank.rank, None, device),
        "wrong type": lambda: rank.part.context(rank.rank, "world", device),
    }.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            errors[name] = str(error)
    return {"excess": rank.excess(found), "exchanges": stats["context_exchanges"], "errors": errors}


def case_no_exchange(device, dtype):
    """Documents that stay on their rank: no collective at all."""
    del device, dtype
    part = partition([0, 10, 20, 30, 40][: dist.get_world_size() + 1], dist.get_world_size())
    context = part.context(dist.get_rank(), dist.group.WORLD, "cpu")
    tensors = problems.batch([0, 10])
    gdn_ops.reset_stats()
    row = tensors["row"].requires_grad_()
    o, _ = gdn_ops.chunk_gated_delta_rule(
        *problems.split(row), -tensors["g"].abs(), tensors["beta"], cp_context=context
    )
    o.sum().backward()
    return {"exchanges": gdn_ops.stats().context_exchanges, "group": context.group_name}


def broken(call):
    """The RuntimeError of a call that should have found a collective broken."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return {
            "error": str(error), "cause": str(error.__cause__), "seconds": time.monotonic() - started,
            "trace": "".join(traceback.format_exception(error)),
        }  # fmt: skip
    return {"error": "", "cause": "", "seconds": 0.0, "trace": ""}


def case_failing_rank(device, dtype):
    """The last rank leaves between forward and backward: every call of the others names its collective."""
    rank = Rank(device, dtype)
    leaves = {n: x.clone().requires_grad_() for n, x in rank.tensors.items()}
    for name in ("row", "g", "beta"):
        leaves[name] = rank.part.shard(rank.tensors[name], rank.rank, pad_to=rank.part.max_tokens).requires_grad_()
    o, _ = rank.op(**leaves)
    if rank.rank == rank.num_ranks - 1:
        return {"left": True}
    torch._dynamo.reset()
    return {
        "backward": broken(lambda: o.sum().backward()),
        "forward": broken(lambda: rank.op(**leaves)),
        "compiled": broken(lambda: torch.compile(rank.op, fullgraph=True)(**leaves)),
    }


def case_stuck_rank(device, dtype):
    """The last rank is alive and never calls: the others' error comes with the group's timeout."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    rank = Rank(device, dtype, group=group)
    if rank.rank == rank.num_ranks - 1:
        time.sleep(5)
        return {"left": True}
    return {"forward": broken(lambda: rank.run(rank.op))}


def main():
    backend, rank, num_ranks, store, output, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", int(rank))
    dtype = torch.float32 if backend == "gloo" else torch.bfloat16
    if device.type == "cuda":
        torch.cuda.set_device(device)
    short = any(case in ("failing_rank", "stuck_rank") for case in cases)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=int(rank), world_size=int(num_ranks),
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    results = {}
    for case in cases:
        started = time.monotonic()
        results[case] = globals()[f"case_{case}"](device, dtype)
        print(f"{case}: {time.monotonic() - started:.1f} s", flush=True)
    with open(output, "w") as file:
        json.dump(results, file)
    if not short:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
