"""DeepSeek V3 and R1: a name and a fenced block of JSON between marks; V3.1: without the fence."""

from service.chat.reading import (
    MAX_HEAD_CHARS,
    NotACallError,
    Reading,
    expect,
    read_until,
    skip_space,
)
from service.chat.tools.grammar import CallSyntax
from service.chat.tools.parser import ToolParser

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _TYPE = "```", "function"


class DeepSeekParser(ToolParser):
    name = "deepseek_v3"
    openers = (_BEGIN, _CALL)
    closers = (_CALL_END, _END)
    inner_marks = (_SEPARATOR,)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        if _FENCE in template:
            return CallSyntax(
                head=_CALL + _TYPE + _SEPARATOR,
                middle=f"\n{_FENCE}json\n",
                tail=f"\n{_FENCE}{_CALL_END}",
                begin=_BEGIN,
                end=_END,
            )
        return CallSyntax(_CALL, _SEPARATOR, _CALL_END, begin=_BEGIN, separator="", end=_END)

    def _read(self, opener: str) -> Reading[None]:
        if opener == _BEGIN:
            yield from expect(_CALL, (yield from skip_space()))
        name = (yield from read_until(_SEPARATOR, MAX_HEAD_CHARS)).strip()
        char = yield from skip_space()
        is_fenced = name == _TYPE and char != "{"
        if is_fenced:
            name = char + (yield from read_until(_FENCE + "json", MAX_HEAD_CHARS))
            char = yield from skip_space()
        if char != "{":
            raise NotACallError
        self._announce(name.strip())
        yield from self._argue_json(char)
        if is_fenced:
            yield from expect(_FENCE, (yield from skip_space()))
