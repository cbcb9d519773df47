"""An attention op of someone else's, with a packed variant: unnormalised causal attention with grouped heads.

Its rows are poisoned with NaN, so a column that the pass forgets shows.
"""

import torch
from torch import Tensor

import inductor_passes

lib = torch.library.Library("toy", "DEF")
TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)
OPTIONS = "Tensor? bias=None, *, float scale=1.0, bool use_norm=False"
LAYOUTS = "int[] q_layout, int[] k_layout, int[] v_layout"
BWD = f"Tensor do, Tensor q, Tensor k, Tensor v, Tensor g, Tensor scores, {OPTIONS}"
GRADS = "Tensor dq, Tensor dk, Tensor dv, Tensor dg"
lib.define(f"attention(Tensor q, Tensor k, Tensor v, Tensor g, {OPTIONS}) -> (Tensor o, Tensor scores)", tags=TAGS)
lib.define(f"attention_bwd({BWD}) -> ({GRADS})", tags=TAGS)
lib.define(
    f"attention_bwd_row({BWD}, int row_width, {LAYOUTS}, bool zero_init=False) -> (Tensor drow, {GRADS})", tags=TAGS
)
lib.define(f"attention_bwd_row_({BWD}, Tensor(a!) row, {LAYOUTS}) -> ({GRADS})", tags=TAGS)

EPS = 1e-6

# What "another version of the package" changes in the test of stale caches: a formula, or the shape that a fake says.
FACTOR = 1
SCORES_PADDING = 0


def normed(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def norm_bwd(dy, x):
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
    return r * dy - x * r**3 * (x * dy).sum(-1, keepdim=True)


def grow(x, heads):
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def attention(q, k, v, g, bias=None, *, scale=1.0, use_norm=False):
    """q, k [B,T,H,K], v [B,T,HV,V], g [B,T,HV] -> o [B,T,HV,V], scores [B,HV,T,T]."""
    if use_norm:
        q, k = normed(q), normed(k)
    scores = torch.einsum("bthk,bshk->bhts", grow(q, v.shape[2]), grow(k, v.shape[2])).tril()
    o = torch.einsum("bhts,bshv->bthv", scores, v) * (g[..., None] * scale)
    padded = torch.nn.functional.pad(scores, (0, SCORES_PADDING))
    return (o if bias is None else o + bias).contiguous(), padded.contiguous().clone()


def gradients(do, q, k, v, g, scores, bias=None, *, scale=1.0, use_norm=False):
    heads, scores = v.shape[2], scores[..., : v.shape[1]]
    nq, nk = (normed(q), normed(k)) if use_norm else (q, k)
    do = do * scale
    dg = (torch.einsum("bhts,bshv->bthv", scores, v) * do).sum(-1)
    dp = do * g[..., None]
    ds = torch.einsum("bthv,bshv->bhts", dp, v).tril()
    dv = torch.einsum("bhts,bthv->bshv", scores, dp)
    dq = torch.einsum("bhts,bshk->bthk", ds, grow(nk, heads))
    dk = torch.einsum("bhts,bthk->bshk", ds, grow(nq, heads))
    dq, dk = (d.unflatten(2, (x.shape[2], -1)).sum(3) for d, x in ((dq, q), (dk, k)))
    if use_norm:
        dq, dk = norm_bwd(dq, q), norm_bwd(dk, k)
    return [dq, dk, dv, dg]


def attention_bwd(*args, **options):
    return tuple(d.contiguous() for d in gradients(*args, **options))


def write(row, grads, layouts):
    B, T = row.shape[:2]
    for i, layout in enumerate(layouts):
        if layout:
            offset, group, length, inner = layout
            H, D = grads[i].shape[2:]
            strides = (*row.stride()[:2], group, inner, 1)
            target = row.as_strided((B, T, H // length, length, D), strides, row.storage_offset() + offset)
            target.copy_(grads[i].unflatten(2, (-1, length)))
            grads[i] = grads[i].new_empty((0, *grads[i].shape[1:]))
    return tuple(d.contiguous() for d in grads)


def attention_bwd_row(*args, row_width, q_layout, k_layout, v_layout, zero_init=False, **options):
    grads = gradients(*args, **options)
    row = args[1].new_full((*args[1].shape[:2], row_width), 0.0 if zero_init else float("nan"))
    return row, *write(row, grads, (q_layout, k_layout, v_layout))


def attention_bwd_row_(*args, row, q_layout, k_layout, v_layout, **options):
    return write(row, gradients(*args, **options), (q_layout, k_layout, v_layout))


def attention_fake(q, k, v, g, bias=None, *, scale=1.0, use_norm=False):
    B, T, HV, V = v.shape
    return v.new_empty((B, T, HV, V)), q.new_empty((B, HV, T, T + SCORES_PADDING))


def dense(tensors, layouts=((), (), (), ())):
    return tuple(
        x.new_empty((0, *x.shape[1:])) if layout else x.new_empty(x.shape)
        for x, layout in zip(tensors, layouts, strict=True)
    )


def attention_bwd_fake(do, q, k, v, g, *rest, **options):
    return dense((q, k, v, g))


def attention_bwd_row_fake(do, q, k, v, g, *rest, row_width, q_layout, k_layout, v_layout, **options):
    row = q.new_empty((*q.shape[:2], row_width))
    return row, *dense((q, k, v, g), (q_layout, k_layout, v_layout, ()))


def attention_bwd_row__fake(do, q, k, v, g, *rest, row, q_layout, k_layout, v_layout, **options):
    return dense((q, k, v, g), (q_layout, k_layout, v_layout, ()))


for real, fake in (
    (attention, attention_fake),
    (attention_bwd, attention_bwd_fake),
    (attention_bwd_row, attention_bwd_row_fake),
    (attention_bwd_row_, attention_bwd_row__fake),
):
    lib.impl(real.__name__, real, "CPU")
    torch.library.register_fake(f"toy::{real.__name__}", fake, lib=lib)


def setup(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs[:4], output[1], inputs[4])
    ctx.options = keyword_only_inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def backward(ctx, do, _):
    q, k, v, g, scores, bias = ctx.saved_tensors
    if FACTOR != 1:
        do = do * FACTOR
    dbias = None if bias is None else do.sum((0, 1, 2))
    return *torch.ops.toy.attention_bwd(do, q, k, v, g, scores, bias, **ctx.options), dbias


torch.library.register_autograd("toy::attention", backward, setup_context=setup, lib=lib)

# ---- the ten lines of docs/passes.md
VARIANT = inductor_passes.register(
    inductor_passes.PackedVariant(
        fwd="toy::attention",
        bwd="toy::attention_bwd",
        bwd_row="toy::attention_bwd_row",
        bwd_row_="toy::attention_bwd_row_",
        grouped_operands=("q", "k"),
        norm_switch="use_norm",
        norm_operands=("q", "k"),
        package=__name__,
        fingerprint="1",
    )
)


def toy(q: Tensor, k: Tensor, v: Tensor, g: Tensor, bias: Tensor | None = None, **options) -> Tensor:
    """The function that users call."""
    return torch.ops.toy.attention(q, k, v, g, bias, **options)[0]
