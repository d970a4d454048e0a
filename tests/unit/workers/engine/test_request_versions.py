"""What an ingress sends to engines of another version, as in a rolling upgrade."""

import msgspec
import pytest

from workers.engine.protocol import GenerateRequest
from workers.pooling.params import Pooling, PoolingParams
from workers.sampling.params import SamplingParams


class OlderSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    temperature: float = 1.0
    max_tokens: int | None = None


class OlderRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GenerateRequest of a version without the fields that came later."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: OlderSampling
    priority: int = 0


def older(request: GenerateRequest) -> OlderRequest:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=OlderRequest)


def test_an_older_engine_takes_what_asks_for_nothing_newer():
    request = GenerateRequest("r", [1, 2], SamplingParams(temperature=0.0, max_tokens=3), 4)
    assert older(request) == OlderRequest("r", [1, 2], OlderSampling(0.0, 3), 4)


@pytest.mark.parametrize(
    "newer",
    [
        GenerateRequest("r", [1], SamplingParams(), pooling=PoolingParams(Pooling.LAST)),
        GenerateRequest("r", [1], SamplingParams(top_p=0.5)),
        GenerateRequest("r", [1], SamplingParams(), resumed_token_ids=[2]),
    ],
)
def test_it_refuses_the_rest_instead_of_ignoring_it(newer):
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        older(newer)


def test_what_does_not_travel_comes_back_as_its_default():
    request = GenerateRequest("r", [1], SamplingParams(seed=7), cache_salt="s")
    encoded = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(encoded, type=GenerateRequest) == request
