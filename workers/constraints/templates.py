"""Compiled grammars: of each as many templates as its requests have use for, within bounds.

Copies of a template share what llguidance has learned of the grammar and the lock around it, so
that their masks take turns however many threads there are. Not thread-safe.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from weakref import WeakSet

from llguidance import LLMatcher

from workers.constraints.grammar_matcher import GrammarMatcher

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_TEXT_BYTES = 1 << 20
"""Of all templates that are kept: what is made of a byte took about 80."""
MAX_CACHED_TEMPLATES = 512
"""What each of them learns of its requests' texts took 1 to 2 MB."""
MAX_TEMPLATES = 64
"""Of one grammar: as many of its masks are made at once."""
SLOW_COMPILE_S = 0.02
MAX_SLOW_TEMPLATES = 8
"""Of a grammar that takes longer to compile: its requests rather share than wait."""


@dataclass(slots=True)
class Template:
    """matcher: has never gone past a token. users: whoever has a copy. They leave by being
    forgotten, however their requests end."""

    matcher: LLMatcher
    number: int
    users: "WeakSet[GrammarMatcher]" = field(default_factory=WeakSet)

    def copy(self) -> GrammarMatcher:
        user = GrammarMatcher(self.matcher.deep_copy(), self.number)
        self.users.add(user)
        return user


@dataclass(slots=True)
class Templates:
    """Of one grammar. num_begun: with those that are being compiled. compile_s: what the quickest
    took of a processor."""

    text_len: int
    known: list[Template] = field(default_factory=list)
    num_begun: int = 0
    compile_s: float = float("inf")

    def least_used(self) -> Template | None:
        return min(self.known, key=lambda one: len(one.users), default=None)

    @property
    def has_room(self) -> bool:
        """Whether one more is worth its time and memory. A grammar has half of the memory at most:
        others are kept beside it."""
        is_slow = bool(self.known) and self.compile_s > SLOW_COMPILE_S
        most = MAX_SLOW_TEMPLATES if is_slow else MAX_TEMPLATES
        affordable = MAX_CACHED_TEXT_BYTES // 2 // max(self.text_len, 1)
        return self.num_begun < min(most, affordable)


class TemplateCache:
    """By the grammar's text; what was asked for longest ago goes first."""

    def __init__(self) -> None:
        self._by_text: OrderedDict[str, Templates] = OrderedDict()

    def copy_or_begin(self, grammar: str) -> GrammarMatcher | None:
        """A copy of a template that nobody uses; where each is in use and no more are to be made,
        of the least used. None: the caller compiles one, and says so by add or give_up."""
        templates = self._by_text.setdefault(grammar, Templates(len(grammar)))
        self._by_text.move_to_end(grammar)
        least = templates.least_used()
        if least is not None and not (least.users and templates.has_room):
            return least.copy()
        templates.num_begun += 1
        return None

    def add(self, grammar: str, matcher: LLMatcher, compile_s: float) -> GrammarMatcher:
        """What has been compiled since copy_or_begin, and how long that took."""
        templates = self._by_text.setdefault(grammar, Templates(len(grammar)))
        template = Template(matcher, len(templates.known))
        templates.known.append(template)
        # Forgotten meanwhile, it has begun anew.
        templates.num_begun = max(templates.num_begun, len(templates.known))
        templates.compile_s = min(templates.compile_s, compile_s)
        while len(self._by_text) > MAX_CACHED_GRAMMARS or self._is_full():
            self._by_text.popitem(last=False)
        return template.copy()

    def give_up(self, grammar: str) -> None:
        """It could not be compiled."""
        templates = self._by_text.get(grammar)
        if templates is None:
            return
        templates.num_begun = max(templates.num_begun - 1, len(templates.known))
        if not templates.num_begun:
            del self._by_text[grammar]

    def _is_full(self) -> bool:
        counts = [(one.text_len, len(one.known)) for one in self._by_text.values()]
        return (
            sum(text_len * num for text_len, num in counts) > MAX_CACHED_TEXT_BYTES
            or sum(num for _, num in counts) > MAX_CACHED_TEMPLATES
        )
