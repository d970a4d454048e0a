"""Who may change what is served: keys of their own, apart from those that clients have."""

import hmac
from collections.abc import Sequence

from service.errors import ApiError, ApiErrorCode
from service.security.api_keys import digest_api_key


class AdminGate:
    """keys: at least one. Holds digests only; every comparison takes the same time."""

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys:
            raise ValueError("an AdminGate needs at least one key")
        self._digests = [digest_api_key(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """authorization: value of the header of that name. Raises ApiError INVALID_API_KEY."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = digest_api_key(key.strip())
        # Every known digest is compared, whichever matches.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(ApiErrorCode.INVALID_API_KEY, "a valid admin key is required")
