"""Everything around a call that must not change what the passes do, or what comes out: the same bits on and off."""

import functools
import inspect
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import inductor_passes
from inductor_passes.inspection import eager_backend
from tests.inductor_passes.spellings import HV, QW, VW, WIDTH, H, V, heads, parts
from tests.inductor_passes.toy_attention import toy


class Model(nn.Module):
    """A body of user code with three projections; whole-number weights, so that no order of sums matters."""

    def __init__(self, body, dtype=torch.float64):
        super().__init__()
        self.body = body
        self.rows = nn.ModuleList(nn.Linear(16, WIDTH, bias=False, dtype=dtype) for _ in range(2))
        self.decay = nn.Linear(16, HV, bias=False, dtype=dtype)
        self.out = nn.Linear(VW, 16, bias=False, dtype=dtype)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randint(-1, 2, weight.shape))

    def forward(self, x):
        return self.body(self, x)

    def finish(self, o):
        return self.out(o.flatten(-2))


BODIES = {}


def body(packed, reason="packed"):
    """packed: how many calls are packed; reason: of every call (a set: reasons of some)."""

    def add(f):
        BODIES[f.__name__] = (f, packed, reason)
        return f

    return add


@body(2)
def two_layers(self, x):
    for row in self.rows:
        x = x + self.finish(toy(*heads(*parts(row(x))), self.decay(x)))
    return x


@body(1)
def checkpointed_block(self, x):
    def block(x):
        return self.finish(toy(*heads(*parts(self.rows[0](x))), self.decay(x)))

    return checkpoint(block, x, use_reentrant=False)


@body(1)
def checkpointed_core(self, x):
    def core(row, g):
        return toy(*heads(*parts(row)), g)

    return self.finish(checkpoint(core, self.rows[0](x), self.decay(x), use_reentrant=False))


@body(1)
def selectively_checkpointed(self, x):
    def block(x):
        return self.finish(toy(*heads(*parts(self.rows[0](x))), self.decay(x)))

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.toy.attention.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


@body(2)
def two_ops_on_two_halves(self, x):
    row = torch.cat([layer(x) for layer in self.rows], dim=-1)
    g = self.decay(x)
    left, right = row.chunk(2, dim=-1)
    return self.finish(toy(*heads(*parts(left)), g) + toy(*heads(*parts(right)), g * 2))


@body(2)
def two_ops_on_two_slices(self, x):
    row = torch.cat([layer(x) for layer in self.rows], dim=-1)
    g = self.decay(x)
    left, right = row[..., :WIDTH], row[..., WIDTH:]
    return self.finish(toy(*heads(*parts(left)), g) + toy(*heads(*parts(right)), g * 2))


@body(0, "overlap")
def two_ops_on_one_row(self, x):
    q, k, v = heads(*parts(self.rows[0](x)))
    g = self.decay(x)
    return self.finish(toy(q, k, v, g) + toy(q, k, v, g * 2))


@body(2)
def two_ops_on_one_split(self, x):
    q, k, v, q2, k2, v2 = torch.cat([layer(x) for layer in self.rows], dim=-1).split([QW, QW, VW] * 2, dim=-1)
    g = self.decay(x)
    return self.finish(toy(*heads(q, k, v), g) + toy(*heads(q2, k2, v2), g * 2))


@body(2)
def two_ops_in_series_on_one_split(self, x):
    # The second op needs the first one's output, parts alternate, and others have columns, too.
    row = torch.cat([layer(x) for layer in self.rows] + [self.rows[0](x)[..., :VW]], dim=-1)
    q, q2, k, k2, v, v2, z = row.split([QW, QW, QW, QW, VW, VW, VW], dim=-1)
    o = toy(*heads(q, k, v), self.decay(x))
    return self.out(toy(*heads(q2, k2, v2), o.sum(-1)).flatten(-2) * z)


