"""Who may call: API keys, kept and compared as SHA-256 digests. Knows no transport."""

import hmac
from collections.abc import Mapping
from typing import Protocol

from service.security.api_keys import digest_api_key
from service.security.callers import ANONYMOUS, Caller


class Authenticator(Protocol):
    def identify(self, authorization: str | None) -> Caller | None:
        """Who calls; None: nobody that may.

        authorization: value of the header or metadata entry of that name, if there is one.
        """
        ...


class OpenAuthenticator:
    """Lets everybody in as one caller: for servers that only trusted clients can reach."""

    def __init__(self, caller: Caller = ANONYMOUS) -> None:
        self._caller = caller

    def identify(self, authorization: str | None) -> Caller | None:
        return self._caller


class ApiKeyAuthenticator:
    """Wants `Bearer <key>`. Holds digests only; every comparison takes the same time."""

    def __init__(self, callers: Mapping[bytes, Caller]) -> None:
        """callers: by digest of their key."""
        self._callers = tuple(callers.items())
        if not self._callers:
            raise ValueError("an ApiKeyAuthenticator needs at least one key")

    def identify(self, authorization: str | None) -> Caller | None:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = digest_api_key(key.strip())
        # Every known digest is compared, whichever matches.
        found = [caller for known, caller in self._callers if hmac.compare_digest(digest, known)]
        return found[0] if found else None


def make_authenticator(
    callers: Mapping[bytes, Caller], anonymous: Caller = ANONYMOUS
) -> Authenticator:
    """No callers: everybody is let in, as `anonymous`."""
    return ApiKeyAuthenticator(callers) if callers else OpenAuthenticator(anonymous)
