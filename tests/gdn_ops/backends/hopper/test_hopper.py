"""The Hopper backend against the float64 recurrence, on the GPU: every case of `measure.ACCURACY`."""

import itertools
import pathlib
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import measure
import oracle
import peers

import gdn_ops
from gdn_ops import settings, shapes
from gdn_ops.backends import hopper
from gdn_ops.backends.hopper import summaries
from gdn_ops.bench import accuracy, gate
from gdn_ops.bench.providers import provider
from gdn_ops.shapes import Inputs, Options, packed_width, segment_rule, sizes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

BOUND = {torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""About one and a half times the largest error of any case but `parallel` on an H200 (5.3e-3 and 1.1e-3)."""


@pytest.fixture(autouse=True)
def documents_are_cut() -> Iterator[None]:
    """With the setting on, calls with few documents and heads are cut; `CUT_CASES` are, none of the others."""
    with settings.configure(cut_documents=True):
        yield


@pytest.mark.parametrize("name", measure.ACCURACY)
def test_results_and_gradients(name: str) -> None:
    """Accuracy, equal bits at every save level and on a second run, the row's own columns untouched, isolation."""
    found = measure.check_case(name)
    assert found.broken == []
    bound = BOUND[found.dtype] * (4 if measure.ACCURACY[name].get("parallel_keys") else 1)
    assert all(error <= bound for error in found.errors.values()), found.errors


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_no_less_accurate_than_the_better_peer(kind: str) -> None:
    assert peers.worse_than_peers("hopper", kind) == {}


@pytest.mark.parametrize(
    "kind, rms, largest",
    [("nearly parallel keys", gate.RELATIVE_RMS, gate.MAX_ABS), ("almost equal keys", 1.15e-2, 3e-2)],
)
def test_keys_that_are_alike(kind: str, rms: float, largest: float) -> None:
    """The bounds of the gate that every usual input has to pass; or not far from them."""
    found = accuracy.errors(kind, provider("ours-hopper", accuracy.CASE), "cuda", accuracy.CASE)
    assert {name: x for name, x in found.relative_rms.items() if not x <= rms} == {}
    assert {name: x for name, x in found.largest.items() if not x <= largest} == {}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_runs_are_bitwise_equal(norm: bool) -> None:
    """Twenty runs, with several items for every program of the persistent kernels.

    With norms dk was once wrong in a few rows of one run in three: a key tile's last loads were still on their way when
    the next tile arrived.
    """
    inputs, do, dfinal = oracle.make(HK=16, HV=48, bounds=[0, 700, 4996, 5000, 6200], initial=True, norm=norm)
    options = Options(128**-0.5, norm)

    def run() -> list[torch.Tensor]:
        out = measure.forward_once(inputs, options, "solve", True)
        grads, row = measure.backward_once(out, do, dfinal, inputs, options, packed=True)
        return [out.o, out.final_state, *grads, row[..., :-64]]

    first = run()
    assert not any(x.isnan().any() for x in first)
    for number in range(19):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True)), number


@pytest.mark.parametrize("tokens", [0, 1])
def test_hardly_any_tokens(tokens: int) -> None:
    inputs, do, dfinal = oracle.make(bounds=[0, 0, tokens], initial=True)
    options = Options(128**-0.5)
    out = measure.forward_once(inputs, options, "solve", final=True)
    grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    assert torch.equal(out.final_state[0], inputs.initial_state[0]), "an empty document passes its state on"
    assert torch.equal(grads.d_initial_state[0], dfinal[0])
    assert not out.o.isnan().any()
    assert not grads.dv.isnan().any()


