"""What lets a request go on at another replica token for token: a seed that this ingress has fixed,
and the output that came so far.

Noise is a function of (seed, position, token) (docs/decisions/0002), so a replica that gets both
draws what the first one would have drawn. Knows no replica.
"""

import random
import secrets
from array import array

import msgspec

from workers.engine.protocol import GenerateRequest

_SEED_BITS = 63
_RETRY_INITIAL_S = 0.1
_RETRY_MAX_S = 2.0


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """The request with a seed: its own, or else one that nobody can predict."""
    if request.sampling.seed is not None:
        return request
    seed = secrets.randbits(_SEED_BITS)
    sampling = msgspec.structs.replace(request.sampling, seed=seed)
    return msgspec.structs.replace(request, sampling=sampling)


def resumed(request: GenerateRequest, number: int, received: "array[int]") -> GenerateRequest:
    """What another replica is sent. number: of the attempt; ids of attempts differ, so that late
    outputs of one are not taken for the next one's. received: all output so far."""
    request_id = f"{request.request_id}+{number}"
    return msgspec.structs.replace(
        request, request_id=request_id, resumed_token_ids=received.tolist()
    )


def retry_delay_s(number: int) -> float:
    """Seconds before a request that every replica refuses is sent again. number: from 1."""
    most_s = min(_RETRY_INITIAL_S * (1 << min(number - 1, 16)), _RETRY_MAX_S)
    return most_s * random.uniform(0.5, 1.0)
