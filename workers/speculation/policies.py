"""Which policy a name stands for."""

from collections.abc import Callable

from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.config import DraftPolicyName
from workers.speculation.policy import DraftPolicy, FixedLength


def make_policy(name: DraftPolicyName, max_draft_tokens: int) -> DraftPolicy:
    """Of a scheduler whose rows have max_draft_tokens at most."""
    return _POLICIES[name](max_draft_tokens)


_POLICIES: dict[DraftPolicyName, Callable[[int], DraftPolicy]] = {
    "adaptive": AdaptiveLength,
    "fixed": FixedLength,
}
