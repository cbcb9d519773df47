"""The `gdn::` ops: schemas, fakes, and the step from an op to the backend that runs it.

A fake is the allocation of `outputs.py` and nothing else; a real call is the same allocation, filled by a backend.
Backends are imported at the first call that needs one, so `import gdn_ops` loads no kernel.
"""

import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdn_ops import counters, settings
from gdn_ops.outputs import (
    Backward,
    Forward,
    allocate_chunk_bwd,
    allocate_chunk_fwd,
    allocate_row,
    gradient_target,
    saved_matrices,
)
from gdn_ops.repeats import is_dense_last, is_gradient_ready, pinned, remembered
from gdn_ops.shapes import SAVE_LEVELS, Inputs, Options, RowLayout, Saved, packed_layouts, packed_width

lib = torch.library.Library("gdn", "DEF")

# Any strides may come in: without this tag Inductor would copy q, k and v into full-row-strided buffers first.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_OPTIONAL_INPUTS = "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None"
_OPTIONS = (
    "float scale, bool use_qk_l2norm=False, bool use_beta_sigmoid=False, bool allow_neg_eigval=False, "
    "bool deterministic=True"
)
_SAVED = "Tensor norms, Tensor gates, Tensor solve, Tensor scores, Tensor states, Tensor updates, Tensor checkpoints"
_QKV = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_HEADS = "int num_qk_heads, int num_v_heads, int head_dim"
_LAYOUTS = "int[] q_layout, int[] k_layout, int[] v_layout"
_FORWARD = f"(Tensor o, Tensor final_state, {_SAVED})"
_SMALL_GRADS = "Tensor dg, Tensor dbeta, Tensor d_initial_state, Tensor dA_log, Tensor ddt_bias"
_BACKWARD_ARGS = f"Tensor do, Tensor? dfinal_state, {_QKV}, {_SAVED}, {_OPTIONAL_INPUTS}, *, {_OPTIONS}"

SCHEMAS = {
    "chunk_fwd": f"({_QKV}, {_OPTIONAL_INPUTS}, *, {_OPTIONS}, "
    f'bool output_final_state=False, str save="solve") -> {_FORWARD}',
    "chunk_bwd": f"({_BACKWARD_ARGS}) -> (Tensor dq, Tensor dk, Tensor dv, {_SMALL_GRADS})",
    "chunk_bwd_row": f"({_BACKWARD_ARGS}, int row_width, {_LAYOUTS}, bool zero_init=False) "
    f"-> (Tensor drow, Tensor dq, Tensor dk, Tensor dv, {_SMALL_GRADS})",
    "chunk_bwd_row_": f"({_BACKWARD_ARGS}, Tensor(a!) row, {_LAYOUTS}) "
    f"-> (Tensor dq, Tensor dk, Tensor dv, {_SMALL_GRADS})",
    "chunk_packed_fwd": f"(Tensor row, Tensor g, Tensor beta, {_OPTIONAL_INPUTS}, *, {_HEADS}, {_OPTIONS}, "
    f'bool output_final_state=False, str save="solve") -> {_FORWARD}',
    "chunk_packed_bwd": f"(Tensor do, Tensor? dfinal_state, Tensor row, Tensor g, Tensor beta, {_SAVED}, "
    f"{_OPTIONAL_INPUTS}, *, {_HEADS}, {_OPTIONS}) -> (Tensor drow, {_SMALL_GRADS})",
}
"""Argument and result lists of every op, by name (namespace `gdn`)."""

# ---- from an op to a backend

_AUTO = {"cpu": ("cpu",), "cuda": ("hopper", "triton")}


@functools.cache
def _load(name: str) -> Any:
    return importlib.import_module(f"gdn_ops.backends.{name}")


def backend_for(inputs: Inputs, options: Options) -> Any:
    """The backend module that runs a call.

    Raises NotImplementedError, with every candidate's reason, if none supports it; a backend that was asked for by
    name in the settings never falls back to another.
    """
    if pinned.backend is not None:
        return pinned.backend
    wanted = settings.current().backend
    candidates = _AUTO.get(inputs.q.device.type, ()) if wanted == "auto" else (wanted,)
    reasons = []
    for name in candidates:
        backend = _load(name)
        reason = backend.unsupported_reason(inputs, options)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"no backend for device {inputs.q.device}" + (": " + "; ".join(reasons) if reasons else "")
    )


