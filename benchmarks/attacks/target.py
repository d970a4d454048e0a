"""What attackers and honest clients know of the service. Imports nothing of it."""

from typing import NamedTuple

API_KEY = "the-honest-clients"
MODEL = "tiny"


class Ports(NamedTuple):
    """Of the service, on 127.0.0.1. pid: of its process."""

    http: int
    grpc: int
    pid: int
