"""Who is chosen, as the grouped products take it. Needs Triton."""

import torch

from workers.layers.cuda.expert_routing import Chosen, ExpertPlaces, choose_by_softmax, counted
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.routing import Choice, SoftmaxRouting


def counted_here(chosen: Choice, experts: Experts) -> Chosen:
    """By the places of experts on this rank, of which one stands for those that lie elsewhere."""
    here = experts.local(chosen)
    num_counted = experts.share.num_kept + experts.num_elsewhere
    return counted(here.weights.contiguous(), here.ids.int().contiguous(), num_counted)


class SoftmaxChooser:
    """By one kernel, which finds their places on this rank, too, unless experts are counted or have
    copies. Pieces of shared experts have weight 1, or the router's."""

    def __init__(self, mixture: MixtureOfExperts, routing: SoftmaxRouting) -> None:
        self._router, self._experts, self._routing = mixture.router, mixture.experts, routing
        self._mixture = mixture

    def __call__(self, x: torch.Tensor) -> Chosen:
        routing, here = self._routing, self._places()
        chosen = choose_by_softmax(
            self._router.logits(x),
            routing.num_chosen,
            self._experts.spec.num_pieces,
            routing.factor,
            routing.is_normed,
            here,
        )
        if here is None:
            self._mixture.count(chosen.ids)
        if self._router.shared_gate is not None:
            chosen.weights[:, routing.num_chosen :] = self._router.piece_weights(x)
        if here is not None or self._experts.num_elsewhere == 0:
            return chosen
        return counted_here(Choice(chosen.weights, chosen.ids.long()), self._experts)

    def _places(self) -> ExpertPlaces | None:
        experts = self._experts
        places = experts.fixed_places
        if experts.num_elsewhere == 0 or places is None or self._mixture.tally is not None:
            return None
        return ExpertPlaces(places, experts.share.num_kept)


class PlainChooser:
    """By plain torch: any routing."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        self._mixture = mixture

    def __call__(self, x: torch.Tensor) -> Chosen:
        return counted_here(self._mixture.choose(x), self._mixture.experts)


def chooser_of(mixture: MixtureOfExperts) -> SoftmaxChooser | PlainChooser:
    routing = mixture.experts.spec.routing
    if isinstance(routing, SoftmaxRouting):
        return SoftmaxChooser(mixture, routing)
    return PlainChooser(mixture)
