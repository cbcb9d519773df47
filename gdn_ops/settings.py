"""Settings: one frozen object, read from the environment once; nothing else in the package reads the environment."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gdn_ops.shapes import SAVE_LEVELS, WHOLE_DOCUMENTS, SegmentRule, Sizes, in_parts, segment_rule

BACKENDS = ("auto", "cpu", "triton", "hopper")


@dataclass(frozen=True)
class Settings:
    """How the ops run. Change it with `configure` or by environment variables before the first call.

    backend (GDN_OPS_BACKEND): "auto" takes the fastest that supports the call; a name never falls back to another.
    save (GDN_OPS_SAVE): what the forward keeps for the backward, "inputs", "solve" or "states"; changes memory and
        time, never a result. Read when a call is made or traced.
    debug (GDN_OPS_DEBUG): check the values of cu_seqlens on a GPU too, which synchronises with the host.
    fast_calls (GDN_OPS_FAST_CALLS): spend less of the host's time on calls on a GPU: from its second call on a kind of
        call repeats its launches without the backend's host code, and eager calls leave the dispatcher out.
    cut_documents (GDN_OPS_CUT_DOCUMENTS): with few documents and heads the Hopper backend cuts documents into segments,
        exactly; a document then no longer has the bits of the same document in another pack. To be the same in a
        forward and its backward.
    backward_bytes (GDN_OPS_BACKWARD_BYTES): about how much scratch for states a backward of the Hopper backend takes
        where it can choose; more is faster, and no bit changes. To be the same in a forward and its backward.
    """

    backend: str = "auto"
    save: str = "solve"
    debug: bool = False
    fast_calls: bool = True
    cut_documents: bool = True
    backward_bytes: int = 400_000_000

    def __post_init__(self) -> None:
        """Refuse unknown words."""
        if self.backend not in BACKENDS:
            raise ValueError(f"setting backend: expected one of {BACKENDS}, got {self.backend!r}")
        if self.save not in SAVE_LEVELS[1:]:
            raise ValueError(f"setting save: expected one of {SAVE_LEVELS[1:]}, got {self.save!r}")
        if not isinstance(self.backward_bytes, int) or isinstance(self.backward_bytes, bool):
            raise TypeError(f"setting backward_bytes: expected an int, got {type(self.backward_bytes).__name__}")
        if self.backward_bytes <= 0:
            raise ValueError(f"setting backward_bytes: expected a positive number, got {self.backward_bytes}")
        for name in ("debug", "fast_calls", "cut_documents"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"setting {name}: expected a bool, got {type(value).__name__}")


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Settings that the environment variables ask for, GDN_OPS_ and the name of a setting.

    Raises ValueError for an unknown word.
    """
    values: dict[str, Any] = {}
    for field in fields(Settings):
        text = environment.get(f"GDN_OPS_{field.name.upper()}")
        if text is None:
            continue
        if field.type in (bool, "bool"):
            if text.lower() not in ("0", "1", "false", "true", ""):
                raise ValueError(f"GDN_OPS_{field.name.upper()}: expected 0 or 1, got {text!r}")
            values[field.name] = text.lower() in ("1", "true")
        elif field.type in (int, "int"):
            if not text.isascii() or not text.isdigit():
                raise ValueError(f"GDN_OPS_{field.name.upper()}: expected a number, got {text!r}")
            values[field.name] = int(text)
        else:
            values[field.name] = text
    return Settings(**values)


_current = from_environment(os.environ)


def current() -> Settings:
    """The settings in force."""
    return _current


def segments(s: Sizes) -> SegmentRule:
    """How the documents of a call are cut, and in how many parts a backward goes through them, under the settings in
    force."""
    rule = segment_rule(s) if _current.cut_documents else WHOLE_DOCUMENTS
    return in_parts(rule, s, _current.backward_bytes)


@contextlib.contextmanager
def configure(**changes: Any) -> Iterator[Settings]:
    """Run a block with some settings changed: `with configure(save="states"): ...`.

    Holds for the whole process while the block runs, autograd's own threads included.
    Raises ValueError or TypeError for an unknown name or word.
    """
    global _current
    before = _current
    known = [field.name for field in fields(Settings)]
    for name in changes:
        if name not in known:
            raise TypeError(f"unknown setting {name!r}; known: {', '.join(known)}")
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
