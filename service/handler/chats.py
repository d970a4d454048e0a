"""Chats: what a model's format and a client's tools make of a request, and of its outputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from service.chat.format import ChatFormat
from service.chat.options import ChatOptions
from service.chat.parser import ChatParser
from service.chat.tools.grammar import UnwritableSchemaError
from service.errors import ApiError, ApiErrorCode
from service.handler.choice import ChoiceAssembler
from service.handler.events import ChoiceDelta
from service.handler.requests import GenerationRequest, NamedConstraint
from service.handler.thinking import ThinkingPlan
from service.tokenizer.constraints import JsonSchema, Marked
from workers.engine.protocol import FinishReason, StepOutput


class Assembler(Protocol):
    """Outputs of one choice in, deltas out; see ChoiceAssembler."""

    index: int

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> str | None: ...

    @property
    def is_finished(self) -> bool: ...

    def push(self, output: StepOutput) -> ChoiceDelta | None: ...


class ChatAssembler:
    """An Assembler whose text is read by a parser. It lives as long as the choice: a stream that
    goes on at another replica goes on here where it was."""

    def __init__(self, assembler: ChoiceAssembler, parser: ChatParser) -> None:
        self.index = assembler.index
        self.finish_reason: str | None = None
        self._assembler = assembler
        self._parser = parser

    @property
    def num_output_tokens(self) -> int:
        return self._assembler.num_output_tokens

    @property
    def is_finished(self) -> bool:
        return self._assembler.is_finished

    def push(self, output: StepOutput) -> ChoiceDelta | None:
        """As ChoiceAssembler.push()."""
        delta = self._assembler.push(output)
        if delta is None:
            return None
        parsed = self._parser.push(delta.text)
        delta.text, delta.reasoning, delta.tool_calls = (
            parsed.content,
            parsed.reasoning,
            parsed.tool_calls,
        )
        if delta.finish_reason is not None:
            self._finish(delta)
        return delta

    def _finish(self, delta: ChoiceDelta) -> None:
        rest = self._parser.flush()
        delta.text += rest.content
        delta.reasoning += rest.reasoning
        if self._parser.has_calls and delta.finish_reason == FinishReason.STOP.value:
            delta.finish_reason = "tool_calls"
        self.finish_reason = delta.finish_reason


class Chats:
    """Of one model. Requests that are no chats pass as they are."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self.format = chat_format

    def check(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the constraint that its tools mean, as far as that is known before its
        prompt is. Raises ApiError."""
        if request.chat is None:
            return request
        _check_budget(request, request.chat)
        self._check_tools(request.chat, request.constraint)
        return self.constrained(request, ())

    def constrained(self, request: GenerationRequest, prompt: Sequence[int]) -> GenerationRequest:
        """The request with the constraint that its tools mean, which begins after the thinking
        where the prompt ends within that. Raises ApiError."""
        options, given = request.chat, request.constraint
        if options is None:
            return request
        is_open = self.format.is_open(prompt)
        try:
            if given is None:
                made = self.format.grammars.of_calls(options, is_open=is_open)
                named = None if made is None else NamedConstraint(made, options.tools_param)
            elif isinstance(given.constraint, JsonSchema) and (
                options.tools or is_open or self.format.has_answer_head
            ):
                answer = self.format.grammars.of_answer(given.constraint, options, is_open=is_open)
                named = NamedConstraint(answer, given.param)
            else:
                named = given
        except (UnwritableSchemaError, ValueError, RecursionError) as error:
            param = given.param if given is not None else options.tools_param
            raise _invalid(f"{param}: {error}", param) from error
        return replace(request, constraint=named)

    def thinking_end(self, request: GenerationRequest) -> str:
        """The mark that ends thinking where the request bounds it; "" where nothing is bounded."""
        options, style = request.chat, self.format.style
        if options is None or options.thinking_budget is None or style is None:
            return ""
        return style.end if _is_free(request) else ""

    def thinking_plan(
        self, request: GenerationRequest, prompt: Sequence[int], end_ids: Sequence[int]
    ) -> ThinkingPlan:
        """Of a request with a thinking_end, which end_ids say."""
        options, style = request.chat, self.format.style
        if options is None or options.thinking_budget is None or style is None:
            raise ValueError("the request bounds no thinking")
        return ThinkingPlan(
            options.thinking_budget,
            style.begin.encode(),
            style.end.encode(),
            tuple(end_ids),
            is_open=self.format.is_open(prompt),
            pieces=self.format.pieces,
        )

    def assembler(
        self, request: GenerationRequest, assembler: ChoiceAssembler, prompt: Sequence[int]
    ) -> Assembler:
        """Of one choice. request: with its constraint."""
        if request.chat is None:
            return assembler
        is_open = _is_free(request) and self.format.is_open(prompt)
        parser = self.format.parser(request.chat, is_open=is_open)
        return assembler if parser is None else ChatAssembler(assembler, parser)

    def _check_tools(self, options: ChatOptions, given: NamedConstraint | None) -> None:
        if not options.tools:
            return
        if not self.format.takes_tools:
            raise _unsupported("this model's chat template has no place for tools")
        if self.format.family is None:
            raise _unsupported("how this model calls tools is not known; see --tool-call-parser")
        if given is not None and options.choice == "required":
            message = f"{given.param} and a tool_choice that forces a call exclude each other"
            raise _invalid(message, given.param)
        if given is not None and not isinstance(given.constraint, JsonSchema):
            raise _invalid(f"{given.param} and tools exclude each other", given.param)


def _is_free(request: GenerationRequest) -> bool:
    """Whether a model may think: other constraints hold from the first token on."""
    return request.constraint is None or isinstance(request.constraint.constraint, Marked)


def _check_budget(request: GenerationRequest, options: ChatOptions) -> None:
    """What is said for a model has no log probabilities."""
    if options.thinking_budget is None:
        return
    param = "thinking_token_budget"
    others = {
        "log probabilities": request.sampling.logprobs is not None,
        "use_beam_search": request.beams is not None,
    }
    for other, is_asked in others.items():
        if is_asked:
            raise _invalid(f"{param} excludes {other}", param)


def _unsupported(why: str) -> ApiError:
    return ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, f"tools: {why}", "tools")


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
