"""`--engine KEY=VALUE` flags: settings from text, for commands that run an engine in process.

The keys and their checks are those of the `engine` section of service.config.
"""

from collections.abc import Sequence

from service.config import EngineSettings, parse_config
from workers.errors import ConfigError


def parse_engine_options(model: str, options: Sequence[str]) -> EngineSettings:
    """A model and its settings, with the model as it was called; the value null means None.

    Raises ConfigError with everything that is wrong.
    """
    values: dict[str, str | None] = {"model": model}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or key in values:
            raise ConfigError(f"engine option {option!r} must be KEY=VALUE, each key once")
        values[key] = None if value == "null" else value
    return parse_config({"engine": values}).engine