@body(1, {"packed", "packed_partly"})
def three_ops_on_one_split_that_share_v(self, x):
    row = torch.cat([self.rows[0](x), self.rows[1](x)[..., : 2 * QW], self.rows[1](x)], dim=-1)
    q, k, v, q2, k2, *others = row.split([QW, QW, VW, QW, QW, QW, QW, VW], dim=-1)
    g = self.decay(x)
    q, k, v = heads(q, k, v)
    q2, k2 = (y.unflatten(-1, (H, -1)) for y in (q2, k2))
    return self.finish(toy(q, k, v, g) + toy(q2, k2, v, g) + toy(*heads(*others), g))


@body(2)
def rows_that_gate_each_other(self, x):
    first, second = (torch.cat([layer(x), self.decay(x)], dim=-1) for layer in self.rows)
    q, k, v, z = first.split([QW, QW, VW, HV], dim=-1)
    q2, k2, v2, z2 = second.split([QW, QW, VW, HV], dim=-1)
    return self.finish(toy(*heads(q, k, v), z2) + toy(*heads(q2, k2, v2), z))


@body(0, "packed_partly")
def rows_that_swap_k(self, x):
    q, k, v = heads(*parts(self.rows[0](x)))
    q2, k2, v2 = heads(*parts(self.rows[1](x)))
    g = self.decay(x)
    return self.finish(toy(q, k2, v, g) + toy(q2, k, v2, g))


@body(1)
def row_used_elsewhere(self, x):
    row = self.rows[0](x)
    return self.finish(toy(*heads(*parts(row)), self.decay(x))) + row.sum(-1, keepdim=True)


@body(1)
def row_is_a_sum(self, x):
    row = self.rows[0](x) + self.rows[1](x)
    return self.finish(toy(*heads(*parts(row)), self.decay(x)))


@body(1)
def edited_in_place(self, x):
    row = self.rows[0](x) * 1
    row[..., :QW].mul_(2)
    return self.finish(toy(*heads(row[..., :QW], row[..., QW : 2 * QW], row[..., 2 * QW :]), self.decay(x)))


@body(1)
def q_is_detached(self, x):
    q, k, v = parts(self.rows[0](x))
    return self.finish(toy(*heads(q.detach(), k, v), self.decay(x)))


@body(1)
def decay_in_the_row_too(self, x):
    q, k, v, g = torch.cat([self.rows[0](x), self.decay(x)], dim=-1).split([QW, QW, VW, HV], dim=-1)
    return self.finish(toy(*heads(q, k, v), g))


@body(1)
def padded_tokens(self, x):
    row, g = F.pad(self.rows[0](x), (0, 0, 0, 2)), F.pad(self.decay(x), (0, 0, 0, 2))
    return self.finish(toy(*heads(*parts(row)), g)[:, : x.shape[1]])


@body(2)
def two_spans_of_tokens(self, x):
    row, g = self.rows[0](x), self.decay(x)
    first = toy(*heads(*parts(row[:, :3])), g[:, :3])
    second = toy(*heads(*parts(row[:, 3:])), g[:, 3:])
    return self.finish(torch.cat([first, second], dim=1))


@body(1)
def every_other_token(self, x):
    row, g = self.rows[0](x)[:, ::2], self.decay(x)[:, ::2]
    return self.finish(toy(*heads(*parts(row)), g))


@body(1)
def tokens_first_row(self, x):
    row = self.rows[0](x.transpose(0, 1))  # [T,B,W], as Megatron keeps it
    q, k, v = (y.transpose(0, 1) for y in parts(row))
    return self.finish(toy(*heads(q, k, v), self.decay(x)))


@body(1)
def tokens_first_row_with_others(self, x):
    # [T,B,q|k|v|gap|z]: z is used sequence first, and g, which lies in the row as well, batch first.
    h = x.transpose(0, 1)
    row = torch.cat([self.rows[0](h), self.rows[1](h)[..., : HV + 3 + VW]], dim=-1)
    q, k, v, g, _, z = row.split([QW, QW, VW, HV, 3, VW], dim=-1)
    o = toy(*(y.transpose(0, 1) for y in heads(q, k, v)), g.transpose(0, 1))
    return self.out(o.flatten(-2).transpose(0, 1) * z).transpose(0, 1)


