"""20,000 random requests to encoder-decoders, with windows and chunks beside: each gets what it
gets alone, and every account is proved after every commit.
"""

import random
from dataclasses import replace

import msgspec
import pytest

from tests.nightly.test_bounded_storm import random_config, random_request, run_traffic
from workers.engine.encoder_input import SourceTokens, TextEncoder
from workers.engine.protocol import GenerateRequest
from workers.scheduler import prefills_under_way
from workers.scheduler.config import EncoderAccount, SchedulerConfig

NUM_REQUESTS = 5_000
LENGTHS = (1, 3, 4, 5, 16, 17, 24)
READER = TextEncoder(max(LENGTHS), vocab_size=32)


def config_of(rng: random.Random) -> SchedulerConfig:
    """From room for one input to room for all. No encoder-decoder keeps states."""
    config = replace(random_config(rng), num_snapshots=0)
    num_pages = 1 + -(-rng.choice([24, 24, 40, 80, 400]) // config.page_size)
    bounded = config.bounded if rng.random() < 0.5 else ()
    return replace(config, encoder=EncoderAccount(num_pages, READER), bounded=bounded)


def request_of(rng: random.Random, request_id: str) -> GenerateRequest:
    """Few inputs, so that some come again."""
    source = SourceTokens([rng.randrange(3)] * rng.choice(LENGTHS))
    return msgspec.structs.replace(random_request(rng, request_id), encoder_input=source)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_what_it_gets_alone(seed, monkeypatch) -> None:
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 4)
    num_requests = num_lives = 0
    while num_requests < NUM_REQUESTS:
        rng = random.Random(1_000_000 * seed + num_lives)
        num_requests += run_traffic(rng, config_of(rng), request_of)
        num_lives += 1
    assert num_lives > NUM_REQUESTS // 60
