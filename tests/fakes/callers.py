"""Callers by API key, for servers under test."""

import time

from service.security.api_keys import ApiKey
from service.security.callers import Caller, make_callers
from service.security.quota import KeyLimits


def callers_of(*keys: str, salt_prefix_cache: bool = False, **limits: int) -> dict[bytes, Caller]:
    """limits: of each key, as in KeyLimits."""
    api_keys = [ApiKey(key, f"name-of-{key}", KeyLimits(**limits)) for key in keys]
    return make_callers(api_keys, time.monotonic, salt_prefix_cache=salt_prefix_cache)
