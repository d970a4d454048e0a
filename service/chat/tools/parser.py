"""ToolParser: what all families' parsers have in common. Text in, content and calls out.

Text that only looks like a call is content, from its first character to its last. A call is told
to the client as soon as its name is certain, and then its arguments as they come: what turns out
not to be JSON after that goes on as content.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from service.chat.options import Tool
from service.chat.parsed import ParsedText
from service.chat.reading import SPACE, NotACallError, Reading, read_json
from service.chat.tools.grammar import CallSyntax
from service.tokenizer.stop_strings import ROOT, StopStrings

MAX_HELD_SPACE_CHARS = 256


class ToolParser(ABC):
    """Of one choice. push() its text in order, flush() at its end.

    tools: those that can be called, by name; other names are text. openers: what begins a call.
    closers: what may follow one and means nothing. inner_marks: what stands within one.
    first_chars: a text that begins with one of them may be a call without an opener. Marks that are
    special tokens of the model's tokenizer have to be in the text. Spaces around calls are dropped.
    """

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    inner_marks: ClassVar[tuple[str, ...]] = ()
    first_chars: ClassVar[str] = ""

    def __init__(
        self, tools: Mapping[str, Tool], make_id: Callable[[], str], *, is_parallel: bool
    ) -> None:
        self._tools = tools
        self._make_id = make_id
        self._is_parallel = is_parallel
        self._marks = StopStrings((*self.openers, *self.closers))
        self._state = ROOT
        self._held: list[str] = []
        self._reading: Reading[str | None] | None = None
        self._is_first = True
        self._is_behind_call = False
        self._is_held_blank = True
        self._num_calls = 0
        self._is_whole = True
        self._parsed = ParsedText()

    @classmethod
    @abstractmethod
    def syntax(cls, template: str) -> CallSyntax | None:
        """How calls are written, for grammars; None where none can be made. template: of the model,
        where versions differ."""

    @abstractmethod
    def _read(self, opener: str) -> Reading[str | None]:
        """One or more calls behind an opener ("": from the first character). Ends with a character
        that is none of theirs, or None. Raises NotACallError."""

    @property
    def num_calls(self) -> int:
        return self._num_calls if self._is_parallel else min(self._num_calls, 1)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments of the last call that is told of are a whole JSON text."""
        return self._is_whole

    def push(self, text: str) -> ParsedText:
        self._parsed = ParsedText()
        for char in text:
            self._take(char)
        return self._parsed

    def flush(self) -> ParsedText:
        """What was undecided is text, now that nothing follows."""
        self._parsed = ParsedText()
        self._reading = None
        self._give_held(len(self._held))
        return self._parsed

    # What families' _read() is made of.

    def _announce(self, name: str, call_id: str = "") -> None:
        if name not in self._tools:
            raise NotACallError
        self._num_calls += 1
        self._held.clear()
        self._is_behind_call = True
        if self._is_shown:
            self._is_whole = False
            self._parsed.add_call(self._num_calls - 1, call_id or self._make_id(), name)

    def _argue(self, piece: str) -> None:
        """The next piece of the arguments of the call that was announced last."""
        self._held.clear()
        if self._is_shown:
            self._parsed.add_arguments(self._num_calls - 1, piece)

    def _argue_json(self, char: str) -> Reading[None]:
        """All arguments of that call as they come, from their first character."""
        yield from read_json(char, self._argue)
        self._is_whole |= self._is_shown

    def _conclude(self, piece: str) -> None:
        """The last piece of the arguments of that call."""
        self._argue(piece)
        self._is_whole |= self._is_shown

    def _forget(self) -> None:
        """What was read since means nothing by itself."""
        self._held.clear()

    @property
    def _is_shown(self) -> bool:
        return self._is_parallel or self._num_calls == 1

    # Text between calls.

    def _look(self, char: str) -> None:
        self._held.append(char)
        self._state = self._marks.step(self._state, char)
        mark = self._marks.match(self._state)
        if mark is not None:
            self._meet(mark)
        elif self._is_first and char in self.first_chars:
            self._start("")
            self._held.pop()
            self._take(char)
        elif not (self._is_held_blank and char in SPACE and self._may_hold_more):
            self._give_certain()

    @property
    def _may_hold_more(self) -> bool:
        return len(self._held) <= MAX_HELD_SPACE_CHARS

    def _meet(self, mark: str) -> None:
        self._state = ROOT
        if mark in self.openers:
            self._start(mark)
        elif self._is_behind_call:
            self._held.clear()
        else:
            self._give_held(len(self._held))

    def _give_certain(self) -> None:
        """All but what may become a mark, and the spaces before that."""
        depth = self._marks.depth(self._state)
        self._is_held_blank = not depth
        end = len(self._held) - depth
        start = end
        while start and self._held[start - 1] in SPACE:
            start -= 1
        self._give_held(end if end - start > MAX_HELD_SPACE_CHARS else start)

    def _give_held(self, num_chars: int) -> None:
        text = "".join(self._held[:num_chars])
        del self._held[:num_chars]
        if self._is_behind_call:
            text = text.lstrip(SPACE)
        if text:
            self._is_behind_call = self._is_first = False
            self._parsed.content += text

    # Calls.

    def _start(self, opener: str) -> None:
        self._is_first = False
        self._state = ROOT
        self._reading = self._read(opener)
        next(self._reading)

    def _take(self, char: str) -> None:
        if self._reading is None:
            self._look(char)
            return
        self._held.append(char)
        try:
            self._reading.send(char)
        except StopIteration as end:
            self._reading = None
            self._held.clear()
            if end.value is not None:
                self._look(end.value)
        except NotACallError:
            self._reading = None
            self._held.pop()
            self._give_held(len(self._held))
            self._look(char)
