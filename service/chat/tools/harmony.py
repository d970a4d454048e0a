"""gpt-oss's Harmony: a message to a function on the commentary channel, its body JSON.

service.chat.harmony takes the channels apart; what it leaves of a call is read here.
"""

from service.chat.reading import MAX_HEAD_CHARS, NotACallError, Reading, read_until, skip_space
from service.chat.tools.grammar import CallSyntax
from service.chat.tools.parser import ToolParser

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, END, CALL, RETURN = "<|start|>", "<|end|>", "<|call|>", "<|return|>"
RECIPIENT = "functions."
CALL_HEAD = f"{CHANNEL}commentary to={RECIPIENT}"


class HarmonyParser(ToolParser):
    name = "harmony"
    openers = (CALL_HEAD,)
    closers = (CALL, END, f"{START}assistant")
    inner_marks = (CHANNEL, MESSAGE, CONSTRAIN, START, RETURN)

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(
            head=CALL_HEAD,
            middle=f" {CONSTRAIN}json{MESSAGE}",
            tail=CALL,
            separator=f"{START}assistant",
        )

    def _read(self, opener: str) -> Reading[None]:
        head = yield from read_until(MESSAGE, MAX_HEAD_CHARS)
        words = head.replace(CONSTRAIN, " ").split()
        char = yield from skip_space()
        if not words or char != "{":
            raise NotACallError
        self._announce(words[0])
        yield from self._argue_json(char)
