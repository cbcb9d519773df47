"""Exact arithmetic on sizes: Python ints where a size is static, sympy polynomials where it is symbolic.

Nothing here asks the shape environment, so nothing adds a guard: what cannot be proved for every value counts as false.
Static sizes never touch sympy, and symbolic results are remembered (every layer of a model asks the same questions).
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

import sympy
import torch
from torch.fx import Node

Size: TypeAlias = int | sympy.Expr


def size(value: int | torch.SymInt | Node) -> Size:
    """A shape entry, a stride, or the node that computes one, as a `Size`."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, torch.SymInt):
        return _tidy(value.node.expr)
    return int(value)  # type: ignore[arg-type]


def shape_of(node: Node) -> list[Size]:
    """The sizes of a node's tensor."""
    return [size(s) for s in node.meta["val"].shape]


def _tidy(expr: sympy.Expr) -> Size:
    return int(expr) if expr.is_Integer else _expanded(expr)


@lru_cache(maxsize=4096)
def _expanded(expr: sympy.Expr) -> Size:
    expr = sympy.expand(expr)
    return int(expr) if expr.is_Integer else expr


def add(a: Size, b: Size) -> Size:
    """a + b."""
    return a + b if isinstance(a, int) and isinstance(b, int) else _tidy(sympy.sympify(a + b))


def subtract(a: Size, b: Size) -> Size:
    """a - b."""
    return a - b if isinstance(a, int) and isinstance(b, int) else _tidy(sympy.sympify(a - b))


def multiply(a: Size, b: Size) -> Size:
    """a * b."""
    return a * b if isinstance(a, int) and isinstance(b, int) else _tidy(sympy.sympify(a * b))


def product(factors: Iterable[Size]) -> Size:
    """The product of all factors."""
    result: Size = 1
    for factor in factors:
        result = multiply(result, factor)
    return result


def divide(a: Size, b: Size) -> Size | None:
    """a / b where the division is exact for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return _divide_symbolic(a, b)


@lru_cache(maxsize=4096)
def _divide_symbolic(a: Size, b: Size) -> Size | None:
    if b == 0:
        return None
    if a == b:
        return 1
    quotient = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    numerator, denominator = sympy.fraction(sympy.together(quotient))
    return _tidy(numerator) if denominator == 1 else None


def divide_with_rest(a: Size, b: Size) -> tuple[Size, Size]:
    """(q, r) with a == q * b + r; which of the many such pairs is a guess that the caller has to check."""
    if isinstance(a, int) and isinstance(b, int):
        return divmod(a, b)
    if isinstance(a, int):
        return 0, a
    return _divide_with_rest_symbolic(a, b)


@lru_cache(maxsize=4096)
def _divide_with_rest_symbolic(a: sympy.Expr, b: Size) -> tuple[Size, Size]:
    try:
        quotient, rest = sympy.div(a, sympy.sympify(b), domain=sympy.ZZ)
    except sympy.PolynomialError:  # a size like max(s0, 1): no polynomial, so nothing to take out
        return 0, a
    return _tidy(quotient), _tidy(rest)


def is_nonnegative(a: Size) -> bool:
    """Provably a >= 0 for every value that the symbols can take."""
    return a >= 0 if isinstance(a, int) else _is_nonnegative_symbolic(a)


@lru_cache(maxsize=4096)
def _is_nonnegative_symbolic(a: sympy.Expr) -> bool:
    symbols = sorted(a.free_symbols, key=str)
    shifted = {}
    for symbol in symbols:
        if symbol.is_positive:
            # Write it as 1 + t with t >= 0: then no negative coefficient means no negative value.
            shifted[symbol] = symbol + 1
        elif not (symbol.is_nonnegative or has_unbacked(symbol)):
            return False
    expr = sympy.expand(a.subs(shifted, simultaneous=True))
    if not expr.is_polynomial(*symbols):
        return False
    return all(c >= 0 for c in sympy.Poly(expr, *symbols).coeffs()) if symbols else bool(expr >= 0)


def has_unbacked(a: Size) -> bool:
    """A symbol in it is known to the data only (torch names these u0, u1, ...; as an extent one is at least 0)."""
    return not isinstance(a, int) and any(str(symbol).startswith("u") for symbol in a.free_symbols)


def same(a: Size, b: Size) -> bool:
    """a == b for every value of the symbols."""
    return a == b if isinstance(a, int) and isinstance(b, int) else subtract(a, b) == 0


def same_shape(a: list[Size], b: list[Size]) -> bool:
    """Equal rank and equal sizes."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def contiguous_strides(shape: list[Size]) -> list[Size]:
    """Row-major strides of a dense tensor of this shape."""
    strides: list[Size] = []
    step: Size = 1
    for extent in reversed(shape):
        strides.append(step)
        step = multiply(step, extent)
    return strides[::-1]


def is_dense(tensor: torch.Tensor) -> bool:
    """Row-major without gaps, for every value of the symbols (torch's own question would add a guard)."""
    shape = [size(s) for s in tensor.shape]
    strides = [size(s) for s in tensor.stride()]
    expected = contiguous_strides(shape)
    return all(n == 1 or same(a, b) for n, a, b in zip(shape, strides, expected, strict=True))
