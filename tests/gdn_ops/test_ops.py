"""Every op passes opcheck in full, at odd strides, with and without each optional input; fakes are the real layout."""

import warnings

import pytest
import torch

import gdn_ops
from gdn_ops import counters, ops, outputs, settings
from gdn_ops.ops import SCHEMAS, backend_for
from gdn_ops.shapes import SAVE_LEVELS, Inputs, Options, Saved

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
OPS = torch.ops.gdn
HK, HV, D = 2, 4, 8
W = (2 * HK + HV) * D
HEADS = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
LAYOUTS = {"q_layout": [0, D, 1, 0], "k_layout": [HK * D, D, 1, 0], "v_layout": [2 * HK * D, D, 1, 0]}


def opcheck(op, args, kwargs):
    torch.library.opcheck(op, args, kwargs, test_utils=CHECKS)


def sample(strides="row", varlen=False, state=True, gate=True, dtype=torch.float32, T=70, seed=0):
    """Tensor arguments of chunk_fwd (without the optional ones that are off) and its row."""
    gen = torch.Generator().manual_seed(seed)
    B = 1 if varlen else 2

    def randn(*shape):
        return torch.randn(*shape, generator=gen)

    row = (randn(B, T, W) * 0.5).to(dtype)
    q, k, v = (x.unflatten(-1, (-1, D)) for x in row.split([HK * D, HK * D, HV * D], -1))
    if strides == "contiguous":
        q, k, v = (x.contiguous() for x in (q, k, v))
    elif strides == "heads_first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif strides == "last_axis":
        q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v))
    g, beta = -randn(B, T, HV).abs(), torch.sigmoid(randn(B, T, HV))
    cu = torch.tensor([0, 5, 5, T - 3], dtype=torch.int32) if varlen else None
    N = 3 if varlen else B
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "initial_state": randn(N, HV, D, D) if state else None,
        "cu_seqlens": cu,
        "A_log": randn(HV) if gate else None,
        "dt_bias": randn(HV) if gate else None,
    }


def with_grad(tensors):
    return [
        x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for x in tensors
    ]


VARIANTS = [
    # strides, varlen, state, gate, norm, save
    ("row", False, True, True, True, "solve"),
    ("contiguous", False, False, False, False, "inputs"),
    ("heads_first", True, True, False, True, "states"),
    ("last_axis", True, False, True, False, "solve"),
]
IDS = ["-".join(map(str, variant)) for variant in VARIANTS]


def options(norm):
    return {"scale": 0.3, "use_qk_l2norm": norm, "use_beta_sigmoid": True, "allow_neg_eigval": norm}


@pytest.mark.parametrize(("strides", "varlen", "state", "gate", "norm", "save"), VARIANTS, ids=IDS)
def test_chunk_fwd_opcheck(strides, varlen, state, gate, norm, save):
    tensors = sample(strides, varlen, state, gate)
    kwargs = {**options(norm), "output_final_state": state, "save": save}
    opcheck(OPS.chunk_fwd.default, tuple(with_grad(tensors.values())), kwargs)


@pytest.mark.parametrize(("strides", "varlen", "state", "gate", "norm", "save"), VARIANTS, ids=IDS)
def test_chunk_packed_fwd_opcheck(strides, varlen, state, gate, norm, save):
    tensors = sample("row", varlen, state, gate)
    row = torch.cat([tensors.pop(name).flatten(-2) for name in "qkv"], -1)
    if strides == "heads_first":
        row = row.transpose(0, 1).contiguous().transpose(0, 1)
    elif strides == "last_axis":
        row = row.transpose(1, 2).contiguous().transpose(1, 2)
    kwargs = {**options(norm), **HEADS, "output_final_state": state, "save": save}
    opcheck(OPS.chunk_packed_fwd.default, tuple(with_grad([row, *tensors.values()])), kwargs)


def backward_args(strides, varlen, state, gate, norm, save):
    tensors = sample(strides, varlen, state, gate)
    kwargs = options(norm)
    out = OPS.chunk_fwd(*tensors.values(), **kwargs, output_final_state=state, save=save)
    do = torch.randn_like(out[0])
    if strides == "contiguous":
        do = do[:, :1].expand_as(do)
    dfinal = torch.randn_like(out[1]) if state else None
    values = list(tensors.values())
    return (do, dfinal, *values[:5], *out[2:], *values[5:]), kwargs


