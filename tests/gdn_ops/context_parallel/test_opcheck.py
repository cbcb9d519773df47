"""Every op of context parallelism passes opcheck in full: one rank with documents in parts, and a rank of three."""

import problems
import pytest
import torch

from gdn_ops.context_parallel import conv, ops, partition, segments

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
OPS = torch.ops.gdn
HK, HV, D = problems.HEADS
CU_SEQLENS = [0, 66, 66, 67, 131, 300]
# One rank whose documents are in parts all the same, in any order.
PIECES = [(4, 150, 19), (3, 0, 64), (0, 20, 46), (1, 0, 0), (2, 0, 1), (4, 130, 20), (0, 0, 20), (4, 0, 130)]
PARTS = {1: partition(CU_SEQLENS, fragments=[PIECES]), 3: partition(CU_SEQLENS, 3, "zigzag")}


def leaves(*tensors):
    return tuple(x.detach().clone().requires_grad_() for x in tensors)


def composite():
    """Calls of the differentiable ops; one rank, as opcheck has no group."""
    part, tensors = PARTS[1], problems.batch(CU_SEQLENS)
    context = part.context(0)
    row, g, beta = (part.shard(tensors[n], 0) for n in ("row", "g", "beta"))
    small = (tensors["initial_state"], tensors["A_log"], tensors["dt_bias"])
    plan = list(context.plan)
    options = {"num_ranks": 1, "group_name": "", "exchange": "saved", "scale": 0.25, "output_final_state": True}
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    x, weight, bias = torch.randn(300, 12), torch.randn(12, 4), torch.randn(12)
    conv_rest = (context.halo.cu_seqlens, list(context.halo))
    return {
        "context_fwd": [((*leaves(*problems.split(row), g, beta, *small), None, None, None, plan), options)],
        "context_packed_fwd": [((*leaves(row, g, beta, *small), None, None, None, plan), heads | options)],
        "context_conv1d": [
            ((*leaves(x, weight, bias), *conv_rest), {"silu": True, "num_ranks": 1, "group_name": ""}),
            ((*leaves(x, weight), None, *conv_rest), {"silu": False, "num_ranks": 1, "group_name": ""}),
        ],
    }


def small(num_ranks):
    """Calls of the ops between the collectives, on the last rank."""
    part, tensors = PARTS[num_ranks], problems.batch(CU_SEQLENS)
    context = part.context(0, pieces=5) if num_ranks == 1 else emulated(part)
    halo, plan = context.halo, list(context.plan)
    row, g, beta = (part.shard(tensors[n], num_ranks - 1) for n in ("row", "g", "beta"))
    q, k, v = problems.split(row)
    gate = (tensors["A_log"], tensors["dt_bias"])
    switches = {"num_ranks": num_ranks, "use_qk_l2norm": True, "use_beta_sigmoid": True}
    forward = (k, v, g, beta, tensors["initial_state"], *gate)
    forward = (*forward, plan)
    told, additions, moves = OPS.segment_summary_fwd(*forward, **switches)
    _, _, *saved = OPS.chunk_fwd(q, k, v, g, beta, None, context.plan.cu_seqlens, *gate, scale=0.25)
    backward = (torch.randn_like(v), tensors["initial_state"], q, k, v, g, beta, *saved, *gate, moves, plan)
    heard, gradients = OPS.segment_summary_bwd(*backward, **switches, scale=0.25)
    assert all((x.numel() > 0) == (num_ranks == 1) for x in (additions, moves, gradients))
    told, heard = torch.cat([told] * num_ranks), torch.cat([heard] * num_ranks)
    combine = {"num_ranks": num_ranks, "num_heads": HV, "key_dim": D, "value_dim": D}

    x, weight, bias = torch.randn(row.shape[1], 12), torch.randn(12, 4), torch.randn(12)
    wide = torch.randn(row.shape[1], 30)[:, 3:15]
    F = halo.cu_seqlens.shape[0] - 1
    history, none = torch.randn(F, 3, 12), torch.empty(0, 3, 12)
    rows = OPS.causal_conv1d_bwd_history(
        x, x, weight, bias, history, halo.cu_seqlens, halo.fragments, silu=True, num_ranks=1
    )
    rows = torch.cat([rows] * num_ranks)
    heard_rows = torch.cat([OPS.halo_tell(wide, halo.tokens, depth=3, num_ranks=1)] * num_ranks)
    return {
        "segment_summary_fwd": [(forward, switches)],
        "segment_summary_bwd": [(backward, switches | {"scale": 0.25})],
        "segment_combine": [
            ((told, told, tensors["initial_state"], additions, moves, plan), combine | {"transposed": False}),
            ((heard, told, None, gradients, moves, plan), combine | {"transposed": True}),
        ],
        "causal_conv1d_fwd": [
            ((x, weight, bias, history, halo.cu_seqlens), {"silu": True}),
            ((wide, weight, None, none, halo.cu_seqlens), {"silu": False}),
        ],
        "causal_conv1d_bwd": [
            ((wide, x, weight, bias, history, history, halo.cu_seqlens), {"silu": True}),
            ((x.T.contiguous().T, wide, weight, None, none, none, halo.cu_seqlens), {"silu": False}),
        ],
        "causal_conv1d_bwd_history": [
            ((x, wide, weight, bias, history, halo.cu_seqlens, halo.fragments), {"silu": True, "num_ranks": num_ranks})
        ],
        "halo_tell": [((wide, halo.tokens), {"depth": 3, "num_ranks": num_ranks})],
        "halo_place": [((heard_rows, halo.sources, halo.distances), {})],
        "halo_return": [((rows, halo.readers, halo.reader_distances), {})],
    }  # fmt: skip


def emulated(part):
    from gdn_ops.context_parallel.context import build_for

    return build_for(part, part.num_ranks - 1, "", "cpu", "saved")


COMPOSITE = ("context_fwd", "context_packed_fwd", "context_conv1d")
SMALL = sorted(({*segments.SCHEMAS, *conv.SCHEMAS, *ops.SCHEMAS}) - {*COMPOSITE})


@pytest.mark.parametrize("name", COMPOSITE)
def test_differentiable_op(name):
    for args, kwargs in composite()[name]:
        torch.library.opcheck(getattr(OPS, name).default, args, kwargs, test_utils=CHECKS)


@pytest.mark.parametrize("num_ranks", PARTS)
@pytest.mark.parametrize("name", SMALL)
def test_small_op(name, num_ranks):
    for args, kwargs in small(num_ranks)[name]:
        torch.library.opcheck(getattr(OPS, name).default, args, kwargs, test_utils=CHECKS)


def test_every_op_has_its_tags():
    for name in (*COMPOSITE, *SMALL):
        op = getattr(OPS, name).default
        assert torch.Tag.pt2_compliant_tag in op.tags, name
        assert torch.Tag.flexible_layout in op.tags, name
        assert not any(argument.alias_info for argument in op._schema.arguments), name
