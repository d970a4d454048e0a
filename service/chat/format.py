"""ChatFormat: how one model writes thinking and tool calls, and what that means for a request.

Found in its chat template, or told by the operator. Knows no protocol and no engine.
"""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from service.chat.constraints import ChatGrammars
from service.chat.options import ChatOptions
from service.chat.parser import ChatParser
from service.chat.reasoning import STYLES, ReasoningStyle, reasoning_style_of
from service.chat.settings import ChatSettings
from service.chat.tools.families import FAMILIES, family_of
from service.chat.tools.parser import ToolParser
from service.tokenizer.chat_template import takes_tools
from service.tokenizer.pieces import TokenPieces

_ID_CHARS = string.ascii_letters + string.digits
# Mistral's templates take no others.
_ID_LENGTHS = {"mistral": 9}
_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """family, style: None where the model has none that is known. takes_tools: whether its template
    shows tools. pieces: its tokens, those that are marks visible.
    """

    family: type[ToolParser] | None
    style: ReasoningStyle | None
    takes_tools: bool
    grammars: ChatGrammars
    pieces: TokenPieces

    @property
    def has_answer_head(self) -> bool:
        """Whether an answer has a head of its own, which a grammar of it has to have too."""
        return self.style is not None and bool(self.style.answer_head)

    def is_open(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends within thinking that the template has begun."""
        if self.style is None:
            return False
        last = prompt_token_ids[-_END_TOKENS:]
        end = b"".join(map(self.pieces.token_bytes, last)).decode("utf-8", "replace")
        return end.rstrip().endswith(self.style.begin)

    def parser(self, options: ChatOptions, *, is_open: bool) -> ChatParser | None:
        """Of one choice; None where all of its text is content."""
        reasoning = None if self.style is None else self.style.parser(is_open=is_open)
        tools = None
        if self.family is not None and options.tools:
            tools = self.family(options.names, self._make_id, is_parallel=options.is_parallel)
        if reasoning is None and tools is None:
            return None
        return ChatParser(reasoning, tools, shows_reasoning=options.shows_reasoning)

    def _make_id(self) -> str:
        length = _ID_LENGTHS.get(self.family.name, 0) if self.family is not None else 0
        if length:
            return "".join(secrets.choice(_ID_CHARS) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"


def make_chat_format(
    template: str | None, tokenizer: Tokenizer, pieces: TokenPieces, settings: ChatSettings
) -> ChatFormat:
    """template: the model's; None: it has none."""
    source = template or ""
    family, style = _choose_family(source, settings), _choose_style(source, settings)
    texts = [*(() if style is None else (style.begin, style.end, *style.marks))]
    if family is not None:
        texts += [*family.openers, *family.closers, *family.inner_marks]
    token_ids = {
        text: token_id
        for text in texts
        if text and (token_id := tokenizer.token_to_id(text)) is not None
    }
    syntax = None if family is None else family.syntax(source)
    return ChatFormat(
        family,
        style,
        takes_tools(source),
        ChatGrammars(family, syntax, style, token_ids),
        _showing(pieces, frozenset(token_ids.values())),
    )


def _choose_family(template: str, settings: ChatSettings) -> type[ToolParser] | None:
    chosen = settings.tool_call_parser
    if settings.custom_tool_calls is not None:
        return settings.custom_tool_calls.to_parser()
    return family_of(template) if chosen == "auto" else FAMILIES.get(chosen)


def _choose_style(template: str, settings: ChatSettings) -> ReasoningStyle | None:
    chosen = settings.reasoning_parser
    return reasoning_style_of(template) if chosen == "auto" else STYLES.get(chosen)


def _showing(pieces: TokenPieces, shown: frozenset[int]) -> TokenPieces:
    """The same pieces with these special tokens as text, whoever hides special tokens."""
    if pieces.special_ids.isdisjoint(shown):
        return pieces
    visible = tuple(
        piece if token_id in shown else hidden
        for token_id, (piece, hidden) in enumerate(
            zip(pieces.pieces, pieces.visible_pieces, strict=True)
        )
    )
    return replace(pieces, visible_pieces=visible, special_ids=pieces.special_ids - shown)
