"""Paths of adapters that every process can be told: messages between processes are UTF-8."""


def is_tellable(path: str) -> bool:
    """Whether a path is UTF-8, which names of files need not be."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


UNTELLABLE = "its path, or the one that links lead to, is no UTF-8"
