"""Graph passes for torch.compile that give split-of-a-packed-row code the backward that writes the row in one piece."""

from typing import TYPE_CHECKING, Any

from inductor_passes.install import install
from inductor_passes.registry import PackedVariant, register
from inductor_passes.settings import Settings, configure, configured, disable, disabled, enable

if TYPE_CHECKING:
    from inductor_passes.inspection import explain
    from inductor_passes.pipeline import counters, rewrite_graph
    from inductor_passes.report import CallReport, Report, UnpackedCallError

__all__ = [
    "CallReport",
    "PackedVariant",
    "Report",
    "Settings",
    "UnpackedCallError",
    "configure",
    "configured",
    "counters",
    "disable",
    "disabled",
    "enable",
    "explain",
    "install",
    "register",
    "rewrite_graph",
]

# What needs sympy or the compiler is loaded when it is first used: importing this package costs nothing.
_LATER = {
    "CallReport": "report",
    "Report": "report",
    "UnpackedCallError": "report",
    "counters": "pipeline",
    "explain": "inspection",
    "rewrite_graph": "pipeline",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value
    return value
