"""The public functions with a context of one rank: same bits, errors, handles, compiled."""

import functools

import problems
import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gdn_ops
from gdn_ops.context_parallel import RecomputeHandle, partition, segments

CU_SEQLENS = [0, 66, 66, 67, 131, 200]
HK, HV, D = problems.HEADS
PART = partition(CU_SEQLENS, 1)
# One rank whose documents are in parts all the same: the whole path, with nobody to talk to.
PIECES = [(4, 50, 19), (3, 0, 64), (0, 20, 46), (1, 0, 0), (2, 0, 1), (4, 30, 20), (0, 0, 20), (4, 0, 30)]
PARTS = partition(CU_SEQLENS, fragments=[PIECES])


def call(row, g, beta, initial_state, A_log, dt_bias, context=None, handle=None, **more):
    options = problems.OPTIONS | {"initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias} | more
    if context is None:
        options["cu_seqlens"] = torch.tensor(CU_SEQLENS)
    return gdn_ops.chunk_gated_delta_rule(
        *problems.split(row), g, beta, use_gate_in_kernel=True, cp_context=context, recompute_handle=handle, **options
    )


def run(function, part=PART):
    leaves = {n: x.requires_grad_() for n, x in problems.batch(CU_SEQLENS).items()}
    local = {n: part.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in leaves.items()}
    o, final = function(**local)
    w_o, w_final = problems.weights(part)
    o = part.unshard([o])
    ((o * w_o).sum() + (final * w_final).sum()).backward()
    return [o.detach(), final.detach(), *(x.grad for x in leaves.values())]


def test_one_rank_is_bitwise_the_ordinary_call():
    context = PART.context(0)
    gdn_ops.reset_stats()
    for a, b in zip(run(call), run(functools.partial(call, context=context)), strict=True):
        assert torch.equal(a, b)
    assert gdn_ops.stats().context_exchanges == 0


@pytest.mark.parametrize("exchange", ["saved", "replay"])
def test_one_rank_with_documents_in_parts(exchange):
    context = PARTS.context(0, exchange=exchange)
    gdn_ops.reset_stats()
    found = run(functools.partial(call, context=context), PARTS)
    assert gdn_ops.stats().context_exchanges == 0
    for a, b in zip(run(call), found, strict=True):
        assert (a - b).abs().max() <= 2e-6 * a.abs().max()


def test_no_gradient_no_save():
    context = PARTS.context(0)
    with torch.no_grad():
        found = call(
            **{n: PARTS.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in problems.batch(CU_SEQLENS).items()},
            context=context,
        )
    o, final = call(**problems.batch(CU_SEQLENS))
    assert (PARTS.unshard([found[0]]) - o).abs().max() < 1e-5
    assert (found[1] - final).abs().max() < 1e-5


def test_compiled_inference_and_training():
    context = PARTS.context(0)
    function = functools.partial(call, context=context)
    compiled = torch.compile(function, fullgraph=True)
    for a, b in zip(run(function, PARTS), run(compiled, PARTS), strict=True):
        assert torch.equal(a, b)
    gdn_ops.reset_stats()
    run(compiled, PARTS)
    assert gdn_ops.stats().packed_gradients == 1


def test_the_text_of_a_graph_does_not_say_which_gpu_it_is_for():
    """As ranks compare their graphs in `test_distributed.py`, where each has a GPU of its own."""
    texts = []
    for index in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True):
            x = torch.empty(3, 4, device=f"cuda:{index}")
            graph = make_fx(segments.rows)(x, torch.empty(2, dtype=torch.int32, device=x.device)).graph
        assert any(node.kwargs.get("device") == x.device for node in graph.nodes)
        texts.append(problems.graph_text(graph))
    assert texts[0] == texts[1]
    assert "aten.index_select" in texts[0]


