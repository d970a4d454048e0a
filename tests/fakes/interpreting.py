"""Runs modules by Triton's interpreter: `python -m tests.fakes.interpreting MODULE ...`, with
TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
from triton import language
from triton.language.core import block_type, dtype, tensor
from triton.runtime import interpreter


class LanguagePatches:
    """Stands for the interpreter's function that puts its own operations into Triton's language.

    A launch does so and takes them out again; so does every call of a function by a kernel, a
    thousand to a launch, though they are there. Here a language has them from its first launch on:
    this process runs no kernel otherwise.
    """

    def __init__(self, patch: Callable[[FunctionType], object]) -> None:
        self._patch = patch
        self._languages: dict[FunctionType, frozenset[ModuleType]] = {}
        self._patched: set[ModuleType] = set()

    def __call__(self, function: FunctionType) -> SimpleNamespace:
        if function not in self._languages:
            of_it = filter(inspect.ismodule, function.__globals__.values())
            known = (language, language.core)
            self._languages[function] = frozenset(one for one in of_it if one in known)
        languages = self._languages[function]
        if not (languages and languages <= self._patched):
            self._patch(function)
            self._patched |= languages
        return SimpleNamespace(restore=lambda: None)


class KnownTypes:
    """What the interpreter derives from a type by its name alone, which it does for every result of
    an operation, by arithmetic that takes longer than the operation: here once for each name.
    """

    def __init__(self) -> None:
        self._build_block, self._build_tensor = block_type.__init__, tensor.__init__
        self._find_array_type = interpreter._get_np_dtype
        self._blocks: dict[tuple[str, tuple[object, ...]], dict[str, object]] = {}
        self._tensors: dict[str, dict[str, object]] = {}
        self._array_types: dict[str, np.dtype] = {}

    def begin_block(self, own: block_type, element_ty: dtype, shape: Sequence[object]) -> None:
        key = element_ty.name, tuple(shape)
        if key not in self._blocks:
            self._build_block(own, element_ty, shape)
            self._blocks[key] = _without(own, "element_ty")
        own.__dict__.update(self._blocks[key], element_ty=element_ty)

    def begin_tensor(self, own: tensor, handle: object, type: dtype) -> None:
        if type.name not in self._tensors:
            self._build_tensor(own, handle, type)
            self._tensors[type.name] = _without(own, "handle", "type", "dtype")
        known = self._tensors[type.name]
        own.__dict__.update(known, handle=handle, type=type, dtype=type.scalar)

    def array_type(self, of: dtype) -> np.dtype:
        if of.name not in self._array_types:
            self._array_types[of.name] = self._find_array_type(of)
        return self._array_types[of.name]


class RoundedProducts:
    """Stands for the interpreter's product of matrices: it adds up in 64 bits and rounds once, so
    that a row's bits do not depend on how many rows there are. NumPy's libraries add up by other
    kernels then, on some CPUs in another order.
    """

    def __init__(self, multiply: Callable[..., interpreter.TensorHandle]) -> None:
        self._multiply = multiply

    def __call__(
        self,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        added: interpreter.TensorHandle,
        *options: object,
    ) -> interpreter.TensorHandle:
        kind = added.data.dtype
        if kind.kind != "f":
            return self._multiply(a, b, added, *options)
        wide = interpreter.TensorHandle(added.data.astype(np.float64), language.float64)
        product = self._multiply(a, b, wide, *options)
        return interpreter.TensorHandle(product.data.astype(kind), added.dtype.scalar)


def _without(own: object, *names: str) -> dict[str, object]:
    return {name: value for name, value in vars(own).items() if name not in names}


def hasten() -> None:
    """The interpreter computes what it did, in less than half the time."""
    interpreter._patch_lang = LanguagePatches(interpreter._patch_lang)
    known = KnownTypes()
    block_type.__init__ = lambda own, *arguments: known.begin_block(own, *arguments)
    tensor.__init__ = lambda own, *arguments: known.begin_tensor(own, *arguments)
    interpreter._get_np_dtype = known.array_type
    builder = interpreter.interpreter_builder
    builder.create_dot = RoundedProducts(builder.create_dot)
    # Sums of integers are computed once more in 64 bits, to be compared where `debug` is set only.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


if __name__ == "__main__":
    hasten()
    for module in sys.argv[1:]:
        runpy.run_module(module, run_name="__main__")
