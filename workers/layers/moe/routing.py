"""How tokens choose among experts, as values. Logits are float32; knows no weights.

Sources: Switch and its kin (arXiv:2101.03961), DeepSeek-V2 (arXiv:2405.04434, 2.2), DeepSeek-V3
(arXiv:2412.19437, 2.1.2).
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from workers.errors import ModelLoadError

_TINY = 1e-20
"""Added to a sum of scores that may all be 0, as in DeepSeek's code."""


class Choice(NamedTuple):
    """Of n tokens, k experts each. weights: float32 (n, k), ids: int64 (n, k)."""

    weights: torch.Tensor
    ids: torch.Tensor


class Routing(Protocol):
    """has_correction: whether a learned number of each expert takes part in the choice."""

    @property
    def num_chosen(self) -> int: ...
    @property
    def has_correction(self) -> bool: ...

    def check(self, num_experts: int) -> None:
        """Raises ModelLoadError where so many experts cannot be chosen among in this way."""

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> Choice:
        """logits: float32 (n, num_experts). correction: float32 (num_experts,) or None."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouting:
    """The likeliest. is_normed: whether the weights are divided by their sum, which is the softmax
    of the chosen logits alone (Mixtral, gpt-oss)."""

    num_chosen: int
    is_normed: bool
    factor: float = 1.0
    has_correction = False

    def check(self, num_experts: int) -> None:
        _check_chosen(self.num_chosen, num_experts)

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> Choice:
        weights, ids = torch.softmax(logits, dim=-1).topk(self.num_chosen, dim=-1)
        if self.is_normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return Choice(weights * self.factor, ids)


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """The likeliest, each weighed by the sigmoid of its own logit (Llama 4)."""

    num_chosen: int
    has_correction = False

    def check(self, num_experts: int) -> None:
        _check_chosen(self.num_chosen, num_experts)

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> Choice:
        chosen, ids = logits.topk(self.num_chosen, dim=-1)
        return Choice(torch.sigmoid(chosen), ids)


@dataclass(frozen=True, slots=True)
class GroupedSoftmaxRouting:
    """The likeliest within the groups whose best expert is likeliest (DeepSeek-V2)."""

    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    factor: float
    has_correction = False

    def check(self, num_experts: int) -> None:
        _check_groups(self.num_groups, self.num_chosen_groups, self.num_chosen, num_experts)

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> Choice:
        scores = torch.softmax(logits, dim=-1)
        best = scores.view(len(scores), self.num_groups, -1).amax(dim=-1)
        within = _within(scores, best, self.num_chosen_groups, 0.0)
        weights, ids = within.topk(self.num_chosen, dim=-1)
        return Choice(weights * self.factor, ids)


@dataclass(frozen=True, slots=True)
class GroupedSigmoidRouting:
    """Scored by sigmoid, chosen by score plus correction, within the groups whose two best are
    best; the correction is in no weight (DeepSeek-V3, GLM-4.5)."""

    num_chosen: int
    num_groups: int
    num_chosen_groups: int
    is_normed: bool
    factor: float
    has_correction = True

    def check(self, num_experts: int) -> None:
        _check_groups(self.num_groups, self.num_chosen_groups, self.num_chosen, num_experts)

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> Choice:
        if correction is None:
            raise ValueError("experts scored by sigmoid are chosen with a correction")
        scores = torch.sigmoid(logits)
        corrected = scores + correction
        by_group = corrected.view(len(corrected), self.num_groups, -1)
        two_best = by_group.topk(min(2, by_group.shape[-1]), dim=-1)[0].sum(dim=-1)
        within = _within(corrected, two_best, self.num_chosen_groups, -torch.inf)
        ids = within.topk(self.num_chosen, dim=-1)[1]
        weights = scores.gather(1, ids)
        if self.is_normed:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return Choice(weights * self.factor, ids)


def _check_chosen(num_chosen: int | None, num_candidates: int) -> None:
    """num_chosen: None where a config does not say."""
    if num_chosen is None or not 1 <= num_chosen <= num_candidates:
        raise ModelLoadError(f"a token cannot take {num_chosen} of {num_candidates} experts")


def _check_groups(
    num_groups: int, num_chosen_groups: int, num_chosen: int, num_experts: int
) -> None:
    if num_groups < 1 or num_experts % num_groups:
        raise ModelLoadError(f"{num_experts} experts make no {num_groups} equal groups")
    if not 1 <= num_chosen_groups <= num_groups:
        raise ModelLoadError(f"a token cannot take {num_chosen_groups} of {num_groups} groups")
    _check_chosen(num_chosen, num_chosen_groups * (num_experts // num_groups))


def _within(
    scores: torch.Tensor, of_groups: torch.Tensor, num_chosen_groups: int, elsewhere: float
) -> torch.Tensor:
    """scores (n, num_experts), with elsewhere outside each token's best groups."""
    best = of_groups.topk(num_chosen_groups, dim=-1)[1]
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
    group_size = scores.shape[-1] // of_groups.shape[-1]
    is_chosen = is_best.unsqueeze(-1).expand(-1, -1, group_size).flatten(1)
    return scores.masked_fill(~is_chosen, elsewhere)
