"""Putting the passes into Inductor's configuration without importing Inductor.

Importing `torch._inductor.config` costs a second, which must not fall on `import gdn_ops`. So where Inductor is not
loaded yet, a finder on `sys.meta_path` waits for that one module and lets `manager.attach()` run right after its body,
before anyone can have read the setting. A first call that is already compiled finds the passes in place.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

_TARGET = "torch._inductor.config"
_lock = threading.Lock()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds `_TARGET` as the other finders do, and attaches the passes after its body has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TARGET:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _AfterImport) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AttachingLoader(spec.loader)
                return spec
        return None


class _AttachingLoader(importlib.abc.Loader):
    """The loader that was found, with one step more."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module (and inspect.getsource, which it uses on itself) shall see its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
        _attach(module)


def _attach(module: ModuleType) -> None:
    from inductor_passes import manager  # only here: it needs Inductor's base class

    manager.attach(module)


def install() -> None:
    """Make `torch.compile` use the passes from now on. Cheap, safe from several threads, and again is no harm."""
    with _lock:
        module = sys.modules.get(_TARGET)
        # While its body is still running (another thread, or a circular import) the module has no settings yet.
        if module is not None and hasattr(module, "_config"):
            _attach(module)
        elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
