"""KeyRing: the API keys of an ingress, which may change while it serves. Knows no transport."""

from collections.abc import Callable
from dataclasses import replace

from service.api.auth import ApiKeyAuthenticator
from service.security.api_keys import ApiKey, digest_api_key
from service.security.callers import Caller, make_callers


class KeyRing:
    """Implements Authenticator. Wants at least one key."""

    def __init__(
        self, keys: tuple[ApiKey, ...], clock: Callable[[], float], *, salt_prefix_cache: bool
    ) -> None:
        self._clock = clock
        self._salt_prefix_cache = salt_prefix_cache
        self._keys: dict[bytes, ApiKey] = {}
        self._callers: dict[bytes, Caller] = {}
        self.renew(keys)

    def identify(self, authorization: str | None) -> Caller | None:
        return self._authenticator.identify(authorization)

    def renew(self, keys: tuple[ApiKey, ...]) -> None:
        """Let in these keys from now on. A key whose limits stay keeps what it has used, also where
        its name or its line has changed.

        Requests under way go on, those of a key that is gone too.
        """
        callers = make_callers(keys, self._clock, salt_prefix_cache=self._salt_prefix_cache)
        by_digest: dict[bytes, ApiKey] = {}
        for key in keys:
            by_digest.setdefault(digest_api_key(key.key), key)
        for digest, key in by_digest.items():
            before = self._keys.get(digest)
            if before is not None and before.limits == key.limits:
                quota = self._callers[digest].quota
                quota.rename(key.name)
                callers[digest] = replace(callers[digest], quota=quota)
        self._keys, self._callers = by_digest, callers
        self._authenticator = ApiKeyAuthenticator(callers)
