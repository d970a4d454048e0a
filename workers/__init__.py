"""Turns requests into tokens on N devices. Knows no HTTP and no Serve.

`from workers import Engine` is the in-process engine. It is resolved on first use, because it
brings torch with it and most importers only need the plain types of workers.engine.protocol.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from workers.engine.engine import Engine

        return Engine
    raise AttributeError(f"module 'workers' has no attribute {name!r}")
