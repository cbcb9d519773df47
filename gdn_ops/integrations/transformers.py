"""Hugging Face transformers' Gated DeltaNet models (Qwen3-Next, Qwen3.5) on `gdn_ops`.

transformers keeps one function per modelling module, `torch_chunk_gated_delta_rule`, and every GDN layer of that module
calls it by its global name. `patch` puts `gdn_ops.chunk_gated_delta_rule` in that place and `unpatch` puts the original
back. The same is done to the convolution ahead of it, `causal_conv1d_fn`, whose replacement acts only where documents
are packed (`cu_seq_lens_q`), which transformers' own torch convolution would mix. Nothing else is touched: the layers'
own code (projections, split, gates, norms), the cached one-token decode and the parameters stay as they are, so a
checkpoint loads as before.

    from gdn_ops.integrations import transformers as gdn_transformers
    gdn_transformers.patch(model)          # or patch() for every supported model class

Packed documents, [1, T] in one call, need their boundaries, positions that start anew in each of them, and no cache:

    model(
        input_ids=ids, position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=n, max_length_k=n,
        use_cache=False,
    )

as transformers' `DataCollatorWithFlattening(return_flash_attn_kwargs=True)` makes them, `use_cache` left out. With a
cache (transformers' default) its sdpa and eager attention layers get no mask that keeps documents apart: they are mixed
there, whatever the GDN layers do. A patched layer that is given boundaries and a cache warns of it, once in a process.

Works with transformers 5.17 and later. Call it before `torch.compile`d code first runs; code compiled earlier is
compiled again at its next call, since Dynamo guards the global.
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN

from gdn_ops.context_parallel import causal_conv1d
from gdn_ops.functional import chunk_gated_delta_rule

__all__ = ["SUPPORTED", "patch", "unpatch"]

FUNCTION = "torch_chunk_gated_delta_rule"
CONVOLUTION = "causal_conv1d_fn"
SUPPORTED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Model families that `patch()` without an argument covers. Other modules that follow the same convention (a global
`torch_chunk_gated_delta_rule` that their layers call) can be passed to `patch` by hand."""

_ORIGINAL = "gdn_ops_original"


def patch(target: nn.Module | ModuleType | None = None) -> list[str]:
    """Make transformers' GDN layers call `gdn_ops.chunk_gated_delta_rule`.

    Args:
        target: a model (the modelling modules of all its layers are patched), a modelling module, or None for every
            family in `SUPPORTED` that this transformers has. What is patched is the modelling module: other models of
            the same class in this process use it too.
    Returns:
        The names of the patched modelling modules (those already patched included).
    Raises:
        ValueError: `target` has no GDN layer of transformers' kind.
        TypeError: `target` is neither a model nor a module.
    """
    modules = _modelling_modules(target)
    for module in modules:
        function, convolution = getattr(module, FUNCTION), getattr(module, CONVOLUTION, None)
        if not hasattr(function, _ORIGINAL):
            setattr(module, FUNCTION, _replacement(function, keeps_documents_apart=convolution is not None))
            if convolution is not None:
                setattr(module, CONVOLUTION, _convolution(convolution))
    return [module.__name__ for module in modules]


def unpatch(target: nn.Module | ModuleType | None = None) -> list[str]:
    """Undo `patch`: put transformers' own function back.

    Args:
        target: as in `patch`; None undoes it in every modelling module that was patched.
    Returns:
        The names of the modelling modules that were patched.
    """
    modules = _patched_modules() if target is None else _modelling_modules(target)
    restored = []
    for module in modules:
        if hasattr(getattr(module, FUNCTION), _ORIGINAL):
            for name in (FUNCTION, CONVOLUTION):
                original = getattr(getattr(module, name, None), _ORIGINAL, None)
                if original is not None:
                    setattr(module, name, original)
            restored.append(module.__name__)
    return restored


