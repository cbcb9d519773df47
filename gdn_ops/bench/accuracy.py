"""Errors of every provider against the float64 recurrence on the same inputs, from usual to hostile ones."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from gdn_ops.bench import gate
from gdn_ops.bench.cases import Case, Data, make_data
from gdn_ops.bench.providers import Provider

CASE = Case("accuracy", 4, 12, 2000, (700, 1, 899, 400))
"""Three value heads a key head, a document of one token, ragged tails."""


def _scaled_decay(factor: float) -> Callable[[Case, Data], Data]:
    return lambda case, data: data._replace(g=factor * data.g)


def _strong_decay(case: Case, data: Data) -> Data:
    generator = torch.Generator(device=data.g.device).manual_seed(1)
    return data._replace(g=-20 * torch.rand(data.g.shape, generator=generator, device=data.g.device))


def _parallel_keys(noise: float) -> Callable[[Case, Data], Data]:
    # A direction a head and, beside it, `noise` times its length at random: k_i . k_j is about 1 / (1 + noise^2). beta
    # is about 0.95 and the weak decay damps nothing, so sums over a chunk are long and cancel. With 0.3 the errors of
    # flash-linear-attention are those that were first measured with such keys, beside FlashQLA's.
    def change(case: Case, data: Data) -> Data:
        generator = torch.Generator(device=data.row.device).manual_seed(2)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=data.row.device)

        heads, size = case.num_qk_heads, case.head_dim
        keys = torch.nn.functional.normalize(
            normal(1, 1, heads, size) + noise * normal(*data.row.shape[:2], heads, size), dim=-1
        )
        row = data.row.clone()
        row[..., heads * size : 2 * heads * size] = keys.flatten(-2).to(row.dtype)
        return data._replace(row=row, g=0.02 * data.g, beta=torch.sigmoid(normal(*data.beta.shape) + 3))

    return change


INPUTS: dict[str, Callable[[Case, Data], Data]] = {
    "base": lambda case, data: data,
    "weak decay": _scaled_decay(0.02),
    "nearly parallel keys": _parallel_keys(0.3),
    "almost equal keys": _parallel_keys(0.1),
    "strong decay": _strong_decay,
    "no decay": _scaled_decay(0.0),
}
"""base: as `make_data` draws them; the others change what the name says. Nearly parallel keys (k_i . k_j about 0.92)
and almost equal ones (0.99) come with beta about 0.95 and weak decay; strong decay is g = -20 U(0,1)."""


@dataclasses.dataclass(frozen=True)
class Errors:
    """Errors of one provider's output and gradients on one kind of inputs: relative root mean square, and the largest
    over the largest expected value."""

    inputs: str
    provider: str
    dtype: str
    use_qk_l2norm: bool
    relative_rms: dict[str, float]
    largest: dict[str, float]


def errors(kind: str, provider: Provider, device: str, case: Case) -> Errors:
    """Run one provider on `INPUTS[kind]`, q, k, v plain views of one row; errors of o, dq, dk, dv, dg, dbeta."""
    data = INPUTS[kind](case, make_data(case, device, seed=5))
    found = gate.results(case, data, provider)
    expected = gate.recurrence(case, data)
    measured = {name: gate.errors(found[name], x) for name, x in expected.items()}
    return Errors(
        kind, provider.name, str(case.dtype).removeprefix("torch."), case.use_qk_l2norm,
        {name: rms for name, (rms, _) in measured.items()},
        {name: largest for name, (_, largest) in measured.items()},
    )  # fmt: skip


def table(rows: list[Errors]) -> list[tuple[str, ...]]:
    """Lines of text cells, the header first."""
    names = tuple(rows[0].relative_rms) if rows else ()
    lines = [("inputs", "provider", "dtype", "error", *names)]
    for r in rows:
        for error, values in (("rms", r.relative_rms), ("largest", r.largest)):
            lines.append((r.inputs, r.provider, r.dtype, error, *(f"{x:.2e}" for x in values.values())))
    return lines
