"""The seam between the protocol-neutral handler and whatever generates tokens.

Knows neither Ray nor sockets: service.routing.router implements it over channels to replicas, tests
implement it in memory.
"""

from typing import Protocol, Self

from service.request_context import RequestContext
from workers.engine.protocol import GenerateRequest, ModelInfo, StepOutput


class TokenStream(Protocol):
    """The outputs of one request, in order.

    Iteration ends after the output that carries a finish_reason; a request that the engine fails
    ends with finish_reason ERROR and an OutputError. What goes wrong outside the engine raises
    service.errors.ApiError from the iteration instead: REPLICA_LOST, or TIMEOUT for a reader
    that left more unread than it may. Outputs that piled up while the reader was away may arrive
    merged into one, in order and never lost.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> StepOutput: ...

    async def aclose(self) -> None:
        """Abort the request unless it has finished. Calling it twice is harmless."""
        ...


class GenerationBackend(Protocol):
    """Takes requests for one model."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the model. Raises ApiError (unavailable) before any replica was seen."""
        ...

    def check_admission(self) -> None:
        """Raise ApiError if no request at all would be taken now.

        Asked before a prompt is tokenised, so that a refusal costs nothing; submit() still decides.
        """
        ...

    async def submit(self, request: GenerateRequest, context: RequestContext) -> TokenStream:
        """Send a request to a replica and return its stream.

        request.request_id must be unique among the requests that are live in this process. context:
        of the client's request, which may have several choices. Raises
        service.errors.ApiError when no replica can take the request: unavailable when there is
        none, overloaded when all are full.
        """
        ...