@body(0, "packed_partly")
def tokens_first_row_with_q_used(self, x):
    q, k, v = (y.transpose(0, 1) for y in parts(self.rows[0](x.transpose(0, 1))))
    return self.finish(toy(*heads(q, k, v), self.decay(x))) + q.sum(-1, keepdim=True)


@body(1)
def batch_first_row_with_a_tokens_first_gate(self, x):
    row = torch.cat([self.rows[0](x), self.rows[1](x)[..., :VW]], dim=-1)
    q, k, v, z = row.split([QW, QW, VW, VW], dim=-1)
    z = z.transpose(0, 1).contiguous()
    o = toy(*heads(q, k, v), self.decay(x)).flatten(-2).transpose(0, 1)
    return self.out(o * z).transpose(0, 1)


@body(1)
def split_on_channels_first(self, x):
    row = self.rows[0](x).transpose(1, 2)  # [B,W,T], as a convolution has it
    q, k, v = (y.transpose(1, 2) for y in row.split([QW, QW, VW], dim=1))
    return self.finish(toy(*heads(q, k, v), self.decay(x)))


@body(1)
def causal_convolution(self, x):
    weight = self.rows[1].weight[:, :3].unsqueeze(1)
    row = F.conv1d(self.rows[0](x).transpose(1, 2), weight, padding=2, groups=WIDTH)[..., : x.shape[1]]
    q, k, v = heads(*parts(row.transpose(1, 2)))
    return self.finish(toy(q.repeat_interleave(HV // H, 2), k.repeat_interleave(HV // H, 2), v, self.decay(x)))


@body(1)
def with_an_optional_argument(self, x):
    bias = self.out.weight[: HV * V // HV, 0][:V]
    return self.finish(toy(*heads(*parts(self.rows[0](x))), self.decay(x), bias, scale=2.0))


def step(function, model, x):
    return steps(lambda x: [function(x)], [model], [x])[0]


def steps(functions, models, inputs):
    """Output and gradients of one step of several models that one function calls, by model."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    for model in models:
        model.zero_grad(set_to_none=True)
    outputs = functions(*inputs)
    sum((y * (torch.arange(y.numel(), dtype=y.dtype) % 5 - 2).view_as(y)).sum() for y in outputs).backward()
    return [
        [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        for y, model, x in zip(outputs, models, inputs, strict=True)
    ]


def make(body, dtype=torch.float64):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Model(body, dtype), torch.randint(-1, 2, (2, 6, 16)).to(dtype)


def on_and_off(body, run=step, dtype=torch.float64, **options):
    reports, results = [], []
    for enabled in (True, False):
        model, x = make(body, dtype)
        with inductor_passes.configured(enabled=enabled):
            backend = eager_backend(reports.append if enabled else None)
            results.append(run(torch.compile(model, backend=backend, **options), model, x))
    on, off = results
    assert len(on) == len(off)
    for a, b in zip(on, off, strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b)
    return on, [call for report in reports for call in report]


class Several(nn.Module):
    """Models side by side, each with its own input."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *inputs):
        return [model(x) for model, x in zip(self.models, inputs, strict=True)]


def calls_in(f, calls):
    lines, first = inspect.getsourcelines(f)
    places = {f"{__file__}:{line}" for line in range(first, first + len(lines))}
    return [call for call in calls if call.location in places]


# Most of a compilation does not depend on the body, so several are compiled as one model.
@pytest.mark.parametrize("part", range(4))
def test_bodies(part):
    names = list(BODIES)[part::4]
    models, inputs = zip(*(make(BODIES[name][0]) for name in names), strict=True)
    several, reports = Several(models), []
    on = steps(torch.compile(several, backend=eager_backend(reports.append), fullgraph=True), models, inputs)
    (report,) = reports
    for name in names:
        f, packed, reason = BODIES[name]
        calls = calls_in(f, report)
        assert [call.packed for call in calls].count(True) == packed, (name, calls)
        assert {call.reason for call in calls} == ({reason} if isinstance(reason, str) else reason), (name, calls)
    assert sum(len(calls_in(BODIES[name][0], report)) for name in names) == len(report)
    for name, found, expected in zip(names, on, steps(several, models, inputs), strict=True):
        for a, b in zip(expected, found, strict=True):
            assert not a.isnan().any(), name
            assert torch.equal(a, b), name


def test_frozen_parameters_leave_operands_without_gradients():
    def f(self, x):
        q, _, _ = heads(*parts(self.rows[0](x.detach())))
        _, k, v = heads(*parts(self.rows[1](x)))
        return self.finish(toy(q, k, v, self.decay(x)))

    def run(function, model, x):
        model.rows[0].requires_grad_(False)
        return step(function, model, x)

    _, (call,) = on_and_off(f, run, fullgraph=True)
    assert call.operands == ("k", "v")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    def f(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            row, g = self.rows[0](x), self.decay(x)
        with torch.autocast("cpu", enabled=False):
            return self.finish(toy(*heads(*parts(row)), g).to(x.dtype))

    on_and_off(f, dtype=dtype, fullgraph=True)


@pytest.mark.parametrize("name", ["two_layers", "tokens_first_row_with_others"])
def test_no_recompilation_for_other_sizes(name):
    f, packed, _ = BODIES[name]
    model, _ = make(f)
    reports = []
    compiled = torch.compile(model, backend=eager_backend(reports.append), dynamic=True, fullgraph=True)
    for B, T in ((2, 6), (3, 6), (3, 11), (5, 7)):
        x = torch.randint(-1, 2, (B, T, 16)).double()
        for a, b in zip(step(compiled, model, x), step(model, model, x), strict=True):
            assert torch.equal(a, b)
    assert [report.packed for report in reports] == [packed]


def test_retain_grad_inside_the_compiled_region():
    """torch breaks the graph there; the gradient that is kept is right, and the report says what it costs."""

    def f(self, x):
        q, k, v = heads(*parts(self.rows[0](x)))
        q.retain_grad()
        self.kept = q
        return self.finish(toy(q, k, v, self.decay(x)))

    kept, reports = [], []
    for backend in ("eager", eager_backend(reports.append)):
        model, x = make(f)
        step(torch.compile(model, backend=backend), model, x)
        kept.append(model.kept.grad)
    assert torch.equal(*kept)
    assert [call.reason for report in reports for call in report] == ["split_elsewhere"]


def test_graph_break_between_layers():
    def f(self, x):
        x = self.finish(toy(*heads(*parts(self.rows[0](x))), self.decay(x)))
        torch._dynamo.graph_break()
        return self.finish(toy(*heads(*parts(self.rows[1](x))), self.decay(x)))

    _, calls = on_and_off(f)
    assert [call.reason for call in calls] == ["packed"] * 2


def test_retain_graph_backward_twice():
    def run(function, model, x):
        x = x.clone().requires_grad_()
        y = function(x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    on_and_off(two_layers, run, fullgraph=True)


def test_compiled_autograd_packs_an_eager_forward():
    def one_layer(self, x):  # what compiled autograd takes grows with the backward's length
        return self.finish(toy(*heads(*parts(self.rows[0](x))), self.decay(x)))

    model, x = make(one_layer)
    expected = step(model, model, x)
    reports = []
    backend = eager_backend(reports.append)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=False)):
        found = step(model, model, x)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert [call.reason for report in reports for call in report] == ["packed"]


def test_export_is_untouched_and_runs():
    model, x = make(two_layers)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        assert torch.equal(program.module()(x), model(x))
        targets = [str(n.target) for n in program.graph.nodes]
    assert targets.count("toy.attention.default") == 2


@pytest.mark.distributed
def test_fsdp2_per_block(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(os.fspath(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        results, reports = [], []
        for enabled in (True, False):
            model, x = make(checkpointed_block)
            fully_shard(model, mesh=mesh)
            model.compile(backend=eager_backend(reports.append if enabled else None))
            with inductor_passes.configured(enabled=enabled):
                x = x.requires_grad_()
                model(x).sum().backward()
            results.append([x.grad, *(p.grad.to_local() for p in model.parameters() if p.grad is not None)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
        assert [call.reason for report in reports for call in report] == ["packed"]
    finally:
        dist.destroy_process_group()
