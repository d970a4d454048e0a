"""Caller: whom a request comes from. Knows no transport."""

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from service.security.api_keys import ApiKey, digest_api_key
from service.security.priorities import PriorityRange
from service.security.quota import Quota, UnlimitedQuota, make_quota

_SALT_PURPOSE = b"tessera prefix cache salt"
_TENANT_PURPOSE = b"tessera tenant"


@dataclass(frozen=True, slots=True)
class Caller:
    """cache_salt: kept apart in the prefix cache from other salts; "" shares. tenant: whose stored
    responses it may see, one for each key and the same in every process."""

    name: str
    quota: Quota
    cache_salt: str = ""
    priorities: PriorityRange = PriorityRange()
    tenant: str = ""

    def salted(self, client_salt: str) -> str:
        """The salt of one request. Distinct callers with salts of their own never collide."""
        # All own salts are of one length, so no client's salt can be mistaken for a part of one.
        return f"{self.cache_salt}:{client_salt}" if self.cache_salt else client_salt


def make_anonymous(priorities: PriorityRange) -> Caller:
    """Everybody, where no keys are asked for: one tenant."""
    return Caller("anonymous", UnlimitedQuota(), priorities=priorities)


ANONYMOUS = make_anonymous(PriorityRange())


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
        tenant = hmac.new(digest, _TENANT_PURPOSE, hashlib.sha256).hexdigest()
        quota = make_quota(key.name, key.limits, clock)
        own_salt = salt if salt_prefix_cache else ""
        callers[digest] = Caller(key.name, quota, own_salt, key.priorities, tenant)
    return callers
