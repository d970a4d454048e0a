"""Temperature and the filters over scaled logits: min_p, top_k, top_p, in this order.

Knows no requests and no randomness. "Scaled" logits have their row maximum at 0 and are divided by
the temperature, so no temperature overflows them and min_p is a plain comparison.

Definitions are those of transformers' warpers (generation/logits_process.py) and of vLLM: min_p
keeps tokens with p >= min_p * max p; top_k those not below the k-th largest; top_p the smallest
set of most likely tokens, after top_k, whose mass reaches top_p. One difference, on ties: a token
equal to the last one that top_p keeps is kept too, so that the set is a function of the values
and not of the order in which a sort left equal ones.
"""

import math

import torch
from torch import Tensor

from workers.sampling.select import descending_keys, select_key

MIN_TEMPERATURE = 1e-5
TOP_P_OFF = math.inf

_NEG_INF = -math.inf
WEIGHT_OF_LIKELIEST = 2.0**40
"""Integer weight of probability max p: sums over 2**22 tokens stay within int64."""


def integer_weights(scaled: Tensor) -> Tensor:
    """int64 weights of tokens from scaled logits: sums of integers are the same in any order, and a
    device's order depends on the number of rows."""
    return scaled.exp().mul_(WEIGHT_OF_LIKELIEST).to(torch.int64)


def scale_by_temperature(logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
    """(logits - row_max) / temperature: float32 (n, k) from (n, k), (n, 1), (n, 1).

    Values end in [-inf, 0]. A logit of +inf, and every logit of a row that holds a NaN or nothing
    above -inf, becomes 0, so that each row keeps at least one token that can be drawn.
    """
    scaled = torch.sub(logits, row_max).nan_to_num_(nan=0.0, posinf=0.0, neginf=_NEG_INF)
    return scaled.div_(temperature)


def mask_min_p_(scaled: Tensor, log_min_p: Tensor) -> Tensor:
    """Mask, in place, tokens less likely than min_p times the likeliest. log_min_p: (n, 1)."""
    return scaled.masked_fill_(scaled < log_min_p, _NEG_INF)


def mask_top_k_(scaled: Tensor, top_k: Tensor) -> Tensor:
    """Mask, in place, tokens below the k-th likeliest. top_k: int64 (n, 1), at least 1."""
    keys = descending_keys(scaled)
    ones = torch.ones_like(keys, dtype=torch.int64)
    return scaled.masked_fill_(keys > select_key(keys, ones, top_k), _NEG_INF)


def mask_top_p_(scaled: Tensor, top_p: Tensor) -> Tensor:
    """Mask, in place, all but the likeliest tokens whose mass reaches top_p, float32 (n, 1)."""
    keys = descending_keys(scaled)
    weights = integer_weights(scaled)
    mass = weights.sum(dim=-1, keepdim=True).double() * top_p
    threshold = select_key(keys, weights, mass.ceil_().to(torch.int64))
    return scaled.masked_fill_(keys > threshold, _NEG_INF)


def mask_sorted_(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """top_k and top_p, in place, on a few tokens that are sorted already.

    scaled: float32 (n, k), descending along the row. top_k: int64 (n, 1) in [1, k].
    top_p: float32 (n, 1), TOP_P_OFF where it is not used.
    """
    scaled.masked_fill_(scaled < scaled.gather(1, top_k - 1), _NEG_INF)
    mass = integer_weights(scaled)
    mass_up_to = mass.cumsum(dim=-1)
    is_kept = mass_up_to - mass < top_p * mass_up_to[:, -1:].double()
    # The first token has no mass above it: it stays even if top_p underflows to 0.
    last_kept = is_kept.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return scaled.masked_fill_(scaled < scaled.gather(1, last_kept), _NEG_INF)
