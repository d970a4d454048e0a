"""The session of a call: a name under which a client's requests belong together.

The API servers set what the call's header says, the handler what stands in its body where no header
does. The router reads the key. Knows no transport and no replica.
"""

import hashlib
from contextvars import ContextVar

NO_SESSION = b""
_KEY_BYTES = 16
_name: ContextVar[str] = ContextVar("tessera_session_name", default="")
_key: ContextVar[bytes] = ContextVar("tessera_session_key", default=NO_SESSION)


def session_name() -> str:
    """What the header of the call under way says, "" if there is none."""
    return _name.get()


def set_session_name(name: str) -> None:
    """For the rest of the call under way, which has no key yet."""
    _name.set(name)
    _key.set(NO_SESSION)


def session_key() -> bytes:
    """Of the call under way, NO_SESSION if it belongs to none."""
    return _key.get()


def set_session_key(key: bytes) -> None:
    """For the rest of the call under way and the tasks that it starts."""
    _key.set(key)


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
