"""Argument checks of the public functions: an error names the argument, what was expected and what came.

Only shapes, dtypes and devices are looked at, so nothing here waits for a GPU and everything can be traced.
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _name(value: object) -> str:
    return type(value).__name__


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_name(value)}")


def _require_shape(name: str, x: Tensor, expected: tuple[int, ...], words: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: expected shape {list(expected)} ({words}), got {list(x.shape)}")


def _require_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: expected device {device} (that of q), got {x.device}")


_MOST_PASSED = 1024
_passed: set[tuple[Any, ...]] = set()
"""Kinds of call that passed every check: checks look at nothing else of a call."""


def call_kind(tensors: Iterable[Tensor | None], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that the checks of a public function look at: `tensors` by shape, dtype and device, `others` by value."""
    # True == 1 == 1.0, and only one of them is a switch.
    return (*[None if x is None else (x.shape, x.dtype, x.device) for x in tensors], others, *map(type, others))


def has_passed(kind: tuple[Any, ...]) -> bool:
    """Whether a call of this kind passed before."""
    try:
        return kind in _passed
    except TypeError:  # something unhashable instead of a switch: the checks will name it
        return False


def passed(kind: tuple[Any, ...]) -> None:
    """Remember that a call of this kind passed."""
    if len(_passed) >= _MOST_PASSED:
        _passed.clear()
    _passed.add(kind)


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {_name(value)}")


def check_dtype(name: str, dtype: object) -> None:
    """Raise TypeError unless `dtype` is one that q, k and v may have."""
    if dtype not in _DTYPES:
        raise TypeError(f"{name}: expected dtype bfloat16, float16 or float32 (float64 on a CPU), got {dtype}")


def _check_operand_dtype(name: str, x: Tensor) -> None:
    check_dtype(name, x.dtype)
    if x.dtype == torch.float64 and x.device.type not in ("cpu", "meta"):
        raise TypeError(f"{name}: float64 is supported on a CPU only, got a tensor on {x.device}")


def check_qkv(q: object, k: object, v: object) -> None:
    """Raise unless q, k, v are [B,T,HK,K], [B,T,HK,K], [B,T,HV,V] (or without B) of one dtype and device."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require_tensor(name, x)
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    if q.dim() not in (3, 4):
        raise ValueError(f"q: expected [B, T, HK, K] or [T, HK, K], got shape {list(q.shape)}")
    _check_operand_dtype("q", q)
    for name, x in (("k", k), ("v", v)):
        if x.dim() != q.dim():
            raise ValueError(f"{name}: expected {q.dim()} dimensions as q has, got shape {list(x.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected dtype {q.dtype} (that of q), got {x.dtype}")
        _require_device(name, x, q.device)
    _require_shape("k", k, tuple(q.shape), "that of q")
    if v.shape[:-2] != q.shape[:-2]:
        raise ValueError(
            f"v: expected leading sizes {list(q.shape[:-2])} ([B, T] of q; heads come after tokens), "
            f"got shape {list(v.shape)}"
        )
    heads, value_heads = q.shape[-2], v.shape[-2]
    if heads < 1 or q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(f"q, v: expected at least one head and one channel, got {list(q.shape)} and {list(v.shape)}")
    if value_heads < 1 or value_heads % heads != 0:
        raise ValueError(f"v: expected a number of heads that is a multiple of q's {heads}, got {value_heads}")


def check_counts(least: int = 1, **counts: object) -> None:
    """Raise unless each of `counts` is an int of at least `least`."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {_name(value)}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_heads(num_qk_heads: int, num_v_heads: int, **head_sizes: int) -> None:
    """Raise unless all are ints of at least 1 and the value heads fall evenly on the query/key heads."""
    check_counts(num_qk_heads=num_qk_heads, num_v_heads=num_v_heads, **head_sizes)
    if num_v_heads % num_qk_heads != 0:
        raise ValueError(f"num_v_heads: expected a multiple of num_qk_heads = {num_qk_heads}, got {num_v_heads}")


_warned_heads_first = False


def warn_of_heads_first(q: Tensor, v: Tensor, *confirming: object) -> None:
    """Warn, once in a process, where q, k, v, g and beta may all be heads first and nothing else would show it.

    That takes HK = HV, or v would be refused, and none of `confirming`, arguments whose checked shape has HV in it. A
    call on few tokens looks the same and is right, so it is no error.
    """
    global _warned_heads_first
    tokens, heads = q.shape[-3], q.shape[-2]
    if _warned_heads_first or any(x is not None for x in confirming):
        return
    # A symbolic size belongs to someone's trace, which no comparison here should narrow.
    if not isinstance(tokens, int) or not 0 < tokens < heads or v.shape[-2] != heads:
        return
    _warned_heads_first = True
    warnings.warn(
        f"q, k, v, g, beta: expected tokens before heads, q [B, T, HK, K] and g [B, T, HV]; got shape {list(q.shape)}, "
        f"fewer tokens ({tokens}) than heads ({heads}). If heads come first here, transpose(-3, -2) q, k and v and "
        "transpose(-2, -1) g and beta; if there are so few tokens, all is well. (Said once.)",
        stacklevel=3,
    )


