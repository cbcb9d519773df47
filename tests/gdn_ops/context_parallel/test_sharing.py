"""What a summary and the forward after it share, with the CPU backend in the place of one that can; no GPU needed.

That the kernels give the same bits from shared matrices: `tests/gdn_ops/backends/hopper/test_summaries.py`.
"""

import problems
import pytest
import torch

import gdn_ops
from gdn_ops.backends import cpu
from gdn_ops.context_parallel import emulation, partition, path
from gdn_ops.outputs import allocate_chunk_fwd

CU_SEQLENS = [0, 66, 66, 67, 131, 300]


@pytest.fixture
def shared(monkeypatch):
    """The CPU backend prepares, and holds a prepared forward to what it computes itself; counts those calls."""
    run, count = cpu.chunk_fwd, {"prepared": 0, "forward": 0}

    def chunk_prepare(out, inputs, options):
        count["prepared"] += 1
        run(out, inputs, options, "solve")
        return out.gates.new_full((3,), 7.0)

    def chunk_fwd(out, inputs, options, save, factors=None):
        if factors is not None:
            assert factors.tolist() == [7.0] * 3
            count["forward"] += 1
            own = allocate_chunk_fwd(
                inputs, output_final_state=False, use_qk_l2norm=options.use_qk_l2norm, save="solve"
            )
            run(own, inputs, options, "solve")
            for name in ("norms", "gates", "solve", "scores"):
                assert torch.equal(getattr(out, name), getattr(own, name)), name
        run(out, inputs, options, save)

    monkeypatch.setattr(cpu, "chunk_prepare", chunk_prepare, raising=False)
    monkeypatch.setattr(cpu, "chunk_fwd", chunk_fwd)
    return count


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
@pytest.mark.parametrize("form, gate, pieces", [("plain", True, 1), ("packed", False, 1), ("packed", True, 3)])
def test_a_plain_step_shares_and_changes_no_bit(form, gate, pieces, save, shared, monkeypatch):
    part = partition(CU_SEQLENS, 3, "zigzag")
    options = problems.OPTIONS if gate else problems.PLAIN
    tensors = problems.batch(CU_SEQLENS, gate=gate)
    found = problems.on_ranks(part, tensors, options, form=form, save=save, pieces=pieces)
    assert shared == {"prepared": 3, "forward": 3}
    monkeypatch.setattr(emulation, "is_plain", lambda tensors: False)
    each = problems.on_ranks(part, tensors, options, form=form, save=save, pieces=pieces)
    assert shared == {"prepared": 3, "forward": 3}
    assert [name for name, x in each.items() if not torch.equal(x, found[name])] == []


def test_a_call_with_a_listener_or_without_a_summary_shares_nothing(shared):
    tensors = problems.batch(CU_SEQLENS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        problems.on_ranks(partition(CU_SEQLENS, 3), tensors, problems.OPTIONS)
    whole = partition(CU_SEQLENS, fragments=[[(0, 0, 66), (1, 0, 0), (2, 0, 1)], [(3, 0, 64), (4, 0, 169)]])
    problems.on_ranks(whole, tensors, problems.OPTIONS)
    assert shared == {"prepared": 0, "forward": 0}


def test_a_backend_that_cannot_prepare_is_asked_for_all(monkeypatch):
    part = partition([0, 200], 2)
    row = problems.batch([0, 200])["row"]
    heads = problems.HEADS
    g, beta = torch.zeros(2, 1, 100, heads[1])
    for rank in range(2):
        mine = part.shard(row, rank)
        options = {"scale": 0.25, "use_qk_l2norm": True}
        plan = emulation.contexts(part, "cpu")[rank].plan
        views = path.row_views(mine, heads)
        call = path.Call(*views, mine, g, beta, None, None, None, plan, 2, options, heads, plain=True)
        assert path.prepare(call) is None


@pytest.mark.parametrize("packed", [False, True])
def test_operands_that_need_copies_are_copied_and_counted_as_without_sharing(packed, shared):
    """On a backend that can share; on any other a shared copy would be for nothing."""
    part = partition([0, 200, 210], fragments=[[(0, 0, 100), (1, 0, 10), (0, 100, 100)]])
    tensors = problems.batch([0, 200, 210], gate=False)
    row = torch.empty(1, 210, 2 * problems.W)[..., ::2].copy_(tensors["row"])
    heads = problems.HEADS
    names = dict(zip(("num_qk_heads", "num_v_heads", "head_dim"), heads, strict=True))
    options = {"cp_context": part.context(0, None, "cpu")}

    def copies():
        gdn_ops.reset_stats()
        if packed:
            gdn_ops.chunk_gated_delta_rule_packed(row, tensors["g"], tensors["beta"], **names, **options)
        else:
            gdn_ops.chunk_gated_delta_rule(*problems.split(row), tensors["g"], tensors["beta"], **options)
        return gdn_ops.stats().input_copies

    assert copies() == (1 if packed else 3)
    assert shared == {"prepared": 0, "forward": 0}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert copies() == (1 if packed else 3)
