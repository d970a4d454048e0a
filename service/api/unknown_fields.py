"""Names in bodies that are no parameter: refused, or left out and told to the log once."""

import logging
from typing import Literal

from pydantic import ValidationError

logger = logging.getLogger(__name__)

UnknownFieldsPolicy = Literal["refuse", "ignore"]
_MAX_NAMES = 256
_MAX_NAME_CHARS = 64


class UnknownFields:
    """One per server: it knows which names it has told. Any thread may use it."""

    def __init__(self, policy: UnknownFieldsPolicy) -> None:
        self._is_ignoring = policy == "ignore"
        self._told: set[str] = set()

    def are_all_ignored(self, error: ValidationError) -> bool:
        """Whether the body may be read again without its unknown names, of which it has some."""
        if not self._is_ignoring:
            return False
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        names = [str(one["loc"][-1]) for one in problems if one["type"] == "extra_forbidden"]
        for name in names:
            self._tell(name[:_MAX_NAME_CHARS])
        return bool(names)

    def _tell(self, name: str) -> None:
        if name not in self._told and len(self._told) < _MAX_NAMES:
            self._told.add(name)
            logger.warning("bodies have an unknown field, which is ignored: %r", name)


UNKNOWN_REFUSED = UnknownFields("refuse")
