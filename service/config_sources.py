"""Where settings come from: a YAML file, and values under dotted names. Knows no setting."""

from pathlib import Path
from typing import Any

import yaml

from workers.errors import ConfigError


def read_yaml(file: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no file of settings."""
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping at the top")
    return data


def set_at(target: dict[str, Any], path: list[str], value: Any) -> None:
    """path: names of sections, then of the setting. Raises ConfigError where one is no section."""
    *parents, leaf = path
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{'.'.join(path)}: {parent} is no section")
        target = child
    target[leaf] = value
