"""Every rank in one process against the float64 recurrence and against one rank."""

import itertools

import problems
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn_ops
from gdn_ops.context_parallel import partition, segments
from gdn_ops.context_parallel.emulation import RankInputs, contexts, emulate
from gdn_ops.context_parallel.partition import LAYOUTS
from gdn_ops.context_parallel.plan import make_plan

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


@pytest.mark.usefixtures("poison_memory")
@pytest.mark.parametrize("num_ranks, pieces, ends", [(2, 2, 1), (2, 5, 1), (2, 5, 3), (3, 3, 1), (3, 3, 2), (4, 4, 1)])
def test_pieces(num_ranks, pieces, ends):
    """A first, an inner and a last fragment of a document, each in pieces; beside documents that stay whole."""
    cu_seqlens = [0, 70, 70, 1000, 1001]
    part = partition(cu_seqlens, num_ranks)
    plans = [make_plan(part, rank, torch.device("cpu"), pieces, ends) for rank in range(2)]
    counts = [plan.cu_seqlens.diff().count_nonzero() for plan in plans]
    assert min(counts) > 2 and max(counts) >= pieces
    check_against_recurrence(part, problems.batch(cu_seqlens), problems.OPTIONS, pieces=pieces, ends=ends)


def test_programs_of_long_pieces_come_first():
    part = partition([0, 65536], 2)
    for rank, (long, others, either) in enumerate([(220, 73, "forward"), (220, 73, "backward")]):
        plan = make_plan(part, rank, torch.device("cpu"), 5, 3)
        lengths = {name: getattr(plan, f"{name}_saved_table")[:, 3].tolist() for name in ("forward", "backward")}
        assert [x for x in lengths.pop(either) if x] == [long, *[others] * 4]
        assert [x for name in lengths for x in lengths[name] if x] == [others] * 4


def test_pieces_change_nothing_but_rounding_in_float64():
    cu_seqlens = [0, 70, 1000, 1001]
    tensors = problems.batch(cu_seqlens, dtype=torch.float64)
    part = partition(cu_seqlens, 3, "zigzag")
    found = problems.on_ranks(part, tensors, problems.OPTIONS, pieces=4)
    errors = problems.distance(found, problems.answer(part, tensors, problems.OPTIONS))
    assert all(errors[name] < 1e-11 for name in ("o", "final_state", "row", "initial_state"))


def test_one_rank_with_a_document_in_parts_cuts_them_too():
    part = partition([0, 600], fragments=[[(0, 250, 350), (0, 0, 250)]])
    check_against_recurrence(part, problems.batch([0, 600]), problems.OPTIONS, pieces=4)


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


def ways_that_differ(part, tensors, options, pieces=None):
    """Ways to call (checkpointed, with hooks, from a row, a second time) whose bits are not those of the plain call."""
    base = problems.on_ranks(part, tensors, options, pieces=pieces)
    different = []
    for way in ("direct", "checkpoint", "selective"):
        for how in ({}, {"form": "packed"}, {"form": "contiguous"}, {"hooks": True}):
            found = problems.on_ranks(part, tensors, options, way=way, pieces=pieces, **how)
            different += [f"{way} {how}: {name}" for name, x in base.items() if not torch.equal(x, found[name])]
    return different


@pytest.mark.parametrize("gate, pieces", [(True, 1), (False, 1), (True, 2)])
def test_checkpoints_and_hooks_change_no_bit(gate, pieces):
    cu_seqlens = CU_SEQLENS if pieces == 1 else [0, 66, 67, 600]
    part = partition(cu_seqlens, 3, "zigzag")
    options = problems.OPTIONS if gate else problems.PLAIN
    assert ways_that_differ(part, problems.batch(cu_seqlens, gate=gate), options, pieces) == []


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


