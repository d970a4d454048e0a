"""ChatParser: the text of one choice, as thinking, content and calls."""

from service.chat.parsed import ParsedText
from service.chat.reasoning import ThoughtReader
from service.chat.tools.parser import ToolParser


class ChatParser:
    """push() the text in order, flush() at its end. Either parser may be missing.

    shows_reasoning: or the thinking is dropped.
    """

    def __init__(
        self, reasoning: ThoughtReader | None, tools: ToolParser | None, *, shows_reasoning: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    @property
    def has_calls(self) -> bool:
        """Whether there are any, and the last one is not cut."""
        return self._tools is not None and self._tools.num_calls > 0 and self._tools.is_whole

    def push(self, text: str) -> ParsedText:
        if self._reasoning is None:
            return self._read_calls(ParsedText(content=text))
        return self._read_calls(self._reasoning.push(text))

    def flush(self) -> ParsedText:
        thought = ParsedText() if self._reasoning is None else self._reasoning.flush()
        parsed = self._read_calls(thought)
        if self._tools is not None:
            last = self._tools.flush()
            parsed.content += last.content
        return parsed

    def _read_calls(self, thought: ParsedText) -> ParsedText:
        parsed = thought if self._tools is None else self._tools.push(thought.content)
        parsed.reasoning = thought.reasoning if self._shows_reasoning else ""
        return parsed
