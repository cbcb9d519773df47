"""The pass (opt-in): an L2 norm of the operands in front of the op moves into the op.

    before                                            after
    qn = x * rsqrt(sum(x * x, -1) + eps)              o = fwd(x, ..., <switch>=True)
    o = fwd(qn, ...)                                  dx = bwd(..., x, ..., <switch>=True)
    dqn = bwd(..., qn, ...)
    dx = <the norm's backward>(dqn, x)

A norm has many spellings (F.normalize, rsqrt, sqrt and a division, a cast on the way), and its backward has more. So it
is recognised by what it computes: both regions are evaluated in float64 on a few random vectors at each of nine scales,
with elements around 1e-6 up to 1e2. Both have to agree to six digits, at every scale, with one of two functions and its
gradient: the op's own x / sqrt(sum(x^2) + eps), or x / norm(x), which F.normalize is for norms above its 1e-12.
Any other eps, or anything that is not the same function of small and of large vectors, is left.

What changes is then exactly this. The op's own formula: roundings. F.normalize and x / norm: a vector of norm n gets
the factor 1 / sqrt(n^2 + eps) in place of 1 / max(n, 1e-12) or 1 / n (so 0 in place of NaN for a vector of zeros), and
the gradient belonging to it: eps / (2 n^2) relative for n^2 well above eps, which is 5e-7 at n = 1 with the op's 1e-6,
and a vector much shorter than 1e-3 stays short. So the pass is off unless it is asked for.

Conditions: every norm operand of the call is such a norm of a tensor of its own shape and dtype, over the last axis;
its gradient goes into the backward of that norm and nowhere else; outputs of the forward whose size changes are used
by the backward alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from inductor_passes.edits import erase_unused, outputs_of, outputs_stay_inside, update_value
from inductor_passes.moves import arguments
from inductor_passes.operand_views import is_private
from inductor_passes.registry import PackedVariant
from inductor_passes.sizes import same, same_shape, shape_of

aten = torch.ops.aten

_KEEP_VALUE = {
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_COMPUTE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.square.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.reciprocal.default,
    aten.sum.dim_IntList,
    aten.linalg_vector_norm.default,
    aten.clamp_min.default,
    aten.where.self,
    aten.where.ScalarOther,
    aten.masked_fill.Scalar,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.eq.Scalar,
    aten.ne.Scalar,
    aten.logical_and.default,
    aten.zeros_like.default,
}


@dataclass(frozen=True)
class Norm:
    """One operand: `source` is normalised into `operand`; by backward call, the gradient and the norm's gradient."""

    name: str
    operand: Node
    source: Node
    gradients: dict[Node, tuple[Node, Node]]


class Source(NamedTuple):
    """The tensor that an operand is the norm of, and the eps in x / sqrt(sum(x^2) + eps): the op's, or 0."""

    node: Node
    eps: float


@dataclass(frozen=True)
class NormPlan:
    """One forward call, its backward calls, and the norms to move into them."""

    fwd: Node | None
    bwds: list[Node]
    norms: list[Norm]


# ------------------------------------------------------------------------------------------------------------ looking
class _Evaluation:
    """Runs a region of the graph on small values; `run` gives None where a node does not belong to the region."""

    def __init__(self, known: dict[Node, Tensor], like: Node) -> None:
        self._values: dict[Node, Tensor | None] = dict(known)
        self._shape = shape_of(like)
        self._small = known[like].shape

    def run(self, node: Node) -> Tensor | None:
        """The node's value, from the known ones alone."""
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Node) -> Tensor | None:
        if node.target is aten.scalar_tensor.default:
            return torch.tensor(float(node.args[0]), dtype=torch.float64)  # type: ignore[arg-type]
        if node.target in _RESHAPES or node.target is aten.expand.default:
            # Sizes in the arguments are the tensor's, not the sample's (and may be nodes of their own).
            source = node.args[0]
            assert isinstance(source, Node)
            value = self.run(source)
            if value is None:
                return None
            return (
                self._expanded(node, value) if node.target is aten.expand.default else _with_ones(node, source, value)
            )
        if node.target not in _COMPUTE and node.target not in _KEEP_VALUE:
            return None
        if any(self.run(source) is None for source in node.all_input_nodes):
            return None
        if node.target in _KEEP_VALUE:
            return self.run(node.args[0])  # type: ignore[arg-type]
        args, kwargs = tree_map_only(Node, self.run, (tuple(node.args), dict(node.kwargs)))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _expanded(self, node: Node, value: Tensor) -> Tensor | None:
        shape = self._small_shape(node)
        return None if shape is None else value.expand(shape)

    def _small_shape(self, node: Node) -> list[int] | None:
        shape = shape_of(node)
        if len(shape) != len(self._shape):
            return None
        small = []
        for extent, full, little in zip(shape, self._shape, self._small, strict=True):
            if not same(extent, full) and extent != 1:
                return None
            small.append(int(little) if same(extent, full) else 1)
        return small