@pytest.mark.parametrize("pieces", [1, 2])
def test_what_inner_ranks_tell_is_computed_in_the_operands_dtype(monkeypatch, pieces):
    """From operands converted to float32 it took a GPU three times as long as all the rest."""
    cu_seqlens = [0, 700]
    part, dtypes, found = partition(cu_seqlens, 4), [], segments._final_states

    def recorded(inputs, options):
        dtypes.append({inputs.k.dtype, inputs.v.dtype})
        return found(inputs, options)

    monkeypatch.setattr(segments, "_final_states", recorded)
    problems.on_ranks(part, problems.batch(cu_seqlens, dtype=torch.bfloat16), problems.OPTIONS, pieces=pieces)
    assert dtypes == [{torch.bfloat16}] * 2 * 4  # H and M of each rank


def test_one_token_per_rank():
    part = partition([0, 5], 5)
    check_against_recurrence(part, problems.batch([0, 5]), problems.OPTIONS)


@st.composite
def partitions(draw):
    """Any documents, cut anywhere, the pieces given to any ranks in any order."""
    sizes = draw(st.lists(st.integers(0, 300), min_size=1, max_size=4))
    cu_seqlens = [0, *itertools.accumulate(sizes)]
    num_ranks = draw(st.integers(1, 5))
    rows = [[] for _ in range(num_ranks)]
    for document, size in enumerate(sizes):
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
        for start, end in itertools.pairwise([0, *cuts, size]):
            row = rows[draw(st.integers(0, num_ranks - 1))]
            row.insert(draw(st.integers(0, len(row))), (document, start, end - start))
    return partition(cu_seqlens, fragments=rows)


