"""Names of modules as recipes write them, as regular expressions on whole names."""

import fnmatch
import re
from collections.abc import Iterable

from workers.errors import ModelLoadError

_EXPRESSION = "re:"


def compiled(expression: str) -> re.Pattern[str]:
    """Raises ModelLoadError for what is no regular expression."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ModelLoadError(
            f"the recipe's pattern {expression!r} cannot be used: {error}"
        ) from error


def by_component(names: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Modules of these names, within such, and whose last components they are."""
    return tuple(compiled(rf"(.*\.)?{re.escape(name)}(\..*)?") for name in names)


def by_glob(names: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """As by_component, where * stands for anything."""
    names = list(names)
    return by_component(names) + tuple(compiled(fnmatch.translate(name)) for name in names)


def by_name_or_expression(names: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """As compressed-tensors has them: whole names, or "re:" and an expression for beginnings."""
    return tuple(
        compiled(f"(?:{name.removeprefix(_EXPRESSION)}).*")
        if name.startswith(_EXPRESSION)
        else compiled(re.escape(name))
        for name in names
    )
