"""Ceilings on what a client wants its output to be, before a grammar is made of it."""

from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest
from service.limits import Limits
from service.tokenizer.constraints import Choices, constraint_bytes
from workers.engine.protocol import ModelInfo


def check_constraint(request: GenerationRequest, limits: Limits, info: ModelInfo) -> None:
    """Raise ApiError naming the parameter if its engine takes no grammar, or it is too large."""
    if request.constraint is None:
        return
    constraint, param = request.constraint.constraint, request.constraint.param
    if not info.has_grammars:
        message = f"{param}: the engine of this model cannot constrain its output; leave it out"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, param)
    max_choices = limits.max_grammar_choices
    if isinstance(constraint, Choices) and not 1 <= len(constraint.texts) <= max_choices:
        raise _over_limit(f"{param}: between 1 and {max_choices} choices are allowed", param)
    num_bytes = constraint_bytes(constraint)
    if num_bytes > limits.max_grammar_bytes:
        raise _over_limit(f"{param} may have at most {limits.max_grammar_bytes} bytes", param)
    # Every choice of every prompt takes it to its engine.
    num_choices = request.n * len(request.prompts)
    if num_bytes * num_choices > limits.max_grammar_cost_bytes:
        raise _over_limit(
            f"{param}: {num_bytes} bytes for {num_choices} choices are more than "
            f"{limits.max_grammar_cost_bytes}; ask for fewer choices or prompts at once",
            param,
        )


def _over_limit(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, param)
