"""How tokens choose among the experts of DeepSeek's models and their kin. Logits are float32.

Sources: DeepSeek-V2 (arXiv:2405.04434, 2.2), DeepSeek-V3 (arXiv:2412.19437, 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from workers.layers.cuda.expert_routing import Chosen, choose_by_softmax, counted
from workers.layers.experts_spec import ExpertsSpec


class Router(Protocol):
    def __call__(self, logits: torch.Tensor) -> Chosen:
        """logits: float32 (n, num_routed). Experts that all tokens share come last."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    spec: ExpertsSpec

    def __call__(self, logits: torch.Tensor) -> Chosen:
        spec = self.spec
        return choose_by_softmax(logits, spec.num_chosen, spec.num_shared, spec.factor)


@dataclass(frozen=True, slots=True)
class GroupedSoftmaxRouter:
    """Within the groups whose best expert is likeliest."""

    spec: ExpertsSpec

    def __call__(self, logits: torch.Tensor) -> Chosen:
        spec = self.spec
        scores = torch.softmax(logits, dim=-1)
        best = scores.view(-1, spec.num_groups, spec.num_routed // spec.num_groups).amax(dim=-1)
        weights, ids = _within(scores, best, 0.0, spec).topk(spec.num_chosen, dim=-1)
        return _with_shared(weights * spec.factor, ids, spec)


@dataclass(frozen=True, slots=True)
class GroupedSigmoidRouter:
    """correction: float32 (num_routed,), takes part in the choice and in no weight."""

    spec: ExpertsSpec
    correction: torch.Tensor

    def __call__(self, logits: torch.Tensor) -> Chosen:
        spec = self.spec
        scores = torch.sigmoid(logits)
        corrected = scores + self.correction
        by_group = corrected.view(-1, spec.num_groups, spec.num_routed // spec.num_groups)
        two_best = by_group.topk(min(2, by_group.shape[-1]), dim=-1)[0].sum(dim=-1)
        ids = _within(corrected, two_best, -torch.inf, spec).topk(spec.num_chosen, dim=-1)[1]
        weights = scores.gather(1, ids)
        if spec.has_normed_weights:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return _with_shared(weights * spec.factor, ids, spec)


def _within(
    scores: torch.Tensor, of_groups: torch.Tensor, elsewhere: float, spec: ExpertsSpec
) -> torch.Tensor:
    """scores (n, num_routed), with elsewhere outside each token's best groups."""
    best = of_groups.topk(spec.num_chosen_groups, dim=-1)[1]
    is_best = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, best, True)
    group_size = spec.num_routed // spec.num_groups
    is_chosen = is_best.unsqueeze(-1).expand(-1, -1, group_size).flatten(1)
    return scores.masked_fill(~is_chosen, elsewhere)


def _with_shared(weights: torch.Tensor, ids: torch.Tensor, spec: ExpertsSpec) -> Chosen:
    num_tokens, num_experts = ids.shape[0], spec.num_routed + spec.num_shared
    shared = torch.arange(spec.num_routed, num_experts, device=ids.device, dtype=torch.int32)
    ones = torch.ones((num_tokens, spec.num_shared), dtype=weights.dtype, device=ids.device)
    all_ids = torch.cat((ids.int(), shared.expand(num_tokens, -1)), dim=-1)
    return counted(torch.cat((weights, ones), dim=-1), all_ids, num_experts)


def router_of(spec: ExpertsSpec, correction: torch.Tensor | None) -> Router:
    """correction: of models that have one."""
    if spec.routing == "softmax":
        return SoftmaxRouter(spec)
    if spec.routing == "grouped_softmax":
        return GroupedSoftmaxRouter(spec)
    if correction is None:
        raise ValueError("experts scored by sigmoid are chosen with a correction")
    return GroupedSigmoidRouter(spec, correction)
