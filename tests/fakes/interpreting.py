"""Runs a module by Triton's interpreter: `python -m tests.fakes.interpreting MODULE`, with
TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import inspect
import runpy
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType

from triton import language
from triton.runtime import interpreter


class LanguagePatches:
    """Stands for the interpreter's function that puts its own operations into Triton's language.

    A launch does so and takes them out again; so does every call of a function by a kernel, a
    thousand to a launch, though they are there. Here such a call does nothing: a third of the time.
    """

    def __init__(self, patch: Callable[[FunctionType], object]) -> None:
        self._patch = patch
        self._languages: dict[FunctionType, frozenset[ModuleType]] = {}
        # Those that have been patched since the launch that is under way began.
        self._patched: set[ModuleType] = set()

    def __call__(self, function: FunctionType) -> object:
        """What the launch restores; None within a launch, where nobody does."""
        if function not in self._languages:
            of_it = filter(inspect.ismodule, function.__globals__.values())
            known = (language, language.core)
            self._languages[function] = frozenset(one for one in of_it if one in known)
        languages = self._languages[function]
        if self._patched and languages <= self._patched:
            return None
        scope = self._patch(function)
        if not self._patched:
            scope.restore = self._ending(scope.restore)
        self._patched |= languages
        return scope

    def _ending(self, restore: Callable[[], None]) -> Callable[[], None]:
        def restored() -> None:
            self._patched.clear()
            restore()

        return restored


if __name__ == "__main__":
    interpreter._patch_lang = LanguagePatches(interpreter._patch_lang)
    runpy.run_module(sys.argv[1], run_name="__main__")
