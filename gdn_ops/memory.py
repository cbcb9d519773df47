"""How many bytes a call keeps and needs, answered from shapes alone: nothing is run and no device is needed."""

import importlib

import torch

from gdn_ops import checks, settings
from gdn_ops.outputs import Forward, allocate_chunk_fwd
from gdn_ops.shapes import SAVE_LEVELS, Inputs, Options, sizes


def _inputs(
    num_tokens: int,
    num_qk_heads: int,
    num_v_heads: int,
    key_dim: int,
    value_dim: int | None,
    batch: int,
    num_documents: int | None,
    dtype: torch.dtype,
    use_gate_in_kernel: bool = False,
) -> Inputs:
    value_dim = key_dim if value_dim is None else value_dim
    checks.check_heads(num_qk_heads, num_v_heads, key_dim=key_dim, value_dim=value_dim)
    checks.check_counts(0, num_tokens=num_tokens, batch=batch)
    checks.check_dtype("dtype", dtype)
    if num_documents is not None:
        checks.check_counts(0, num_documents=num_documents)
        if batch != 1:
            raise ValueError(f"batch: documents are packed along T, so B must be 1 with num_documents, got {batch}")

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    gates = meta(batch, num_tokens, num_v_heads, dtype=torch.float32)
    return Inputs(
        meta(batch, num_tokens, num_qk_heads, key_dim),
        meta(batch, num_tokens, num_qk_heads, key_dim),
        meta(batch, num_tokens, num_v_heads, value_dim),
        gates,
        gates,
        cu_seqlens=None if num_documents is None else meta(num_documents + 1, dtype=torch.int64),
        A_log=meta(num_v_heads, dtype=torch.float32) if use_gate_in_kernel else None,
    )


def _save_level(save: str | None) -> str:
    save = settings.current().save if save is None else save
    if save not in SAVE_LEVELS:
        raise ValueError(f"save: expected one of {SAVE_LEVELS}, got {save!r}")
    return save


def saved_bytes(
    num_tokens: int,
    num_qk_heads: int,
    num_v_heads: int,
    key_dim: int = 128,
    value_dim: int | None = None,
    *,
    batch: int = 1,
    num_documents: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    use_qk_l2norm: bool = False,
    save: str | None = None,
) -> int:
    """Bytes that one call keeps for its backward beyond its inputs.

    Args:
        num_tokens: T, per sequence of the batch.
        num_qk_heads, num_v_heads, key_dim, value_dim: HK, HV, K, V (V = K if None).
        batch: B; num_documents: N where documents are packed along T (then B = 1), None for a dense batch.
        dtype: of q, k, v; use_qk_l2norm: whether the op normalises q and k.
        save: "inputs", "solve" or "states"; None reads the setting.

    Raises ValueError or TypeError for an unknown `save` and for sizes, a batch or a dtype that the op refuses. A CPU
    takes heads of any size, so the answer does not say that a GPU backend takes the call.
    """
    inputs = _inputs(num_tokens, num_qk_heads, num_v_heads, key_dim, value_dim, batch, num_documents, dtype)
    out: Forward = allocate_chunk_fwd(
        inputs, output_final_state=False, use_qk_l2norm=use_qk_l2norm, save=_save_level(save)
    )
    return sum(x.numel() * x.element_size() for x in out.saved)


def scratch_bytes(
    num_tokens: int,
    num_qk_heads: int,
    num_v_heads: int,
    key_dim: int = 128,
    value_dim: int | None = None,
    *,
    batch: int = 1,
    num_documents: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    use_qk_l2norm: bool = False,
    use_gate_in_kernel: bool = False,
    save: str | None = None,
    backend: str = "triton",
) -> int:
    """Most bytes of temporary memory that one backward needs on a GPU beyond inputs, outputs and saved tensors.

    Arguments and errors as `saved_bytes`; use_gate_in_kernel: whether the op computes the decay from A_log; backend:
    "triton" or "hopper". Raises ValueError for another backend, and with the reason for what that backend refuses.
    """
    if backend not in ("triton", "hopper"):
        raise ValueError(f"backend: expected 'triton' or 'hopper', got {backend!r}")
    checks.check_bool("use_gate_in_kernel", use_gate_in_kernel)
    inputs = _inputs(
        *(num_tokens, num_qk_heads, num_v_heads, key_dim, value_dim, batch, num_documents, dtype, use_gate_in_kernel)
    )
    save = _save_level(save)
    module = importlib.import_module(f"gdn_ops.backends.{backend}")
    reason = module.unsupported_operands(inputs)
    if reason is not None:
        raise ValueError(f"backend: {backend} does not take such a call: {reason}")
    if backend == "hopper":
        return int(module.scratch_bytes(inputs, Options(1.0, use_qk_l2norm), backward=True, save=save))
    options = {"save": save, "use_qk_l2norm": use_qk_l2norm, "use_gate": use_gate_in_kernel}
    return int(module.scratch_bytes(sizes(inputs), itemsize=inputs.q.element_size(), **options).backward)
