"""Triton's CPU interpreter without what it does again and again.

It remaps the language for a launch, and anew for every device function that a program calls, although it is remapped already:
looking through all of it took a third of the time of the kernels' tests. And every value looks its NumPy type up in a table made
for it. Where another version of Triton has no such functions, it runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any


def remap_once(interpreter: Any) -> None:
    """Has a device function use the language as its launch has remapped it, and types of values be looked up in one table."""
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype")):
        return
    remap, tl = interpreter._patch_lang, interpreter.tl
    of_launch: list[set[str]] = []
    for_good: set[str] = set()  # what a device function has had remapped is not restored

    class Scope:
        """What a launch restores when it ends."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def restore(self) -> None:
            self._inner.restore()
            of_launch.pop()

    def remap_new(fn: Any) -> Any:
        modules = {x.__name__ for x in fn.__globals__.values() if isinstance(x, ModuleType) and x in (tl, tl.core)}
        if not of_launch:
            of_launch.append(modules)
            return Scope(remap(fn))
        if modules - of_launch[-1] - for_good:
            remap(fn)
            for_good.update(modules)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = remap_new
    interpreter._get_np_dtype = _in_one_table(interpreter._get_np_dtype, tl)


def _in_one_table(numpy_type: Callable[[Any], Any], tl: Any) -> Callable[[Any], Any]:
    scalar = cache(numpy_type)

    def find(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return numpy_type(element) if isinstance(element, tl.pointer_type) else scalar(element)

    return find