def test_another_batch_of_equal_sizes_is_not_compiled_again():
    """Other documents, cut elsewhere: equally many fragments and links, so the same graph."""
    other = partition([0, 60, 60, 67, 140, 200], fragments=[
        [(4, 41, 19), (3, 0, 73), (0, 20, 40), (1, 0, 0), (2, 0, 7), (4, 30, 11), (0, 0, 20), (4, 0, 30)]
    ])  # fmt: skip
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda context, **x: call(context=context, **x), fullgraph=True, backend=graphs)
    for part in (PARTS, other):
        context = part.context(0)
        found = run(functools.partial(compiled, context), part)
        eager = run(functools.partial(call, context=context), part)
        assert all(torch.equal(a, b) for a, b in zip(found, eager, strict=True))
    assert graphs.frame_count == 1


def test_any_input_may_want_a_gradient_alone():
    context = PARTS.context(0)
    tensors = {n: PARTS.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in problems.batch(CU_SEQLENS).items()}
    full = {n: x.clone().requires_grad_() for n, x in tensors.items()}
    _, final = call(**full, context=context)
    final.sum().backward()
    for name in tensors:
        alone = {n: x.clone().requires_grad_(n == name) for n, x in tensors.items()}
        _, final = call(**alone, context=context)
        final.sum().backward()
        assert torch.equal(alone[name].grad, full[name].grad), name
        assert all(x.grad is None for n, x in alone.items() if n != name)


