"""Captures end where one fails, and steps go on. Knows no graph."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class CaptureAttempts:
    """Of one rank: graphs are captured until one cannot be.

    Steps without a graph run eagerly, so that a capture which finds no memory, or whose model does
    what CUDA does not capture, is no failure of a step: with one warning no other is tried, and the
    graphs that are there stay in use. Ranks of a group cannot agree on that while they wait for
    each other: there it is a failure (decision 0044).
    """

    def __init__(self, is_alone: bool, free_memory: Callable[[], None]) -> None:
        self._is_alone = is_alone
        self._free_memory = free_memory
        self._has_failed = False

    def attempt(self, capture: Callable[[], bool]) -> bool:
        """What capture says, False where it failed or an earlier one did."""
        if self._has_failed:
            return False
        try:
            return capture()
        except RuntimeError as error:
            if not self._is_alone:
                raise
            self._has_failed = True
            logger.warning(
                "no further CUDA graphs are captured, steps without one run eagerly: %s", error
            )
        # Not before the error is gone: its frames hold the capture's tensors.
        self._free_memory()
        return False
