"""Gathers a generation's deltas into whole choices, for answers that are not streamed."""

from contextlib import aclosing
from dataclasses import dataclass, field

from service.handler.events import ChoiceDelta, TokenLogprob
from service.handler.generation import Generation


@dataclass(slots=True)
class CollectedCall:
    """pieces: of the arguments."""

    index: int
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class ChoiceResult:
    """All deltas of one choice joined; fields as in ChoiceDelta."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    embedding: bytes = b""
    reasoning_parts: list[str] = field(default_factory=list)
    tool_calls: list[CollectedCall] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.reasoning_parts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self._add_chat(delta)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
            self.cumulative_logprob += sum(one.logprob or 0.0 for one in delta.logprobs)
        if delta.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = []
            self.prompt_logprobs.extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        if delta.embedding:
            self.embedding = delta.embedding

    def _add_chat(self, delta: ChoiceDelta) -> None:
        if delta.reasoning:
            self.reasoning_parts.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self.tool_calls):
                self.tool_calls.append(CollectedCall(call.index, call.id, call.name))
            self.tool_calls[call.index].pieces.append(call.arguments)


async def collect(generation: Generation) -> list[ChoiceResult]:
    """Choices in order of their index. Raises ApiError, as iterating the generation does."""
    results = [ChoiceResult(index) for index in range(len(generation.runs))]
    async with aclosing(aiter(generation)) as deltas:
        async for delta in deltas:
            results[delta.index].add(delta)
    return results
