"""Where a replica's channel listens, and with which key. Travels over Ray's control plane."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """One running replica. replica_id names one life of it: a replacement has another.

    model: the name of the one that it serves. node_id: the node whose processes can reach
    unix_path. tcp_host is None where the replica does not listen on TCP. key: the secret that both
    ends of a connection prove.
    """

    replica_id: str
    model: str
    node_id: str
    unix_path: str
    tcp_host: str | None
    tcp_port: int
    key: bytes = field(repr=False)

    def is_reachable_from(self, node_id: str) -> bool:
        return self.node_id == node_id or self.tcp_host is not None
