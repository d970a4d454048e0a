"""What a model's makers recommend for sampling, where a client leaves it open."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from service.handler.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """values: fields of SamplingParams, in their ranges. max_tokens: of an answer to which neither
    the client nor the protocol sets a length."""

    values: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def applied(self, request: GenerationRequest) -> GenerationRequest:
        if request.default_max_tokens is None and self.max_tokens is not None:
            request = replace(request, default_max_tokens=self.max_tokens)
        own = {name: value for name, value in self.values.items() if name in request.unset}
        # A beam search samples nothing.
        if not own or request.beams is not None:
            return request
        return replace(request, sampling=msgspec.structs.replace(request.sampling, **own))


NO_DEFAULTS = SamplingDefaults()
