"""The Triton backend on a GPU: accuracy of every launch configuration, determinism, isolation, graphs, threads."""

import gc
import importlib.util
import pathlib
import sys
import threading

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

_HERE = pathlib.Path(__file__).parent


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


harness = _load(_HERE / "harness.py")
peers = _load(_HERE.parent / "peers.py")
Case = harness.Case

from gdn_ops.backends.triton import forward, gradients, launch, reverse, scores  # noqa: E402
from gdn_ops.bench import accuracy, gate  # noqa: E402
from gdn_ops.bench.providers import provider  # noqa: E402
from gdn_ops.outputs import allocate_chunk_bwd, allocate_chunk_fwd  # noqa: E402
from gdn_ops.shapes import sizes  # noqa: E402

pytestmark = pytest.mark.gpu

EVERYTHING = dict(norm=True, gate=True, sigmoid=True, double=True, initial=True, final=True)
BF16 = dict(dtype=torch.bfloat16)


def _run(case, made=None):
    return harness.run(case, harness.make(case, "cuda") if made is None else made)


def _same(a, b, names=harness.NAMES):
    return [n for n in names if not torch.equal(a[n], b[n])]


@pytest.mark.parametrize(
    "dtype, budget", [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (16, 16), (40, 24), (96, 192), (256, 256), (256, 16)])
def test_every_configuration_is_close_to_recurrence(dtype, budget, K, V):
    case = Case(documents=(70, 0, 1, 150), unused=5, HK=2, HV=4, K=K, V=V, dtype=dtype, **EVERYTHING)
    wrong = {n: e for n, e in harness.errors(case, "cuda").items() if not e <= budget}
    assert not wrong


def test_every_configuration_of_smaller_devices_is_close_to_recurrence(monkeypatch):
    monkeypatch.setattr(launch, "shared_memory", lambda: 0)
    monkeypatch.setattr(launch, "on_hopper", lambda: False)
    for dtype, budget in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)):
        case = Case(documents=(70, 0, 1, 150), HK=2, HV=4, K=128, V=128, dtype=dtype, **EVERYTHING)
        wrong = {n: e for n, e in harness.errors(case, "cuda").items() if not e <= budget}
        assert not wrong, dtype


def test_tma_with_ragged_documents_is_close_to_recurrence():
    case = Case(documents=(700, 0, 1, 450), unused=5, HK=2, HV=4, K=128, V=128, **BF16, **EVERYTHING)
    wrong = {n: e for n, e in harness.errors(case, "cuda").items() if not e <= 1e-2}
    assert not wrong


@pytest.mark.parametrize("stage", [forward._FORWARD, reverse._REVERSE, gradients._GRADIENTS, scores._SCORES])
def test_configurations_are_data(stage):
    assert all(config.num_warps in (1, 2, 4, 8) for config in stage.values())


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_no_less_accurate_than_the_better_peer(kind):
    assert peers.worse_than_peers("triton", kind) == {}


@pytest.mark.parametrize("kind", accuracy.INPUTS)
def test_accuracy_is_within_the_bounds_of_the_benchmarks_gate(kind):
    found = accuracy.errors(kind, provider("ours-triton", accuracy.CASE), "cuda", accuracy.CASE)
    rms, largest = gate.RELATIVE_RMS, gate.MAX_ABS
    if kind == "almost equal keys":  # sums over a chunk cancel nearly all of themselves
        rms, largest = 1.2e-2, 4e-2
    assert {name: x for name, x in found.relative_rms.items() if not x <= rms} == {}
    assert {name: x for name, x in found.largest.items() if not x <= largest} == {}


def test_deterministic_over_runs():
    case = Case(documents=(300, 1, 517), HK=2, HV=6, K=128, V=128, **BF16, **EVERYTHING)
    made = harness.make(case, "cuda")
    first = _run(case, made)
    for _ in range(19):
        assert _same(first, _run(case, made)) == []


def test_strides_change_no_bit():
    results = []
    # Documents long enough for TMA, which cannot load what starts off 16 bytes.
    for rows in ("dense", "unaligned", "heads_first", "sliced", "packed", "interleaved"):
        results.append(_run(Case(documents=(70, 600), rows=rows, HK=2, HV=4, K=128, V=128, norm=True, **BF16)))
    for other in results[1:]:
        assert _same(results[0], other) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K, V", [(128, 128), (64, 96), (256, 256)])
def test_save_levels_change_no_bit(dtype, K, V):
    results = []
    for save in ("inputs", "solve", "states"):
        results.append(_run(Case(documents=(70, 200), save=save, K=K, V=V, dtype=dtype, **EVERYTHING)))
    for other in results[1:]:
        assert _same(results[0], other) == []


def test_turns_change_no_bit(monkeypatch):
    case = Case(HK=4, HV=8, K=128, V=128, documents=(266,), norm=True, **BF16)
    one = _run(case)
    monkeypatch.setattr(harness.backend, "SCRATCH_LIMIT", 1)
    assert _same(one, _run(case)) == []


def test_document_alone_as_in_pack():
    pack = Case(documents=(30, 267, 9), HK=2, HV=4, K=128, V=128, norm=True, **BF16)
    inputs, options, do, _ = made = harness.make(pack, "cuda")
    together = _run(pack, made)
    part = slice(30, 297)
    cut = inputs._replace(
        **{n: getattr(inputs, n)[:, part].contiguous() for n in ("q", "k", "v", "g", "beta")},
        cu_seqlens=torch.tensor([0, 267], dtype=torch.int32, device="cuda"),
    )
    alone = Case(documents=(267,), HK=2, HV=4, K=128, V=128, norm=True, **BF16)
    single = _run(alone, (cut, options, do[:, part], None))
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(together[n][:, part], single[n]), n


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("documents", [(30, 67, 129), (30, 67, 909)], ids=["pointers", "tma"])
def test_bad_values_stay_in_their_document(value, documents):
    case = Case(documents=documents, HK=2, HV=4, K=128, V=128, norm=True, **BF16)
    clean = _run(case)
    made = harness.make(case, "cuda")
    inputs, _, do, _ = made
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, do):
        x[:, 30:97] = value
    dirty = _run(case, made)
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(clean[n][:, :30], dirty[n][:, :30]), n
        assert torch.equal(clean[n][:, 97:], dirty[n][:, 97:]), n


