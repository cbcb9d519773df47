"""Run by test_plans.py in a process of its own, under Triton's interpreter: calls through the op, by plans and without.

A plan's launches hold addresses; here they go back to the interpreter as tensors at those addresses.
"""

import ctypes
import json
from typing import Any

import interpreting
import torch
from torch import Tensor

from gdn_ops import ops, settings
from gdn_ops.backends import launching
from gdn_ops.outputs import Forward
from gdn_ops.shapes import packed_layouts, packed_width

HK, HV, D = 2, 4, 16
recorded: list[str] = []
launched: list[str] = []


def _at(address: int, dtype: torch.dtype) -> Tensor:
    """A tensor that starts at an address; kernels look at nothing else of it."""
    if address == 0:  # of a tensor without elements
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=dtype)


class Interpreted:
    """Stands for a compiled kernel: runs it on addresses."""

    run = None

    def __init__(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]):
        self._kernel = kernel
        self._dtypes = [x.dtype if isinstance(x, Tensor) else None for x in args]
        self._options = options
        self.metadata = None
        recorded.append(kernel.__name__)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: Any) -> None:
            launched.append(self._kernel.__name__)
            given = [x if dtype is None else _at(x, dtype) for x, dtype in zip(args, self._dtypes, strict=False)]
            self._kernel[grid](*given, **self._options)

        return run


def compiled_for(kernel: Any, grid: Any, args: tuple[Any, ...], options: Any) -> tuple[Any, tuple[Any, ...]]:
    """As `launching.compiled_for`, without compiling."""
    return Interpreted(kernel, args, dict(options)), ()


def inputs(seed: int, T: int, varlen: bool, everything: bool, dtype: torch.dtype) -> tuple[Tensor, list[Tensor | None]]:
    """A packed row, and g, beta, initial_state, cu_seqlens, A_log, dt_bias."""
    gen = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    row = randn(1, T, packed_width(HK, HV, D)).to(dtype)
    ends = sorted(torch.randint(0, T, (2,), generator=gen).tolist())
    cu = torch.tensor([0, *ends], dtype=torch.int32) if varlen else None
    state = randn(2 if varlen else 1, HV, D, D) if everything else None
    gate = (randn(HV), randn(HV)) if everything else (None, None)
    return row, [-randn(1, T, HV).abs(), randn(1, T, HV).sigmoid(), state, cu, *gate]


def forward_and_backward(
    kernels: dict[str, Any], form: str, row: Tensor, rest: list[Tensor | None], do: Tensor, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Everything that is returned for one step, by the op of a form."""
    heads = {"num_qk_heads": HK, "num_v_heads": HV, "head_dim": D}
    final = rest[2] is not None
    call = {"scale": D**-0.5, **options}
    if form == "packed":
        out = kernels["chunk_packed_fwd"](row, *rest, **heads, **call, output_final_state=final)
        dfinal = out[1].clone() if final else None
        back = kernels["chunk_packed_bwd"](do, dfinal, row, *rest[:2], *out[2:], *rest[2:], **heads, **call)
        return (*out[:2], *back)
    qkv = ops._Heads(HK, HV, D).views(row)
    out = kernels["chunk_fwd"](*qkv, *rest, **call, output_final_state=final)
    dfinal = out[1].clone() if final else None
    args = (do, dfinal, *qkv, *rest[:2], *out[2:], *rest[2:])
    layouts = dict(zip(("q_layout", "k_layout", "v_layout"), map(list, packed_layouts(HK, HV, D)), strict=True))
    if form == "row":
        back = kernels["chunk_bwd_row"](*args, **call, **layouts, row_width=packed_width(HK, HV, D))
    elif form == "row_":
        wide = torch.full((*row.shape[:2], packed_width(HK, HV, D) + 16), 7.0, dtype=row.dtype)
        target = wide[..., 8:-8]
        back = (*kernels["chunk_bwd_row_"](*args, **call, row=target, **layouts), wide)
    else:
        back = kernels["chunk_bwd"](*args, **call)
    return (*out[:2], *back)


def check(form: str, everything: bool, varlen: bool, save: str) -> dict[str, Any]:
    """Three calls of a kind on other data: the third, by its plan, against the implementation as written."""
    written = {name: run for name, (run, _) in ops._IMPLEMENTATIONS.items()}
    planned = {name: ops._on_gpu(name, run) for name, run in written.items()}
    options: dict[str, Any] = {}
    if everything:
        options = {"use_qk_l2norm": True, "use_beta_sigmoid": True}
    recorded.clear()
    differ: list[int] = []
    for seed in range(3):
        row, rest = inputs(seed, 70, varlen, everything, torch.float16)
        do = torch.randn(1, 70, HV, D, generator=torch.Generator().manual_seed(seed + 9)).half()
        with settings.configure(save=save):
            launched.clear()
            got = forward_and_backward(planned, form, row, rest, do, options)
            if seed == 0:  # runs as written: nothing to compare it with
                assert not recorded
                continue
            again = len(launched)
            want = forward_and_backward(written, form, row, rest, do, options)
        differ += [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not torch.equal(a, b)]
    return {"differ": differ, "recorded": len(recorded), "launched": again}


CHECKS = {
    "contiguous": ("dense", False, False, "solve"),
    "packed": ("packed", True, True, "solve"),
    "row": ("row", True, True, "inputs"),
    "row_": ("row_", False, True, "states"),
}

if __name__ == "__main__":
    interpreting.patch_once()
    launching.compiled_for = compiled_for
    # Whatever a launch does not write is NaN, in outputs and in the shared workspace.
    torch.use_deterministic_algorithms(True)
    with settings.configure(backend="triton", fast_calls=True):
        for name, arguments in CHECKS.items():
            print(json.dumps({"check": name, **check(*arguments)}), flush=True)
    assert Forward._fields[0] == "o"
