"""A call's launches worked out once and repeated with other addresses.

What a backend's host code does depends on shapes, strides, dtypes and options only. So it runs once per combination of
those, on stand-ins without memory, while every launch is recorded (`record`); a `Plan` then allocates the outputs and
one workspace and repeats the launches. That takes a tenth of the time of the host code, which is longer than the
kernels run at a few thousand tokens.

Recorded arguments are places: a tensor of the call and an offset. Each tensor has a stand-in of its own, so views of
one row and equal tensors are told apart. A torch operation that would compute something cannot be recorded; a call with
one has no plan and runs as written. Temporary tensors share the workspace where no launch needs both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gdn_ops.backends import launching
from gdn_ops.backends.launching import Direct, Grid, Launcher

_ALIGNMENT = 512
"""Of a temporary tensor in the workspace, in bytes; as torch's allocator aligns."""

_MOST_ADDRESSES = 128
"""Sets of addresses a plan remembers launches for: the layers of a model, and again for recomputation."""


class Place(NamedTuple):
    """An address: `offset` bytes into a call's tensor number `tensor`, or into the workspace, which comes last."""

    tensor: int
    offset: int


class _Described(NamedTuple):
    """A tensor descriptor whose base is yet to be found."""

    place: Place
    descriptor: Any


class _Address:
    """As much of a tensor as a descriptor's base has to be."""

    def __init__(self, address: int, dtype: torch.dtype):
        self._address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self._address


