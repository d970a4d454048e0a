"""What the handler reports about requests, for whoever counts it. Knows no Prometheus."""

from typing import Protocol


class RequestMetrics(Protocol):
    """Called from the event loop, once a step and choice at most: implementations must be cheap.

    A request that is admitted gets on_accepted once and on_finished once per choice (an engine
    request); one that is refused before that gets on_rejected once. So does one whose API key or
    message is refused, whatever it asked for. Durations are seconds.
    """

    def on_accepted(self, num_prompt_tokens: int, num_choices: int) -> None:
        """All prompts are tokenised and every choice was sent to a replica."""
        ...

    def on_first_token(self, seconds: float, queue_s: float, prefill_s: float) -> None:
        """seconds: from the request's arrival. queue_s, prefill_s: the engine's own share of it."""
        ...

    def on_vector(self, queue_s: float, prefill_s: float) -> None:
        """A prompt has become a vector, which is no token. The engine's own times, as above."""
        ...

    def on_tokens(self, count: int, inter_token_s: float) -> None:
        """`count` more tokens of one choice; inter_token_s is the time since its last, a token."""
        ...

    def on_finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
    ) -> None:
        """reason: "stop", "length", "abort" (the client left) or the code of an ApiError."""
        ...

    def on_rejected(self, code: str) -> None:
        """code: the ApiErrorCode of a request that generated nothing."""
        ...
