"""What a summary and the pass after it share, with the CPU backend in the place of one that can; no GPU needed.

That kernels give the same bits from shared matrices: the last test here, and
`tests/gdn_ops/backends/hopper/test_hopper.py`.
"""

import dataclasses
from typing import NamedTuple

import problems
import pytest
import torch
from torch import Tensor

import gdn_ops
from gdn_ops.backends import cpu
from gdn_ops.context_parallel import emulation, partition, path
from gdn_ops.context_parallel.plan import Hears
from gdn_ops.outputs import allocate_chunk_fwd

CU_SEQLENS = [0, 66, 66, 67, 131, 300]
SHARED_NAMES = ("norms", "gates", "solve", "scores")


class Scratch(NamedTuple):
    factors: Tensor
    more: Tensor

    @staticmethod
    def of(tensors):
        return Scratch(*tensors)

    @property
    def tensors(self):
        return tuple(self)


@pytest.fixture
def shared(monkeypatch):
    """The CPU backend prepares, and holds a prepared pass to what it computes itself; counts those calls."""
    run, run_back = cpu.chunk_fwd, cpu.chunk_bwd
    count = {"prepared": 0, "forward": 0, "prepared back": 0, "states": 0, "backward": 0}

    def computed(inputs, options, save):
        own = allocate_chunk_fwd(inputs, output_final_state=False, use_qk_l2norm=options.use_qk_l2norm, save=save)
        run(own, inputs, options, save)
        return own.saved

    def held(found, inputs, options):
        own = computed(inputs, options, "solve")
        assert [name for name in SHARED_NAMES if not torch.equal(getattr(found, name), getattr(own, name))] == []

    def scratch_of(x):
        return Scratch(x.new_full((3,), 7.0), x.new_full((2,), 8.0))

    def is_ours(scratch):
        return (scratch.factors.tolist(), scratch.more.tolist()) == ([7.0] * 3, [8.0] * 2)

    def chunk_prepare(out, inputs, options):
        count["prepared"] += 1
        run(out, inputs, options, "solve")
        return scratch_of(out.gates)

    def chunk_fwd(out, inputs, options, save, scratch=None):
        if scratch is not None:
            assert is_ours(scratch)
            count["forward"] += 1
            held(out, inputs, options)
        run(out, inputs, options, save)

    def chunk_prepare_bwd(inputs, saved, options, tables):
        count["prepared back"] += 1
        assert [x.tolist() for x in tables] == [[8.0] * 2]
        filled = dict(zip(SHARED_NAMES, computed(inputs, options, "solve"), strict=False))
        return saved._replace(**filled), scratch_of(inputs.g)

    def chunk_states(inputs, saved, options, scratch):
        assert is_ours(scratch)
        if saved.states.shape[0]:
            return None
        count["states"] += 1
        found = computed(inputs, options, "states")
        return found.states, found.updates

    def chunk_bwd(out, do, dfinal_state, inputs, saved, options, scratch=None, states_again=None):
        if scratch is not None:
            assert is_ours(scratch)
            count["backward"] += 1
            held(saved, inputs, options)
        if states_again is not None:
            saved = saved._replace(states=states_again[0], updates=states_again[1])
        run_back(out, do, dfinal_state, inputs, saved, options)

    for function in (chunk_prepare, chunk_fwd, chunk_prepare_bwd, chunk_states, chunk_bwd, Scratch):
        monkeypatch.setattr(cpu, function.__name__, function, raising=False)
    return count


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
@pytest.mark.parametrize("form, gate, pieces", [("plain", True, 1), ("packed", False, 1), ("packed", True, 3)])
def test_a_plain_step_shares_and_changes_no_bit(form, gate, pieces, save, shared, monkeypatch):
    part = partition(CU_SEQLENS, 3, "zigzag")
    options = problems.OPTIONS if gate else problems.PLAIN
    tensors = problems.batch(CU_SEQLENS, gate=gate)
    gdn_ops.reset_stats()
    found = problems.on_ranks(part, tensors, options, form=form, save=save, pieces=pieces)
    counted = gdn_ops.stats()
    states = 0 if save == "states" else 3
    expected = {"prepared": 3, "forward": 3, "prepared back": 3, "states": states, "backward": 3}
    assert shared == expected
    monkeypatch.setattr(emulation, "is_plain", lambda tensors: False)
    gdn_ops.reset_stats()
    each = problems.on_ranks(part, tensors, options, form=form, save=save, pieces=pieces)
    assert shared == expected
    assert gdn_ops.stats() == counted
    assert [name for name, x in each.items() if not torch.equal(x, found[name])] == []