class Step(NamedTuple):
    """One launch; args are values, places and described places."""

    launcher: Launcher
    args: tuple[Any, ...]

    def at(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments with places filled in."""
        return tuple([_resolved(x, addresses) if isinstance(x, tuple) else x for x in self.args])


def _resolved(x: Any, addresses: tuple[int, ...]) -> Any:
    if isinstance(x, Place):
        return addresses[x.tensor] + x.offset
    described = x.descriptor
    moved = object.__new__(type(described))
    moved.__dict__.update(described.__dict__)
    moved.base = _Address(addresses[x.place.tensor] + x.place.offset, described.base.dtype)
    return moved


class Output(NamedTuple):
    """A dense tensor that the call returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan:
    """The launches of one kind of call. Safe to use from several threads."""

    def __init__(self, device: torch.device, steps: Sequence[Step], outputs: Sequence[Output], workspace: int):
        self.steps = tuple(steps)
        self.outputs = tuple(outputs)
        self.workspace_bytes = workspace
        self._is_direct = all(step.launcher.is_direct for step in self.steps)
        self._device = device
        self._index = device.index
        self._calls: dict[tuple[int, ...], tuple[Direct, ...]] = {}
        self._stream: Callable[[int], int] = triton.runtime.driver.active.get_current_stream

    def __call__(self, tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
        """Run the call on tensors like those that it was recorded for; returns its outputs."""
        index = self._index
        if index is not None and torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
        device = self._device
        outputs = tuple([torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.outputs])
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        addresses = (
            *[0 if x is None else x.data_ptr() for x in tensors],
            *[x.data_ptr() for x in outputs],
            workspace.data_ptr(),
            self._stream(self._index),
        )
        if launching.hooked() or not self._is_direct:
            for step in self.steps:
                step.launcher(step.at(addresses))
            return outputs
        calls = self._calls.get(addresses)
        if calls is None:
            calls = self._prepare(addresses)
        for function, arguments in calls:
            function(*arguments)
        return outputs

    def _prepare(self, addresses: tuple[int, ...]) -> tuple[Direct, ...]:
        calls = tuple([x.launcher.direct(addresses[-1], x.at(addresses)) for x in self.steps])
        while len(self._calls) >= _MOST_ADDRESSES:
            self._calls.pop(next(iter(self._calls)), None)
        self._calls[addresses] = calls
        return calls


# ---- recording


class _CannotRecord(Exception):
    """The host code does something that is not a launch."""


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}


def _storages(values: Any) -> set[int]:
    found: set[int] = set()
    for x in values if isinstance(values, list | tuple) else (values,):
        if isinstance(x, Tensor):
            found.add(x.untyped_storage()._cdata)
        elif isinstance(x, list | tuple):
            found |= _storages(x)
    return found


class _Recorder(TorchDispatchMode):
    """Takes launches; lets allocations and views pass and stops at every other torch operation."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, Grid, tuple[Any, ...], Mapping[str, Any]]] = []
        self._alive: list[Any] = []

    def add(self, kernel: Any, grid: Grid, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self.launches.append((kernel, grid, args, options))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._alive.append(found)  # a freed storage's identity could be given to another
        if func in _ALLOCATIONS:
            return found
        writes = any(x.alias_info is not None and x.alias_info.is_write for x in func._schema.arguments)
        results = _storages(found)
        if writes or not results or not results <= _storages(args):
            raise _CannotRecord(str(func))
        return found


class _Memory(NamedTuple):
    """One temporary tensor: bytes, and the first and last launch that takes it."""

    size: int
    first: int
    last: int


def _arrange(memories: Sequence[_Memory]) -> tuple[list[int], int]:
    """Offsets in one workspace, and its size; two overlap only if no launch takes both. Largest first, lowest fit."""
    offsets = [0] * len(memories)
    placed: list[tuple[int, int, _Memory]] = []
    for i in sorted(range(len(memories)), key=lambda i: (-memories[i].size, i)):
        memory = memories[i]
        size = -(-memory.size // _ALIGNMENT) * _ALIGNMENT
        at = 0
        for start, end, other in sorted(placed):
            if other.first <= memory.last and memory.first <= other.last and start < at + size and at < end:
                at = end
        offsets[i] = at
        placed.append((at, at + size, memory))
    return offsets, max((end for _, end, _ in placed), default=0)


def record(
    run: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]], tensors: Sequence[Tensor | None], device: torch.device
) -> Plan | None:
    """The plan of `run(tensors)`, whose launches go to `launching`; None if it does anything else.

    `run` gets tensors without memory of the same shapes, strides and dtypes, and nothing is launched. The plan is valid
    for tensors of these shapes, strides and dtypes that start at multiples of 16 bytes, on `device`.
    """
    stand_ins = [
        None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors
    ]
    recorder = _Recorder()
    before = launching.recording.recorder
    launching.recording.recorder = recorder
    try:
        with recorder:
            outputs = run(stand_ins)
    except _CannotRecord:
        return None
    finally:
        launching.recording.recorder = before
    return _plan(recorder.launches, stand_ins, outputs, device)


def _plan(
    launches: Sequence[tuple[Any, Grid, tuple[Any, ...], Mapping[str, Any]]],
    stand_ins: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    device: torch.device,
) -> Plan | None:
    owners: dict[int, int] = {}
    for i, x in enumerate((*stand_ins, *outputs)):
        if x is None:
            continue
        identity = x.untyped_storage()._cdata
        if identity in owners or x.storage_offset() != 0 or (i >= len(stand_ins) and not x.is_contiguous()):
            return None
        owners[identity] = i
    workspace = len(stand_ins) + len(outputs)
    temporaries: dict[int, int] = {}
    memories: list[_Memory] = []

    def place(x: Tensor, launch: int) -> Place:
        storage = x.untyped_storage()
        offset = int(x.storage_offset()) * x.element_size()
        owner = owners.get(storage._cdata)
        if owner is not None:
            return Place(owner, offset)
        number = temporaries.setdefault(storage._cdata, len(memories))
        if number == len(memories):
            memories.append(_Memory(storage.nbytes(), launch, launch))
        memories[number] = memories[number]._replace(last=launch)
        return Place(workspace + number, offset)  # moved into the workspace below

    recorded = []
    for i, (kernel, grid, args, options) in enumerate(launches):
        places = [
            place(x, i)
            if isinstance(x, Tensor)
            else x
            if x is None or isinstance(x, int | float)
            else _Described(place(x.base, i), x)
            for x in args
        ]
        recorded.append((*launching.compiled_for(kernel, grid, args, options), grid, places))
    offsets, size = _arrange(memories)

    def settled(x: Any) -> Any:
        if isinstance(x, _Described):
            return x._replace(place=settled(x.place))
        if isinstance(x, Place) and x.tensor >= workspace:
            return Place(workspace, offsets[x.tensor - workspace] + x.offset)
        return x

    steps = [
        Step(Launcher(compiled, grid), (*map(settled, places), *constants))
        for compiled, constants, grid, places in recorded
    ]
    return Plan(device, steps, [Output(tuple(x.shape), x.dtype) for x in outputs], size)
