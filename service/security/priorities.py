"""PriorityRange: which priorities a caller may give its requests. Knows no key and no request."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_GREATEST = 2**31 - 1
_LEAST = -_GREATEST


class PriorityRange(BaseModel):
    """Both ends included; lower runs first and preempts. Without settings 0 is all there is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_priority: int = Field(default=0, ge=_LEAST, le=_GREATEST)
    max_priority: int = Field(default=0, ge=_LEAST, le=_GREATEST)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Requests that say nothing have priority 0.
        if not self.min_priority <= 0 <= self.max_priority:
            raise ValueError("a range of priorities must include 0")
        return self

    def __contains__(self, priority: int) -> bool:
        return self.min_priority <= priority <= self.max_priority
