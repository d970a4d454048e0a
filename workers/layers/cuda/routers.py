"""Who is chosen, as the grouped products take it. Needs Triton."""

import torch

from workers.layers.cuda.expert_routing import Chosen, choose_by_softmax, counted
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.routing import Choice, SoftmaxRouting


class SoftmaxChooser:
    """One kernel, for experts that all lie here. Pieces of shared experts have weight 1, or the
    router's."""

    def __init__(self, mixture: MixtureOfExperts, routing: SoftmaxRouting) -> None:
        self._router, self._routing = mixture.router, routing
        self._num_pieces = mixture.experts.spec.num_pieces

    def __call__(self, x: torch.Tensor) -> Chosen:
        routing = self._routing
        chosen = choose_by_softmax(
            self._router.logits(x),
            routing.num_chosen,
            self._num_pieces,
            routing.factor,
            routing.is_normed,
        )
        if self._router.shared_gate is not None:
            chosen.weights[:, routing.num_chosen :] = self._router.piece_weights(x)
        return chosen


class PlainChooser:
    """By plain torch, then counted: any routing, and experts of which some lie elsewhere."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        self._mixture = mixture

    def __call__(self, x: torch.Tensor) -> Chosen:
        experts = self._mixture.experts
        here: Choice = experts.local(self._mixture.router(x))
        num_counted = experts.share.num_kept + experts.num_elsewhere
        return counted(here.weights.contiguous(), here.ids.int().contiguous(), num_counted)


def chooser_of(mixture: MixtureOfExperts) -> SoftmaxChooser | PlainChooser:
    routing = mixture.experts.spec.routing
    if isinstance(routing, SoftmaxRouting) and mixture.experts.num_elsewhere == 0:
        return SoftmaxChooser(mixture, routing)
    return PlainChooser(mixture)
