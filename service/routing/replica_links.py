"""What links say of the replicas at their other ends."""

from service.channel.client import ReplicaLink
from service.routing.sleep import is_asleep


def is_usable(link: ReplicaLink) -> bool:
    load = link.load
    return link.is_connected and not (load.is_draining or load.is_stalled or load.sleep_level)


def is_well(link: ReplicaLink) -> bool:
    """Whether it takes requests, or would if an operator woke it."""
    return is_usable(link) or is_asleep(link)


def emptiest(links: dict[str, ReplicaLink]) -> dict[str, ReplicaLink]:
    """The one replica whose loss would befall the fewest requests of this ingress."""
    replica_id = min(links, key=lambda replica_id: links[replica_id].num_live_requests)
    return {replica_id: links[replica_id]}
