"""Reading a recipe's fields. What is of another type or value than is known is an error by name."""

from collections.abc import Collection, Mapping
from typing import Any

from workers.errors import ModelLoadError


def refuse(recipe: str, what: str, supported: str) -> ModelLoadError:
    """The error for a recipe that cannot be served."""
    return ModelLoadError(f"quantised by {recipe} with {what}; supported: {supported}")


def strings(value: Any, name: str) -> list[str]:
    """A list of strings, or nothing."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ModelLoadError(f"quantization_config.{name} is no list of names: {value!r}")
    return list(value)


def one_of(stated: Mapping[str, Any], name: str, known: Collection[Any], recipe: str) -> Any:
    """The field, which must have one of the known values. A missing one is None."""
    value = stated.get(name)
    # By type, too: 4.0 and True are equal to integers, and a list is no key of a mapping.
    if not any(type(value) is type(one) and value == one for one in known):
        raise refuse(recipe, f"{name}={value!r}", ", ".join(map(repr, known)))
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ModelLoadError(f"quantization_config.{name} is no JSON object: {value!r}")
    return value


def group_size_of(stated: Mapping[str, Any], recipe: str) -> int:
    """The field group_size: a positive number, or -1 for whole rows."""
    size = stated.get("group_size")
    if type(size) is not int or (size < 1 and size != -1):
        raise refuse(recipe, f"group_size={size!r}", "a number of columns, or -1")
    return size


def block_of(value: Any) -> tuple[int, int] | None:
    """[rows, columns] of a block, or None for what is none."""
    if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value):
        return None
    return (value[0], value[1]) if len(value) == 2 else None
