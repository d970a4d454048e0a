"""The key of a session: under it a router remembers which replica a client's requests go to.

Knows no transport and no replica.
"""

import hashlib

NO_SESSION = b""
_KEY_BYTES = 16


def make_session_key(caller: str, cache_salt: str, name: str) -> bytes:
    """The same in every process. Sessions of other callers or salts never share one."""
    if not name:
        return NO_SESSION
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in (caller, cache_salt, name):
        data = part.encode()
        # With its length, so that no part can pass for the end of another.
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
