"""Every setting of the passes, read from the environment once, in one frozen object.

| variable | values (default first) | what it does |
|---|---|---|
| INDUCTOR_PASSES | 1, 0 | 0: graphs are left as they are |
| INDUCTOR_PASSES_GROUPED_HEADS | 1, 0 | 1: repeated query/key heads become native grouped heads |
| INDUCTOR_PASSES_FOLD_NORM | 0, 1 | 1: an L2 norm in front of the op moves into the op |
| INDUCTOR_PASSES_REMOVE_COPIES | 1, 0 | 1: `.contiguous()` and the like in front of the op are dropped |
| INDUCTOR_PASSES_STRICT | 0, 1 | 1: a training call that was not packed whole is an error |
"""

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Settings:
    """What the passes may do. All of it is part of the compile-cache key.

    enabled: rewrite at all; grouped_heads: fold repeated heads (not bitwise in low precision: the sum over a group
    moves into the op); fold_norm: fold an L2 norm in front of the op into the op's own (not bitwise); remove_copies:
    drop copies in front of the op; strict: raise `UnpackedCallError` where a training call is not packed whole.
    """

    enabled: bool = True
    grouped_heads: bool = True
    fold_norm: bool = False
    remove_copies: bool = True
    strict: bool = False


_VARIABLES = {
    "enabled": "INDUCTOR_PASSES",
    "grouped_heads": "INDUCTOR_PASSES_GROUPED_HEADS",
    "fold_norm": "INDUCTOR_PASSES_FOLD_NORM",
    "remove_copies": "INDUCTOR_PASSES_REMOVE_COPIES",
    "strict": "INDUCTOR_PASSES_STRICT",
}
_WORDS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Settings as `environment` has them; ValueError names a variable whose value is not understood."""
    values = {}
    for name, variable in _VARIABLES.items():
        text = environment.get(variable, "").strip().lower()
        if not text:
            continue
        if text not in _WORDS:
            raise ValueError(f"{variable} must be one of {', '.join(_WORDS)}, got {environment[variable]!r}")
        values[name] = _WORDS[text]
    return Settings(**values)


_lock = threading.Lock()
_process_wide = read_settings(os.environ)
# Changes for one block of code hold in that thread (context) only, so two threads may compile with different settings.
_block_changes: ContextVar[tuple[tuple[str, bool], ...]] = ContextVar("inductor_passes_block_changes", default=())


def current() -> Settings:
    """The settings that a compilation started now, in this thread, would use."""
    return replace(_process_wide, **dict(_block_changes.get()))


def configure(**changes: bool) -> None:
    """Change settings for the whole process, e.g. `configure(fold_norm=True)`. TypeError for an unknown name."""
    global _process_wide
    _check_names(changes)
    with _lock:
        _process_wide = replace(_process_wide, **changes)


@contextlib.contextmanager
def configured(**changes: bool) -> Iterator[None]:
    """`configure` for one block of code, in this thread only."""
    _check_names(changes)
    token = _block_changes.set((*_block_changes.get(), *changes.items()))
    try:
        yield
    finally:
        _block_changes.reset(token)


def enable() -> None:
    """Let later compilations use the passes (the default once a package has installed them)."""
    configure(enabled=True)


def disable() -> None:
    """Leave the graphs of later compilations as they are. What is compiled already stays."""
    configure(enabled=False)


def disabled() -> contextlib.AbstractContextManager[None]:
    """`with disabled():` compiles without the passes, in this thread only."""
    return configured(enabled=False)


def _check_names(changes: Mapping[str, bool]) -> None:
    known = [field.name for field in fields(Settings)]
    for name, value in changes.items():
        if name not in known:
            raise TypeError(f"unknown setting {name!r}; known: {', '.join(known)}")
        if not isinstance(value, bool):
            raise TypeError(f"setting {name} must be a bool, got {value!r}")
