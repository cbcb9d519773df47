"""Which ops have a packed variant. Owners register here; the passes know no op by name.

An owner of an op that takes q, k, v (any names, any number) and has a backward op registers four ops:

- `fwd(q, k, v, ...) -> (...)`: the op that users call.
- `bwd(..., q, k, v, ...) -> (dq, dk, dv, ...)`: dense gradients. Its operands carry the names that `fwd` gives them.
- `bwd_row(<as bwd>, *, int row_width, int[] <operand>_layout ..., bool zero_init=False) -> (drow, dq, dk, dv, ...)`:
  the same backward. A gradient whose layout is not empty goes into drow [B,T,row_width] and its own output has zero
  rows. Columns of drow that no gradient covers are undefined, or zero with zero_init.
- `bwd_row_(<as bwd>, *, Tensor(a!) row, int[] <operand>_layout ...) -> (dq, dk, dv, ...)`: the same, into columns of a
  row [B,T,W] that also holds what others wrote. May be left out.

Operands are [B,T,H,D]. A layout is [] or [offset, stride_group, group_len, stride_in_group], in elements: head h lies
at offset + (h // group_len) * stride_group + (h % group_len) * stride_in_group of its token's row, its D channels
dense.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch._ops import OpOverload


@dataclass(frozen=True)
class PackedVariant:
    """The ops of one family, by qualified name ("namespace::name"; the default overload), and what may be done to them.

    operands: argument names whose gradients can lie in a row; gradients: the bwd outputs that are these gradients, in
    the same order; grouped_operands: operands that may have fewer heads than the others (head h of the others uses head
    h // r of these); norm_switch: name of a bool argument of fwd, bwd and the row ops that L2-normalises norm_operands
    in the op, as x / sqrt(sum(x^2) + norm_eps); norm_option: how the owner's users ask for that, in words of reports;
    takes_row: further forward ops of the family, which take the row itself and return its gradient whole: nothing is to
    be done for them, and reports say that they are packed; package: the owner's package or module, whose frames are not
    the user's code;
    fingerprint: what the ops compute (a hash of the sources of fakes and formulas, a version), part of the cache key.
    """

    fwd: str
    bwd: str
    bwd_row: str
    bwd_row_: str | None = None
    operands: tuple[str, ...] = ("q", "k", "v")
    gradients: tuple[int, ...] = (0, 1, 2)
    grouped_operands: tuple[str, ...] = ()
    norm_switch: str | None = None
    norm_operands: tuple[str, ...] = ()
    norm_eps: float = 1e-6
    norm_option: str = ""
    takes_row: tuple[str, ...] = ()
    package: str = ""
    fingerprint: str | Callable[[], str] = ""

    def __post_init__(self) -> None:
        if len(self.operands) != len(self.gradients):
            raise ValueError(f"operands and gradients must be of one length, got {self.operands} and {self.gradients}")
        for name in (*self.grouped_operands, *self.norm_operands):
            if name not in self.operands:
                raise ValueError(f"{name!r} is not one of the operands {self.operands}")
        for name in (self.fwd, self.bwd, self.bwd_row, self.bwd_row_ or self.fwd, *self.takes_row):
            if name.count("::") != 1:
                raise ValueError(f"an op's name must read 'namespace::name', got {name!r}")

    @cached_property
    def ops(self) -> "VariantOps":
        """The overloads, looked up when a graph is first searched (so registration needs no op yet).

        LookupError if one is not defined by then.
        """
        try:
            return VariantOps(
                overload(self.fwd),
                overload(self.bwd),
                overload(self.bwd_row),
                None if self.bwd_row_ is None else overload(self.bwd_row_),
                tuple(overload(name) for name in self.takes_row),
            )
        except AttributeError as error:
            raise LookupError(
                f"inductor_passes: a packed variant of {self.fwd!r} is registered, but one of its ops is not defined "
                f"({error}). Define the ops before anything is compiled, or take the variant out again with "
                "inductor_passes.registry.unregister."
            ) from error

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """What the compile caches must tell apart: names, options, schemas and the owner's fingerprint."""
        *ops, takes_row = self.ops
        schemas = tuple(str(op._schema) for op in (*ops, *takes_row) if op is not None)
        fingerprint = self.fingerprint if isinstance(self.fingerprint, str) else self.fingerprint()
        options = (self.operands, self.gradients, self.grouped_operands)
        norm = (self.norm_switch, self.norm_operands, self.norm_eps)
        return (schemas, options, norm, fingerprint)


class VariantOps(NamedTuple):
    """The overloads of a `PackedVariant`."""

    fwd: OpOverload
    bwd: OpOverload
    bwd_row: OpOverload
    bwd_row_: OpOverload | None
    takes_row: tuple[OpOverload, ...]


def overload(name: str) -> OpOverload:
    """The default overload of "namespace::name"; AttributeError if no such op was defined."""
    namespace, op = name.split("::")
    return getattr(getattr(torch.ops, namespace), op).default


_lock = threading.Lock()
_variants: dict[str, PackedVariant] = {}


def register(variant: PackedVariant) -> PackedVariant:
    """Let the passes rewrite calls of `variant.fwd`; registering the same again changes nothing.

    ValueError if the forward op has another variant already.
    """
    with _lock:
        known = _variants.get(variant.fwd)
        if known is not None and known != variant:
            raise ValueError(f"{variant.fwd} has another packed variant already: {known}")
        _variants.setdefault(variant.fwd, variant)
        return _variants[variant.fwd]


def unregister(variant: PackedVariant) -> None:
    """Take a variant out again. KeyError if it is not registered."""
    with _lock:
        del _variants[variant.fwd]


def variants() -> tuple[PackedVariant, ...]:
    """Every registered variant, sorted by its forward op's name."""
    with _lock:
        return tuple(_variants[name] for name in sorted(_variants))
