"""Sizes for people."""

GIB = 1 << 30
_UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_LEAST_SHOWN = 0.1


def size(num_bytes: int) -> str:
    """In the largest unit of which there is a tenth at least."""
    for unit, name in _UNITS:
        if num_bytes >= _LEAST_SHOWN * unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} bytes"