@pytest.mark.parametrize(("strides", "varlen", "state", "gate", "norm", "save"), VARIANTS, ids=IDS)
def test_chunk_bwd_opcheck(strides, varlen, state, gate, norm, save):
    args, kwargs = backward_args(strides, varlen, state, gate, norm, save)
    opcheck(OPS.chunk_bwd.default, args, kwargs)
    row_kwargs = {**kwargs, **LAYOUTS, "v_layout": [] if state else LAYOUTS["v_layout"], "row_width": W + 3}
    opcheck(OPS.chunk_bwd_row.default, args, {**row_kwargs, "zero_init": True})
    row_kwargs.pop("row_width")
    wide = torch.randn(*args[2].shape[:2], W + 9)[..., 2 : W + 5]
    opcheck(OPS.chunk_bwd_row_.default, args, {**row_kwargs, "row": wide})


@pytest.mark.parametrize(("strides", "varlen", "state", "gate", "norm", "save"), VARIANTS, ids=IDS)
def test_chunk_packed_bwd_opcheck(strides, varlen, state, gate, norm, save):
    (do, dfinal, q, k, v, *rest), kwargs = backward_args("row", varlen, state, gate, norm, save)
    row = torch.cat([x.flatten(-2) for x in (q, k, v)], -1)
    opcheck(OPS.chunk_packed_bwd.default, (do, dfinal, row, *rest), {**kwargs, **HEADS})


def test_every_op_has_its_tags_and_schema():
    for name in SCHEMAS:
        op = getattr(OPS, name).default
        assert torch.Tag.flexible_layout in op.tags
        assert torch.Tag.pt2_compliant_tag in op.tags
        aliased = [x.name for x in op._schema.arguments if x.alias_info is not None]
        assert aliased == (["row"] if name == "chunk_bwd_row_" else [])


@pytest.mark.parametrize("save", SAVE_LEVELS)
@pytest.mark.parametrize("varlen", [False, True])
def test_real_outputs_have_the_allocation_s_metadata(save, varlen):
    tensors = sample(varlen=varlen)
    kwargs = {**options(True), "output_final_state": True, "save": save}
    real = OPS.chunk_fwd(*tensors.values(), **kwargs)
    meta = [x if x is None else x.to("meta") for x in tensors.values()]
    planned = outputs.allocate_chunk_fwd(Inputs(*meta), output_final_state=True, use_qk_l2norm=True, save=save)
    for name, a, b in zip(outputs.Forward._fields, real, planned.returned, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), name
        assert a.is_contiguous(), name


def test_saved_tensors_stay_dense_between_convolutions(monkeypatch):
    # Inductor lays four-dimensional tensors that wait for a backward out channels-last up to the last convolution.
    seen = []
    dense = outputs.saved_matrices

    def spy(returned, inputs):
        seen.append([x.is_contiguous() for x in returned])
        return dense(returned, inputs)

    monkeypatch.setattr(ops, "saved_matrices", spy)
    B, T = 2, 70
    convolutions = [torch.nn.Conv1d(W, W, 4, groups=W, padding=3) for _ in range(2)]

    def model(x, g, beta):
        for convolution in convolutions:
            q, k, v = convolution(x.transpose(1, 2))[..., :T].transpose(1, 2).split([HK * D, HK * D, HV * D], -1)
            q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
            o, _ = gdn_ops.chunk_gated_delta_rule(q, k, v, -g.exp(), beta, use_qk_l2norm_in_kernel=True)
            x = x + torch.nn.functional.pad(o.flatten(-2), (0, W - HV * D))
        return x

    gates = [torch.rand(B, T, HV, requires_grad=True) for _ in range(2)]
    with torch._inductor.config.patch(force_layout_optimization=True):
        torch.compile(model, fullgraph=True)(torch.randn(B, T, W), *gates).sum().backward()
    assert seen == [[True] * len(Saved._fields)] * 2