def test_first_call_under_graph_capture() -> None:
    """A shape that nothing has run yet is captured at once, and its replay gives an eager call's bits."""
    inputs, do, dfinal = oracle.make(HK=3, HV=6, bounds=[0, 100, 321], initial=True, seed=7)
    options = Options(128**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = measure.forward_once(inputs, options, "solve", final=True)
        grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    graph.replay()
    captured = [x.clone() for x in (*out[:2], *grads)]
    out = measure.forward_once(inputs, options, "solve", final=True)
    grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    assert all(torch.equal(a, b) for a, b in zip(captured, (*out[:2], *grads), strict=True))


def test_targets_and_gradients_that_tma_cannot_address() -> None:
    """An expanded output gradient is copied; targets off 16 bytes get the same bits as aligned ones."""
    inputs, do, _ = oracle.make(HK=2, HV=2, bounds=[0, 70, 200])
    do = do[:, :1].expand(do.shape)
    options = Options(128**-0.5)
    out = measure.forward_once(inputs, options, "solve", final=False)
    aligned, _ = measure.backward_once(out, do, None, inputs, options, packed=False)
    odd = torch.full((1, 200, 3 * 256 + 3), float("nan"), dtype=do.dtype, device=do.device)
    targets = [odd[..., 1 + i * 256 : 257 + i * 256].unflatten(-1, (2, 1, 128)) for i in range(3)]
    grads = aligned._replace(dq=targets[0], dk=targets[1], dv=targets[2])
    hopper.chunk_bwd(grads, do, None, inputs, out.saved, options)
    for a, b in zip(targets, aligned[:3], strict=True):
        assert torch.equal(a.reshape(b.shape), b)
    assert odd[..., [0, -1, -2]].isnan().all()


def test_a_rate_that_overflows_where_the_softplus_is_zero() -> None:
    inputs, do, _ = oracle.make(HK=1, HV=2, T=70, gate=True)
    A_log, dt_bias = (torch.tensor([x, 0.5], device=do.device) for x in (88.7, -200.0))
    inputs = inputs._replace(A_log=A_log, dt_bias=dt_bias)
    options = Options(128**-0.5)
    out = measure.forward_once(inputs, options, "solve", final=False)
    grads, _ = measure.backward_once(out, do, None, inputs, options, packed=False)
    assert torch.count_nonzero(grads.dg[..., 0]) == 0
    assert all(x.isfinite().all() for x in grads)
    assert torch.count_nonzero(grads.dg[..., 1]) > 0


def test_tokens_farther_apart_than_32_bits_reach() -> None:
    """Operands, output gradient and targets whose last token lies beyond 2^31 elements: the bits of dense ones."""
    HK, HV, T, stride = 1, 3, 200, 2**24
    assert (T - 1) * stride > 2**31
    inputs, do, _ = oracle.make(HK=HK, HV=HV, bounds=[0, 70, T])
    options = Options(128**-0.5)
    far = torch.empty(T * stride, dtype=do.dtype, device=do.device).as_strided((1, T, stride), (T * stride, stride, 1))

    def moved(x: torch.Tensor, column: int) -> torch.Tensor:
        target = far[..., column : column + x.shape[2] * 128].unflatten(-1, (x.shape[2], 128))
        return target.copy_(x)

    columns = [0, 128 * HK, 256 * HK, 128 * (2 * HK + HV)]
    q, k, v, far_do = (moved(x, column) for x, column in zip((inputs.q, inputs.k, inputs.v, do), columns, strict=True))
    results = []
    for given, given_do in ((inputs, do), (inputs._replace(q=q, k=k, v=v), far_do)):
        assert hopper.unsupported_reason(given, options) is None
        out = measure.forward_once(given, options, "solve", final=True)
        grads, _ = measure.backward_once(out, given_do, None, given, options, packed=False)
        results.append((out.o, out.final_state, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    start = columns[-1] + 128 * HV
    targets = [
        far[..., start + i * 1024 : start + i * 1024 + heads * 128].unflatten(-1, (heads, 1, 128))
        for i, heads in enumerate((HK, HK, HV))
    ]
    hopper.chunk_bwd(grads._replace(dq=targets[0], dk=targets[1], dv=targets[2]), do, None, inputs, out.saved, options)
    for target, x in zip(targets, results[0][2:5], strict=True):
        assert torch.equal(target.reshape(x.shape), x)


CUT_CASES = [name for name in measure.ACCURACY if name.startswith("cut")]


def test_cut_cases_are_cut() -> None:
    for name in CUT_CASES:
        case = dict(measure.ACCURACY[name])
        case.pop("dense", None)
        inputs, _, _ = oracle.make(**case)
        rule = segment_rule(sizes(inputs))
        assert rule.is_split
        assert rule.num_cuts > 0
        assert inputs.q.shape[1] // 64 >= 3 * rule.chunks // 2


@pytest.mark.parametrize("name", CUT_CASES)
def test_without_running_segments_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward runs on documents and leaves states at cuts; only the backward's recomputation is cut."""
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", 0)
    test_results_and_gradients(name)


def test_recomputation_from_cuts_has_the_bits_of_whole_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", 0)
    inputs, do, dfinal = oracle.make(HK=2, HV=4, bounds=measure.LONG, initial=True)
    options = Options(128**-0.5)
    results = []
    for chains, cuts in ((132, True), (0, False)):
        monkeypatch.setattr(shapes, "_CHECKPOINT_CHAINS", chains)
        out = measure.forward_once(inputs, options, "solve", final=True)
        assert (out.checkpoints.shape[0] > 0) == cuts
        grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
        results.append((*out[:2], *grads))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def assert_a_graph_follows(inputs: Inputs, do: Tensor, dfinal: Tensor | None, options: Options) -> None:
    """A captured call replays with other boundaries: the bits of eager calls, and as float64."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = measure.forward_once(inputs, options, "solve", final=True)
        grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    for bounds in ([0, 0, 4900, 4900], [0, 100, 3300, 4700], [0, 4898, 4899, 4900]):
        inputs.cu_seqlens.copy_(torch.tensor(bounds))
        graph.replay()
        captured = [x.clone() for x in (*out[:2], *grads)]
        eager = measure.forward_once(inputs, options, "solve", final=True)
        eager_grads, _ = measure.backward_once(eager, do, dfinal, inputs, options, packed=False)
        assert all(torch.equal(a, b) for a, b in zip(captured, (*eager[:2], *eager_grads), strict=True))
        want = oracle.run(inputs, options, do, dfinal, bounds)
        assert oracle.relative_error(out.o, want.o) <= BOUND[torch.bfloat16], bounds
        for name in ("q", "k", "v"):
            x = getattr(grads, f"d{name}").reshape(want.grads[name].shape)
            assert oracle.relative_error(x, want.grads[name]) <= BOUND[torch.bfloat16], (bounds, name)


@pytest.mark.parametrize("chains", [40, 0], ids=["segments", "documents"])
def test_a_captured_call_follows_other_boundaries(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which documents are cut is decided on the device: a graph replays with any boundaries of the same number."""
    monkeypatch.setattr(shapes, "_SPLIT_CHAINS", chains)
    inputs, do, dfinal = oracle.make(HK=1, HV=4, bounds=[0, 2500, 2501, 4900], initial=True, seed=5)
    assert_a_graph_follows(inputs, do, dfinal, Options(128**-0.5))


def in_turns(monkeypatch: pytest.MonkeyPatch, groups: int, parts: int) -> None:
    """Have backwards go through so many groups of heads and parts of documents, with states at both ends too."""
    monkeypatch.setattr(hopper, "_CHAINED_DOCUMENTS", 0)
    monkeypatch.setattr(shapes, "turns", lambda s, most_bytes: shapes.Turns(groups, parts))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("save", ["solve", "inputs"])
def test_parts_of_documents_change_no_bit(save: str, norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of heads and parts of documents: the bits of all at once, which is compared with float64."""
    bounds = [0, 760, 760, 761, 2230, 3430]
    inputs, do, dfinal = oracle.make(
        HK=2, HV=6, bounds=bounds, T=bounds[-1] + 37, norm=norm, gate=True, initial=not norm, decay="weak"
    )
    options = Options(128**-0.5, norm)
    want = oracle.run(inputs, options, do, dfinal, bounds)
    first = None
    for groups, parts in ((1, 1), (1, 3), (2, 1), (2, 4), (1, 8)):
        in_turns(monkeypatch, groups, parts)
        with settings.configure(cut_documents=False):
            out = measure.forward_once(inputs, options, save, dfinal is not None)
            grads, row = measure.backward_once(out, do, dfinal, inputs, options, packed=True)
        assert out.checkpoints.shape[0] == (5 * (parts - 1) if save == "solve" else 0)
        assert row[..., -64:].isnan().all()
        found = (*out[:2], *grads)
        if first is None:
            first = found
            for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias"):
                x = getattr(grads, f"d{name}")
                error = oracle.relative_error(x.reshape(want.grads[name].shape), want.grads[name])
                assert error <= BOUND[torch.bfloat16], name
        names = (*out._fields[:2], *grads._fields)
        others = [name for name, a, b in zip(names, first, found, strict=True) if not torch.equal(a, b)]
        assert others == [], (groups, parts)


def test_a_captured_call_in_parts_follows_other_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    in_turns(monkeypatch, 2, 3)
    inputs, do, dfinal = oracle.make(HK=2, HV=4, bounds=[0, 2500, 2501, 4900], initial=True, seed=5)
    with settings.configure(cut_documents=False):
        assert_a_graph_follows(inputs, do, dfinal, Options(128**-0.5))


def test_peak_memory_of_the_main_shape() -> None:
    """A step at most 2.0 GB, the output and the gradient row included; all heads and documents at once take 3.65."""
    HK, HV, T = 16, 48, measure.bounds_of(measure.MAIN)[-1]
    row = torch.randn(1, T, packed_width(HK, HV, 128), device="cuda", dtype=torch.bfloat16)
    row[..., : 2 * HK * 128] *= 128**-0.5
    row.requires_grad_()
    g = (-0.1 * torch.rand(1, T, HV, device="cuda")).requires_grad_()
    beta = torch.rand(1, T, HV, device="cuda").requires_grad_()
    do = torch.randn(1, T, HV, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor(measure.bounds_of(measure.MAIN), device="cuda", dtype=torch.int32)
    peaks, results = [], []
    for most_bytes in (settings.Settings().backward_bytes, 10**10):
        with settings.configure(backward_bytes=most_bytes):
            for _ in range(3):  # the third call repeats launches
                o = row.grad = g.grad = beta.grad = None
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                o, _ = gdn_ops.chunk_gated_delta_rule_packed(
                    row, g, beta, num_qk_heads=HK, num_v_heads=HV, cu_seqlens=cu
                )
                o.backward(do)
                peaks.append(torch.cuda.max_memory_allocated() - before)
            results.append([o.detach(), row.grad, g.grad, beta.grad])
    assert max(peaks[:3]) <= 2.0e9
    assert min(peaks[3:]) >= 3.5e9
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_summaries_of_whole_documents_have_the_bits_of_a_call() -> None:
    """Context parallelism's H and dH, which start from a document's own states; with the op's matrices and without."""
    bounds = measure.LONG
    inputs, do, dfinal = oracle.make(HK=2, HV=4, bounds=bounds, initial=True, norm=True)
    options = Options(128**-0.5, use_qk_l2norm=True)
    with settings.configure(cut_documents=False):
        out = measure.forward_once(inputs, options, "solve", final=True)
        grads, _ = measure.backward_once(out, do, dfinal, inputs, options, packed=False)
    forward, backward, chunk = [], [], 0
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        length = -(-(end - start) // 64)
        forward.append((start, end, chunk, length, n, -1, n, 0))
        backward.append((start, end, chunk, length, n, n, -1, 0))
        chunk += length
    nothing = [(0, 0, 0, 0, -1, -1, -1, 0)] * len(forward)
    table = torch.tensor([*forward, *nothing], dtype=torch.int32, device="cuda")
    for prepared in (None, (out.solve, hopper.chunk_prepare(out, inputs, options).factors)):
        states = torch.full_like(out.final_state, float("nan"))
        summaries.segments_fwd(states, torch.empty_like(states), table, inputs, options, prepared)
        assert torch.equal(states.mT, out.final_state)
    none = out.saved._replace(**{name: x[:0] for name, x in out.saved._asdict().items()})
    for saved in (out.saved, none):
        gradients = torch.full_like(states, float("nan"))
        table = torch.tensor(backward, dtype=torch.int32, device="cuda")
        summaries.segments_bwd(gradients, do, dfinal, table, inputs, saved, options)
        assert torch.equal(gradients.mT, grads.d_initial_state)
        gradients.fill_(float("nan"))
        prepared = hopper.chunk_prepare_bwd(inputs, saved, options)
        summaries.segments_bwd(gradients, do, dfinal, table, inputs, prepared[0], options, prepared[1])
        assert torch.equal(gradients.mT, grads.d_initial_state)
