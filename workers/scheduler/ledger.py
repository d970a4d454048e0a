"""Live requests by id, last words of aborted ones, and the counters. Knows no pages."""

from dataclasses import dataclass, field
from itertools import accumulate

from workers.engine.protocol import FinishReason, StepOutput
from workers.scheduler.request import Request
from workers.speculation.config import MAX_DRAFT_TOKENS


@dataclass(slots=True)
class Counters:
    """Since the start; they only grow. Output that a request came with counts as its prompt.

    num_runs_by_accepted: of the runs that had drafts, how many had 0, 1, ... right ones.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_runs_by_accepted: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT_TOKENS + 1))

    def add_run(self, num_drafts: int, num_accepted: int) -> None:
        """A run that a step verified; num_drafts 0: it was an ordinary row."""
        if num_drafts:
            self.num_draft_tokens += num_drafts
            self.num_accepted_draft_tokens += num_accepted
            self.num_runs_by_accepted[num_accepted] += 1

    def as_stats(self) -> dict[str, int]:
        """Those that EngineStats has under the same names."""
        return {
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_prompt_tokens": self.num_cached_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_finished": self.num_finished,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_draft_tokens": self.num_accepted_draft_tokens,
        }

    def accepted_by_position(self, num_positions: int) -> tuple[int, ...]:
        """How many first, second, ... drafts of a run were right."""
        at_least = [*accumulate(reversed(self.num_runs_by_accepted))][::-1]
        return tuple(at_least[1 : num_positions + 1])

    @property
    def num_written_tokens(self) -> int:
        """Tokens ever written to KV memory; what a prompt needs counts once it is admitted."""
        return self.num_prompt_tokens - self.num_cached_prompt_tokens + self.num_output_tokens


class Ledger:
    """Every accepted request is here until its final output has been handed out, exactly once.

    last_words: final outputs of aborted requests, by id, until take_outputs.
    """

    def __init__(self) -> None:
        self.counters = Counters()
        self._live: dict[str, Request] = {}
        self.last_words: dict[str, StepOutput] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_ids(self) -> list[str]:
        return list(self._live)

    @property
    def num_media_bytes(self) -> int:
        """Of what all live requests have brought for their placeholders."""
        return sum(request.num_media_bytes for request in self._live.values())

    def is_known(self, request_id: str) -> bool:
        """Whether a final output of this id is still to come."""
        return request_id in self._live or request_id in self.last_words

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    def add(self, request: Request) -> None:
        self._live[request.request_id] = request

    def end(self, request: Request) -> None:
        """The caller hands out the final output."""
        del self._live[request.request_id]
        request.is_ended = True
        self.counters.num_finished += 1

    def end_aborted(self, request: Request) -> None:
        """The final output waits for take_outputs()."""
        self.end(request)
        request_id = request.request_id
        self.last_words[request_id] = StepOutput(request_id, [], FinishReason.ABORT)

    def take_outputs(self) -> list[StepOutput]:
        outputs = list(self.last_words.values())
        self.last_words.clear()
        return outputs
