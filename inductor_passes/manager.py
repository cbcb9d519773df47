"""The one object that Inductor sees, in `torch._inductor.config.joint_custom_pre_pass`.

It runs the passes on the joint graph, where the partitioner still can save the row in place of its parts. Its `uuid()`
covers the passes' sources, the settings and every registered op, so neither the FX graph cache nor AOTAutograd's cache
can return code that was made by other passes or for other formulas (AOTAutograd's cache does not look at formulas
itself). Passes that the user has set keep their place and run first.
"""

import functools
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from inductor_passes import pipeline, registry, settings
from inductor_passes.dense_rows import register_lowering
from inductor_passes.report import Report

log = logging.getLogger("inductor_passes")

SLOT = "joint_custom_pre_pass"
WATCH_SLOT = "joint_custom_post_pass"

REPLACED = (
    "torch._inductor.config.joint_custom_pre_pass does not contain the pass of inductor_passes: what is compiled, or "
    "taken from a cache, keeps the unpacked backward. Use inductor_passes.manager.chain(your_pass), or backend='gdn'."
)
REMEDY = (
    "torch._inductor.config.joint_custom_pre_pass was set after inductor_passes was installed, and the new value does "
    "not contain its pass: {calls} call(s) of {ops} keep the unpacked backward. Set it before importing the package "
    "that installs the pass, or set it to inductor_passes.manager.chain(your_pass), or use "
    "torch.compile(backend='gdn')."
)


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def identity() -> tuple[object, ...]:
    """What the compiled code depends on here: sources, settings, registered ops."""
    ops = tuple(variant.identity for variant in registry.variants())
    return ("inductor_passes", _source_hash(), settings.current(), ops)


class _Singleton(CustomGraphPass):
    """A pass that stays one object: torch copies and pickles its configuration, and repr() goes into hashes."""

    def __copy__(self) -> "_Singleton":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Singleton":
        return self

    def __repr__(self) -> str:
        return f"inductor_passes.manager.{type(self).__name__}"


_this_thread = threading.local()
"""Inductor calls a graph's pre-pass and then its post-pass in one thread: `ran` goes from the first to the second."""


class PassManager(_Singleton):
    """Runs the passes on a joint (or inference) graph and keeps the report."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place and publish what was done."""
        register_lowering()
        report = pipeline.rewrite_graph(graph, strides_hold=False)
        _this_thread.ran = True
        if len(report):
            publish(report)

    def uuid(self) -> Any:
        """What Inductor's and AOTAutograd's caches are keyed by."""
        return identity()

    def __reduce__(self) -> Any:
        return _the_manager, ()


class Watch(_Singleton):
    """Sits in the post-pass slot and says, once, if a later setting dropped the manager from the pre-pass slot.

    On a cache hit no pass runs, and the graph is not to be had. But Inductor asks every slot for its `uuid()` then, so
    that much is said (at INFO level, since the graph may hold no call): the pass was not in its slot.
    """

    def __init__(self) -> None:
        self._said = False
        self._said_on_lookup = False
        self._lock = threading.Lock()

    def __call__(self, graph: Graph) -> None:
        """Look whether the manager ran on this graph; changes nothing."""
        ran, _this_thread.ran = getattr(_this_thread, "ran", False), False
        if ran or not settings.current().enabled:
            return
        sites = pipeline.find_calls(graph)
        if not sites:
            return
        with self._lock:
            if self._said:
                return
            self._said = True
        names = ", ".join(sorted({site.variant.fwd for site in sites}))
        log.warning(REMEDY.format(calls=len(sites), ops=names))

    def uuid(self) -> Any:
        """What Inductor's and AOTAutograd's caches are keyed by."""
        from torch._inductor import config

        if settings.current().enabled and manager not in _as_passes(getattr(config, SLOT)):
            with self._lock:
                said, self._said_on_lookup = self._said_on_lookup, True
            if not said:
                log.info(REPLACED)
        return identity()

    def __reduce__(self) -> Any:
        return _the_watch, ()


class Chain(CustomGraphPass):
    """Several passes in one slot, in order. It can be cached if each of them can (torch 2.11 takes one pass only)."""

    def __init__(self, passes: Iterable[Callable[[Graph], object]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run the passes in order."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        """The members' identities, or None if one has none."""
        parts = []
        for one in self.passes:
            part = one.uuid() if isinstance(one, CustomGraphPass) else None
            if not part:
                return None  # Inductor then bypasses its caches, as it would for that pass alone
            parts.append(part)
        return ("chain", *parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Chain":
        return self

    def __repr__(self) -> str:
        return f"inductor_passes.manager.Chain({', '.join(map(repr, self.passes))})"


manager = PassManager()
watch = Watch()


def _the_manager() -> PassManager:
    return manager


def _the_watch() -> Watch:
    return watch


def _as_passes(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Chain):
        return list(value.passes)
    return list(value) if isinstance(value, list | tuple) else [value]


def _with(value: Any, ours: _Singleton) -> Any:
    passes = _as_passes(value)
    if ours in passes:
        return value
    return Chain([*passes, ours]) if passes else ours


def chain(*passes: Callable[[Graph], object]) -> CustomGraphPass:
    """The user's passes and then this package's, as one value for `joint_custom_pre_pass`."""
    return _with(list(passes), manager)


def attach(config: ModuleType) -> None:
    """Put the manager (and its watch) into Inductor's configuration, behind whatever the user has set already."""
    for slot, ours in ((SLOT, manager), (WATCH_SLOT, watch)):
        _attach_to(config, slot, ours)


def _attach_to(config: ModuleType, slot: str, ours: _Singleton) -> None:
    # A value set the public way holds in one thread only (torch keeps configuration in context variables since 2.13),
    # but compilation may start in any. So the default is changed, and a value that the user has set in this thread as
    # well.
    entry = config._config[slot]
    if hasattr(entry, "default"):
        entry.default = _with(entry.default, ours)
    value = getattr(config, slot)
    if ours not in _as_passes(value):
        setattr(config, slot, _with(value, ours))


def publish(report: Report) -> None:
    """Give a report to the log (INFO: the table) and, as an artifact of the compilation, to torch's trace."""
    log.info("%s", report)
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "inductor_passes_report", "encoding": "string"},
        payload_fn=lambda: str(report),
    )


def gdn_backend(
    gm: torch.fx.GraphModule,
    example_inputs: list[torch.Tensor],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="gdn")`: Inductor with the passes, whatever mode, options or configuration say.

    Where `torch.compile` hands on both, options win over mode.
    """
    import torch._inductor
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = {}
    if mode and mode != "default":
        patches.update(torch._inductor.list_mode_options(mode, kwargs.get("dynamic")))
    patches.update({key.replace("-", "_"): value for key, value in (options or {}).items()})
    patches[SLOT] = _with(patches.get(SLOT, getattr(config, SLOT)), manager)
    return compile_fx(gm, example_inputs, config_patches=patches)  # type: ignore[arg-type, return-value]
