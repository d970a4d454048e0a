"""Caller: whom a request comes from, and how the layers below learn it.

The API servers set the caller of a call before its handler runs, in the call's own context, which
tasks that it starts inherit. Knows no transport.
"""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

from service.security.api_keys import ApiKey
from service.security.quota import Quota, UnlimitedQuota, make_quota

_SALT_PURPOSE = b"tessera prefix cache salt"


@dataclass(frozen=True, slots=True)
class Caller:
    """cache_salt: kept apart in the prefix cache from other salts; "" shares."""

    name: str
    quota: Quota
    cache_salt: str = ""

    def salted(self, client_salt: str) -> str:
        """The salt of one request. Distinct callers with salts of their own never collide."""
        # All own salts are of one length, so no client's salt can be mistaken for a part of one.
        return f"{self.cache_salt}:{client_salt}" if self.cache_salt else client_salt


ANONYMOUS = Caller("anonymous", UnlimitedQuota())
_current: ContextVar[Caller] = ContextVar("tessera_caller", default=ANONYMOUS)


def current_caller() -> Caller:
    """Of the call under way; ANONYMOUS where no server has set one."""
    return _current.get()


def set_caller(caller: Caller) -> None:
    """For the rest of the call under way."""
    _current.set(caller)


def digest_api_key(key: str) -> bytes:
    """SHA-256: what is kept and compared instead of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def make_callers(
    keys: Iterable[ApiKey], clock: Callable[[], float], *, salt_prefix_cache: bool
) -> dict[bytes, Caller]:
    """By digest of the key; the first of equal keys counts.

    Salts are equal in every process that has the same key.
    """
    callers: dict[bytes, Caller] = {}
    for key in keys:
        digest = digest_api_key(key.key)
        if digest in callers:
            continue
        salt = hmac.new(digest, _SALT_PURPOSE, hashlib.sha256).hexdigest()
        quota = make_quota(key.name, key.limits, clock)
        callers[digest] = Caller(key.name, quota, salt if salt_prefix_cache else "")
    return callers
