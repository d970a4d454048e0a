"""Outputs under many schemas: each parses and validates, at temperature 1, by the tiny model.

TESSERA_SCHEMA_FOLDER: schemas of a folder in place of generated ones (see random_schemas.py).
"""

import os
from pathlib import Path

import pytest

from tests.nightly.random_schemas import generated, of_folder
from tests.nightly.schema_outputs import Way, count_valid, engine_of, taken

NUM_SCHEMAS = 1000
TWO_RANKS = {"tp_size": 2, "num_cpu_threads": 1}
WAYS = {
    "alone": Way(),
    "eight_choices": Way(num_choices=8),
    "retracted": Way(is_retracted=True, num_streams=150),
    "two_ranks": Way(settings=TWO_RANKS),
    "choices_retracted_on_two_ranks": Way(8, True, num_streams=150, settings=TWO_RANKS),
}


def schemas():
    folder = os.environ.get("TESSERA_SCHEMA_FOLDER")
    if folder is None:
        return [generated(seed) for seed in range(NUM_SCHEMAS)]
    return list(of_folder(Path(folder)))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", WAYS)
def test_every_output_parses_and_validates(name) -> None:
    way, own = WAYS[name], schemas()
    # As many outputs as there are schemas, of a share of them where each has several.
    pairs = taken(own)[:: way.num_choices]
    with engine_of(way) as engine:
        num_ended = count_valid(engine, pairs, way)
        num_retracted = engine.stats().num_preemptions
    num_outputs = len(pairs) * way.num_choices
    print(
        f"{name}: {len(own)} schemas, {num_outputs} outputs under {len(pairs)} of those that are "
        f"taken, {num_ended} ended by themselves, {num_retracted} retracted"
    )
    assert (num_retracted > 0) == way.is_retracted
    if "TESSERA_SCHEMA_FOLDER" not in os.environ:
        assert num_ended == num_outputs == NUM_SCHEMAS
    assert num_ended > 0.5 * num_outputs > 0