def check_row(row: object, num_qk_heads: int, num_v_heads: int, head_dim: int) -> None:
    """Raise unless `row` is [B,T,W] or [T,W] with W = (2 * num_qk_heads + num_v_heads) * head_dim."""
    _require_tensor("row", row)
    assert isinstance(row, Tensor)
    check_heads(num_qk_heads, num_v_heads, head_dim=head_dim)
    if row.dim() not in (2, 3):
        raise ValueError(f"row: expected [B, T, W] or [T, W], got shape {list(row.shape)}")
    _check_operand_dtype("row", row)
    width = (2 * num_qk_heads + num_v_heads) * head_dim
    if row.shape[-1] != width:
        raise ValueError(
            f"row: expected a last axis of {width} = (2 * {num_qk_heads} + {num_v_heads}) * {head_dim} "
            f"(slice a wider row first), got shape {list(row.shape)}"
        )


def _require_float(name: str, x: Tensor) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name}: expected dtype bfloat16, float16, float32 or float64, got {x.dtype}")


def check_gates(g: object, beta: object, lead: tuple[int, ...], device: torch.device) -> None:
    """Raise unless g and beta are [..., HV] in any float dtype of 16 bits or more (`lead` is the expected shape)."""
    for name, x in (("g", g), ("beta", beta)):
        _require_tensor(name, x)
        assert isinstance(x, Tensor)
        _require_float(name, x)
        _require_shape(name, x, lead, "tokens by value heads, heads last")
        _require_device(name, x, device)


def check_documents(cu_seqlens: object, batch: int, device: torch.device) -> None:
    """Raise unless `cu_seqlens` is int32 or int64 [N+1] on `device`, with one packed row of tokens (B == 1)."""
    if cu_seqlens is None:
        return
    _require_tensor("cu_seqlens", cu_seqlens)
    assert isinstance(cu_seqlens, Tensor)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected dtype int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(cu_seqlens.shape)}")
    _require_device("cu_seqlens", cu_seqlens, device)
    if batch != 1:
        raise ValueError(f"cu_seqlens: documents are packed along T, so B must be 1, got {batch}")


def check_state(initial_state: object, expected: tuple[int, ...], q: Tensor) -> None:
    """Raise unless `initial_state` is [N,HV,K,V] float32 (float64 where q is) on q's device."""
    if initial_state is None:
        return
    _require_tensor("initial_state", initial_state)
    assert isinstance(initial_state, Tensor)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial_state.dtype != dtype:
        raise TypeError(f"initial_state: expected dtype {dtype}, got {initial_state.dtype}")
    _require_shape("initial_state", initial_state, expected, "documents or batch, value heads, K, V")
    _require_device("initial_state", initial_state, q.device)


def check_gate_parameters(
    use_gate_in_kernel: bool, A_log: object, dt_bias: object, num_v_heads: int, device: torch.device
) -> None:
    """Raise unless A_log (and dt_bias, optional) are float [HV] and given exactly when the gate is in the op."""
    check_bool("use_gate_in_kernel", use_gate_in_kernel)
    if use_gate_in_kernel and A_log is None:
        raise ValueError("A_log: expected a tensor [HV] with use_gate_in_kernel=True, got None")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is None:
            continue
        if not use_gate_in_kernel:
            raise ValueError(f"{name}: only used with use_gate_in_kernel=True, which was not given")
        _require_tensor(name, x)
        assert isinstance(x, Tensor)
        _require_float(name, x)
        _require_shape(name, x, (num_v_heads,), "one per value head")
        _require_device(name, x, device)


def check_scale(scale: object, head_dim: int) -> float:
    """The scale as a float, K**-0.5 for None; raise TypeError for anything that is no number."""
    if scale is None:
        return float(head_dim) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale: expected a float or None, got {_name(scale)}")
    return float(scale)


def check_switches(**switches: object) -> None:
    """Raise TypeError for a switch that is no bool, ValueError for a combination that would be ignored silently."""
    for name, value in switches.items():
        check_bool(name, value)
    if switches["allow_neg_eigval"] and not switches["use_beta_sigmoid_in_kernel"]:
        raise ValueError(
            "allow_neg_eigval: doubles the sigmoid taken in the op, so it needs use_beta_sigmoid_in_kernel=True; "
            "a beta that is already a write strength is scaled by the caller"
        )
