"""What a mixture of experts computes. Knows no tensor and no config."""

from dataclasses import dataclass
from typing import Literal

Routing = Literal["softmax", "grouped_softmax", "grouped_sigmoid"]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts: num_routed of which every token takes num_chosen, and num_shared that
    all take; width: of one expert.

    routing: "softmax" takes the likeliest; "grouped_softmax" does within the num_chosen_groups of
    num_groups that have the likeliest; "grouped_sigmoid" scores by sigmoid, chooses by score plus a
    correction of each expert, groups by their two best. factor: of the weights; has_normed_weights:
    whether they are divided by their sum first.
    """

    num_routed: int
    num_chosen: int
    num_shared: int
    width: int
    routing: Routing
    num_groups: int
    num_chosen_groups: int
    factor: float
    has_normed_weights: bool
