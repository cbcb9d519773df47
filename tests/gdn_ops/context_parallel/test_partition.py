"""Who holds which token: layouts, explicit fragments, errors, and the inverse of sharding."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdn_ops.context_parallel import Fragment, partition
from gdn_ops.context_parallel.partition import LAYOUTS
from gdn_ops.context_parallel.pieces import (
    _OUTPUTS,
    _REVERSE,
    Cuts,
    _about,
    _run,
    cut,
    cut_share,
    cuts_by_rule,
    has_inner_fragments,
)
from gdn_ops.context_parallel.plan import hears

lengths = st.lists(st.integers(0, 40), min_size=0, max_size=6)


def bounds(sizes):
    total, out = 0, [0]
    for size in sizes:
        total += size
        out.append(total)
    return out


@given(lengths, st.integers(1, 9), st.sampled_from(LAYOUTS), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_shard_and_unshard_are_inverse(sizes, num_ranks, layout, padding):
    part = partition(bounds(sizes), num_ranks, layout)
    x = torch.arange(2 * part.num_tokens).view(2, -1)
    shards = [part.shard(x, rank, pad_to=part.max_tokens + padding) for rank in range(num_ranks)]
    assert all(s.shape[1] == part.max_tokens + padding for s in shards)
    assert torch.equal(part.unshard(shards), x)
    assert sum(part.tokens(rank) for rank in range(num_ranks)) == part.num_tokens
    assert {f.document for row in part.fragments for f in row} == set(range(part.num_documents))


@given(lengths, st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_contiguous_ranks_differ_by_one_token_at_most(sizes, num_ranks):
    part = partition(bounds(sizes), num_ranks)
    counts = [part.tokens(rank) for rank in range(num_ranks)]
    assert max(counts) - min(counts) <= 1


def test_layouts_by_hand():
    cu = [0, 4, 12]
    assert partition(cu, 2).fragments == ((Fragment(0, 0, 4), Fragment(1, 0, 2)), (Fragment(1, 2, 6),))
    assert partition(cu, 2, "zigzag").fragments == (
        (Fragment(0, 0, 3), Fragment(1, 5, 3)),
        (Fragment(0, 3, 1), Fragment(1, 0, 5)),
    )
    assert partition(cu, 2, "zigzag_per_document").fragments == (
        (Fragment(0, 0, 1), Fragment(0, 3, 1), Fragment(1, 0, 2), Fragment(1, 6, 2)),
        (Fragment(0, 1, 2), Fragment(1, 2, 4)),
    )


def test_cu_seqlens_may_be_a_tensor():
    for dtype in (torch.int32, torch.int64):
        assert partition(torch.tensor([0, 3, 9], dtype=dtype), 2) == partition([0, 3, 9], 2)
    with pytest.raises(TypeError, match="cu_seqlens: expected int32 or int64"):
        partition(torch.tensor([0.0, 3.0]), 2)


def test_explicit_fragments_in_any_order():
    part = partition([0, 10, 12], fragments=[[(1, 0, 2), (0, 6, 4), (0, 3, 0)], [(0, 0, 6)]])
    assert part.num_ranks == 2
    assert part.positions(0).tolist() == [10, 11, 6, 7, 8, 9]
    assert part.document_positions(0).tolist() == [0, 1, 6, 7, 8, 9]
    assert part.local_cu_seqlens(0) == (0, 2, 6)
    assert [tuple(p) for p in part.chains[0]] == [(1, 0), (0, 1)]


def test_a_document_without_tokens_belongs_to_who_names_it_or_to_rank_0():
    part = partition([0, 0, 3, 3], fragments=[[(1, 0, 3)], [(2, 0, 0)]])
    assert part.fragments == ((Fragment(1, 0, 3), Fragment(0, 0, 0)), (Fragment(2, 0, 0),))
    assert not part.crosses_ranks


@pytest.mark.parametrize(
    ("fragments", "message"),
    [
        ([[(0, 0, 5)], [(0, 4, 6)]], r"fragments\[1\]\[0\]: token 4 of document 0 is held twice"),
        ([[(0, 0, 5)], [(0, 6, 4)]], "tokens 5 to 5 of document 0 are missing"),
        ([[(0, 0, 5)], []], "tokens 5 to 9 of document 0 are missing"),
        ([[(0, 0, 11)]], r"fragments\[0\]\[0\]: expected tokens within the 10 of document 0"),
        ([[(1, 0, 5)]], r"expected a document from 0 to 0, got 1"),
        ([[(0, 0, -1)]], "expected tokens within"),
        ([], "at least one rank"),
    ],
)
def test_wrong_fragments_say_which(fragments, message):
    with pytest.raises(ValueError, match=message):
        partition([0, 10], fragments=fragments)


def test_other_errors():
    with pytest.raises(TypeError, match=r"fragments\[0\]\[0\]: expected \(document, offset, length\), got 3"):
        partition([0, 10], fragments=[[3]])
    with pytest.raises(TypeError, match="three ints"):
        partition([0, 10], fragments=[[(0, 0.0, 10)]])
    with pytest.raises(ValueError, match="layout: expected one of"):
        partition([0, 10], 2, "round_robin")
    with pytest.raises(TypeError, match="num_ranks: expected an int, got NoneType"):
        partition([0, 10])
    with pytest.raises(ValueError, match="num_ranks: expected at least 1, got 0"):
        partition([0, 10], 0)
    with pytest.raises(ValueError, match="expected one list a rank, 3, got 1"):
        partition([0, 10], 3, fragments=[[(0, 0, 10)]])
    with pytest.raises(ValueError, match="start at 0, got 5"):
        partition([5, 10], 2)
    with pytest.raises(ValueError, match="got 10 then 8 at index 2"):
        partition([0, 10, 8], 2)
    part = partition([0, 10], 2)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        part.tokens(2)
    with pytest.raises(ValueError, match="x: expected at least 10 tokens along dim 1, got 9"):
        part.shard(torch.zeros(1, 9), 0)
    with pytest.raises(ValueError, match="pad_to: expected at least the 5 tokens of rank 0, got 4"):
        part.shard(torch.zeros(1, 10), 0, pad_to=4)
    with pytest.raises(ValueError, match="parts: expected one tensor a rank, 2, got 1"):
        part.unshard([torch.zeros(1, 10)])
    with pytest.raises(ValueError, match=r"parts\[1\]: expected at least 5 tokens along dim 1, got 4"):
        part.unshard([torch.zeros(1, 5), torch.zeros(1, 4)])


def test_sharding_is_differentiable():
    part = partition([0, 7], 2, "zigzag")
    x = torch.randn(1, 7, requires_grad=True)
    weights = torch.arange(1.0, 8.0)
    (part.unshard([part.shard(x, rank) for rank in range(2)]) * weights).sum().backward()
    assert torch.equal(x.grad, weights[None])


def test_the_rule_for_pieces_fills_the_chip_and_leaves_short_shares_whole():
    assert cuts_by_rule(1000, 48) == cuts_by_rule(1984, 48) == Cuts(1, 1)
    # All pieces equal: heads times pieces are whole rounds of 132 multiprocessors, or nearly.
    for heads in (16, 24, 32):
        pieces, ends = cuts_by_rule(32768, heads)
        assert ends == 1
        assert pieces * heads / (132 * -(-pieces * heads // 132)) > 0.9, heads
    assert cuts_by_rule(10**7, 1) == Cuts(16, 1)
    assert cuts_by_rule(32768, None) == Cuts(8, 1)
    assert cuts_by_rule(32768, None, pieces=3) == Cuts(3, 1)
    # 48 long chains leave 84 multiprocessors, on which the 240 others run three in a row, the 144 of four pieces two.
    assert cuts_by_rule(32768, 48) == cuts_by_rule(32768, 48, pieces=6) == Cuts(6, 3)
    assert cuts_by_rule(32768, 48, pieces=4) == Cuts(4, 2)
    assert has_inner_fragments(partition([0, 900], 3)) and not has_inner_fragments(partition([0, 900], 2))
    assert cuts_by_rule(32768, 48, has_inner=True).pieces == 5


def test_lengths_of_a_share_are_told_apart_roughly():
    """So that batches of other lengths do not run the model again each."""
    assert len({_about(n) for n in range(512, 1024)}) == 16
    assert all(n >= _about(n) > n - max(n // 16, 1) for n in range(1, 3000))
    assert cuts_by_rule(32768, 40) == cuts_by_rule(32768 + 64 * 31, 40)


@given(st.integers(0, 300), st.integers(1, 4), st.integers(0, 600))
@settings(max_examples=50, deadline=None)
def test_the_model_starts_programs_in_order_and_shares_what_can_be_moved(num_long, length, num_others):
    """Without the limit, the next program goes to the multiprocessor that is free first; with it, at least the bytes'
    time passes, and at most as if all the time as many ran as there are multiprocessors."""
    sizes = [100.0 * length] * num_long + [100.0] * num_others
    programs = ((num_long, 100.0 * length), (num_others, 100.0))
    free = [0.0] * 132
    for size in sizes:
        heapq.heappush(free, heapq.heappop(free) + size + 2 / _OUTPUTS.microseconds)
    chains = max(free) * _OUTPUTS.microseconds
    alone = _run(_OUTPUTS._replace(kilobytes=0.0), programs)
    assert alone == pytest.approx(chains)
    both = _run(_OUTPUTS, programs)
    slowest = 132 * _OUTPUTS.kilobytes / 4000
    assert max(alone, sum(sizes) * _OUTPUTS.kilobytes / 4000) <= 1.001 * both
    assert both <= max(1, slowest / _OUTPUTS.microseconds) * alone * 1.001


def test_the_model_of_a_known_launch():
    # 120 chains of 103 chunks move 120 KB each: 4 TB/s, so 3.6 microseconds for a chunk of each and not 2.35.
    assert _run(_REVERSE, ((120, 103.0),)) == pytest.approx((103 + 2 / 2.35) * 120 * 120 / 4000)


@given(st.integers(0, 5000), st.integers(1, 16), st.integers(1, 4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_cuts_are_at_whole_chunks_and_cover_a_fragment(length, pieces, longer, is_first):
    bounds = cut(length, pieces, *((longer, 1) if is_first else (1, longer)))
    assert bounds[0] == 0 and bounds[-1] == length
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert all(bound % 64 == 0 for bound in bounds[:-1])
    assert all(size > 0 for size in lengths) or lengths == [0]
    assert len(lengths) <= pieces
    chunks = [-(-size // 64) for size in lengths]
    assert sum(chunks) == -(-length // 64)
    if longer == 1 or pieces == 1:
        assert max(chunks) <= -(-sum(chunks) // pieces)
    elif len(lengths) > 1:
        assert len(lengths) == pieces
        long, *others = chunks if is_first else chunks[::-1]
        assert len(set(others)) == 1
        assert longer * others[0] <= long < longer * (others[0] + 1) + pieces


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_s_pieces_cover_its_tokens_once(layout):
    part = partition([0, 40, 5000, 5000, 9001], 3, layout)
    for pieces, ends in ((1, 1), (4, 1), (4, 3), (16, 2)):
        for rank in range(3):
            spans = cut_share(part, rank, pieces, ends)
            flat = [x for fragment in spans for x in fragment]
            assert [a for a, _ in flat] == [0, *(b for _, b in flat[:-1])]
            assert flat[-1][1] == part.tokens(rank)
            assert all((a - fragment[0][0]) % 64 == 0 for fragment in spans for a, _ in fragment)


def test_only_the_first_and_the_last_piece_of_a_document_are_longer():
    part = partition([0, 3 * 64 * 60], 3)
    lengths = [[(b - a) // 64 for a, b in cut_share(part, rank, 4, 2)[0]] for rank in range(3)]
    assert lengths == [[24, 12, 12, 12], [15, 15, 15, 15], [12, 12, 12, 24]]
    part = partition([0, 64 * 120], 2, "zigzag")  # rank 0 has both ends
    lengths = [[[(b - a) // 64 for a, b in spans] for spans in cut_share(part, rank, 4, 2)] for rank in range(2)]
    assert lengths == [[[20, 10], [10, 20]], [[15, 15, 15, 15]]]


def test_who_has_a_use_for_an_exchange():
    part = partition([0, 10, 100], 3)
    assert [tuple(hears(part, rank)) for rank in range(3)] == [(False, True), (True, True), (True, False)]
    # All of a document in one part: nobody's words.
    whole = partition([0, 10, 20, 30], fragments=[[(0, 0, 10)], [(1, 0, 5), (2, 0, 10)], [(1, 5, 5)]])
    assert [tuple(hears(whole, rank)) for rank in range(3)] == [(False, False), (False, True), (True, False)]
    # A rank that has a document's parts hears itself.
    assert hears(partition([0, 10], fragments=[[(0, 5, 5), (0, 0, 5)]]), 0) == (True, True)


def test_pieces_are_those_of_documents_in_parts_only():
    part = partition([0, 1000, 3000], fragments=[[(0, 0, 1000), (1, 0, 700)], [(1, 700, 1300)]])
    counts = [[len(spans) for spans in cut_share(part, rank, pieces)] for rank in (0, 1) for pieces in (1, 4)]
    assert counts == [[1, 1], [1, 2], [1], [3]]
    assert cut_share(part, 0, 4) == [[(0, 1000)], [(1000, 1384), (1384, 1700)]]
    with pytest.raises(ValueError, match="pieces: expected at least 1, got 0"):
        partition([0, 9], 1).context(0, pieces=0)
    with pytest.raises(TypeError, match="num_v_heads: expected an int or None, got float"):
        partition([0, 9], 1).context(0, num_v_heads=2.0)
    assert partition([0, 10**6], 1).context(0, device="cpu", num_v_heads=48).pieces == 1


def test_exchange_bytes_do_not_depend_on_the_number_of_tokens():
    heads = {"num_v_heads": 48}
    short, long = (partition([0, tokens], 2).exchange_bytes(**heads) for tokens in (1000, 10**6))
    # One state of [48, 128, 128] float32 each way: a chain of two needs no transition product.
    assert short == long == (48 * 128 * 128 * 4, 48 * 128 * 128 * 4)
    # Inner fragments add their transition products, in the forward only.
    assert partition([0, 1000], 8).exchange_bytes(**heads) == (2 * short.forward, short.backward)
    # Documents that stay on their rank cost nothing.
    assert partition([0, 500, 1000], 2).exchange_bytes(**heads) == (0, 0)
