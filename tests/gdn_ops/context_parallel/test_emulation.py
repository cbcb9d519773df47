"""Every rank in one process against the float64 recurrence and against one rank."""

import itertools

import problems
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_ops.context_parallel import partition
from gdn_ops.context_parallel.emulation import emulate
from gdn_ops.context_parallel.partition import LAYOUTS

# Documents of no token, of one, of a whole chunk and of several chunks with ragged ends.
CU_SEQLENS = [0, 66, 66, 67, 131, 300]


def check_against_recurrence(part, tensors, options, **how):
    expected = problems.answer(part, tensors, options)
    one = problems.on_ranks(partition(part.cu_seqlens, 1), tensors, options)
    found = problems.on_ranks(part, tensors, options, **how)
    own, errors = problems.distance(one, expected), problems.distance(found, expected)
    for name, error in errors.items():
        # Twice what one rank errs, and one float32 rounding for each product along the chain of ranks.
        assert error <= 2 * own[name] + 1e-6, f"{name}: {error:.1e}, one rank {own[name]:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_layouts(layout, num_ranks):
    part = partition(CU_SEQLENS, num_ranks, layout)
    check_against_recurrence(part, problems.batch(CU_SEQLENS), problems.OPTIONS)


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("form", ["plain", "contiguous", "packed"])
def test_forms_are_bitwise_the_same(form, gate, save):
    part = partition(CU_SEQLENS, 3, "zigzag")
    options = problems.OPTIONS if gate else problems.PLAIN
    tensors = problems.batch(CU_SEQLENS, gate=gate)
    check_against_recurrence(part, tensors, options, form=form, save=save)
    plain = problems.on_ranks(part, tensors, options)
    found = problems.on_ranks(part, tensors, options, form=form, save=save)
    assert [name for name, x in plain.items() if not torch.equal(x, found[name])] == []


@pytest.mark.usefixtures("poison_memory")
def test_ranks_and_documents_without_tokens():
    cu_seqlens = [0, 0, 1, 2, 2]
    part = partition(cu_seqlens, 4)
    assert [part.tokens(rank) for rank in range(4)] == [0, 1, 0, 1]
    check_against_recurrence(part, problems.batch(cu_seqlens), problems.OPTIONS)
    nothing = partition([0], 2)
    found = problems.on_ranks(nothing, problems.batch([0]), problems.PLAIN)
    assert found["o"].shape[1] == 0
    assert found["final_state"].shape[0] == 0


def test_one_token_per_rank():
    part = partition([0, 5], 5)
    check_against_recurrence(part, problems.batch([0, 5]), problems.OPTIONS)


@st.composite
def partitions(draw):
    """Any documents, cut anywhere, the pieces given to any ranks in any order."""
    sizes = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    cu_seqlens = [0, *itertools.accumulate(sizes)]
    num_ranks = draw(st.integers(1, 5))
    rows = [[] for _ in range(num_ranks)]
    for document, size in enumerate(sizes):
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
        for start, end in itertools.pairwise([0, *cuts, size]):
            row = rows[draw(st.integers(0, num_ranks - 1))]
            row.insert(draw(st.integers(0, len(row))), (document, start, end - start))
    return partition(cu_seqlens, fragments=rows)


