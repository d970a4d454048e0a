"""A share of tests/nightly/test_schemas.py: some schemas, several choices, and too few pages."""

from tests.nightly.random_schemas import generated
from tests.nightly.schema_outputs import Way, count_valid, engine_of, taken


def test_choices_are_valid_though_they_are_retracted() -> None:
    way = Way(num_choices=8, is_retracted=True, num_streams=64, max_tokens=120)
    pairs = taken([generated(seed) for seed in range(5)])
    with engine_of(way) as engine:
        assert count_valid(engine, pairs, way) > 30
        assert engine.stats().num_preemptions > 0
