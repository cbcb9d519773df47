"""Call sites as models have them, written small: from a hidden state to q, k, v and the call of Gated DeltaNet.

Each is a function of a bag of weights and x [B,T,16]. What the layers around it do differently between projects is
kept: where the row comes from, how it is cut, what stands between the cut and the call.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from gdn_ops import chunk_gated_delta_rule

H, HV, D = 2, 4, 8
R = HV // H
QW, VW = H * D, HV * D
WIDTH = 2 * QW + VW


@dataclass(frozen=True)
class Site:
    """reason: what the report says of the call; batch: B of its input."""

    family: str
    call: Callable[..., torch.Tensor]
    reason: str = "packed"
    batch: int = 2


SITES: dict[str, Site] = {}


def site(family, **about):
    def add(f):
        SITES[f.__name__] = Site(family, f, **about)
        return f

    return add


class Weights(nn.Module):
    """Projections of every kind that the sites use; float64, so that eager and compiled agree closely."""

    def __init__(self):
        super().__init__()

        def linear(n_in, n_out):
            return nn.Linear(n_in, n_out, bias=False, dtype=torch.float64)

        self.qkv = linear(16, WIDTH)
        self.qkvz = linear(16, WIDTH + VW)
        self.q, self.k, self.v = linear(16, QW), linear(16, QW), linear(16, VW)
        self.b, self.a, self.ba = linear(16, HV), linear(16, HV), linear(16, 2 * HV)
        self.out = linear(VW, 16)
        self.conv = nn.Parameter(torch.randn(WIDTH, 1, 4, dtype=torch.float64) * 0.3)
        self.A_log = nn.Parameter(torch.zeros(HV, dtype=torch.float64))

    def gates(self, x):
        return -self.A_log.exp() * F.softplus(self.a(x)), self.b(x).sigmoid()

    def convolve(self, row):
        """[B,T,W] -> [B,T,W]: a causal convolution per channel, channels first inside, SiLU behind."""
        y = F.conv1d(row.transpose(1, 2), self.conv, padding=3, groups=WIDTH)[..., : row.shape[1]]
        return F.silu(y).transpose(1, 2)

    def forward(self, site, x):
        return site(self, x)


def gdn(w, q, k, v, x, norm=True, **options):
    g, beta = w.gates(x)
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=norm, **options)
    return w.out(o.flatten(-2))


def cut(row):
    return row.split([QW, QW, VW], dim=-1)


# ---- transformers: Qwen3-Next and Qwen3.5
@site("transformers Qwen3.5")
def qwen35(w, x):
    q, k, v = torch.split(w.convolve(w.qkv(x)), [QW, QW, VW], dim=-1)
    lead = x.shape[:2]
    q, k, v = q.reshape(*lead, -1, D), k.reshape(*lead, -1, D), v.reshape(*lead, -1, D)
    q, k = q.repeat_interleave(R, dim=2), k.repeat_interleave(R, dim=2)
    return gdn(w, q, k, v, x)


@site("transformers Qwen3-Next")
def qwen3_next(w, x):
    # One projection with [q | k | v*r | z*r] per key head; the parts go into the convolution as one row again.
    lead = x.shape[:2]
    q, k, v, z = w.qkvz(x).view(*lead, H, -1).split([D, D, R * D, R * D], dim=3)
    mixed = torch.cat([y.reshape(*lead, -1) for y in (q, k, v)], dim=-1)
    q, k, v = cut(w.convolve(mixed))
    q, k, v = (y.reshape(*lead, -1, D) for y in (q, k, v))
    q, k = q.repeat_interleave(R, dim=2), k.repeat_interleave(R, dim=2)
    return gdn(w, q, k, v, x) * z.reshape(*lead, VW).mean(-1, keepdim=True)


@site("transformers Qwen3-Next, convolution dropped")
def qwen3_next_no_convolution(w, x):
    lead = x.shape[:2]
    q, k, v, z = w.qkvz(x).view(*lead, H, -1).split([D, D, R * D, R * D], dim=3)
    v, z = v.reshape(*lead, HV, D), z.reshape(*lead, VW)
    return gdn(w, q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v, x) * z.mean(-1, keepdim=True)


@site("transformers, contiguous operands")
def transformers_contiguous(w, x):
    q, k, v = (y.unflatten(-1, (-1, D)).contiguous() for y in cut(w.convolve(w.qkv(x))))
    return gdn(w, q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v, x)


# ---- flash-linear-attention's layer and its users
@site("flash-linear-attention layer, fused projection")
def fla_fused(w, x):
    q, k, v = (rearrange(y, "... (h d) -> ... h d", d=D) for y in cut(F.silu(w.qkv(x))))
    return gdn(w, q, k, v, x)


@site("flash-linear-attention layer, repeated by einops")
def fla_repeat(w, x):
    q, k, v = (rearrange(y, "b t (h d) -> b t h d", d=D) for y in w.qkv(x).tensor_split((QW, 2 * QW), dim=-1))
    q, k = (y.unsqueeze(3).expand(-1, -1, -1, R, -1).reshape(*y.shape[:2], HV, D) for y in (q, k))
    return gdn(w, q, k, v, x)


@site("flash-linear-attention layer, one projection each", reason="computed_between")
def fla_separate(w, x):
    q, k, v = (F.silu(p(x)).unflatten(-1, (-1, D)) for p in (w.q, w.k, w.v))
    return gdn(w, q, k, v, x)


@site("flash-linear-attention layer, SiLU on each part", reason="computed_between")
def fla_silu_after(w, x):
    q, k, v = (F.silu(y).unflatten(-1, (-1, D)) for y in cut(w.qkv(x)))
    return gdn(w, q, k, v, x)


@site("gates from the same projection")
def gates_in_the_row(w, x):
    row = torch.cat([w.qkv(x), w.ba(x)], dim=-1)
    q, k, v, b, a = row.split([QW, QW, VW, HV, HV], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    o, _ = chunk_gated_delta_rule(q, k, v, -F.softplus(a), b.sigmoid(), use_qk_l2norm_in_kernel=True)
    return w.out(o.flatten(-2))


# ---- packed documents: prime-rl, axolotl, verl
def documents(x):
    return torch.tensor([0, 5, 5, x.shape[1] - 1], dtype=torch.int32)


@site("prime-rl: one packed sequence", batch=1)
def packed_documents(w, x):
    q, k, v = (y.unflatten(-1, (-1, D)) for y in cut(w.qkv(x)))
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


@site("axolotl: packed, heads repeated", batch=1)
def packed_documents_repeated(w, x):
    q, k, v = (y.reshape(1, -1, y.shape[-1] // D, D) for y in cut(w.qkv(x)))
    q, k = q.repeat_interleave(R, dim=2), k.repeat_interleave(R, dim=2)
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


@site("verl: padding removed, [T,W] rows", batch=1)
def padding_removed(w, x):
    q, k, v = cut(w.qkv(x.squeeze(0)))
    q, k, v = q.view(1, -1, H, D), k.view(1, -1, H, D), v.view(1, -1, HV, D)
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


@site("verl: heads transposed and back", batch=1)
def transposed_and_back(w, x):
    q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in cut(w.qkv(x)))
    q, k, v = (y.transpose(1, 2).contiguous() for y in (q, k, v))
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


# ---- Megatron: sequence first
@site("Megatron: [T,B,W] with one packed sequence", batch=1)
def megatron_packed(w, x):
    row = w.qkv(x.transpose(0, 1))
    q, k, v = (y.transpose(0, 1).unflatten(-1, (-1, D)) for y in cut(row))
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


@site("Megatron: transposed to [B,T,W] and made contiguous first")
def megatron_contiguous(w, x):
    row = w.qkvz(x.transpose(0, 1)).transpose(0, 1).contiguous()
    q, k, v, z = row.split([QW, QW, VW, VW], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in (q, k, v))
    return gdn(w, q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v, x) * z.mean(-1, keepdim=True)


# ---- attention-gym, sglang, vLLM, torchtitan
@site("attention-gym: unbind of a three-fold projection")
def unbind_three(w, x):
    row = w.qkv(x)[..., : 3 * QW].unflatten(-1, (3, H, D))
    q, k, v = row.unbind(2)
    g, beta = (y[..., :H] for y in w.gates(x))
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)
    return F.linear(o.flatten(-2), w.out.weight[:, :QW])


@site("vLLM and sglang: mixed rows [T,W], rearranged to one sequence", batch=1)
def mixed_rows(w, x):
    q, k, v = cut(w.qkv(x[0]))
    q, k, v = (rearrange(y, "l (h d) -> 1 l h d", d=D) for y in (q, k, v))
    return gdn(w, q, k, v, x, cu_seqlens=documents(x))


@site("vLLM: contiguous mixed rows with a gate", batch=1)
def mixed_rows_gate(w, x):
    mixed, z = w.qkvz(x[0]).split([WIDTH, VW], dim=-1)
    q, k, v = (rearrange(y, "l (h d) -> 1 l h d", d=D).contiguous() for y in cut(mixed))
    return gdn(w, q, k, v, x, cu_seqlens=documents(x)) * z[None].mean(-1, keepdim=True)


@site("torchtitan: views by named sizes")
def named_views(w, x):
    B, T, _ = x.shape
    row = w.qkv(x)
    q = row[..., :QW].view(B, T, -1, D)
    k = row[..., QW : 2 * QW].view(B, T, -1, D)
    v = row[..., 2 * QW :].view(B, T, -1, D)
    return gdn(w, q, k, v, x)


@site("torchtitan: heads split off one axis")
def one_head_axis(w, x):
    q, k, v = w.qkv(x).unflatten(-1, (-1, D)).split([H, H, HV], dim=-2)
    return gdn(w, q, k, v, x)


@site("norm outside the op", reason="packed_partly")
def norm_outside(w, x):
    q, k, v = (y.unflatten(-1, (-1, D)) for y in cut(w.qkv(x)))
    return gdn(w, F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, x, norm=False)


@site("activation checkpointing around the core")
def checkpointed_core(w, x):
    def core(row, x):
        q, k, v = (y.unflatten(-1, (-1, D)) for y in cut(row))
        return gdn(w, q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v, x)

    return torch.utils.checkpoint.checkpoint(core, w.qkv(x), x, use_reentrant=False)
