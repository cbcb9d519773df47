"""Calls of an op on a GPU that are like earlier ones, without the backend's host code.

A kind of call is everything that host code depends on: shapes, strides, dtypes, devices and options. The first call of
a kind runs as written, so that a length which never comes again costs nothing more. The second is recorded
(`backends/plans.py`), and from then on its launches are repeated. A call that a backend cannot record, one with a
tensor off 16 bytes, or one that checks values runs as written every time; so does every call while the setting
`fast_calls` is off.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import counters, settings
from gdn_ops.shapes import CHUNK

_GENERATION = 256
"""Kinds of call, those of late, that each op remembers at least; at most twice as many."""

_COPIES = {
    "q": "input_copies",
    "k": "input_copies",
    "v": "input_copies",
    "row": "input_copies",
    "do": "gradient_copies",
}
"""Arguments whose last axis has to be dense, and what counts their copies; all others have to be dense as a whole."""


class _Pinned(threading.local):
    backend: Any = None


pinned = _Pinned()
"""The backend of the call that this thread records: its stand-ins are on no device that one could be chosen by."""


def is_dense_last(x: Tensor) -> bool:
    """Whether kernels can address `x`: a dense last axis, any other strides."""
    return x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0


def is_gradient_ready(do: Tensor) -> bool:
    """Whether kernels can address the output's gradient [B,T,HV,V].

    They reckon distances between tokens of one chunk in 32 bits. For q, k and v a backend's `unsupported_reason` says
    so; the caller does not choose how autograd lays out a gradient.
    """
    is_near = do.shape[1] <= 1 or do.stride(1) * CHUNK < 2**31
    return is_dense_last(do) and (is_near or do.numel() == 0)


class _Kind(NamedTuple):
    """What is known of one kind of call: its plan, or None, and which arguments it needs copies of."""

    plan: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...] | None] | None
    copies: tuple[int, ...] = ()


_SEEN_ONCE = _Kind(None)
_WITHOUT_PLAN = _Kind(None)


class _Kinds:
    """The kinds of calls of one op, by key. Safe to use from several threads.

    In two generations: when the new one is full, it becomes the old one, and what that held is forgotten. A kind that
    is met among the old moves to the new. So those that come again and again stay, however many others come once, and
    finding one takes a look into a dict and nothing more.
    """

    def __init__(self) -> None:
        self.recent: dict[tuple[Any, ...], _Kind] = {}
        """Looked into without the lock; never changed but by `keep`."""
        self._older: dict[tuple[Any, ...], _Kind] = {}
        self._lock = threading.Lock()

    def from_older(self, key: tuple[Any, ...]) -> _Kind | None:
        """The kind of a key that is not among the recent ones, from now on one of them, or None."""
        kind = self._older.get(key)
        if kind is not None:
            self.keep(key, kind)
        return kind

    def keep(self, key: tuple[Any, ...], kind: _Kind) -> None:
        """Remember `kind`."""
        with self._lock:
            if len(self.recent) >= _GENERATION and key not in self.recent:
                self.recent, self._older = {}, self.recent
            self.recent[key] = kind


def remembered(
    run: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    backend_of: Callable[[Sequence[Any], dict[str, Any]], Any],
    count: str | None,
    counts_copies: bool = True,
) -> Callable[..., tuple[Tensor, ...]]:
    """`run`, with a memory of plans.

    Args:
        run: an op's implementation. Positional arguments are tensors or None; of the options only `row` is a tensor.
        names: those of the positional arguments.
        backend_of: which backend runs a call (arguments, options).
        count: the counter that `run` adds to, once a call, unless a backend is pinned.
        counts_copies: whether `run` counts the copies of operands that it makes.
    """
    kinds = _Kinds()

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        current = settings.current()
        if current.debug or not current.fast_calls:
            return run(*args, **kwargs)
        tensors: Sequence[Any] = (*args, kwargs["row"]) if "row" in kwargs else args
        key = (
            current.backend,
            current.cut_documents,
            current.backward_bytes,
            kwargs.get("deterministic", True) or torch.are_deterministic_algorithms_enabled(),
            *[None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors],
            *(kwargs.items() if count is None else _hashable(kwargs)),
        )
        kind = kinds.recent.get(key)
        if kind is None:
            kind = kinds.from_older(key)
        if kind is None:
            kinds.keep(key, _SEEN_ONCE)
            return run(*args, **kwargs)
        if kind is _SEEN_ONCE:
            kind = _record(run, names, backend_of, args, kwargs)
            kinds.keep(key, kind)
        if kind.plan is None:
            return run(*args, **kwargs)
        if kind.copies:
            tensors = list(tensors)
            for i in kind.copies:
                tensors[i] = tensors[i].contiguous()
        found = kind.plan(tensors)
        if found is None:
            return run(*args, **kwargs)
        for i in kind.copies if counts_copies else ():
            if names[i] in _COPIES:
                counters.count(_COPIES[names[i]])
        if count is not None:
            counters.count(count)
        return found

    return call


def _hashable(kwargs: dict[str, Any]) -> list[Any]:
    """Options with lists as tuples, without the row that is written."""
    return [(name, tuple(x) if isinstance(x, list) else x) for name, x in kwargs.items() if name != "row"]


def _is_ready(name: str, x: Tensor) -> bool:
    if name == "do":
        return is_gradient_ready(x)
    return is_dense_last(x) if name in _COPIES else x.is_contiguous()


def _copied(names: Sequence[str], args: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Places of the arguments that backends cannot take as they are."""
    return tuple(
        i for i, (name, x) in enumerate(zip(names, args, strict=False)) if x is not None and not _is_ready(name, x)
    )


def _record(
    run: Callable[..., tuple[Tensor, ...]],
    names: Sequence[str],
    backend_of: Callable[[Sequence[Any], dict[str, Any]], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Kind:
    """What is known of the kind of this call; nothing is run."""
    if any(x is not None and x.data_ptr() % 16 for x in args):  # may get another backend than its kind does otherwise
        return _SEEN_ONCE
    copies = _copied(names, args)
    # As the call written out: the backend is chosen for the copies, which may suit one that the originals do not.
    ready = [x.contiguous() if i in copies else x for i, x in enumerate(args)]
    backend = backend_of(ready, kwargs)
    row = {"row": kwargs["row"]} if "row" in kwargs else {}
    present = [x for x in (*args, *row.values()) if x is not None]
    device = present[0].device
    if not hasattr(backend, "record") or any(x.device != device for x in present):
        return _WITHOUT_PLAN

    def on_stand_ins(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        stand_in = {"row": tensors[-1]} if row else {}
        return run(*tensors[: len(args)], **{**kwargs, **stand_in})

    pinned.backend = backend
    try:
        # Kernels are loaded, and limits asked, for the device that is the current one.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            return _Kind(backend.record(on_stand_ins, [*ready, *row.values()], device), copies)
    finally:
        pinned.backend = None