@given(partitions(), st.booleans(), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_random_partitions(part, gate, seed):
    tensors = problems.batch(part.cu_seqlens, seed=seed, gate=gate)
    check_against_recurrence(part, tensors, problems.OPTIONS if gate else problems.PLAIN)


def test_long_chain_without_decay():
    """The transition products of 8 ranks one after the other, and nothing fades: errors would add up."""
    cu_seqlens = [0, 1024]
    tensors = problems.batch(cu_seqlens, gate=False, g=0.0)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    part = partition(cu_seqlens, 8)
    assert len(part.chains[0]) == 8
    check_against_recurrence(part, tensors, options)


def test_transitions_are_as_exact_as_float32_for_bfloat16_operands():
    """Against float64 products of the same bfloat16 keys: 1e-5 is far below bfloat16's 4e-3."""
    from gdn_ops import reference

    cu_seqlens = [0, 384]
    part = partition(cu_seqlens, 3)
    row = problems.batch(cu_seqlens, dtype=torch.bfloat16)["row"]
    g, beta = torch.zeros(1, 128, problems.HV), torch.full((1, 128, problems.HV), 0.5)
    _, k, _ = problems.split(part.shard(row, 1))
    plan = part_plan(part, 1)
    words = torch.ops.gdn.segment_summary_fwd(
        k, k.new_zeros(1, 128, problems.HV, problems.D), g, beta, None, None, None, plan.forward_segments,
        plan.forward_starts, plan.transition_segments, num_ranks=1, use_qk_l2norm=True,
    )  # fmt: skip
    M = words.view(2, problems.HV, problems.D, problems.D)[1]
    identity = torch.eye(problems.D).expand(1, problems.HV, problems.D, problems.D)
    zero = torch.zeros(1, 128, problems.HV, problems.D)
    _, expected = reference.chunk_gated_delta_rule(
        k, k, zero, g, beta, initial_state=identity, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert (M - expected[0]).abs().max() < 1e-5 * expected.abs().max()


def part_plan(part, rank):
    from gdn_ops.context_parallel.plan import make_plan

    return make_plan(part, rank, torch.device("cpu"))


def test_runs_are_bitwise_equal():
    part = partition(CU_SEQLENS, 4, "zigzag_per_document")
    tensors = problems.batch(CU_SEQLENS)
    first, second = (problems.on_ranks(part, tensors, problems.OPTIONS) for _ in range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def test_bfloat16_is_within_the_error_budget_of_one_rank():
    tensors = problems.batch(CU_SEQLENS, dtype=torch.bfloat16)
    check = partition(CU_SEQLENS, 3)
    expected = problems.answer(check, tensors, problems.OPTIONS)
    one = problems.distance(problems.on_ranks(partition(CU_SEQLENS, 1), tensors, problems.OPTIONS), expected)
    many = problems.distance(problems.on_ranks(check, tensors, problems.OPTIONS), expected)
    assert all(error <= 2 * one[name] + 4e-3 for name, error in many.items())


def test_float64_is_exact_to_float64():
    tensors = problems.batch(CU_SEQLENS, dtype=torch.float64)
    part = partition(CU_SEQLENS, 3, "zigzag")
    errors = problems.distance(
        problems.on_ranks(part, tensors, problems.OPTIONS), problems.answer(part, tensors, problems.OPTIONS)
    )
    # g, beta and their parameters are float32 tensors, so are their gradients.
    assert all(errors[name] < 1e-11 for name in ("o", "final_state", "row", "initial_state"))


def test_wrong_number_of_ranks():
    with pytest.raises(ValueError, match="inputs: expected one entry a rank, 2, got 0"):
        emulate(partition([0, 4], 2), [])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpu_is_within_the_error_budget_of_one_rank(layout, form, dtype):
    tensors = problems.batch(CU_SEQLENS, dtype=dtype)
    on_gpu = {name: x.cuda() for name, x in tensors.items()}
    part = partition(CU_SEQLENS, 4, layout)
    expected = problems.answer(part, tensors, problems.OPTIONS)

    def found(p):
        return {n: x.cpu() for n, x in problems.on_ranks(p, on_gpu, problems.OPTIONS, form=form).items()}

    one = problems.distance(found(partition(CU_SEQLENS, 1)), expected)
    many = found(part)
    errors = problems.distance(many, expected)
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-5
    assert all(error <= 2 * one[name] + rounding for name, error in errors.items()), (errors, one)
    again = found(part)
    assert all(torch.equal(x, again[name]) for name, x in many.items())
