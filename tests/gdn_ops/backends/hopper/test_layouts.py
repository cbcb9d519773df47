"""What the Hopper backend takes, and how it reads axes, on tensors without data."""

import pytest
import torch

pytest.importorskip("triton")

from gdn_ops import settings, shapes
from gdn_ops.backends import hopper
from gdn_ops.backends.hopper import chunks, tma
from gdn_ops.backends.hopper.gates import NUM_FACTORS
from gdn_ops.shapes import CHUNK, Inputs, Options, sizes

OPTIONS = Options(128**-0.5)


def inputs_of(
    B: int = 1, T: int = 256, HK: int = 2, HV: int = 6, D: int = 128, dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    def empty(heads: int) -> torch.Tensor:
        return torch.empty(B, T, heads, D, dtype=dtype, device="meta")

    gates = torch.empty(B, T, HV, device="meta")
    return Inputs(empty(HK), empty(HK), empty(HV), gates, gates)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)


def test_unsupported_reason_elsewhere() -> None:
    reason = hopper.unsupported_reason(inputs_of(), OPTIONS)
    assert reason is not None
    assert "compute capability 9.0" in reason


@pytest.mark.usefixtures("on_hopper")
class TestUnsupportedReason:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_takes_dense_operands(self, dtype: torch.dtype) -> None:
        assert hopper.unsupported_reason(inputs_of(B=2, dtype=dtype), OPTIONS) is None

    def test_takes_calls_without_tokens(self) -> None:
        assert hopper.unsupported_reason(inputs_of(T=0), OPTIONS) is None

    @pytest.mark.parametrize(
        ("case", "words"),
        [({"dtype": torch.float32}, "bfloat16 or float16"), ({"D": 64}, "128 channels"), ({"D": 256}, "K = 256")],
    )
    def test_names_what_it_lacks(self, case: dict, words: str) -> None:
        reason = hopper.unsupported_reason(inputs_of(**case), OPTIONS)
        assert reason is not None
        assert words in reason

    def test_takes_views_of_a_row(self) -> None:
        row = torch.empty(2, 64, 10 * 128 + 8, dtype=torch.bfloat16, device="meta")
        q, k, v = (x.unflatten(-1, (-1, 128)) for x in row[..., 8:].split([256, 256, 768], -1))
        assert hopper.unsupported_reason(inputs_of()._replace(q=q, k=k, v=v), OPTIONS) is None

    def test_refuses_a_row_off_16_bytes(self) -> None:
        row = torch.empty(1, 64, 10 * 128 + 4, dtype=torch.bfloat16, device="meta")
        q, k, v = (x.unflatten(-1, (-1, 128)) for x in row[..., 4:].split([256, 256, 768], -1))
        reason = hopper.unsupported_reason(inputs_of()._replace(q=q, k=k, v=v), OPTIONS)
        assert reason is not None
        assert "q starts at an address" in reason
        reason = hopper.unsupported_reason(inputs_of(T=64)._replace(q=row[..., :256].unflatten(-1, (2, 128))), OPTIONS)
        assert reason is not None
        assert "token stride of 1284 elements" in reason

    def test_refuses_axes_that_do_not_merge(self) -> None:
        heads_first = torch.empty(2, 6, 64, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        reason = hopper.unsupported_reason(inputs_of(B=2, T=64)._replace(v=heads_first), OPTIONS)
        assert reason is not None
        assert "v: batch and token axes" in reason

    def test_takes_heads_first_without_a_batch(self) -> None:
        heads_first = torch.empty(1, 6, 64, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
        assert hopper.unsupported_reason(inputs_of(T=64)._replace(v=heads_first), OPTIONS) is None

    def test_refuses_heads_too_far_apart(self) -> None:
        far = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16, device="meta").as_strided(
            (1, 64, 6, 128), (2**40, 128, 2**29, 1)
        )
        reason = hopper.unsupported_reason(inputs_of(T=64)._replace(v=far), OPTIONS)
        assert reason is not None
        assert "spans more than" in reason


def test_unaddressable_expanded_tokens() -> None:
    expanded = torch.empty(1, 2, 128, dtype=torch.bfloat16, device="meta").expand(64, 2, 128)
    assert "token stride of 0" in str(tma.unaddressable(expanded))


def test_head_groups_cover_all_heads_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for HK, HV in ((16, 48), (5, 15), (1, 32)):
        for groups in {1, HK, 2 if HK % 2 == 0 else HK}:
            monkeypatch.setattr(shapes, "turns", lambda s, most_bytes, groups=groups: shapes.Turns(groups, 1))
            cu = torch.empty(9, dtype=torch.int32, device="meta")
            s = sizes(inputs_of(T=262144, HK=HK, HV=HV)._replace(cu_seqlens=cu))
            found = hopper.head_groups(s, at_once=False)
            assert len(found) == groups
            assert [h for group in found for h in group] == list(range(HV))
            assert all(len(group) % (HV // HK) == 0 for group in found)
            assert len(hopper.head_groups(s, at_once=True)) == 1
    assert len(hopper.head_groups(sizes(inputs_of(T=32768, HK=16, HV=48)), at_once=False)) == 1, "a cut document"


@pytest.mark.parametrize("N, with_initial", [(5, False), (5, True), (16, True), (17, True)])
def test_pieces_of_a_document_are_taken_whole_with_all_heads(N: int, with_initial: bool) -> None:
    """They have states at both ends, and are few."""
    inputs = inputs_of(T=32768, HK=16, HV=48)._replace(cu_seqlens=torch.empty(N + 1, dtype=torch.int32, device="meta"))
    if with_initial:
        inputs = inputs._replace(initial_state=torch.empty(N, 48, 128, 128, device="meta"))
    at_once = hopper._is_at_once(sizes(inputs), with_initial)
    assert at_once == (with_initial and N <= 16)
    told = hopper.scratch_bytes(inputs, OPTIONS, backward=True)
    assert 2.0e9 < told < 2.3e9 if at_once else told < 0.5e9


def test_scratch_bytes_of_the_main_shape() -> None:
    cu = torch.empty(6, dtype=torch.int32, device="meta")
    inputs = inputs_of(T=32768, HK=16, HV=48)._replace(cu_seqlens=cu)
    forward = hopper.scratch_bytes(inputs, OPTIONS, backward=False)
    backward = hopper.scratch_bytes(inputs, OPTIONS, backward=True)
    assert forward < 0.2e9
    assert 0.4e9 < backward < 0.45e9, "in two groups of heads and three parts a sixth of 2.0 GB, and row sums"
    assert hopper.scratch_bytes(inputs, OPTIONS, backward=True, save="states") < 1e9
    assert hopper.scratch_bytes(inputs, OPTIONS, backward=True, save="inputs") > backward + 0.4e9
    with settings.configure(backward_bytes=10**10):
        assert 2.1e9 < hopper.scratch_bytes(inputs, OPTIONS, backward=True) < 2.2e9


@pytest.mark.parametrize(("N", "HV", "parts"), [(1, 8, 1), (1, 48, 1), (2, 32, 1), (5, 48, 3)], ids=str)
def test_scratch_bytes_count_every_table(N: int, HV: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that saves all it prepares needs its factors, and the tables to the byte."""
    monkeypatch.setattr(chunks, "launch", lambda *args, **options: None)
    cu = torch.empty(N + 1, dtype=torch.int32, device="meta")
    inputs = inputs_of(T=32768, HK=HV // 4, HV=HV)._replace(cu_seqlens=cu)
    s = sizes(inputs)
    rule = settings.segments(s)
    assert (rule.parts, rule.num_cuts > 0, rule.num_left > 0) == (parts, N == 1, HV != 8)
    made = chunks.chunk_table(cu, s.N, s.T, s.num_chunks, rule, inputs.q)
    factors = s.num_chunks * HV * NUM_FACTORS * CHUNK * 4
    told = hopper.scratch_bytes(inputs, OPTIONS, backward=False)
    assert told - factors == sum(x.numel() * x.element_size() for x in made)


@pytest.mark.parametrize("backward", [False, True])
def test_scratch_bytes_of_a_call_without_tokens(backward: bool) -> None:
    assert hopper.scratch_bytes(inputs_of(T=0), OPTIONS, backward=backward) == 0
