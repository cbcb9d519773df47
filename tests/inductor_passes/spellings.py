"""Ways to write "packed row -> q, k, v" that people use, each with what the passes are to make of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange

from tests.inductor_passes.toy_attention import toy

H, K, HV, V = 2, 4, 4, 8
R = HV // H
QW, VW = H * K, HV * V
WIDTH = 2 * QW + VW


@dataclass(frozen=True)
class Spelling:
    """`split(row)` gives q, k, v (and z); packed: the operands whose gradients shall lie in the row.

    lead: the row's leading axes, "BT" or "T"; extra: what else happens to q: "used", "returned", "hook".
    """

    name: str
    split: Callable[..., tuple[torch.Tensor, ...]]
    width: int = WIDTH
    lead: str = "BT"
    packed: str = "qkv"
    reason: str = "packed"
    gate: bool = False
    extra: str = ""
    grouped: bool = False
    copies: int = 0
    rows_made: int = 0
    dynamic: bool = True
    exact: bool = True


SPELLINGS: dict[str, Spelling] = {}


def spelling(**about):
    def add(split):
        SPELLINGS[split.__name__] = Spelling(split.__name__, split, **about)
        return split

    return add


def heads(q, k, v):
    return q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))


def parts(row):
    return row.split([QW, QW, VW], dim=-1)


# ---- F1: split, chunk, tensor_split, any order, any view
@spelling()
def split_view(row):
    q, k, v = parts(row)
    lead = row.shape[:2]
    return q.view(*lead, H, K), k.view(*lead, H, K), v.view(*lead, HV, V)


@spelling()
def split_unflatten(row):
    return heads(*parts(row))


@spelling()
def split_reshape(row):
    q, k, v = parts(row)
    lead = row.shape[:2]
    return q.reshape(*lead, -1, K), k.reshape(*lead, -1, K), v.reshape(*lead, -1, V)


@spelling()
def split_rearrange(row):
    q, k, v = parts(row)
    return (rearrange(q, "b t (h d) -> b t h d", d=K), rearrange(k, "b t (h d) -> b t h d", d=K),
            rearrange(v, "b t (h d) -> b t h d", d=V))  # fmt: skip


@spelling()
def torch_split(row):
    return heads(*torch.split(row, (QW, QW, VW), -1))


@spelling(width=3 * QW)
def chunk(row):
    return tuple(x.unflatten(-1, (H, K)) for x in row.chunk(3, dim=-1))


@spelling()
def tensor_split(row):
    return heads(*torch.tensor_split(row, (QW, 2 * QW), dim=-1))


@spelling()
def order_vkq(row):
    v, k, q = row.split([VW, QW, QW], dim=-1)
    return heads(q, k, v)


@spelling()
def order_kvq(row):
    k, v, q = row.split([QW, VW, QW], dim=-1)
    return heads(q, k, v)


@spelling(lead="T")
def tokens_only(row):
    q, k, v = parts(row)
    return q.view(1, -1, H, K), k.view(1, -1, H, K), v.view(1, -1, HV, V)


@spelling(lead="T")
def tokens_only_unsqueeze(row):
    return tuple(x.unsqueeze(0) for x in heads(*parts(row)))


@spelling(lead="T")
def tokens_only_row_batched(row):
    return heads(*parts(row[None]))


# ---- F2: on the head axis, and in two steps
@spelling(width=(2 * H + HV) * K)
def head_axis_split(row):
    return row.unflatten(-1, (2 * H + HV, K)).split([H, H, HV], dim=2)


@spelling(width=(2 * H + HV) * K)
def head_axis_slice(row):
    r = row.view(*row.shape[:2], -1, K)
    return r[:, :, :H], r[:, :, H : 2 * H], r[:, :, 2 * H :]


@spelling()
def two_steps(row):
    qk, v = row.split([2 * QW, VW], dim=-1)
    q, k = qk.chunk(2, dim=-1)
    return heads(q, k, v)


@spelling()
def two_steps_heads(row):
    qk, v = row.split([2 * QW, VW], dim=-1)
    q, k = qk.unflatten(-1, (2 * H, K)).split(H, dim=-2)
    return q, k, v.unflatten(-1, (HV, V))


# ---- F3: channel first
@spelling(copies=3)
def channel_first_transposed(row):
    return heads(*parts(row.transpose(1, 2).contiguous().transpose(1, 2)))


@spelling()
def heads_first_and_back(row):
    return tuple(x.transpose(1, 2).transpose(1, 2) for x in heads(*parts(row)))


# ---- F4: slices
@spelling()
def slicing(row):
    return heads(row[..., :QW], row[..., QW : 2 * QW], row[..., 2 * QW :])


@spelling()
def slicing_negative(row):
    return heads(row[..., : -QW - VW], row[..., -QW - VW : -VW], row[..., -VW:])


@spelling()
def narrow(row):
    return heads(row.narrow(-1, 0, QW), row.narrow(-1, QW, QW), row.narrow(-1, 2 * QW, VW))


@spelling(width=3 * QW)
def select(row):
    r = row.unflatten(-1, (3, H, K))
    return r.select(2, 0), r[:, :, 1], r.select(-3, -1)


@spelling(dynamic=False)
def as_strided(row):
    B, T = row.shape[:2]
    lead = (T * WIDTH, WIDTH)
    return (row.as_strided((B, T, H, K), (*lead, K, 1), 0), row.as_strided((B, T, H, K), (*lead, K, 1), QW),
            row.as_strided((B, T, HV, V), (*lead, V, 1), 2 * QW))  # fmt: skip


# ---- F5: unbind
@spelling(width=3 * QW)
def unbind(row):
    return row.unflatten(-1, (3, H, K)).unbind(2)


@spelling(width=3 * QW)
def unbind_rearranged(row):
    return tuple(rearrange(row, "b t (three h d) -> three b t h d", three=3, h=H))


@spelling(width=3 * QW)
def unbind_last(row):
    return tuple(x.unflatten(-1, (H, K)) for x in row.unflatten(-1, (3, QW)).unbind(-2))


# ---- F6: repeated heads
@spelling(grouped=True)
def repeat_interleave(row):
    q, k, v = heads(*parts(row))
    return q.repeat_interleave(R, dim=2), k.repeat_interleave(R, dim=2), v


@spelling(grouped=True)
def repeat_interleave_back(row):
    q, k, v = heads(*parts(row))
    return q.repeat_interleave(R, dim=-2), k.repeat_interleave(R, -2), v


@spelling(grouped=True)
def expand_reshape(row):
    q, k, v = heads(*parts(row))
    q, k = (x[:, :, :, None].expand(-1, -1, -1, R, -1).reshape(*x.shape[:2], HV, K) for x in (q, k))
    return q, k, v


@spelling(grouped=True)
def unsqueeze_expand_flatten(row):
    q, k, v = heads(*parts(row))
    q, k = (x.unsqueeze(3).expand(*x.shape[:3], R, K).flatten(2, 3) for x in (q, k))
    return q, k, v


@spelling(grouped=True)
def repeat_heads_first(row):
    q, k, v = (x.transpose(1, 2) for x in heads(*parts(row)))
    q, k = (x.repeat_interleave(R, dim=1) for x in (q, k))
    return tuple(x.transpose(1, 2) for x in (q, k, v))


@spelling(grouped=True, width=3 * QW, packed="qk", reason="packed_partly")
def repeat_all_of_one_head_row(row):
    q, k, v = row.unflatten(-1, (3, H, K)).unbind(2)
    return q.repeat_interleave(R, 2), k.repeat_interleave(R, 2), v.repeat_interleave(R, 2)


# ---- F7: interleaved per key head
@spelling(width=H * (2 * K + R * V))
def per_head(row):
    q, k, v = row.unflatten(-1, (H, 2 * K + R * V)).split([K, K, R * V], dim=-1)
    return q, k, v.reshape(*row.shape[:2], HV, V)


@spelling(width=3 * QW)
def per_head_equal(row):
    return row.view(*row.shape[:2], H, 3 * K).chunk(3, dim=-1)


@spelling(width=3 * QW)
def per_head_unbind(row):
    return row.unflatten(-1, (H, 3, K)).unbind(-2)


@spelling(width=H * (2 * K + 2 * R * V), gate=True)
def per_head_with_gate(row):
    q, k, v, z = row.unflatten(-1, (H, -1)).split([K, K, R * V, R * V], dim=-1)
    lead = row.shape[:2]
    return q, k, v.reshape(*lead, HV, V), z.reshape(*lead, VW)


# ---- copies in front of the op
@spelling(copies=3)
def contiguous_before(row):
    return heads(*(x.contiguous() for x in parts(row)))


@spelling(copies=3)
def contiguous_after(row):
    return tuple(x.contiguous() for x in heads(*parts(row)))


@spelling(copies=3)
def clone(row):
    return tuple(x.clone() for x in heads(*parts(row)))


@spelling(copies=3)
def contiguous_twice(row):
    q, k, v = (x.contiguous() for x in parts(row))
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in heads(q, k, v))


# ---- rows that others write too
@spelling(width=WIDTH + VW, gate=True)
def with_gate(row):
    q, k, v, z = row.split([QW, QW, VW, VW], dim=-1)
    return *heads(q, k, v), z


@spelling(width=WIDTH + VW, gate=True)
def gate_first(row):
    z, q, k, v = row.split([VW, QW, QW, VW], dim=-1)
    return *heads(q, k, v), z


@spelling(width=WIDTH + VW, gate=True)
def gate_by_slices(row):
    return *heads(row[..., :QW], row[..., QW : 2 * QW], row[..., 2 * QW : WIDTH]), row[..., WIDTH:]


@spelling(width=WIDTH + QW)
def gap(row):
    return heads(row[..., :QW], row[..., QW : 2 * QW], row[..., 3 * QW :])


@spelling(width=WIDTH + 5)
def padding(row):
    return heads(*parts(row[..., :WIDTH]))


# ---- other uses on the way
@spelling(extra="used", packed="kv", reason="packed_partly")
def q_used_elsewhere(row):
    return heads(*parts(row))


@spelling(extra="returned", packed="kv", reason="packed_partly")
def q_returned(row):
    return heads(*parts(row))


@spelling(extra="hook", packed="kv", reason="packed_partly")
def hook_on_q(row):
    q, k, v = heads(*parts(row))
    if q.requires_grad:
        q.register_hook(lambda grad: grad * 2)
    return q, k, v


@spelling(packed="kv", reason="packed_partly")
def q_scaled(row):
    q, k, v = heads(*parts(row))
    return q * 0.5, k, v


@spelling(packed="v", reason="packed_partly", exact=False)
def norm_outside(row):
    q, k, v = heads(*parts(row))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v


@spelling(packed="v", reason="packed_partly")
def k_is_q(row):
    q, _, v = heads(*parts(row))
    return q, q, v


@spelling(packed="kv", reason="packed_partly")
def overlapping_slices(row):
    return heads(row[..., :QW], row[..., K : QW + K], row[..., 2 * QW :])


@spelling(packed="qk", reason="packed_partly", exact=False)
def v_from_elsewhere(row):
    q, k, v = heads(*parts(row))
    return q, k, torch.tanh(v)


@spelling(exact=False)
def silu_before(row):
    return heads(*parts(F.silu(row)))


@spelling()
def cast_before(row):
    return heads(*parts(row.float().double()))


# ---- left alone
@spelling(packed="", reason="cast_between")
def cast_after(row):
    return tuple(x.float() for x in heads(*parts(row)))


@spelling(packed="", reason="computed_between", exact=False)
def silu_after(row):
    return heads(*(F.silu(x) for x in parts(row)))


@spelling(packed="", reason="computed_between", width=3 * QW)
def repeat_tiled(row):
    # Head h reads head h % H here, which is not what grouped heads mean.
    q, k, v = row.unflatten(-1, (3, H, K)).unbind(2)
    return q.repeat(1, 1, R, 1), k.repeat(1, 1, R, 1), v.repeat(1, 1, R, 1)


class Layer(torch.nn.Module):
    """x [B,T,16] -> projection -> row -> q, k, v -> toy op -> projection."""

    def __init__(self, spelling: Spelling, dtype=torch.float64):
        super().__init__()
        self.spelling = spelling
        self.project = torch.nn.Linear(16, spelling.width, bias=False, dtype=dtype)
        self.decay = torch.nn.Linear(16, HV, bias=False, dtype=dtype)
        self.out = torch.nn.Linear(VW, 16, bias=False, dtype=dtype)
        with torch.no_grad():  # small whole numbers: sums are exact, so their order cannot matter
            for weight in self.parameters():
                weight.copy_(torch.randint(-2, 3, weight.shape))

    def forward(self, x):
        row = self.project(x)
        q, k, v, *z = self.spelling.split(row)
        g = self.decay(x if x.dim() == 3 else x[None])[..., : v.shape[2]]
        o = toy(q, k, v, g.to(q.dtype), scale=0.5).flatten(-2)
        if self.spelling.lead == "T":
            o = o.squeeze(0)
        if self.spelling.gate:
            o = o * z[0]
        y = torch.nn.functional.linear(o.to(x.dtype), self.out.weight[:, : o.shape[-1]])
        if self.spelling.extra == "used":
            y = y + q.sum((2, 3))[..., None]
        return (y, q) if self.spelling.extra == "returned" else y


def make_input(spelling: Spelling, B=2, T=6, dtype=torch.float64):
    return torch.randint(-2, 3, (B, T, 16) if spelling.lead == "BT" else (T, 16)).to(dtype)


def train_step(layer, module, x):
    """Outputs and every gradient of one step, on whole numbers."""
    return train_steps(lambda x: [layer(x)], [module], [x])[0]


def train_steps(layers, modules, inputs):
    """The same of several layers that one function calls, by layer, after one backward."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    for module in modules:
        module.zero_grad(set_to_none=True)
    found = [y if isinstance(y, tuple) else (y,) for y in layers(*inputs)]
    for outputs in found:
        if len(outputs) > 1:
            outputs[1].retain_grad()
    weighted = ((y * (torch.arange(y.numel(), dtype=y.dtype) % 5 - 2).view_as(y)).sum() for y in sum(found, ()))
    sum(weighted).backward()
    results = []
    for outputs, module, x in zip(found, modules, inputs, strict=True):
        grads = [p.grad for p in module.parameters()] + [y.grad for y in outputs if not y.is_leaf and y.retains_grad]
        results.append([y.detach() for y in outputs] + [x.grad] + [g for g in grads if g is not None])
    return results