@given(partitions(), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_random_partitions(part, pieces, ends, gate, seed):
    tensors = problems.batch(part.cu_seqlens, seed=seed, gate=gate)
    check_against_recurrence(part, tensors, problems.OPTIONS if gate else problems.PLAIN, pieces=pieces, ends=ends)


def test_long_chain_without_decay():
    """The transition products of 8 ranks one after the other, and nothing fades: errors would add up."""
    cu_seqlens = [0, 1024]
    tensors = problems.batch(cu_seqlens, gate=False, g=0.0)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    part = partition(cu_seqlens, 8)
    assert len(part.chains[0]) == 8
    check_against_recurrence(part, tensors, options)


@pytest.mark.parametrize("pieces", [1, 2])
def test_transitions_are_as_exact_as_float32_for_bfloat16_operands(pieces):
    """Against float64 products of the same bfloat16 keys: 1e-5 is far below bfloat16's 4e-3."""
    from gdn_ops import reference

    cu_seqlens = [0, 384]
    part = partition(cu_seqlens, 3)
    row = problems.batch(cu_seqlens, dtype=torch.bfloat16)["row"]
    g, beta = torch.zeros(1, 128, problems.HV), torch.full((1, 128, problems.HV), 0.5)
    _, k, _ = problems.split(part.shard(row, 1))
    plan = make_plan(part, 1, torch.device("cpu"), pieces)
    assert plan.is_cut == (pieces > 1)
    words = torch.ops.gdn.segment_summary_fwd(
        k, k.new_zeros(1, 128, problems.HV, problems.D), g, beta, None, None, None, list(plan), num_ranks=1,
        use_qk_l2norm=True,
    )[0]  # fmt: skip
    M = words.view(2, problems.HV, problems.D, problems.D)[1]
    identity = torch.eye(problems.D).expand(1, problems.HV, problems.D, problems.D)
    zero = torch.zeros(1, 128, problems.HV, problems.D)
    _, expected = reference.chunk_gated_delta_rule(
        k, k, zero, g, beta, initial_state=identity, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert (M - expected[0]).abs().max() < 1e-5 * expected.abs().max()


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


def test_what_does_not_fit_the_partition_is_refused():
    """Kernels on a GPU would read past the tensors."""
    part = partition([0, 40], 2)
    tensors = problems.batch([0, 40], gate=False)
    q, k, v = problems.split(tensors["row"])
    whole = [RankInputs(*(part.shard(x, rank) for x in (q, k, v, tensors["g"], tensors["beta"]))) for rank in range(2)]
    emulate(part, whole, cp_contexts=contexts(part, "cpu"))
    short = [whole[0], RankInputs(*(x[:, :19] for x in whole[1][:5]))]
    with pytest.raises(ValueError, match=r"inputs\[1\]: this rank holds 20 tokens, got 19"):
        emulate(part, short)
    for other in (
        partition([0, 40], 3),
        partition([0, 50], 2),
        partition([0, 20, 40], 2),
        partition([0, 40], 2, "zigzag"),
    ):
        with pytest.raises(ValueError, match="cp_contexts: expected those of the partition"):
            emulate(part, whole, cp_contexts=contexts(other, "cpu"))
    with pytest.raises(ValueError, match="cp_contexts: expected those of the partition"):
        emulate(part, whole, cp_contexts=contexts(part, "cpu")[:1])
    with pytest.raises(ValueError, match="save: expected one of"):
        emulate(part, whole, save="all")


# ---- on one GPU: the production head size, so that the backend in use is the one of production


@pytest.fixture
def head_size_128(monkeypatch):
    HK, HV, D = 1, 2, 128
    for name, value in {"HK": HK, "HV": HV, "D": D, "HEADS": (HK, HV, D), "W": (2 * HK + HV) * D}.items():
        monkeypatch.setattr(problems, name, value)


def gpu_errors(part, tensors, options, **how):
    """By name the error of the ranks, that of one rank, both against float64, and the ranks' results."""
    expected = problems.answer(part, tensors, options)
    one = problems.distance(problems.on_ranks(partition(part.cu_seqlens, 1), tensors, options), expected)
    found = problems.on_ranks(part, tensors, options, **how)
    return problems.distance(found, expected), one, found


def over_budget(errors, one, rounding):
    return {name: (error, one[name]) for name, error in errors.items() if not error <= 2 * one[name] + rounding}


@pytest.mark.gpu
@pytest.mark.usefixtures("head_size_128")
@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 8e-3), (torch.float32, 1e-5)])
def test_gpu_layouts_are_within_the_error_budget_of_one_rank(dtype, rounding):
    for pieces, cu_seqlens in ((1, CU_SEQLENS), (4, [0, 70, 1000, 1001])):
        tensors = {n: x.cuda() for n, x in problems.batch(cu_seqlens, dtype=dtype).items()}
        for layout in LAYOUTS:
            part = partition(cu_seqlens, 4, layout)
            cuts = {"pieces": pieces, "ends": 2 if layout == "contiguous" else 1}
            errors, one, found = gpu_errors(part, tensors, problems.OPTIONS, **cuts)
            assert over_budget(errors, one, rounding) == {}, (layout, pieces)
            again = problems.on_ranks(part, tensors, problems.OPTIONS, **cuts)
            assert all(torch.equal(x, again[name]) for name, x in found.items()), (layout, pieces)


@pytest.mark.gpu
@pytest.mark.usefixtures("head_size_128")
@pytest.mark.parametrize("gate", [True, False])
def test_gpu_checkpoints_and_hooks_change_no_bit(gate):
    """Also the norm in the op on and off, plain, packed and contiguous operands, and a second run."""
    pieces, cu_seqlens = (1, CU_SEQLENS) if gate else (3, [0, 66, 67, 600])
    tensors = {n: x.cuda() for n, x in problems.batch(cu_seqlens, dtype=torch.bfloat16, gate=gate).items()}
    part, options = partition(cu_seqlens, 3, "zigzag"), problems.OPTIONS if gate else problems.PLAIN
    errors, one, _ = gpu_errors(part, tensors, options, pieces=pieces)
    assert over_budget(errors, one, 8e-3) == {}
    assert ways_that_differ(part, tensors, options, pieces) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("head_size_128")
@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 8e-3), (torch.float32, 1e-5)])
def test_gpu_long_chain_without_decay(dtype, rounding):
    """The transition products of 8 ranks one after the other, and nothing fades."""
    cu_seqlens = [0, 2000]
    tensors = {n: x.cuda() for n, x in problems.batch(cu_seqlens, dtype=dtype, gate=False, g=0.0).items()}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    part = partition(cu_seqlens, 8)
    assert len(part.chains[0]) == 8
    for pieces in (1, 2):
        errors, one, _ = gpu_errors(part, tensors, options, form="packed", pieces=pieces)
        assert over_budget(errors, one, rounding) == {}, pieces


