"""From attention scores to attention probabilities, with what torch's own SDPA does not offer."""

import torch


def capped_sink_softmax(
    scores: torch.Tensor,
    bias: torch.Tensor | None,
    logit_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax over the last dimension of float32 scores (already scaled); may overwrite scores.

    bias: broadcastable to scores, 0 where a key is visible and -inf where it is not; every row of
    scores must see at least one key. logit_cap c > 0: s becomes c * tanh(s / c) first (Gemma 2).
    sinks: logits broadcastable to scores with a last dimension of 1, that take part in the
    denominator only ("attention is off by one"; gpt-oss).
    """
    if logit_cap > 0.0:
        scores.div_(logit_cap).tanh_().mul_(logit_cap)
    if bias is not None:
        scores.add_(bias)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
    scores.sub_(peak).exp_()
    return scores.div_(scores.sum(dim=-1, keepdim=True).add_(torch.exp(sinks - peak)))
