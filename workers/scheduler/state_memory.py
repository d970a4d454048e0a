"""What the scheduler asks of states, and the answer where there is nothing to keep of them."""

from typing import Protocol

from workers.kv_cache.prefix_cache import PrefixMatch
from workers.kv_cache.radix_node import RadixNode
from workers.scheduler.plan import StepPlan
from workers.scheduler.request import Request
from workers.scheduler.running_table import SlotArray


class StateMemory(Protocol):
    """What the scheduler asks where prefixes may have states.

    keeps_snapshots: whether they do.
    """

    keeps_snapshots: bool

    def open(self, request: Request, match: PrefixMatch) -> None:
        """The request has got its slot and begins with match."""

    def plan_chunk(self, request: Request, start: int, stop: int) -> None:
        """The step computes tokens start .. stop - 1 of the request's prompt."""

    def plan_decode(self, slots: SlotArray) -> None:
        """The step computes one token of each of slots; seq_lens counts it."""

    def resume_length(self, request: Request, num_tokens: int) -> int:
        """Of the first num_tokens tokens, whole pages, of a prompt that is being computed: after
        how many another request will be able to go on, once it is."""
        ...

    def with_moves(self, plan: StepPlan) -> StepPlan:
        """The plan with all that has been planned since the last one."""
        ...

    def settle(self, step_id: int) -> None:
        """The oldest step that is not committed yet has run. Before its requests end."""

    def share(self, request: Request) -> None:
        """The prompt's pages have gone to the cache, down to request.node."""

    def leave(self, request: Request, node: RadixNode) -> None:
        """The request's pages have gone to the cache, down to node."""

    def close(self, request: Request) -> None:
        """The request leaves its slot; what it has not handed over is dropped."""

    def check_integrity(self) -> None:
        """Raise IntegrityError unless each place has exactly one owner."""


class NoStateMemory:
    """Of a model without states, and of one whose prefixes nobody keeps."""

    keeps_snapshots = False

    def open(self, request: Request, match: PrefixMatch) -> None:
        """There is nothing to go on from."""

    def plan_chunk(self, request: Request, start: int, stop: int) -> None:
        """There is nothing to save."""

    def plan_decode(self, slots: SlotArray) -> None:
        """There is nothing to save."""

    def resume_length(self, request: Request, num_tokens: int) -> int:
        return num_tokens

    def with_moves(self, plan: StepPlan) -> StepPlan:
        return plan

    def settle(self, step_id: int) -> None:
        """Nothing was saved."""

    def share(self, request: Request) -> None:
        """Pages are all there is."""

    def leave(self, request: Request, node: RadixNode) -> None:
        """Pages are all there is."""

    def close(self, request: Request) -> None:
        """It has nothing."""

    def check_integrity(self) -> None:
        """There are no places."""
