"""Runs the Hopper backend's kernels on a CPU, instruction by instruction of their source, with PyTorch.

What a kernel's Python source says is carried out with tensors: pointers, TMA tiles with their bounds, asynchronous
products (at once), mbarriers with their phases, arrivals and bytes, and a warp-specialised kernel's partitions as
threads that wait for each other by those barriers alone. So indices, masks, phases, barrier counts and rounding are
checked without a GPU; layouts, swizzles, registers and the hardware's own memory ordering are not.

Shared memory starts as NaN. A pointer that leaves its tensor's storage and a barrier nobody completes raise. So does a
kernel that may start before earlier ones have ended (`early.py`), and in one of its programs touches memory or ends
before it has waited for them.
"""

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from gdn_ops.backends import early, launching
from gdn_ops.backends.hopper import gradients

_DEADLOCK_SECONDS = 20.0
_MULTIPROCESSORS = 3

_changed = threading.Condition()
"""Held while a barrier changes; notified after."""
_place = threading.local()
"""`program`: this thread's program ids; `failed`: what stops the other partitions of a program that raised; `waited`:
whether the program has waited for earlier kernels; `stores`: those of a partition that may still read their tiles."""


class Block(torch.Tensor):
    """A tensor with the attributes of a Triton value that kernels look at."""

    @property
    def type(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(layout=None)

    def to(self, *args: Any, bitcast: bool = False, **options: Any) -> Any:
        return self.view(*args) if bitcast else super().to(*args, **options)

    # `x += y` gives a kernel's name another value; it does not change the value that other names have.
    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other


def _block(x: Any) -> Any:
    return torch.as_tensor(x).as_subclass(Block)


class _Pointer:
    """Elements of one tensor's storage."""

    def __init__(self, memory: Tensor, offset: Any):
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def to_start(cls, x: Tensor) -> "_Pointer":
        elements = x.untyped_storage().nbytes() // x.element_size()
        return cls(x.as_strided((elements,), (1,), 0), _block(x.storage_offset()))

    def __add__(self, offset: Any) -> "_Pointer":
        return _Pointer(self.memory, self.offset + offset)

    def __getitem__(self, index: Any) -> "_Pointer":
        return _Pointer(self.memory, self.offset[index])

    def _where(self, mask: Any) -> tuple[Tensor, Tensor]:
        assert _place.waited, "memory is touched before earlier kernels have ended"
        at, mask = torch.broadcast_tensors(torch.as_tensor(self.offset).long(), torch.as_tensor(mask, dtype=torch.bool))
        assert not (mask & ((at < 0) | (at >= self.memory.numel()))).any(), "a pointer leaves its tensor's storage"
        return torch.where(mask, at, 0), mask

    def load(self, mask: Any = True, other: Any = 0.0) -> Block:
        at, mask = self._where(mask)
        if self.memory.numel() == 0:
            return _block(torch.as_tensor(other).expand(mask.shape))
        return _block(torch.where(mask, self.memory[at], torch.as_tensor(other).to(self.memory.dtype)))

    def store(self, value: Any, mask: Any = True) -> None:
        at, mask = self._where(mask)
        value = torch.as_tensor(value).to(self.memory.dtype)
        at, mask, value = torch.broadcast_tensors(at, mask, value)
        self.memory[at[mask].as_subclass(torch.Tensor)] = value[mask].as_subclass(torch.Tensor)


class _Shared:
    """A tile in shared memory, or a view of one."""

    def __init__(self, data: Tensor):
        self.data, self.dtype, self.shape = data, data.dtype, tuple(data.shape)

    def index(self, i: Any) -> "_Shared":
        return _Shared(self.data[int(i)])

    def slice(self, start: int, length: int) -> "_Shared":
        return _Shared(self.data[start : start + length])

    def permute(self, order: tuple[int, ...]) -> "_Shared":
        return _Shared(self.data.permute(order))

    def load(self, layout: Any) -> Block:
        return _block(self.data.clone())

    def store(self, value: Tensor) -> None:
        assert value.dtype == self.dtype, "a tile is stored in its own dtype"
        self.data.copy_(value.expand(self.shape))


class _Descriptor:
    """A TMA descriptor inside a kernel."""

    def __init__(self, given: TensorDescriptor):
        self.dtype, self.block = given.base.dtype, tuple(given.block_shape)
        self.data = given.base.as_strided(given.shape, given.strides, given.base.storage_offset())

    def tiles(self, corner: list[Any], tile: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of tensor and tile that lie on each other."""
        assert _place.waited, "memory is touched before earlier kernels have ended"
        rows, cols = (int(x) for x in corner)
        assert tuple(tile.shape) == self.block, "tile and descriptor differ in shape"
        part = self.data[max(rows, 0) : rows + self.block[0], max(cols, 0) : cols + self.block[1]]
        top, left = max(-rows, 0), max(-cols, 0)
        return part, tile[top : top + part.shape[0], left : left + part.shape[1]]


class _Barrier:
    def __init__(self, count: int):
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def change(self, arrivals: int, num_bytes: int) -> None:
        with _changed:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase ^ 1
            _changed.notify_all()


_barriers: dict[tuple[int, int], _Barrier] = {}


def _barrier_of(x: _Shared) -> _Barrier:
    return _barriers[x.data.untyped_storage().data_ptr(), x.data.storage_offset()]


class _mbarrier:
    @staticmethod
    def MBarrierLayout() -> None:
        return None

    @staticmethod
    def init(bar: _Shared, count: int) -> None:
        _barriers[bar.data.untyped_storage().data_ptr(), bar.data.storage_offset()] = _Barrier(count)

    @staticmethod
    def expect(bar: _Shared, num_bytes: int, pred: Any = True) -> None:
        if pred:
            _barrier_of(bar).change(1, int(num_bytes))

    @staticmethod
    def arrive(bar: _Shared, count: int = 1, pred: Any = True) -> None:
        if pred:
            _barrier_of(bar).change(count, 0)

    @staticmethod
    def wait(bar: _Shared, phase: Any) -> None:
        barrier = _barrier_of(bar)
        with _changed:
            done = _changed.wait_for(lambda: barrier.phase != int(phase) or _place.failed, _DEADLOCK_SECONDS)
        assert done and not _place.failed, "a barrier is never completed"


def _async_load(desc: _Descriptor, corner: list[Any], bar: _Shared, tile: _Shared, pred: Any = True) -> None:
    if pred:
        tile.data.zero_()
        source, target = desc.tiles(corner, tile.data)
        target.copy_(source)
        _barrier_of(bar).change(0, -tile.data.numel() * tile.data.element_size())


def _async_store(desc: _Descriptor, corner: list[Any], tile: _Shared) -> None:
    _place.stores.append(desc.tiles(corner, tile.data))


def _store_wait(pending: int) -> None:
    """A store takes its tile no earlier than it must, so that a tile that is filled too early shows."""
    while len(_place.stores) > pending:
        target, source = _place.stores.pop(0)
        target.copy_(source)


def _warpgroup_mma(a: Any, b: _Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False) -> Block:
    left = a.data if isinstance(a, _Shared) else a
    assert left.dtype == b.dtype, "operands of one dtype"
    product = _product(left, b.data)
    assert product.shape == acc.shape
    return _block(acc + product if use_acc else product)


def _warpgroup_mma_wait(outstanding: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.as_subclass(torch.Tensor).double() @ b.as_subclass(torch.Tensor).double()).float()


def _cut(x: Tensor) -> Tensor:
    """As the tensor cores take a float32 operand: without the last 13 bits of its fraction."""
    bits = x.as_subclass(torch.Tensor).contiguous().view(torch.int32)
    return (bits & ~0x1FFF).view(torch.float32)


def _mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: str) -> Block:
    assert input_precision == "tf32" and a.dtype == b.dtype == torch.float32
    return _block(acc + _product(_cut(a), _cut(b)))


def _warp_specialize(partitions: list[Any], *sizes: Any) -> None:
    errors: list[Exception] = []
    place = dict(_place.__dict__)
    failed: list[bool] = place["failed"]

    def run(partition: Callable[..., None], args: tuple[Any, ...]) -> None:
        _place.__dict__.update(place)
        _place.stores = []
        try:
            with torch.no_grad():  # which a new thread does not have from the one that started it
                partition(*args)
            assert not _place.stores, "a partition ends before its stores"
        except Exception as error:  # noqa: BLE001  (raised again below, in the thread that started this one)
            errors.append(error)
            with _changed:
                failed.append(True)
                _changed.notify_all()

    threads = [threading.Thread(target=run, args=x) for x in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _cumsum(x: Tensor, axis: int, reverse: bool = False) -> Tensor:
    return x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)


def _dot(a: Tensor, b: Tensor, acc: Tensor | None = None, input_precision: str | None = None) -> Block:
    return _block(_product(a, b) if acc is None else acc + _product(a, b))


def _inline_asm(asm: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> None:
    assert not is_pure, "what is pure may be moved or left out"
    assert asm.startswith("griddepcontrol.")
    if asm.startswith("griddepcontrol.wait"):
        _place.waited = True


def _arange(start: int, end: int, layout: Any = None) -> Block:
    return _block(torch.arange(start, end))


class _Language:
    """What kernels use of `triton.language` and of Gluon's, under the names they use; layouts mean nothing here."""

    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    int32, int64 = torch.int32, torch.int64
    constexpr = staticmethod(lambda x: x)
    load = staticmethod(lambda at, **options: at.load(**options))
    store = staticmethod(lambda at, value, **options: at.store(value, **options))
    arange = staticmethod(_arange)
    inline_asm_elementwise = staticmethod(_inline_asm)
    program_id = staticmethod(lambda axis: _block(_place.program[axis]))
    full = staticmethod(lambda shape, value, dtype, layout=None: _block(torch.full(shape, value, dtype=dtype)))
    zeros = staticmethod(lambda shape, dtype: _block(torch.zeros(shape, dtype=dtype)))
    where = staticmethod(lambda c, a, b: _block(torch.where(torch.as_tensor(c), a, b)))
    maximum = staticmethod(lambda a, b: _block(torch.fmax(torch.as_tensor(a), torch.as_tensor(b))))
    minimum = staticmethod(lambda a, b: _block(torch.fmin(torch.as_tensor(a), torch.as_tensor(b))))
    exp, exp2, log, log2 = (staticmethod(f) for f in (torch.exp, torch.exp2, torch.log, torch.log2))
    abs, sqrt, sigmoid, sum = (staticmethod(f) for f in (torch.abs, torch.sqrt, torch.sigmoid, torch.sum))
    rsqrt = staticmethod(torch.rsqrt)
    reshape, permute = staticmethod(torch.reshape), staticmethod(torch.permute)
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))
    split = staticmethod(lambda x: x.unbind(-1))
    broadcast_to = staticmethod(torch.broadcast_to)
    trans = staticmethod(lambda x: x.mT)
    dot, cumsum = staticmethod(_dot), staticmethod(_cumsum)
    convert_layout = staticmethod(lambda x, layout: x)
    static_range = range
    allocate_shared_memory = staticmethod(lambda dtype, shape, layout: _Shared(_uninitialized(dtype, shape)))
    warp_specialize = staticmethod(_warp_specialize)

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout"):
            return lambda *args, **options: None
        raise AttributeError(name)


