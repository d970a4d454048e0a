"""Which policy a name stands for."""

from collections.abc import Callable

from workers.speculation.adaptive import AdaptiveLength, lengths_up_to
from workers.speculation.config import DraftPolicyName, SpeculativeConfig
from workers.speculation.policy import DraftPolicy, FixedLength


def make_policy(
    name: DraftPolicyName, max_draft_tokens: int, has_trees: bool = False
) -> DraftPolicy:
    """Of a scheduler whose rows have max_draft_tokens at most. has_trees: they are trees."""
    return _POLICIES[name](max_draft_tokens, has_trees)


def draft_lengths(speculation: SpeculativeConfig) -> list[int]:
    """Of which a step has one, for most of its rows, ascending: what devices prepare for."""
    most = speculation.max_draft_tokens
    if speculation.policy == "fixed":
        return [most]
    return [0, most] if speculation.tree else lengths_up_to(most)


_POLICIES: dict[DraftPolicyName, Callable[[int, bool], DraftPolicy]] = {
    "adaptive": AdaptiveLength,
    "fixed": lambda max_draft_tokens, _: FixedLength(max_draft_tokens),
}