def _with_ones(node: Node, source: Node, value: Tensor) -> Tensor | None:
    """A reshape of the sample, where all it does is to add or drop axes of size 1."""
    before = [extent for extent in shape_of(source) if extent != 1]
    after = shape_of(node)
    if not same_shape(before, [extent for extent in after if extent != 1]):
        return None
    extents = iter(extent for extent in value.shape if extent != 1)
    return value.reshape([1 if extent == 1 else next(extents) for extent in after])


def _sample(node: Node, seed: int) -> Tensor:
    """A few small vectors in the place of a tensor: its last axis, and leading sizes that no other size equals."""
    *lead, last = shape_of(node)
    shape = [*(1 if extent == 1 else 2 + dim for dim, extent in enumerate(lead)), int(last)]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _formula(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _formula_backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return r * dy - x * r**3 * (x * dy).sum(-1, keepdim=True)


_SCALES = tuple(10.0**power for power in range(-6, 3))
"""Of the samples: what is the same function at one scale may clamp, or have another eps, that shows at another."""


def _agree(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9 * float(b.abs().max()))


def _norm_eps(operand: Node, source: Node, eps: float) -> float | None:
    """Which eps, of 0 and this one, makes `operand` the norm of `source` at every scale; None if neither does."""
    sample = _sample(source, 0)
    found = [eps, 0.0]
    for scale in _SCALES:
        x = scale * sample
        value = _Evaluation({source: x}, source).run(operand)
        found = [candidate for candidate in found if _agree(value, _formula(x, candidate))]
        if not found:
            return None
    return found[0]


def find_source(operand: Node, eps: float) -> Source | None:
    """The tensor that `operand` is the L2 norm of, over the last axis, or None. Looks only."""
    shape, dtype = shape_of(operand), operand.meta["val"].dtype
    if not shape or not isinstance(shape[-1], int) or shape[-1] < 2:
        return None
    queue, seen = [operand], {operand}
    while queue:
        node = queue.pop(0)
        if node is not operand and same_shape(shape_of(node), shape) and node.meta["val"].dtype == dtype:
            found = _norm_eps(operand, node, eps)
            if found is not None:
                return Source(node, found)
        if node.target in _COMPUTE or node.target in _KEEP_VALUE or node.target in (aten.expand.default, *_RESHAPES):
            new = [n for n in node.all_input_nodes if n not in seen and isinstance(n.meta.get("val"), Tensor)]
            seen.update(new)
            queue += new
    return None


class _NormBackward:
    """The norm's backward at every scale, next to what the graph computes."""

    def __init__(self, gradient: Node, source: Source) -> None:
        x, dy = _sample(source.node, 1), _sample(source.node, 2)
        self._runs = [
            (
                _Evaluation({source.node: scale * x, gradient: dy}, source.node),
                _formula_backward(dy, scale * x, source.eps),
            )
            for scale in _SCALES
        ]

    def reaches(self, node: Node) -> bool:
        """The node can be computed from the norm's input and the gradient alone."""
        return self._runs[0][0].run(node) is not None

    def is_result(self, node: Node) -> bool:
        """The node is the norm's gradient."""
        return all(_agree(evaluation.run(node), expected) for evaluation, expected in self._runs)


def find_norm_gradient(gradient: Node, source: Source) -> Node | None:
    """The node that takes a gradient through the norm of `source`, if all of the gradient's uses lead there."""
    backward = _NormBackward(gradient, source)
    end: Node | None = None
    inside = {gradient}
    queue = [gradient]
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user in inside or user.op != "call_function" or not backward.reaches(user):
                continue
            inside.add(user)
            fits = user.meta["val"].dtype == gradient.meta["val"].dtype and same_shape(
                shape_of(user), shape_of(source.node)
            )
            if end is None and fits and backward.is_result(user):
                end = user  # what computes on with it is no longer the norm's
            else:
                queue.append(user)
    leaving = [node for node in inside if any(user not in inside for user in node.users)]
    return end if end is not None and leaving == [end] else None


def find_norms(variant: PackedVariant, fwd: Node | None, bwds: list[Node]) -> NormPlan | None:
    """What moving the norms of one call into the op takes, or None if it cannot be done. Looks only."""
    # The regions are evaluated on real values, though compilers run passes in a fake mode.
    with _disable_current_modes(), torch.no_grad():
        return _find_norms(variant, fwd, bwds)


def are_norms(variant: PackedVariant, fwd: Node | None) -> bool:
    """Whether every norm operand of a call is normalised in front of the op, as the op could do it. Looks only."""
    if variant.norm_switch is None or not variant.norm_operands or fwd is None:
        return False
    given = arguments(fwd)
    operands = [given[name] for name in variant.norm_operands]
    with _disable_current_modes(), torch.no_grad():
        return not given[variant.norm_switch] and all(
            isinstance(operand, Node) and find_source(operand, variant.norm_eps) is not None for operand in operands
        )


def _find_norms(variant: PackedVariant, fwd: Node | None, bwds: list[Node]) -> NormPlan | None:
    callers = [node for node in (fwd, *bwds) if node is not None]
    if variant.norm_switch is None or not variant.norm_operands or not callers:
        return None
    given = [arguments(node) for node in callers]
    if any(a[variant.norm_switch] for a in given):
        return None
    norms = []
    for name in variant.norm_operands:
        operand = given[0][name]
        if not isinstance(operand, Node) or any(a[name] is not operand for a in given):
            return None
        source = find_source(operand, variant.norm_eps)
        if source is None or (bwds and not is_private(source.node)):
            return None
        gradients = {}
        index = variant.gradients[variant.operands.index(name)]
        for bwd in bwds:
            gradient = outputs_of(bwd).get(index)
            if gradient is None or not gradient.users:
                continue
            end = find_norm_gradient(gradient, source)
            if end is None:
                return None
            gradients[bwd] = (gradient, end)
        norms.append(Norm(name, operand, source.node, gradients))
    replaced = {norm.operand: norm.source.meta["val"] for norm in norms}
    if fwd is not None and outputs_stay_inside(fwd, bwds, replaced, {variant.norm_switch: True}) is None:
        return None
    return NormPlan(fwd, bwds, norms)


# ------------------------------------------------------------------------------------------------------------ editing
def replace_norms(graph: Graph, plan: NormPlan, variant: PackedVariant) -> None:
    """Do what a plan says."""
    callers = [node for node in (plan.fwd, *plan.bwds) if node is not None]
    assert variant.norm_switch is not None
    for node in callers:
        names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        for norm in plan.norms:
            if norm.name in node.kwargs:
                node.update_kwarg(norm.name, norm.source)
            else:
                node.update_arg(names.index(norm.name), norm.source)
        position = names.index(variant.norm_switch)
        if position < len(node.args):
            node.update_arg(position, True)
        else:
            node.update_kwarg(variant.norm_switch, True)
        update_value(node)
        for item in outputs_of(node).values():
            update_value(item)
    for norm in plan.norms:
        for gradient, end in norm.gradients.values():
            end.replace_all_uses_with(gradient)
            erase_unused(graph, end)
