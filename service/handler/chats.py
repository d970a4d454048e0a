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
            elif isinstance(given.constraint, JsonSchema) and (options.tools or is_open):
                answer = self.format.grammars.of_answer(given.constraint, options, is_open=is_open)
                named = NamedConstraint(answer, given.param)
            else:
                named = given
        except (UnwritableSchemaError, ValueError, RecursionError) as error:
            param = given.param if given is not None else options.tools_param
            raise _invalid(f"{param}: {error}", param) from error
        return replace(request, constraint=named)

    def assembler(
        self, request: GenerationRequest, assembler: ChoiceAssembler, prompt: Sequence[int]
    ) -> Assembler:
        """Of one choice. request: with its constraint."""
        if request.chat is None:
            return assembler
        # Other constraints hold from the first token on: such a model does not think.
        is_free = request.constraint is None or isinstance(request.constraint.constraint, Marked)
        is_open = is_free and self.format.is_open(prompt)
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


def _unsupported(why: str) -> ApiError:
    return ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, f"tools: {why}", "tools")


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
