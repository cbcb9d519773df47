"""Makes Triton's interpreter faster for the checks that run in a process of their own; no tests of its own."""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once() -> None:
    """Within a launch, leave `triton.language` as the launch has made it.

    The interpreter replaces every function of the language again at each call of a helper, which is a third of its
    time and changes nothing. A version of Triton that does it in another way is left alone.
    """
    patch = getattr(interpreter, "_patch_lang", None)
    scope = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope is None:
        return

    def patch_what_is_not(fn: Any) -> Any:
        modules = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        if modules and not any(tl.core.is_builtin(module.load) for module in modules):
            return scope()
        return patch(fn)

    interpreter._patch_lang = patch_what_is_not
