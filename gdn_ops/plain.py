"""Whether PyTorch's dispatcher would do anything for a call but pass it on.

For an op that is written in Python each pass through the dispatcher takes the host about as long as five launches, and
an eager training step makes four. Where nothing listens, the public functions and their backward call the
implementation themselves. What listens: a mode (fake tensors, tracing, selective checkpointing), a function transform,
a profiler, forward-mode derivatives, or a tensor that is not simply memory on a CPU or a GPU.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from gdn_ops import settings

_TYPES = frozenset((Tensor, torch.nn.Parameter))
_NEEDED = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_dispatch_keys"),
    (torch._C, "_is_tracing"),
    (torch._C._functorch, "maybe_current_level"),
    (torch._C._autograd, "_profiler_enabled"),
    (torch.autograd.forward_ad, "_current_level"),
)
"""What of PyTorch is asked; a version without one of them always dispatches."""

_can_ask = all(hasattr(module, name) for module, name in _NEEDED)
_plain_keys: dict[int, bool] = {}
"""Whether a tensor with these dispatch keys is simply memory."""


def _nobody_listens() -> bool:
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._autograd._profiler_enabled()
        and torch.autograd.forward_ad._current_level < 0
        and not torch._C._is_tracing()
    )


def _keys(x: Tensor) -> int:
    return torch._C._dispatch_keys(x).raw_repr()


def _learn(x: Tensor) -> bool:
    with torch.inference_mode(False):
        known = x.device.type in ("cpu", "cuda") and _keys(x) == _keys(torch.empty(0, device=x.device))
    _plain_keys[_keys(x)] = known
    return known


def is_plain(tensors: Iterable[Any]) -> bool:
    """Whether a call of an op on `tensors` (or None) does nothing in the dispatcher that its kernel would miss.

    On a GPU only with the setting `fast_calls`. Not for use while a graph is traced by Dynamo.
    """
    fast_calls = settings.current().fast_calls
    if not (_can_ask and _nobody_listens()):
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) not in _TYPES or (x.is_cuda and not fast_calls):
            return False
        keys = torch._C._dispatch_keys(x).raw_repr()
        if not (_plain_keys[keys] if keys in _plain_keys else _learn(x)):
            return False
    return True
