"""What transformers' code raises when it is run in another way than it was written for."""

from collections.abc import Iterator
from contextlib import contextmanager

from workers.errors import ModelLoadError

_PROBE_ERRORS = (
    *(AttributeError, TypeError, ValueError, LookupError, NameError, RuntimeError),
    AssertionError,
)


@contextmanager
def probing(obstacle: str) -> Iterator[None]:
    """Turn it into ModelLoadError: obstacle, and what transformers says."""
    try:
        yield
    except _PROBE_ERRORS as error:
        raise ModelLoadError(f"{obstacle}: {error}") from error
