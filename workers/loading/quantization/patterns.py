"""Names of modules as recipes write them, as regular expressions on whole names."""

import fnmatch
import re
from collections.abc import Iterable

from workers.errors import ModelLoadError

_EXPRESSION = "re:"
_MAX_CHARACTERS = 512
_MAX_REPEATS = 4
_MAX_GROUPS = 4
BOUNDS = (
    f"at most {_MAX_CHARACTERS} characters, {_MAX_REPEATS} repeats and {_MAX_GROUPS} groups are "
    "matched, and neither repeats of a group nor flags"
)
# Escaped characters and sets, in which repeats and groups are letters like others.
_LITERALS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_GROUP = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P<\w+>))?")
# Among them comments and a verbose mode, behind which a repeat is still of what is before them.
_OTHER_EXTENSION = re.compile(r"\(\?(?![:=!]|<[=!]|P<\w)")
_REPEAT = re.compile(r"(?:[*+?]|\{\d*,?\d*\})[?+]?")


def compiled(expression: str) -> re.Pattern[str]:
    """Raises ModelLoadError for what is no regular expression."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ModelLoadError(
            f"the recipe's pattern {expression!r} cannot be used: {error}"
        ) from error


def stated_expression(expression: str) -> re.Pattern[str]:
    """A checkpoint's own expression, for beginnings of names.

    Raises ModelLoadError for what is none, and for one that could hold a start: the time of a match
    grows by a factor with every repeat and group, and exponentially with repeats of a group.
    """
    if not is_bounded(expression):
        shown = expression[:_MAX_CHARACTERS]
        raise ModelLoadError(f"the recipe's pattern {shown!r} is too complex: {BOUNDS}")
    return compiled(f"(?:{expression}).*")


def is_bounded(expression: str) -> bool:
    """Whether a match takes no longer than a name's length to the power of a few repeats."""
    if len(expression) > _MAX_CHARACTERS:
        return False
    bare = _LITERALS.sub("x", expression)
    return not (
        len(_GROUP.findall(bare)) > _MAX_GROUPS
        or len(_REPEAT.findall(_GROUP.sub("", bare))) > _MAX_REPEATS
        or _REPEATED_GROUP.search(bare)
        or _OTHER_EXTENSION.search(bare)
    )


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
        stated_expression(name.removeprefix(_EXPRESSION))
        if name.startswith(_EXPRESSION)
        else compiled(re.escape(name))
        for name in names
    )
