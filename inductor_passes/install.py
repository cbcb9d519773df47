"""Putting the passes where torch.compile finds them, without importing Inductor.

Importing `torch._inductor.config` costs a second, which must not fall on `import gdn_ops`. So where Inductor is not
loaded yet, a finder on `sys.meta_path` waits for that one module and lets `manager.attach` run right after its body,
before anyone can have read the setting. A first call that is already compiled finds the passes in place. The name
"gdn" for `torch.compile(backend="gdn")` gets into Dynamo's registry in the same way.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_lock = threading.Lock()


def _attach(config: ModuleType) -> None:
    from inductor_passes import manager  # only here: it needs Inductor's base class

    manager.attach(config)


def _register_backend(dynamo_registry: ModuleType) -> None:
    # An installed distribution has an entry point of this name, too; a checkout on the path has not.
    if "gdn" not in dynamo_registry._COMPILER_FNS:
        dynamo_registry.register_backend(gdn_backend, name="gdn")


def gdn_backend(*args: Any, **kwargs: Any) -> Any:
    """`manager.gdn_backend`, loaded when it is first used."""
    from inductor_passes import manager

    return manager.gdn_backend(*args, **kwargs)


_WAITING: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "torch._inductor.config": ("_config", _attach),
    "torch._dynamo.backends.registry": ("register_backend", _register_backend),
}
"""By module: a name that it has once its body has run, and what is to be done then."""


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and has something done after its body has run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders have for the module, with a loader that does one step more."""
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _AfterImport) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _OneStepMore(spec.loader, self)
                return spec
        return None


class _OneStepMore(importlib.abc.Loader):
    """The loader that was found, and then the step."""

    def __init__(self, loader: importlib.abc.Loader, finder: _AfterImport) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader itself."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's body, then the step."""
        # The body (Inductor's configuration reads its own source) shall see its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self._finder]
        _WAITING[self._finder.name][1](module)


def install() -> None:
    """Make `torch.compile` use the passes from now on. Cheap, safe from several threads, and again is no harm."""
    with _lock:
        for name, (sign, step) in _WAITING.items():
            module = sys.modules.get(name)
            # While its body is still running (a circular import, another thread) there is nothing to write to yet.
            if module is not None and hasattr(module, sign):
                step(module)
            elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
                sys.meta_path.insert(0, _AfterImport(name))
