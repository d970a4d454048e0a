"""best_of: more choices are made than are told, and the likeliest ones win. Knows no stream."""

from dataclasses import replace

import msgspec

from service.handler.collect import ChoiceResult
from service.handler.requests import GenerationRequest


def with_likelihoods(request: GenerationRequest) -> GenerationRequest:
    """The request with what its choices are compared by, where they are."""
    num_best = request.num_best
    if num_best == request.n:
        return replace(request, num_best=None)
    if num_best is None or request.sampling.logprobs is not None:
        return request
    sampling = msgspec.structs.replace(request.sampling, logprobs=0)
    return replace(request, sampling=sampling, hides_logprobs=True)


def best_of(results: list[ChoiceResult], request: GenerationRequest) -> list[ChoiceResult]:
    """Of each prompt's choices those with the highest cumulative log probability, as vLLM ranked
    them, the best one first. results: of all prompts, in order. request: with_likelihoods."""
    if request.num_best is None:
        return results
    kept: list[ChoiceResult] = []
    for start in range(0, len(results), request.n):
        ranked = sorted(results[start : start + request.n], key=lambda one: -one.cumulative_logprob)
        kept += ranked[: request.num_best]
    for index, result in enumerate(kept):
        result.index = index
        if request.hides_logprobs:
            result.logprobs = None
    return kept