def test_double_backward_is_refused():
    context = PARTS.context(0)
    tensors = {n: PARTS.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in problems.batch(CU_SEQLENS).items()}
    row = tensors["row"].requires_grad_()
    o, _ = call(**tensors, context=context)
    (grad,) = torch.autograd.grad(o.square().sum(), row, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.square().sum().backward()


def test_errors_of_the_call():
    tensors = problems.batch(CU_SEQLENS)
    context = PART.context(0)
    with pytest.raises(TypeError, match="cp_context: expected a gdn_ops.context_parallel.Context, got Partition"):
        call(**tensors, context=PART)
    with pytest.raises(ValueError, match="cu_seqlens: with cp_context the documents are those of the partition"):
        call(**tensors, context=context, cu_seqlens=torch.tensor(CU_SEQLENS))
    with pytest.raises(ValueError, match="this rank holds 200 tokens, got 150"):
        call(**{n: x[:, :150] if n in ("row", "g", "beta") else x for n, x in tensors.items()}, context=context)
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[5, 2, 16, 16\]"):
        call(**(tensors | {"initial_state": tensors["initial_state"][:1]}), context=context)
    with pytest.raises(ValueError, match="B must be 1, got 2"):
        call(
            **{n: x.expand(2, *x.shape[1:]) if n in ("row", "g", "beta") else x for n, x in tensors.items()},
            context=context,
        )
    with pytest.raises(ValueError, match="recompute_handle: only used with cp_context"):
        call(**tensors, handle=RecomputeHandle())
    with pytest.raises(TypeError, match="recompute_handle: expected a RecomputeHandle, got str"):
        call(**tensors, context=context, handle="mine")
    with pytest.raises(ValueError, match="exchange: expected one of"):
        PART.context(0, exchange="never")


def test_a_call_that_passed_its_checks_says_nothing_about_another_context():
    tensors = problems.batch(CU_SEQLENS)
    call(**tensors, context=PART.context(0))
    with pytest.raises(ValueError, match="this rank holds 201 tokens, got 200"):
        call(**tensors, context=partition([*CU_SEQLENS[:-1], 201], 1).context(0))
    with pytest.raises(ValueError, match=r"initial_state: expected shape \[1, 2, 16, 16\]"):
        call(**tensors, context=partition([0, 200], 1).context(0))
    with pytest.raises(ValueError, match="cp_context: expected device cpu"):
        call(**tensors, context=PART.context(0, device="meta"))


def test_without_a_batch_axis():
    tensors = problems.batch(CU_SEQLENS)
    with_batch = call(**tensors, context=PART.context(0))
    flat = {n: x[0] if n in ("row", "g", "beta") else x for n, x in tensors.items()}
    without = call(**flat, context=PART.context(0))
    assert torch.equal(with_batch[0][0], without[0])


# ---- handles


def checkpointed(handle, context, **tensors):
    inner = functools.partial(call, context=context, handle=handle)
    return checkpoint(inner, **tensors, use_reentrant=False, context_fn=handle.context_fn)


def local(requires_grad=True):
    tensors = problems.batch(CU_SEQLENS)
    tensors = {n: PARTS.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in tensors.items()}
    return {n: x.requires_grad_(requires_grad) for n, x in tensors.items()}


def test_handle_and_policy_spare_the_summary_and_keep_the_bits(monkeypatch):
    context = PARTS.context(0)
    inner = functools.partial(call, context=context)
    selective = functools.partial(create_selective_checkpoint_contexts, gdn_ops.checkpoint_policy)
    runs = []

    def counted(*args):
        runs.append(1)
        return final_states(*args)

    final_states = segments._final_states
    monkeypatch.setattr(segments, "_final_states", counted)
    direct = run(inner, PARTS)
    once = len(runs)
    assert once == 2  # H and M
    for function, times in (
        (lambda **x: checkpoint(inner, **x, use_reentrant=False), 2),
        (lambda **x: checkpointed(RecomputeHandle(), context, **x), 1),
        (lambda **x: checkpoint(inner, **x, use_reentrant=False, context_fn=selective), 1),
    ):
        runs.clear()
        found = run(function, PARTS)
        assert all(torch.equal(a, b) for a, b in zip(direct, found, strict=True))
        assert len(runs) == times * once


def test_handle_outside_of_its_checkpoint():
    with pytest.raises(RuntimeError, match="recompute_handle: used outside of its checkpoint"):
        call(**local(), context=PARTS.context(0), handle=RecomputeHandle())


def test_handle_in_an_evaluation():
    """Without gradients torch's checkpoint enters no context; the handle stays new for the step that follows."""
    handle, context = RecomputeHandle(), PARTS.context(0)
    wanted = run(lambda **x: checkpointed(handle, context, **x), PARTS)
    handle, tensors = RecomputeHandle(), local()
    with torch.no_grad():
        o, _ = checkpointed(handle, context, **tensors)
        direct, _ = call(**tensors, context=context)
        again, _ = call(**tensors, context=context, handle=handle)
    assert torch.equal(o, direct)
    assert torch.equal(again, direct)
    found = run(lambda **x: checkpointed(handle, context, **x), PARTS)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_handle_that_is_missing_in_the_recompute():
    outer, context = RecomputeHandle(), PARTS.context(0)

    def layer(**tensors):
        # Made anew inside: the recompute gets one that no forward filled. It shares the phases of the outer one.
        inner = RecomputeHandle()
        inner._phase = outer._phase
        return call(**tensors, context=context, handle=inner)

    o, _ = checkpoint(layer, **local(), use_reentrant=False, context_fn=outer.context_fn)
    with pytest.raises(RuntimeError, match="recompute_handle: missing"):
        o.sum().backward()


def test_handle_of_an_earlier_step():
    handle, context = RecomputeHandle(), PARTS.context(0)
    checkpointed(handle, context, **local())
    with pytest.raises(RuntimeError, match="recompute_handle: stale or shared"):
        checkpointed(handle, context, **local())


def test_handle_taken_twice():
    handle, context = RecomputeHandle(), PARTS.context(0)
    o, _ = checkpointed(handle, context, **local())
    o.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="recompute_handle: used twice"):
        o.sum().backward()


def test_handle_of_another_batch():
    contexts = [PARTS.context(0), PARTS.context(0)]
    handle = RecomputeHandle()

    def layer(**tensors):
        return call(**tensors, context=contexts.pop(0), handle=handle)

    o, _ = checkpoint(layer, **local(), use_reentrant=False, context_fn=handle.context_fn)
    with pytest.raises(ValueError, match="recompute_handle: put by a call with"):
        o.sum().backward()


def test_handle_in_compiled_code():
    handle = RecomputeHandle()
    compiled = torch.compile(functools.partial(call, context=PARTS.context(0), handle=handle), fullgraph=True)
    with pytest.raises(Exception, match="recompute_handle"):
        compiled(**local())