def _dense_last(x: Tensor, counter: str) -> Tensor:
    """`x` itself where kernels can address it (dense last axis, any other strides), else a counted copy."""
    if is_dense_last(x):
        return x
    counters.count(counter)
    return x.contiguous()


def _ready_gradient(do: Tensor) -> Tensor:
    """The output's gradient where kernels can address it, else a counted copy."""
    if is_gradient_ready(do):
        return do
    counters.count("gradient_copies")
    return do.contiguous()


def _ready(inputs: Inputs) -> Inputs:
    """Operands as backends take them; the per-head scalars are small enough to be made dense without counting."""

    def dense(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.contiguous()

    q, k, v = (_dense_last(x, "input_copies") for x in inputs[:3])
    return Inputs(
        q,
        k,
        v,
        inputs.g.contiguous(),
        inputs.beta.contiguous(),
        dense(inputs.initial_state),
        dense(inputs.cu_seqlens),
        dense(inputs.A_log),
        dense(inputs.dt_bias),
    )


_warned_deterministic = False


def _ready_options(options: Options) -> Options:
    """Hold the deterministic route where the process asked torch for deterministic algorithms."""
    global _warned_deterministic
    if options.deterministic or not torch.are_deterministic_algorithms_enabled():
        return options
    if not _warned_deterministic:
        _warned_deterministic = True
        warnings.warn(
            "deterministic=False was asked for, but torch.use_deterministic_algorithms(True) is on: "
            "the deterministic route is used",
            stacklevel=2,
        )
    return options._replace(deterministic=True)


def check_cu_seqlens_values(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError if document boundaries do not start at 0, decrease, or pass the last token (reads values)."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected to start at 0, got {bounds[0]}")
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        if b < a:
            raise ValueError(f"cu_seqlens: expected never to decrease, got {a} then {b} at index {i + 1}")
    if bounds[-1] > num_tokens:
        raise ValueError(f"cu_seqlens: expected to end at or before T = {num_tokens}, got {bounds[-1]}")


def _check_values(inputs: Inputs) -> None:
    """On a CPU always, on a GPU in debug mode only: reading values there would wait for the device."""
    cu = inputs.cu_seqlens
    if cu is not None and (cu.device.type == "cpu" or settings.current().debug):
        check_cu_seqlens_values(cu, inputs.q.shape[1])


# ---- the ops on real values; `args` are the schema's, defaults filled in by the dispatcher


class _Call(NamedTuple):
    """A backward call, ready for a backend."""

    do: Tensor
    dfinal_state: Tensor | None
    inputs: Inputs
    saved: Saved
    options: Options


def _fill_chunk_fwd(inputs: Inputs, options: Options, output_final_state: bool, save: str) -> Forward:
    if save not in SAVE_LEVELS:
        raise ValueError(f"save: expected one of {SAVE_LEVELS}, got {save!r}")
    inputs, options = _ready(inputs), _ready_options(options)
    _check_values(inputs)
    out = allocate_chunk_fwd(
        inputs, output_final_state=output_final_state, use_qk_l2norm=options.use_qk_l2norm, save=save
    )
    backend_for(inputs, options).chunk_fwd(out, inputs, options, save)
    return out


def _fill_chunk_bwd(call: _Call, out: Backward, targets: tuple[Tensor, Tensor, Tensor]) -> None:
    inputs, options = _ready(call.inputs), _ready_options(call.options)
    dfinal_state = None if call.dfinal_state is None else call.dfinal_state.contiguous()
    do = _ready_gradient(call.do)
    filled = out._replace(dq=targets[0], dk=targets[1], dv=targets[2])
    saved = saved_matrices(call.saved, inputs)
    backend_for(inputs, options).chunk_bwd(filled, do, dfinal_state, inputs, saved, options)


def _targets(
    inputs: Inputs, out: Backward, row: Tensor | None, layouts: Sequence[RowLayout | None]
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        gradient_target(grad, row, layout, x.shape[2], x.shape[3])
        for grad, layout, x in zip(out[:3], layouts, inputs[:3], strict=True)
    )
    return dq, dk, dv


def _backward_call(
    do: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    norms: Tensor, gates: Tensor, solve: Tensor, scores: Tensor, states: Tensor, updates: Tensor, checkpoints: Tensor,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, **options: Any,
) -> _Call:  # fmt: skip
    return _Call(
        do,
        dfinal_state,
        Inputs(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias),
        Saved(norms, gates, solve, scores, states, updates, checkpoints),
        Options(**options),
    )


def _layout(numbers: Sequence[int]) -> RowLayout | None:
    return RowLayout(*numbers) if numbers else None


def _layouts(kwargs: dict[str, Any]) -> list[RowLayout | None]:
    return [_layout(kwargs.pop(f"{name}_layout")) for name in "qkv"]


def _chunk_fwd(
    *tensors: Tensor, output_final_state: bool = False, save: str = "solve", **options: Any
) -> tuple[Tensor, ...]:
    return _fill_chunk_fwd(Inputs(*tensors), Options(**options), output_final_state, save).returned


def _chunk_bwd(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    call = _backward_call(*args, **options)
    out = allocate_chunk_bwd(call.inputs)
    _fill_chunk_bwd(call, out, _targets(call.inputs, out, None, (None, None, None)))
    return tuple(out)


def _count_packed_gradients() -> None:
    if pinned.backend is None:  # a recorded call is counted when it runs
        counters.count("packed_gradients")


def _gaps(row_width: int, layouts: Sequence[RowLayout | None], inputs: Inputs) -> list[tuple[int, int]]:
    """Column ranges of a row that no packed gradient covers."""
    covered = bytearray(row_width)
    for layout, x in zip(layouts, inputs[:3], strict=True):
        if layout is None:
            continue
        heads, dim = x.shape[2:]
        for head in range(heads):
            group, member = divmod(head, layout.group_len)
            start = layout.offset + group * layout.stride_group + member * layout.stride_in_group
            covered[start : start + dim] = b"\1" * dim
    gaps, start = [], 0
    while (start := covered.find(0, start)) >= 0:
        end = covered.find(1, start)
        end = row_width if end < 0 else end
        gaps.append((start, end))
        start = end
    return gaps


def _chunk_bwd_row(*args: Any, row_width: int, zero_init: bool = False, **kwargs: Any) -> tuple[Tensor, ...]:
    layouts = _layouts(kwargs)
    call = _backward_call(*args, **kwargs)
    out = allocate_chunk_bwd(call.inputs, [layout is not None for layout in layouts])
    row = allocate_row(call.inputs, row_width)
    if zero_init:
        for start, end in _gaps(row_width, layouts, call.inputs):
            row[..., start:end].zero_()
    _fill_chunk_bwd(call, out, _targets(call.inputs, out, row, layouts))
    _count_packed_gradients()
    return (row, *out)


def _chunk_bwd_row_(*args: Any, row: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    layouts = _layouts(kwargs)
    call = _backward_call(*args, **kwargs)
    assert row.stride(-1) == 1, "the pass only writes into rows with dense channels"
    out = allocate_chunk_bwd(call.inputs, [layout is not None for layout in layouts])
    _fill_chunk_bwd(call, out, _targets(call.inputs, out, row, layouts))
    _count_packed_gradients()
    return tuple(out)


class _Heads(NamedTuple):
    num_qk_heads: int
    num_v_heads: int
    head_dim: int

    @staticmethod
    def take(kwargs: dict[str, Any]) -> "_Heads":
        return _Heads(*(kwargs.pop(name) for name in _Heads._fields))

    def views(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v where they lie in `row` [B,T,W]."""
        width = self.num_qk_heads * self.head_dim
        q, k, v = row.split([width, width, self.num_v_heads * self.head_dim], dim=-1)
        return (
            q.unflatten(-1, (self.num_qk_heads, self.head_dim)),
            k.unflatten(-1, (self.num_qk_heads, self.head_dim)),
            v.unflatten(-1, (self.num_v_heads, self.head_dim)),
        )


def _chunk_packed_fwd(
    row: Tensor, *tensors: Tensor, output_final_state: bool = False, save: str = "solve", **kwargs: Any
) -> tuple[Tensor, ...]:
    heads = _Heads.take(kwargs)
    views = heads.views(_dense_last(row, "input_copies"))
    return _fill_chunk_fwd(Inputs(*views, *tensors), Options(**kwargs), output_final_state, save).returned


def _packed_backward_call(heads: _Heads, row: Tensor, args: tuple[Any, ...], options: dict[str, Any]) -> _Call:
    do, dfinal_state, _, *rest = args
    return _backward_call(do, dfinal_state, *heads.views(row), *rest, **options)


def _chunk_packed_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    heads = _Heads.take(kwargs)
    call = _packed_backward_call(heads, _dense_last(args[2], "input_copies"), args, kwargs)
    layouts = packed_layouts(*heads)
    out = allocate_chunk_bwd(call.inputs, (True, True, True))
    row = allocate_row(call.inputs, packed_width(*heads))
    _fill_chunk_bwd(call, out, _targets(call.inputs, out, row, layouts))
    _count_packed_gradients()
    return (row, *out[3:])


# ---- the fakes


def _chunk_fwd_fake(
    *tensors: Tensor,
    output_final_state: bool = False,
    save: str = "solve",
    use_qk_l2norm: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    return allocate_chunk_fwd(
        Inputs(*tensors), output_final_state=output_final_state, use_qk_l2norm=use_qk_l2norm, save=save
    ).returned


def _chunk_bwd_fake(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(allocate_chunk_bwd(_backward_call(*args, **options).inputs))


def _chunk_bwd_row_fake(*args: Any, row_width: int, zero_init: bool = False, **kwargs: Any) -> tuple[Tensor, ...]:
    layouts = _layouts(kwargs)
    inputs = _backward_call(*args, **kwargs).inputs
    out = allocate_chunk_bwd(inputs, [layout is not None for layout in layouts])
    return (allocate_row(inputs, row_width), *out)


def _chunk_bwd_row__fake(*args: Any, row: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    layouts = _layouts(kwargs)
    inputs = _backward_call(*args, **kwargs).inputs
    return tuple(allocate_chunk_bwd(inputs, [layout is not None for layout in layouts]))


def _chunk_packed_fwd_fake(row: Tensor, *tensors: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    return _chunk_fwd_fake(*_Heads.take(kwargs).views(row), *tensors, **kwargs)


def _chunk_packed_bwd_fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    heads = _Heads.take(kwargs)
    inputs = _packed_backward_call(heads, args[2], args, kwargs).inputs
    return (allocate_row(inputs, packed_width(*heads)), *allocate_chunk_bwd(inputs, (True, True, True))[3:])


# ---- on a GPU


def _backend_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The backend that runs a call of the op `name`."""
    num_operands = 3 if "packed" in name else 5
    if name.endswith("fwd"):
        tensors = tuple(args)
    else:  # without do, dfinal_state and the saved tensors
        tensors = (*args[2 : 2 + num_operands], *args[2 + num_operands + len(Saved._fields) :])
    if "packed" in name:
        tensors = (*_Heads.take(dict(kwargs)).views(tensors[0]), *tensors[1:])
    options = Options(**{field: kwargs[field] for field in Options._fields if field in kwargs})
    return backend_for(Inputs(*tensors), _ready_options(options))


def _on_gpu(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    schema = getattr(torch.ops.gdn, name).default._schema
    return remembered(
        run,
        [x.name for x in schema.arguments if not x.kwarg_only],
        functools.partial(_backend_of, name),
        count="packed_gradients" if name in ("chunk_bwd_row", "chunk_bwd_row_", "chunk_packed_bwd") else None,
    )


# ---- registration


def _on_cpu(run: Callable[..., Any]) -> Callable[..., Any]:
    """torch ops inside a kernel must not see autocast, which would lower the precision of its matrix products."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return run(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return run(*args, **kwargs)

    return call


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "chunk_fwd": (_chunk_fwd, _chunk_fwd_fake),
    "chunk_bwd": (_chunk_bwd, _chunk_bwd_fake),
    "chunk_bwd_row": (_chunk_bwd_row, _chunk_bwd_row_fake),
    "chunk_bwd_row_": (_chunk_bwd_row_, _chunk_bwd_row__fake),
    "chunk_packed_fwd": (_chunk_packed_fwd, _chunk_packed_fwd_fake),
    "chunk_packed_bwd": (_chunk_packed_bwd, _chunk_packed_bwd_fake),
}

kernels: dict[tuple[str, str], Callable[..., tuple[Tensor, ...]]] = {}
"""What the dispatcher calls in the end, by op and device type; for calls that it would only pass on (`plain.py`)."""

for _name, (_run, _fake) in _IMPLEMENTATIONS.items():
    lib.define(_name + SCHEMAS[_name], tags=_TAGS)
    kernels[_name, "cpu"] = _on_cpu(_run)
    kernels[_name, "cuda"] = _on_gpu(_name, _run)
    lib.impl(_name, kernels[_name, "cpu"], "CPU")
    lib.impl(_name, kernels[_name, "cuda"], "CUDA")
    torch.library.register_fake(f"gdn::{_name}", _fake, lib=lib)
