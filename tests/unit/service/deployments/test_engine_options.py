"""KEY=VALUE flags become an EngineConfig, or an error that says which one is wrong."""

import pytest

from service.deployments.engine_options import parse_engine_options
from workers.config import EngineConfig
from workers.errors import ConfigError


def test_values_take_the_types_of_their_fields() -> None:
    options = ["page_size=16", "enable_overlap=false", "dtype=float32", "num_pages=null"]
    assert parse_engine_options("folder", options).to_engine_config() == EngineConfig(
        model="folder",
        page_size=16,
        enable_overlap=False,
        dtype="float32",
        target_inter_token_ms=55.0,
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("page_size", "KEY=VALUE"),
        ("page_size=many", "page_size"),
        ("no_such_key=1", "no_such_key"),
        ("tp_size=0", "tp_size"),
        ("model=other", "once"),
    ],
)
def test_what_is_wrong_is_named(option: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_engine_options("folder", [option])
