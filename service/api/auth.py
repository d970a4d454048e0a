"""Who may call: API keys, kept and compared as SHA-256 digests. Knows no transport."""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Protocol


class Authenticator(Protocol):
    def is_allowed(self, authorization: str | None) -> bool:
        """authorization: value of the header or metadata entry of that name, if there is one."""
        ...


class OpenAuthenticator:
    """Lets everybody in: for servers that only trusted clients can reach."""

    def is_allowed(self, authorization: str | None) -> bool:
        return True


class ApiKeyAuthenticator:
    """Wants `Bearer <key>`. Holds digests only; every comparison takes the same time."""

    def __init__(self, key_digests: Iterable[bytes]) -> None:
        self._digests = tuple(key_digests)
        if not self._digests:
            raise ValueError("an ApiKeyAuthenticator needs at least one key")

    def is_allowed(self, authorization: str | None) -> bool:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        digest = digest_api_key(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


def digest_api_key(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_authenticator(key_digests: Iterable[bytes]) -> Authenticator:
    """No keys: everybody is let in."""
    digests = tuple(key_digests)
    return ApiKeyAuthenticator(digests) if digests else OpenAuthenticator()