@pytest.mark.parametrize("form", ["packed", "packed views", "plain"])
@pytest.mark.parametrize("hearing", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("exchange", ["saved", "replay"])
def test_a_rank_waits_for_words_when_it_has_a_use_for_them(hearing, form, exchange, shared, monkeypatch):
    """And computes states before, where it has; a rank without a use waits when all its kernels are launched."""
    part = partition([0, 200, 210], fragments=[[(0, 0, 100), (1, 0, 10), (0, 100, 100)]])
    log = []

    class Noted(path.Gathering):
        def wait(self):
            log.append(f"wait for {self.what}")
            return self.words

    def start(told, num_ranks, group_name, what):
        log.append(f"tell {what}")
        return Noted(told, told, num_ranks, group_name, what)

    monkeypatch.setattr(path.Gathering, "start", staticmethod(start))
    for name in ("forward", "states_ahead", "received_states", "received_gradients", "backward"):
        run = getattr(path, name)
        monkeypatch.setattr(path, name, lambda *a, n=name, run=run, **k: (log.append(n), run(*a, **k))[1])
    context = part.context(0, None, "cpu", exchange=exchange)
    tensors = problems.batch([0, 200, 210], gate=False)
    names = dict(zip(("num_qk_heads", "num_v_heads", "head_dim"), problems.HEADS, strict=True))

    def step(context):
        row = tensors["row"].clone().requires_grad_()
        if form == "packed":
            o, _ = gdn_ops.chunk_gated_delta_rule_packed(
                row, tensors["g"], tensors["beta"], **names, cp_context=context
            )
        else:
            views = gdn_ops.packed_qkv_views(row, **names) if form == "packed views" else problems.split(row)
            o, _ = gdn_ops.chunk_gated_delta_rule(*views, tensors["g"], tensors["beta"], cp_context=context)
        o.square().sum().backward()
        return o.detach(), row.grad

    found = step(dataclasses.replace(context, hears=Hears(*hearing)))
    words = "segment states", "segment state gradients"
    early = [f"tell {words[0]}", f"wait for {words[0]}", "received_states", "forward"]
    late = [f"tell {words[0]}", "received_states", "forward", f"wait for {words[0]}"]
    early_back = [f"tell {words[1]}", "states_ahead", f"wait for {words[1]}", "received_gradients", "backward"]
    late_back = [f"tell {words[1]}", "received_gradients", "states_ahead", "backward", f"wait for {words[1]}"]
    # Once more for the backward, which may read what others told of their transitions.
    again = [*early[:2], "received_states"] if exchange == "replay" else []
    assert log == (early if hearing[0] else late) + again + (early_back if hearing[1] else late_back)
    assert shared["states"] == 1
    log.clear()
    monkeypatch.setattr(path, "prepare_backward", lambda call, saved, tables: None)
    assert all(torch.equal(a, b) for a, b in zip(found, step(context), strict=True))
    assert log == early + again + early_back
    assert shared["states"] == 1


def test_a_call_with_a_listener_or_without_a_summary_shares_nothing(shared):
    tensors = problems.batch(CU_SEQLENS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        problems.on_ranks(partition(CU_SEQLENS, 3), tensors, problems.OPTIONS)
    whole = partition(CU_SEQLENS, fragments=[[(0, 0, 66), (1, 0, 0), (2, 0, 1)], [(3, 0, 64), (4, 0, 169)]])
    problems.on_ranks(whole, tensors, problems.OPTIONS)
    assert not any(shared.values())


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
        saved = path.forward(call, None, False, "solve")[2]
        assert path.prepare_backward(call, saved) is None


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
    assert not any(shared.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert copies() == (1 if packed else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_v_heads", [2, 34])
@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
def test_gpu_a_plain_step_has_the_bits_of_one_that_shares_nothing(save, num_v_heads, monkeypatch):
    """Of heads few enough for the op to cut pieces once more, and of more; first calls and repeated ones."""
    HK, D = 2, 128
    heads = (HK, num_v_heads, D)
    for name, value in {"HK": HK, "HV": num_v_heads, "D": D, "HEADS": heads, "W": (2 * HK + num_v_heads) * D}.items():
        monkeypatch.setattr(problems, name, value)
    cu_seqlens = [0, 70, 4000, 4001]
    part = partition(cu_seqlens, 2)
    tensors = {n: x.cuda() for n, x in problems.batch(cu_seqlens, dtype=torch.bfloat16).items()}
    how = {"form": "packed", "save": save, "pieces": 4, "ends": 2}
    found = [problems.on_ranks(part, tensors, problems.OPTIONS, **how) for _ in range(3)]
    monkeypatch.setattr(emulation, "is_plain", lambda tensors: False)
    found.append(problems.on_ranks(part, tensors, problems.OPTIONS, **how))
    for other in found[1:]:
        assert [name for name, x in other.items() if not torch.equal(x, found[0][name])] == []