@pytest.mark.gpu
@pytest.mark.usefixtures("head_size_128")
@pytest.mark.parametrize("pieces", [1, 4])
def test_gpu_transitions_are_as_exact_as_the_op(pieces):
    """Against float64 products of the same bfloat16 keys, without decay: what is told errs as a state of the op."""
    from gdn_ops import reference

    T, HV, D = 2000, problems.HV, problems.D
    part = partition([0, 3 * T], 3)
    k = problems.split(problems.batch([0, T], dtype=torch.bfloat16)["row"].cuda())[1]
    g, beta = torch.zeros(1, T, HV, device="cuda"), torch.full((1, T, HV), 0.5, device="cuda")
    plan = make_plan(part, 1, k.device, pieces)
    words = torch.ops.gdn.segment_summary_fwd(
        k, k.new_zeros(1, T, HV, D), g, beta, None, None, None, list(plan), num_ranks=1, use_qk_l2norm=True,
    )[0]  # fmt: skip
    _, expected = reference.chunk_gated_delta_rule(
        k.double(), k.double(), k.new_zeros((1, T, HV, D), dtype=torch.float64), g, beta,
        initial_state=torch.eye(D, device="cuda", dtype=torch.float64).expand(1, HV, D, D), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    _, alone = gdn_ops.chunk_gated_delta_rule(
        k, k, k.new_zeros((1, T, HV, D)), g, beta, output_final_state=True, use_qk_l2norm_in_kernel=True,
        initial_state=torch.eye(D, device="cuda").expand(1, HV, D, D).contiguous(),
    )  # fmt: skip
    error, own = ((x.double() - expected[0]).norm().item() for x in (words.view(2, HV, D, D)[1], alone[0]))
    assert error <= 1.5 * own + 1e-5 * expected.norm().item()
    assert own < 2e-2 * expected.norm().item()


@pytest.mark.gpu
@pytest.mark.usefixtures("head_size_128")
@pytest.mark.parametrize("pieces", [1, 8])
def test_gpu_repeated_calls_have_the_bits_of_the_first_with_contexts_of_other_batches(pieces):
    """One rank whose documents are in parts; other documents, as many pieces and links."""
    parts = [
        partition([0, n, 1000], fragments=[[(1, 700 - n, 300), (0, 0, n), (1, 0, 700 - n)]]) for n in (300, 250, 290)
    ]

    def step(part, context, seed):
        tensors = {n: x.cuda() for n, x in problems.batch(part.cu_seqlens, seed, dtype=torch.bfloat16).items()}
        leaves = {n: x.requires_grad_() for n, x in tensors.items()}
        local = {n: part.shard(x, 0) if n in ("row", "g", "beta") else x for n, x in leaves.items()}
        gate = {"use_gate_in_kernel": True, "A_log": leaves["A_log"], "dt_bias": leaves["dt_bias"]}
        o, final = gdn_ops.chunk_gated_delta_rule(
            *problems.split(local["row"]), local["g"], local["beta"], initial_state=leaves["initial_state"],
            cp_context=context, **problems.OPTIONS, **gate,
        )  # fmt: skip
        w_o, w_final = problems.weights(part)
        ((part.unshard([o]) * w_o.cuda()).sum() + (final * w_final.cuda()).sum()).backward()
        return [o.detach(), final.detach(), *(x.grad for x in leaves.values())]

    for seed, part in enumerate((*parts, *parts)):
        context = part.context(0, device="cuda", pieces=pieces)
        found = step(part, context, seed)
        with gdn_ops.settings.configure(debug=True):  # runs as written
            written = step(part, context, seed)
        assert all(torch.equal(a, b) for a, b in zip(found, written, strict=True)), seed
