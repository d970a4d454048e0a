"""How many prompt tokens a step may take, so that nobody's next token waits too long for them.

While no request decodes a step is as large as max_step_tokens allows. While one does, the predicted
duration of the step, which is what decoding requests wait for, stays under the target.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from workers.scheduler.step_cost import StepCostModel
from workers.scheduler.step_filling import StepFilling
from workers.scheduler.step_work import StepWork

MIN_PROMPT_SHARE = 0.25
"""Of the target: prompts get so many seconds of a step even where decode rows need all of it."""
MIN_PROMPT_TOKENS = 128
UNMEASURED_PROMPT_TOKENS = 512
"""What prompts get beside decode rows as long as no step has been measured."""

ANY_NUMBER = 1 << 30


class PromptAllowance(Protocol):
    """What a step has left for prompts, beyond its budget of tokens."""

    def room_for(self, num_prefix_tokens: int) -> int:
        """Most tokens of a chunk that follows so many tokens of its prompt."""

    def spend(self, num_prefix_tokens: int, num_tokens: int) -> None:
        """A chunk has been added."""


@dataclass(slots=True)
class TokenAllowance:
    """tokens: left for chunks, whatever they cost."""

    tokens: int = ANY_NUMBER

    def room_for(self, num_prefix_tokens: int) -> int:
        return self.tokens

    def spend(self, num_prefix_tokens: int, num_tokens: int) -> None:
        self.tokens -= num_tokens


@dataclass(slots=True)
class TimedAllowance:
    """seconds, tokens: left for chunks; token_s, key_s: what these cost, token_s above 0.
    first_tokens: what the first chunk may have even if it takes longer, so that prompts get on.
    """

    seconds: float
    tokens: int
    token_s: float
    key_s: float
    first_tokens: int

    def room_for(self, num_prefix_tokens: int) -> int:
        """At least 1 where a chunk without a prefix has room."""
        if self.first_tokens:
            return max(self.first_tokens, min(self.tokens, self._tokens_within(num_prefix_tokens)))
        if self.seconds <= 0.0:
            return 0
        return min(self.tokens, max(1, self._tokens_within(num_prefix_tokens)))

    def spend(self, num_prefix_tokens: int, num_tokens: int) -> None:
        keys = num_tokens * (num_prefix_tokens + 0.5 * num_tokens)
        self.seconds -= num_tokens * self.token_s + keys * self.key_s
        self.tokens = max(0, self.tokens - num_tokens)
        self.first_tokens = 0

    def _tokens_within(self, num_prefix_tokens: int) -> int:
        """The most n with n * token_s + n * (num_prefix_tokens + n / 2) * key_s <= seconds."""
        linear_s = self.token_s + num_prefix_tokens * self.key_s
        root_s = math.sqrt(linear_s**2 + 2.0 * self.key_s * self.seconds)
        return int(2.0 * self.seconds / (linear_s + root_s))


class StepTarget(Protocol):
    """Decides what prompts may take of a step."""

    def allowance(
        self, num_decode_rows: int, num_decode_keys: int, num_prompt_tokens: int
    ) -> PromptAllowance:
        """For a step with these decode rows while so many tokens of prompts wait."""


class NoTarget:
    """Steps as large as max_step_tokens, whoever waits."""

    def allowance(
        self, num_decode_rows: int, num_decode_keys: int, num_prompt_tokens: int
    ) -> PromptAllowance:
        return TokenAllowance()


class InterTokenTarget:
    """Steps with decode rows are to last at most target_s, as far as costs can tell.

    costs: of steps with prompt tokens. filling: how much of what the target allows they take.
    """

    def __init__(self, target_s: float, costs: StepCostModel, filling: StepFilling) -> None:
        self._target_s = target_s
        self._costs = costs
        self._filling = filling

    def allowance(
        self, num_decode_rows: int, num_decode_keys: int, num_prompt_tokens: int
    ) -> PromptAllowance:
        if num_decode_rows == 0:
            return TokenAllowance()
        costs = self._costs
        if not costs.is_fitted:
            return TokenAllowance(UNMEASURED_PROMPT_TOKENS)
        decode_s = costs.predict(StepWork(0, 0.0, num_decode_rows, num_decode_keys))
        left_s = max(self._target_s - decode_s, MIN_PROMPT_SHARE * self._target_s)
        allowance = TimedAllowance(
            left_s, ANY_NUMBER, costs.token_s, costs.key_s, MIN_PROMPT_TOKENS
        )
        most = allowance.room_for(0)
        allowance.tokens = self._filling.num_tokens(num_prompt_tokens, most, num_decode_rows)
        return allowance