def _convolution(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function with transformers' arguments that keeps packed documents apart, and remembers what it stands for."""

    @functools.wraps(original)
    def replaced(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Tensor:
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if cu_seqlens is None:
            return original(hidden_states, weight, bias, activation=activation, **kwargs)
        fused = "silu" if activation in ("silu", "swish") else None
        # Its result is dense by tokens, so the layer's split of it is three views of one row.
        row = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=fused, cu_seqlens=cu_seqlens)
        if activation is not None and fused is None:
            row = ACT2FN[activation](row)
        return row.transpose(1, 2)

    setattr(replaced, _ORIGINAL, original)
    return replaced


def _replacement(
    original: Callable[..., Any], *, keeps_documents_apart: bool
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """A function with transformers' arguments that calls ours, and remembers what it stands for.

    keeps_documents_apart: whether the module's convolution has been replaced too.
    """
    # A module that has no convolution of that name may use the causal_conv1d package's, which is told by `seq_idx`.
    takes_documents = keeps_documents_apart or importlib.util.find_spec("causal_conv1d") is not None

    @functools.wraps(original)
    def replaced(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # `chunk_size` only shapes the computation; `unused` holds the model call's other keywords (attention options
        # and the like), which transformers hands to every layer and its own function drops too.
        if cu_seqlens is not None and not takes_documents:
            raise ValueError(
                f"cu_seq_lens_q: {original.__module__} has no {CONVOLUTION} to replace, and a convolution that knows "
                "no documents mixes them; install the causal_conv1d package (and pass seq_idx) to train on packed "
                "sequences, or pass one document a row"
            )
        if cu_seqlens is not None and output_final_state:  # which transformers asks for if there is a cache
            _warn_of_a_cache()
        query, key, value = _token_major(query, key, value)
        return chunk_gated_delta_rule(
            query,
            key,
            value,
            g,
            beta,
            initial_state=None if initial_state is None else initial_state.to(torch.float32),
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens,
        )

    setattr(replaced, _ORIGINAL, original)
    return replaced


_warned = False


@torch.compiler.assume_constant_result  # where a call is traced: said then, and no graph break
def _warn_of_a_cache() -> bool:
    """Say once what the GDN layers cannot put right: attention layers get no document mask where a cache is in use."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "packed documents (cu_seq_lens_q) together with a cache: transformers then makes no document mask, so its "
            "sdpa and eager attention layers mix the documents. Pass use_cache=False to the model. (Said once.)",
            stacklevel=3,
        )
    return True


def _token_major(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with dense channels, as parts of one row.

    transformers' torch convolution returns its channels first. The op would copy such operands itself, in the forward
    and again in the backward; here they are copied once. Under `torch.compile` the graph pass has the row written dense
    by the kernel that computes it, which costs nothing.
    """
    if torch.compiler.is_compiling() or all(x.stride(-1) == 1 for x in (q, k, v)):
        return q, k, v
    if q.shape[-2] == v.shape[-2]:
        # Older transformers repeats query and key heads first. The pass undoes that, if no row is built of the copies.
        return q.contiguous(), k.contiguous(), v.contiguous()
    row = torch.cat([x.flatten(-2) for x in (q, k, v)], dim=-1)
    q_part, k_part, v_part = row.split([x.shape[-2] * x.shape[-1] for x in (q, k, v)], dim=-1)
    return q_part.unflatten(-1, q.shape[-2:]), k_part.unflatten(-1, k.shape[-2:]), v_part.unflatten(-1, v.shape[-2:])


def _modelling_modules(target: nn.Module | ModuleType | None) -> list[ModuleType]:
    """The modules that define the function for `target`, in a fixed order."""
    if target is None:
        names = (f"transformers.models.{family}.modeling_{family}" for family in SUPPORTED)
        found = [importlib.import_module(name) for name in names if importlib.util.find_spec(name) is not None]
        # A family without the function is a transformers this project does not know: say it, never skip it silently.
        missing = [module.__name__ for module in found if not hasattr(module, FUNCTION)]
        if missing or not found:
            raise ValueError(
                f"transformers {transformers.__version__} has no {FUNCTION} in {', '.join(missing) or SUPPORTED}; "
                "this integration is written for transformers 5.17 and later"
            )
        return found
    if isinstance(target, nn.Module):
        names_of_layers: Iterable[str] = dict.fromkeys(type(layer).__module__ for layer in target.modules())
        found = [sys.modules[name] for name in names_of_layers if hasattr(sys.modules.get(name), FUNCTION)]
        if not found:
            raise ValueError(
                f"target: {type(target).__name__} has no layer from a module with a {FUNCTION} function "
                "(expected a Gated DeltaNet model of transformers, such as Qwen3_5ForCausalLM)"
            )
        return found
    if isinstance(target, ModuleType):
        if not hasattr(target, FUNCTION):
            raise ValueError(f"target: module {target.__name__} has no {FUNCTION} function")
        return [target]
    raise TypeError(f"target: expected a model, a modelling module or None, got {type(target).__name__}")


def _patched_modules() -> list[ModuleType]:
    return [
        module
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and hasattr(module.__dict__.get(FUNCTION), _ORIGINAL)
    ]
