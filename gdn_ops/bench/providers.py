"""Who is measured: this package and, where they are importable, the libraries that users have today."""

import importlib
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gdn_ops
from gdn_ops.bench.cases import Case, Data

try:
    from triton.errors import TritonError
except ImportError:
    _TRITON_ERRORS: tuple[type[Exception], ...] = ()
else:
    _TRITON_ERRORS = (TritonError,)  # no RuntimeError: out of resources, compilation, ptxas

Run = Callable[[Data], Tensor]
"""Forward of one form: data (its row or its parts require grad) -> output."""


@dataclass(frozen=True)
class Provider:
    """A library's call on q, k, v [B,T,H,D]; `missing` says why it cannot be measured here."""

    name: str
    call: Callable[[Case, Data, Tensor, Tensor, Tensor], Tensor] | None
    missing: str | None = None
    ours: bool = False
    backend: str | None = None
    deterministic: bool = True


FAILURES: tuple[type[Exception], ...] = (
    *(RuntimeError, ValueError, TypeError, AssertionError, AttributeError, LookupError, ImportError, OSError),
    subprocess.SubprocessError,
    *_TRITON_ERRORS,
)
"""What another library's call, or its compiler, fails with; reported with its trace, and the run goes on."""


def split(case: Case, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as plain user code takes them out of a row."""
    width = case.num_qk_heads * case.head_dim
    q, k, v = row.split([width, width, case.num_v_heads * case.head_dim], dim=-1)
    return (
        q.unflatten(-1, (case.num_qk_heads, case.head_dim)),
        k.unflatten(-1, (case.num_qk_heads, case.head_dim)),
        v.unflatten(-1, (case.num_v_heads, case.head_dim)),
    )


def _ours(deterministic: bool) -> Callable[[Case, Data, Tensor, Tensor, Tensor], Tensor]:
    def call(case: Case, data: Data, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gdn_ops.chunk_gated_delta_rule(
            q,
            k,
            v,
            data.g,
            data.beta,
            use_qk_l2norm_in_kernel=case.use_qk_l2norm,
            cu_seqlens=data.cu_seqlens,
            deterministic=deterministic,
        )[0]

    return call


def _chunk_gated_delta_rule_of(module: Any) -> Callable[[Case, Data, Tensor, Tensor, Tensor], Tensor]:
    def call(case: Case, data: Data, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module.chunk_gated_delta_rule(
            q, k, v, data.g, data.beta, use_qk_l2norm_in_kernel=case.use_qk_l2norm, cu_seqlens=data.cu_seqlens
        )[0]

    return call


def _attention_gym_of(module: Any) -> Callable[[Case, Data, Tensor, Tensor, Tensor], Tensor]:
    def call(case: Case, data: Data, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.use_qk_l2norm:
            q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
        return module.chunk_gdn(q, k, v, data.g, data.beta, cu_seqlens=data.cu_seqlens, impl="fused")[0]

    return call


def _transformers_of(module: Any) -> Callable[[Case, Data, Tensor, Tensor, Tensor], Tensor]:
    def call(case: Case, data: Data, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = case.num_v_heads // case.num_qk_heads
        q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        function = module.torch_chunk_gated_delta_rule
        return function(q, k, v, g=data.g, beta=data.beta, use_qk_l2norm_in_kernel=case.use_qk_l2norm)[0]

    return call


_MODULES = {
    "fla": ("fla.ops.gated_delta_rule", _chunk_gated_delta_rule_of),
    "qla": ("flash_qla", _chunk_gated_delta_rule_of),
    "gym": ("attn_gym.linear", _attention_gym_of),
    "transformers": ("transformers.models.qwen3_5.modeling_qwen3_5", _transformers_of),
}

OURS = ("ours", "ours-cpu", "ours-triton", "ours-hopper", "ours-unordered")
NAMES = (*OURS, *_MODULES)
"""ours: the backend that the package chooses, ours-BACKEND: that one, ours-unordered: with deterministic=False;
fla: flash-linear-attention on its own kernels; qla: FlashQLA; gym: attention-gym; transformers: its pure torch
function."""


def provider(name: str, case: Case) -> Provider:
    """The provider of a name; never raises for one that is not installed or cannot take the case."""
    if name in OURS:
        backend = name.removeprefix("ours-") if name in ("ours-cpu", "ours-triton", "ours-hopper") else None
        deterministic = name != "ours-unordered"
        return Provider(name, _ours(deterministic), ours=True, backend=backend, deterministic=deterministic)
    path, make = _MODULES[name]
    if name == "transformers" and case.documents is not None:
        return Provider(name, None, "has no variable-length documents")
    if name == "fla":
        # Installed beside FlashQLA it hands its calls over; then this line would show FlashQLA under another name.
        os.environ["FLA_FLASH_QLA"] = "0"
    try:
        module = importlib.import_module(path)
    except FAILURES as error:  # a library built for another torch or CUDA fails in its own ways while it loads
        return Provider(name, None, f"not importable ({error})")
    return Provider(name, make(module))
