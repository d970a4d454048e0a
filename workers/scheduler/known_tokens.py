"""What decode rows of requests with a grammar bring, as far as the host knows."""

from collections.abc import Sequence

from workers.kv_cache.radix_node import IntArray
from workers.scheduler.request import ConstrainedRequest, Request


def name_known(input_ids: IntArray, requests: Sequence[Request], positions: IntArray) -> None:
    """Put into input_ids what stands at positions, int32 (n,) both, of requests with a grammar, as
    far as the host knows: forced tokens, and those of rows that run again, for which the device
    has sampled something else."""
    for row, request in enumerate(requests):
        if isinstance(request, ConstrainedRequest):
            token_id = request.known_token(int(positions[row]))
            if token_id is not None:
                input_ids[row] = token_id
