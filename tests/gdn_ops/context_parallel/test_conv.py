"""The convolution against torch's own in float64, by document; over fragments on one rank, and compiled."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import gdn_ops
import gdn_ops.settings
from gdn_ops.context_parallel import causal_conv1d, partition

W = 12


def problem(T, width, dtype=torch.float64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = {"x": (1, T, W), "weight": (W, width), "bias": (W,), "grad": (1, T, W)}
    return {name: torch.randn(*shape, generator=gen).to(dtype) for name, shape in shapes.items()}


def answer(bounds, x, weight, bias, grad, silu=True):
    leaves = [None if t is None else t.double().clone().requires_grad_() for t in (x, weight, bias)]
    x, weight, bias = leaves
    parts = []
    for start, end in itertools.pairwise(bounds):
        if start == end:  # torch's own refuses no tokens
            continue
        padded = F.pad(x[:, start:end].transpose(1, 2), (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=W).transpose(1, 2))
    y = torch.cat([*parts, x[:, bounds[-1] :] * 0], 1)
    y = F.silu(y) if silu else y
    y.backward(grad.double())
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves if t is not None)]


def found(function, x, weight, bias, grad):
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    y.backward(grad)
    return [y.detach(), *(t.grad for t in leaves if t is not None)]


def close(a, b, tolerance=1e-11):
    return all(
        (x.double() - y).abs().max() <= tolerance * y.abs().max().clamp(min=1)
        for x, y in zip(a, b, strict=True)
        if y.numel()
    )


@pytest.mark.usefixtures("poison_memory")
@pytest.mark.parametrize("width", range(2, 9))
@pytest.mark.parametrize("activation", ["silu", None])
def test_documents_without_ranks(width, activation):
    bounds = [0, 5, 5, 6, 30]
    data = problem(33, width)
    cu_seqlens = torch.tensor(bounds)
    expected = answer(bounds, **data, silu=activation == "silu")
    result = found(lambda *t: causal_conv1d(*t, activation=activation, cu_seqlens=cu_seqlens), **data)
    assert close(result, expected)
    without_bias = data | {"bias": None}
    expected = answer(bounds, **without_bias, silu=activation == "silu")
    assert close(
        found(lambda *t: causal_conv1d(*t, activation=activation, cu_seqlens=cu_seqlens), **without_bias), expected
    )


def test_a_batch_is_as_many_documents():
    data = problem(20, 4)
    y = causal_conv1d(data["x"].view(2, 10, W), data["weight"], data["bias"])
    expected = answer([0, 10, 20], **data)[0]
    assert close([y.view(1, 20, W)], [expected])


@st.composite
def pieces(draw):
    """Documents cut into short pieces in any order, all on one rank: the whole path of rows and of their gradients."""
    sizes = draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    row = []
    for document, size in enumerate(sizes):
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=8)))
        row += [(document, a, b - a) for a, b in itertools.pairwise([0, *cuts, size])]
    return partition([0, *itertools.accumulate(sizes)], fragments=[draw(st.permutations(row))])


@given(pieces(), st.integers(2, 8))
@settings(max_examples=60, deadline=None)
def test_any_pieces_of_documents(part, width):
    data = problem(part.num_tokens, width)
    context = part.context(0)

    def function(x, weight, bias):
        return part.unshard([causal_conv1d(part.shard(x, 0), weight, bias, cp_context=context)])

    assert close(found(function, **data), answer(part.cu_seqlens, **data))


def test_compiled_is_eager():
    part = partition([0, 9, 30], fragments=[[(1, 10, 11), (0, 0, 9), (1, 0, 10)]])
    data = problem(30, 4, torch.float32)
    context = part.context(0)

    def function(x, weight, bias):
        return causal_conv1d(x, weight, bias, cp_context=context)

    eager, compiled = found(function, **data), found(torch.compile(function, fullgraph=True), **data)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_computes_in_float32(dtype):
    data = problem(40, 4, dtype)
    cu_seqlens = torch.tensor([0, 17, 40])
    result = found(lambda *t: causal_conv1d(*t, cu_seqlens=cu_seqlens), **data)
    assert close(result, answer([0, 17, 40], **data), 2 * torch.finfo(dtype).eps)
    assert all(x.dtype == dtype for x in result)


def test_the_backend_that_is_asked_for_never_falls_back():
    x, weight = torch.zeros(1, 4, W), torch.zeros(W, 4)
    with gdn_ops.settings.configure(backend="triton"), pytest.raises(NotImplementedError, match="triton: device cpu"):
        causal_conv1d(x, weight)


def test_copies_are_counted():
    x, weight = torch.randn(1, W, 40).transpose(1, 2).requires_grad_(), torch.randn(W, 4)
    gdn_ops.reset_stats()
    causal_conv1d(x, weight).sum().backward()
    stats = gdn_ops.stats()
    assert (stats.input_copies, stats.gradient_copies) == (2, 1)
    wide = torch.randn(1, 40, W + 9)[..., 4 : W + 4].requires_grad_()
    gdn_ops.reset_stats()
    causal_conv1d(wide, weight).backward(torch.randn(1, 40, W))
    assert gdn_ops.stats().input_copies == gdn_ops.stats().gradient_copies == 0


def test_a_document_with_nan_spoils_no_other():
    data = problem(30, 4)
    cu_seqlens = torch.tensor([0, 9, 19, 30])
    clean = found(lambda *t: causal_conv1d(*t, cu_seqlens=cu_seqlens), **data)
    data["x"][:, 9:19] = data["grad"][:, 9:19] = float("nan")
    dirty = found(lambda *t: causal_conv1d(*t, cu_seqlens=cu_seqlens), **data)
    for part in (slice(0, 9), slice(19, 30)):
        assert torch.equal(clean[0][:, part], dirty[0][:, part])
        assert torch.equal(clean[1][:, part], dirty[1][:, part])


def test_errors():
    x, weight = torch.zeros(1, 4, W), torch.zeros(W, 4)
    for wrong in (torch.zeros(W, 1), torch.zeros(W, 9), torch.zeros(W + 1, 4), torch.zeros(W, 1, 4)):
        with pytest.raises(ValueError, match=r"weight: expected \[12, width\] with width 2 to 8, got"):
            causal_conv1d(x, wrong)
    with pytest.raises(ValueError, match=r"bias: expected \[12\], got \[3\]"):
        causal_conv1d(x, weight, torch.zeros(3))
    with pytest.raises(ValueError, match="activation: expected 'silu' or None, got 'relu'"):
        causal_conv1d(x, weight, activation="relu")
    with pytest.raises(ValueError, match="x: expected a floating"):
        causal_conv1d(x[0], weight)
    with pytest.raises(ValueError, match="B must be 1, got 2"):
        causal_conv1d(torch.zeros(2, 4, W), weight, cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(TypeError, match="weight: expected a floating dtype, got torch.int64"):
        causal_conv1d(x, torch.ones(W, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="cu_seqlens: expected dtype int32 or int64, got torch.float32"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match="cu_seqlens: expected to start at 0, got 1"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([1, 4]))
    with pytest.raises(ValueError, match="cu_seqlens: expected to end at or before T = 4, got 9"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="this rank holds 9 tokens, got 4"):
        causal_conv1d(x, weight, cp_context=partition([0, 9], 1).context(0))


def test_no_document_gives_zeros():
    x = torch.ones(1, 3, W, requires_grad=True)
    y = causal_conv1d(x, torch.ones(W, 4), cu_seqlens=torch.tensor([0]))
    y.sum().backward()
    assert not y.any()
    assert not x.grad.any()


@pytest.fixture
def kernel():
    with gdn_ops.settings.configure(backend="triton"):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-7), (torch.float32, 1e-6)])
def test_gpu_pieces_are_as_whole_documents(dtype, tolerance):
    """Halo rows, and gradients that go back over them, in the GPU's kernels; one rank stands for all."""
    part = partition([0, 100, 700], fragments=[[(1, 50, 550), (0, 2, 98), (1, 0, 50), (0, 0, 2)]])
    data = {name: x.cuda() for name, x in problem(700, 4, dtype).items()}
    context, cu_seqlens = part.context(0, device="cuda"), torch.tensor([0, 100, 700], device="cuda")
    whole = found(lambda *t: causal_conv1d(*t, cu_seqlens=cu_seqlens), **data)

    def function(x, weight, bias):
        return part.unshard([causal_conv1d(part.shard(x, 0), weight, bias, cp_context=context)])

    pieces = found(function, **data)
    assert torch.equal(whole[0], pieces[0])
    assert close(pieces[1:], [x.double() for x in whole[1:]], tolerance)
    assert all(torch.equal(a, b) for a, b in zip(pieces, found(function, **data), strict=True))
    assert close(whole, [x.cuda() for x in answer([0, 100, 700], **{n: x.cpu() for n, x in data.items()})], tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
def test_gpu_default_is_within_rounding_of_float64(dtype, tolerance):
    data = {name: x.cuda() for name, x in problem(700, 4, dtype).items()}
    cu_seqlens = torch.tensor([0, 100, 700], device="cuda")
    result = found(lambda *t: causal_conv1d(*t, cu_seqlens=cu_seqlens), **data)
    assert close(result, [x.cuda() for x in answer([0, 100, 700], **{n: x.cpu() for n, x in data.items()})], tolerance)


@pytest.mark.gpu
@pytest.mark.usefixtures("kernel")
def test_gpu_compiled_is_eager():
    cu_seqlens = torch.tensor([0, 100, 700], device="cuda")
    data = {name: x.cuda() for name, x in problem(700, 4, torch.bfloat16).items()}

    def function(x, weight, bias):
        return causal_conv1d(x, weight, bias, cu_seqlens=cu_seqlens)

    eager, compiled = found(function, **data), found(torch.compile(function, fullgraph=True), **data)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
