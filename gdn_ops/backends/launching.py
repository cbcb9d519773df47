"""How a Triton kernel is launched: the one place that knows what of Triton's launcher differs between versions.

Triton works out on every launch, from every argument, which compiled kernel fits. That takes the host longer than some
kernels run. Here a launch whose arguments are of known kinds goes straight to the compiled kernel that Triton returned
for such arguments before; and a launch with known *addresses* (`plans.py`) straight to the C function underneath, with
the arguments as Triton's own launcher made them (`Launcher`). Hooks on launches, which profilers install, are
honoured: while there are any, every launch goes through Triton.
"""

import contextvars
import copy
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from gdn_ops.backends import early

Grid = tuple[int, int, int]

_MOST_KEPT = 4096
"""Compiled kernels remembered; the memory is emptied when it is full."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels, and the constants to pass to them, by everything that Triton specialises on."""


class Recorder(Protocol):
    """Takes launches instead of running them."""

    def add(self, kernel: Any, grid: Grid, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Note one launch."""


class _Recording(threading.local):
    recorder: Recorder | None = None


recording = _Recording()
"""Who takes this thread's launches; None: they run."""


def _specialization(x: Any) -> Any:
    """What a compiled kernel assumes of an argument: Triton's rules, or finer."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if x is None or isinstance(x, bool):
        return x
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    if isinstance(x, float):
        return float
    return x.base.dtype, *x.block_shape  # a tensor descriptor


def launch(kernel: Any, grid: Grid, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Launch on the current device and stream.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function; its run-time parameters come first.
        args: the run-time arguments, in order.
        options: its compile-time parameters, in order, and Triton's own (num_warps and the like).
    """
    if recording.recorder is not None:
        recording.recorder.add(kernel, grid, args, options)
        return
    options = early.with_options(kernel, options)
    key = _key(kernel, args, options)
    known = _compiled.get(key)
    if known is not None:
        compiled, constants = known
        _run(compiled, grid, (*args, *constants))
        return
    compiled = contextvars.copy_context().run(_first_launch, kernel, grid, args, options)
    if compiled is not None:
        _remember(key, kernel, compiled, args, options)


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory of one launch for TMA descriptors that a kernel makes; torch's allocator aligns it to 512 bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _first_launch(kernel: Any, grid: Grid, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Compile and launch. Runs in a copy of the caller's context: Triton keeps its allocator there."""
    triton.set_allocator(_allocate)
    return kernel[grid](*args, **options)


def _launch_with_scratch(compiled: Any, grid: Grid, args: tuple[Any, ...]) -> None:
    """Launch a kernel that needs memory of its own; in a copy of the caller's context, as above."""
    triton.set_allocator(_allocate)
    compiled[grid](*args)


def _run(compiled: Any, grid: Grid, args: tuple[Any, ...]) -> None:
    """Launch a compiled kernel through Triton, on the current stream."""
    if getattr(compiled.metadata, "global_scratch_size", 0):
        contextvars.copy_context().run(_launch_with_scratch, compiled, grid, args)
    else:
        compiled[grid](*args)


def compiled_for(
    kernel: Any, grid: Grid, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    """The compiled kernel of a launch and the constants to pass after `args`, compiled now if it has to be."""
    options = early.with_options(kernel, options)
    key = _key(kernel, args, options)
    known = _compiled.get(key)
    if known is None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        if hasattr(compiled, "result"):  # compiled in another thread
            compiled = compiled.result()
        known = _remember(key, kernel, compiled, args, options)
    return known


def _key(kernel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    return (id(kernel), torch.cuda.current_device(), *map(_specialization, args), *options.values())


def _remember(
    key: tuple[Any, ...], kernel: Any, compiled: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...]]:
    if len(_compiled) >= _MOST_KEPT:
        _compiled.clear()
    known = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
    _compiled[key] = known
    return known


# ---- the C function underneath


class Direct(NamedTuple):
    """A launch with every argument in its final form: `function(*arguments)`."""

    function: Callable[..., None]
    arguments: tuple[Any, ...]


def current_stream(device: int) -> int:
    """The handle of torch's current stream on a device."""
    return triton.runtime.driver.active.get_current_stream(device)


def hooked() -> bool:
    """Whether a profiler wants to see every launch."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


class _Taken(threading.local):
    arguments: tuple[Any, ...] = ()


_taken = _Taken()


def _take(*arguments: Any) -> None:
    _taken.arguments = arguments


class Launcher:
    """A compiled kernel on a grid, and what Triton's launcher passes to its C function for it.

    Triton's own code makes those arguments (tensor descriptors become TMA descriptors, other things are added), for a
    stand-in of the C function. `is_direct`: that is possible; otherwise Triton has to be asked at each launch.
    """

    def __init__(self, compiled: Any, grid: Grid):
        self.compiled = compiled
        self.grid = grid
        launcher = compiled.run
        self.is_direct = _has_known_shape(launcher)
        self.scratch_bytes = 0
        if self.is_direct:
            self.scratch_bytes = launcher.global_scratch_size * launcher.num_ctas * math.prod(grid)
            self._function = _innermost(launcher.launch)
            wrap = sys.modules[type(launcher).__module__].wrap_handle_tensordesc  # type: ignore[attr-defined]
            signature = dict(compiled.src.signature.items())
            self._stand_in = copy.copy(launcher)
            self._stand_in.launch = wrap(_take, signature, getattr(compiled.metadata, "tensordesc_meta", None))

    def __call__(self, args: tuple[Any, ...]) -> None:
        """Launch through Triton, on the current stream; its hooks are called."""
        _run(self.compiled, self.grid, args)

    def direct(self, stream: int, args: tuple[Any, ...], scratch: int = 0) -> Direct:
        """The launch with its final arguments, not launched; only where `is_direct`.

        `args` hold addresses instead of tensors, `scratch` is the address of `scratch_bytes`; the launch is valid for
        those.
        """
        if self.scratch_bytes:
            return contextvars.copy_context().run(self._with_scratch, stream, args, scratch)
        return self._make(stream, args)

    def _with_scratch(self, stream: int, args: tuple[Any, ...], scratch: int) -> Direct:
        """`_make`, in a copy of the caller's context: Triton keeps its allocator there."""
        triton.set_allocator(lambda size, alignment, stream: scratch)
        return self._make(stream, args)

    def _make(self, stream: int, args: tuple[Any, ...]) -> Direct:
        compiled = self.compiled
        self._stand_in(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
        arguments, _taken.arguments = _taken.arguments, ()
        return Direct(self._function, arguments)


def _has_known_shape(launcher: Any) -> bool:
    """Whether a launcher is as in Triton 3.6 to 3.9 and does nothing at a launch but call its C function."""
    return (
        hasattr(sys.modules.get(type(launcher).__module__), "wrap_handle_tensordesc")
        and hasattr(launcher, "launch")
        and hasattr(launcher, "global_scratch_size")
        and hasattr(launcher, "num_ctas")
        and getattr(launcher, "profile_scratch_size", 1) == 0
        and not getattr(launcher, "gsan_enabled", False)
        and not inspect.isfunction(_innermost(launcher.launch))
    )


def _innermost(function: Any) -> Any:
    """The C function inside the wrapper that makes TMA descriptors, or what is there."""
    if not inspect.isfunction(function):
        return function
    return inspect.getclosurevars(function).nonlocals.get("launcher", function)
