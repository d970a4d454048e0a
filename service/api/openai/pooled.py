"""What requests have in common whose inputs become vectors or scores, as vLLM has it."""

from typing import Annotated, Literal

from pydantic import Field

from service.api.openai.parameters import INT32_MAX, Int32, StrictModel
from service.handler.embedding import RequestFields
from service.handler.requests import AS_MANY_AS_FIT


class PooledParameters(StrictModel):
    """None means the default.

    truncate_prompt_tokens: keep that many tokens of an input, -1 as many as the model takes, of its
    end or, with truncation_side "right", of its beginning, which encoders keep without it. user
    changes nothing. priority, cache_salt and request_id as for completions. Inputs are never padded
    for a client.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=AS_MANY_AS_FIT, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["do_not_pad"] | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def common_fields(self, request_id: str) -> RequestFields:
        """request_id: of the call, for a body without one of its own."""
        side = self.truncation_side
        return {
            "model": self.model or "",
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "keeps_beginning": None if side is None else side == "right",
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "request_id": self.request_id or request_id,
        }
