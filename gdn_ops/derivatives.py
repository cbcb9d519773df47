"""First derivatives only, by autograd itself: others are an error, never a number that lacks a term."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What torch asks in `autograd.Function.apply`; where a version has no such function, torch's error has to do.
transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def refuse_transforms() -> None:
    """Say what to use instead, where torch would say that an autograd.Function must override a method. Nothing is
    refused that torch takes."""
    if transforms_active():
        raise NotImplementedError(
            "gated delta rule: torch.func transforms other than vmap (grad, vjp, jacrev and the like) are not "
            "supported; take derivatives with torch.autograd.grad or backward()"
        )


class _NoSecondDerivative(torch.autograd.Function):
    """Identity on gradients that also depends on what they were computed from; differentiating it raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RuntimeError("gated delta rule: no second derivative (double backward through a gradient of the op)")


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Decorate the backward of an autograd.Function whose own derivative is not implemented.

    torch's `once_differentiable` ties its error to *incoming* gradients that require grad. A loss that is linear in the
    output sends one that does not, and the gradient would come back as a constant: a gradient penalty then vanishes.

    `backward` takes (ctx, saved, *grads): activation checkpointing lets saved tensors be unpacked only once.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():  # no graph of this backward was asked for
            return found
        sources = [x for x in (*saved, *grads) if x is not None and x.requires_grad]
        places = [i for i, x in enumerate(found) if x is not None]
        if not sources or not places:
            return found
        tied = _NoSecondDerivative.apply(len(places), *(found[i] for i in places), *sources)
        result = list(found)
        for i, x in zip(places, tied, strict=True):
            result[i] = x
        return tuple(result)

    return run