@pytest.mark.parametrize("layout", ["packed", "interleaved", "gap"])
@pytest.mark.parametrize("norm", [False, True])
def test_chunk_bwd_row_writes_the_dense_gradients_into_the_row(layout, norm, poison_memory):
    args, kwargs = backward_args("row", True, True, True, norm, "solve")
    dense = OPS.chunk_bwd(*args, **kwargs)
    width, layouts = W, LAYOUTS
    if layout == "interleaved":  # per key head: q, k, then its two value heads
        step = (2 + HV // HK) * D
        layouts = {"q_layout": [0, step, 1, 0], "k_layout": [D, step, 1, 0], "v_layout": [2 * D, step, HV // HK, D]}
    elif layout == "gap":
        width = W + 5
        layouts = {name: [x[0] + 5 if name == "v_layout" else x[0], *x[1:]] for name, x in LAYOUTS.items()}
    row, *rest = OPS.chunk_bwd_row(*args, **kwargs, row_width=width, zero_init=layout == "gap", **layouts)
    expected = torch.zeros_like(row)
    for grad, numbers in zip(dense[:3], layouts.values(), strict=True):
        offset, stride_group, group_len, stride_in_group = numbers
        for h in range(grad.shape[2]):
            start = offset + h // group_len * stride_group + h % group_len * stride_in_group
            expected[..., start : start + D] = grad[:, :, h]
    assert torch.equal(row, expected)
    assert [x.shape[0] for x in rest[:3]] == [0, 0, 0]
    for a, b in zip(rest[3:], dense[3:], strict=True):
        assert torch.equal(a, b)
    wide = torch.full((*row.shape[:2], width + 6), 7.0)
    inner = wide[..., 3:-3]
    OPS.chunk_bwd_row_(*args, **kwargs, row=inner, **layouts)
    if layout == "gap":
        assert (inner[..., 2 * HK * D : 2 * HK * D + 5] == 7).all()
        inner[..., 2 * HK * D : 2 * HK * D + 5] = 0
    assert torch.equal(inner, expected)
    assert (wide[..., :3] == 7).all()
    assert (wide[..., -3:] == 7).all()


def test_copies_are_counted_exactly():
    gdn_ops.reset_stats()
    for strides in ("row", "contiguous", "heads_first"):
        OPS.chunk_fwd(*sample(strides).values(), scale=1.0)
    assert gdn_ops.stats().input_copies == 0
    OPS.chunk_fwd(*sample("last_axis").values(), scale=1.0)
    assert gdn_ops.stats().input_copies == 3
    args, kwargs = backward_args("row", False, False, False, False, "solve")
    expanded = args[0][..., :1].expand_as(args[0])
    gdn_ops.reset_stats()
    OPS.chunk_bwd(expanded, *args[1:], **kwargs)
    assert gdn_ops.stats().as_dict() == {**counters.Stats().as_dict(), "gradient_copies": 1}


def test_values_do_not_depend_on_strides():
    found = [
        OPS.chunk_fwd(*sample(s, varlen=True).values(), **options(True), output_final_state=True)
        for s in ("row", "contiguous", "heads_first", "last_axis")
    ]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


def test_autocast_changes_nothing():
    tensors = sample(dtype=torch.bfloat16)
    plain = OPS.chunk_fwd(*tensors.values(), scale=1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = OPS.chunk_fwd(*tensors.values(), scale=1.0)
    for a, b in zip(plain, cast, strict=True):
        assert torch.equal(a, b)


def test_a_backend_asked_for_by_name_never_falls_back():
    inputs = Inputs(*(x if x is None else x.to("meta") for x in sample().values()))
    with pytest.raises(NotImplementedError, match="no backend for device meta"):
        backend_for(inputs, Options(1.0))
    if not torch.cuda.is_available():
        pytest.importorskip("triton")
        with settings.configure(backend="triton"), pytest.raises(NotImplementedError, match="triton: "):
            OPS.chunk_fwd(*sample().values(), scale=1.0)


def test_unknown_save_level():
    with pytest.raises(ValueError, match="save: expected one of"):
        OPS.chunk_fwd(*sample().values(), scale=1.0, save="all")


def test_deterministic_mode_of_torch_forces_the_deterministic_route_with_one_warning(monkeypatch):
    from gdn_ops import ops

    monkeypatch.setattr(ops, "_warned_deterministic", False)
    tensors = sample(T=5)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="deterministic=False was asked for"):
            OPS.chunk_fwd(*tensors.values(), scale=1.0, deterministic=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            OPS.chunk_fwd(*tensors.values(), scale=1.0, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(before)


def test_backends_get_a_copy_of_a_gradient_whose_tokens_are_far_apart(monkeypatch):
    """As memory on no device, with a backend that looks at what it is given."""
    shape, asked = (1, 70, HV, D), []

    class Backend:
        @staticmethod
        def chunk_bwd(out, do, *_):
            asked.append(do.stride())

    monkeypatch.setattr(ops, "backend_for", lambda *_: Backend)
    tensors = [x if x is None else x[:1].to("meta") for x in sample(gate=False).values()]
    dense = (HV * D, D, 1)
    for strides, expected in (((0, 2**25 - 1, D, 1), 2**25 - 1), ((0, 2**25, D, 1), HV * D)):
        gdn_ops.reset_stats()
        do = torch.empty_strided(shape, strides, device="meta")
        forward = OPS.chunk_fwd(*tensors, scale=1.0)
        ops._chunk_bwd(do, None, *tensors[:5], *forward[2:], *tensors[5:], scale=1.0)
        assert asked[-1][1:] == (expected, *dense[1:])
        assert gdn_ops.stats().gradient_copies == int(expected == HV * D)
