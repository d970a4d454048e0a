"""What transformers says of a config each time that it reads one, left out: a survey reads several
times what a start reads once."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings_of_transformers() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
