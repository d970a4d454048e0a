"""Whether an address can be reached from its own machine only."""

import ipaddress


def is_loopback(host: str) -> bool:
    """host: a numeric address, or a name. Of names only localhost is taken for its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