def _uninitialized(dtype: torch.dtype, shape: list[int]) -> Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def _reinterpret(x: _Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> _Shared:
    assert dtype == x.dtype
    return _Shared(x.data.view(shape))


_language = _Language()
_REPLACED = {
    "gl": _language, "tl": _language, "mbarrier": _mbarrier, "async_load": _async_load, "async_store": _async_store,
    "warpgroup_mma": _warpgroup_mma, "warpgroup_mma_wait": _warpgroup_mma_wait, "reinterpret": _reinterpret,
    "mma_v2": _mma_v2, "fence_async_shared": lambda: None, "barrier": lambda: None, "store_wait": _store_wait,
}  # fmt: skip
_emulated: dict[JITFunction, Callable[..., Any]] = {}


def _function(kernel: JITFunction) -> Callable[..., Any]:
    if kernel in _emulated:
        return _emulated[kernel]
    source = kernel.fn
    names = dict(source.__globals__)
    result = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    _emulated[kernel] = result
    for name in source.__code__.co_names:
        x = _REPLACED.get(name, names.get(name))
        if isinstance(x, JITFunction):
            x = _function(x)
        elif type(x).__name__ == "constexpr":
            x = x.value
        if name in names or name in _REPLACED:
            names[name] = x
    return result


def _argument(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Pointer.to_start(x)
    if isinstance(x, int):
        return _block(x)
    return _Descriptor(x) if isinstance(x, TensorDescriptor) else x


class _Emulator:
    """Takes launches instead of Triton."""

    def __init__(self, launched: list[str] | None):
        self._launched = launched

    def add(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if self._launched is not None:
            self._launched.append(kernel.fn.__name__)
        run = _function(kernel)
        given = [_argument(x) for x in args]
        names = kernel.arg_names
        constants = {name: x for name, x in options.items() if name in names}
        starts_early = names[-1] == early.PARAMETER
        if starts_early:
            constants[early.PARAMETER] = early._WAITS
        recording, launching.recording.recorder = launching.recording.recorder, None
        try:
            for program in itertools.product(*(range(n) for n in grid)):
                _place.program, _place.failed, _place.waited = program, [], not starts_early
                _place.stores = []
                _barriers.clear()
                run(*given, **constants)
                assert not _place.stores, "a program ends before its stores"
                assert _place.waited, "a program ends before earlier kernels have"
        finally:
            launching.recording.recorder = recording


@contextlib.contextmanager
def emulated(launched: list[str] | None = None) -> Iterator[None]:
    """Within this, the Hopper backend runs on CPU tensors, for a device of three multiprocessors.

    launched: gets the names of the kernels that are launched, in order.
    """
    names = gradients.gradients.__globals__ if hasattr(gradients, "gradients") else gradients.__globals__
    multiprocessors, names["multiprocessors"] = names["multiprocessors"], lambda: _MULTIPROCESSORS
    launching.recording.recorder = _Emulator(launched)
    try:
        yield
    finally:
        launching.recording.recorder = None
        names["multiprocessors"] = multiprocessors
