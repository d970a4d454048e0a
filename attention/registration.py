"""The table of attention backends and the decorator that fills it. Imports no backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from attention.backends.base import AttentionBackend
from attention.capability import AttentionBackendError

BackendClass = TypeVar("BackendClass", bound=type[AttentionBackend])


class BackendRegistry:
    """Backend classes by name, in order of registration."""

    def __init__(self) -> None:
        self._classes: dict[str, type[AttentionBackend]] = {}

    def register(self, name: str) -> Callable[[BackendClass], BackendClass]:
        """Class decorator; the name must be the class's capability.name and not yet taken."""

        def add(backend_class: BackendClass) -> BackendClass:
            declared = backend_class.capability.name
            if declared != name:
                raise ValueError(f"registered as {name!r} but its capability says {declared!r}")
            if name in self._classes:
                raise ValueError(f"attention backend {name!r} is registered twice")
            self._classes[name] = backend_class
            return backend_class

        return add

    def get(self, name: str) -> type[AttentionBackend]:
        if name not in self._classes:
            known = ", ".join(self._classes)
            raise AttentionBackendError(f"no attention backend named {name!r}; there are: {known}")
        return self._classes[name]

    def __iter__(self) -> Iterator[type[AttentionBackend]]:
        return iter(self._classes.values())


ATTENTION_BACKENDS = BackendRegistry()

register_attention_backend = ATTENTION_BACKENDS.register

# What a backend whose capability says has_mla is built as for a model that keeps latents.
LATENT_BACKENDS = BackendRegistry()

register_latent_backend = LATENT_BACKENDS.register