def _buffers(case, made):
    inputs = made[0]
    out = allocate_chunk_fwd(inputs, output_final_state=case.final, use_qk_l2norm=case.norm, save=case.save)
    grads = allocate_chunk_bwd(inputs)
    return out, grads, grads._replace(**{n: getattr(grads, n).unsqueeze(3) for n in ("dq", "dk", "dv")})


def test_graph_captured_as_first_call_replays_other_documents():
    # Head sizes that no other test uses: nothing is compiled before the capture.
    case = Case(documents=(100, 28, 72), HK=1, HV=3, K=48, V=112, norm=True, **BF16)
    made = harness.make(case, "cuda")
    inputs, options, do, _ = made
    out, grads, targets = _buffers(case, made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        harness.backend.chunk_fwd(out, inputs, options, case.save)
        harness.backend.chunk_bwd(targets, do, None, inputs, out.saved, options)
    other = Case(documents=(1, 190, 5), unused=4, HK=1, HV=3, K=48, V=112, norm=True, **BF16)
    inputs.cu_seqlens.copy_(torch.tensor([0, 1, 191, 196]))
    harness.poison((*out, *grads))
    graph.replay()
    want = _run(other, made)
    got = {"o": out.o} | dict(zip(harness.NAMES[2:], grads, strict=True))
    for n in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[n], want[n]), n


def test_thousands_of_documents_times_heads():
    lengths = tuple(1 + i % 3 for i in range(3000))
    case = Case(documents=lengths, HK=8, HV=32, K=16, V=16, norm=True, **BF16)
    result = _run(case)
    alone = Case(documents=None, T=1, HK=8, HV=32, K=16, V=16, norm=True, **BF16)
    inputs, options, do, _ = harness.make(case, "cuda")
    cut = inputs._replace(
        **{n: getattr(inputs, n)[:, :1].contiguous() for n in ("q", "k", "v", "g", "beta")}, cu_seqlens=None
    )
    single = _run(alone, (cut, options, do[:, :1], None))
    assert torch.equal(result["o"][:, :1], single["o"])
    assert all(bool(result[n].isfinite().all()) for n in ("o", "dq", "dk", "dv", "dg", "dbeta"))


def test_offsets_past_two_to_the_31():
    T, HK, D = 2048, 1, 128
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    case = Case(documents=(T,), HK=HK, HV=1, K=D, V=D, **BF16)
    made = harness.make(case, "cuda")
    want = _run(case, made)
    wide = torch.empty((1, T, 2**21 + 2**19), dtype=torch.bfloat16, device="cuda")
    inputs = made[0]
    for i, x in enumerate(inputs[:3]):
        view = wide[:, :, i * D : (i + 1) * D].unsqueeze(2)
        view.copy_(x)
        inputs = inputs._replace(**{"qkv"[i]: view})
    assert inputs.q.stride(1) * T > 2**32
    assert _same(want, _run(case, (inputs, *made[1:]))) == []


def test_two_threads_and_streams():
    case = Case(documents=(70, 65), HK=2, HV=4, K=80, V=80, norm=True, **BF16)
    made = harness.make(case, "cuda")
    torch.cuda.synchronize()
    results, failures = {}, []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                out, grads, targets = _buffers(case, made)
                inputs, options, do, _ = made
                harness.backend.chunk_fwd(out, inputs, options, case.save)
                harness.backend.chunk_bwd(targets, do, None, inputs, out.saved, options)
                torch.cuda.current_stream().synchronize()
                results[i] = (out.o, *grads[:5])
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    want = _run(case, made)
    for got in results.values():
        for n, x in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), got, strict=True):
            assert torch.equal(x, want[n]), n


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_other_device_than_the_current_one():
    case = Case(documents=(70, 65), HK=2, HV=4, K=64, V=64, norm=True, **BF16)
    with torch.cuda.device(0):
        got = harness.run(case, harness.make(case, "cuda:1"))
    want = _run(case)
    assert _same({n: x.cpu() for n, x in got.items()}, {n: x.cpu() for n, x in want.items()}) == []


def _peak_bytes(function):
    """Bytes that a call asks for at most beyond what was allocated before it."""
    function()  # compiles
    # Garbage of other tests that is collected meanwhile would be taken off the peak.
    gc.collect()
    gc.disable()
    try:
        # What is asked for, not the blocks it is given: a block that was cached may be larger by up to 1 MB.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        function()
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    finally:
        gc.enable()


@pytest.mark.parametrize("save", ["inputs", "solve", "states"])
def test_scratch_bytes_are_what_is_allocated(save):
    case = Case(documents=(4000, 3000), HK=4, HV=8, K=128, V=128, norm=True, save=save, **BF16)
    inputs, options, do, _ = made = harness.make(case, "cuda")
    out, _, targets = _buffers(case, made)
    said = harness.backend.scratch_bytes(sizes(inputs), save=save, use_qk_l2norm=True)
    forward_peak = _peak_bytes(lambda: harness.backend.chunk_fwd(out, inputs, options, save))
    backward_peak = _peak_bytes(lambda: harness.backend.chunk_bwd(targets, do, None, inputs, out.saved, options))
    assert forward_peak == said.forward
    assert backward_peak == said.backward
