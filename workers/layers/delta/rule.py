"""The gated delta rule in plain torch, and who computes it on a GPU.

A head's state S (key_dim, value_dim) takes tokens one by one: S <- e^g S, then
S <- S + k (beta (v - k S)), and the token reads q S. Source: Gated Delta Networks (Yang et al.,
arXiv:2412.06464); many tokens at once by its section 3.3 (the WY form within chunks). Sums are kept
in float32. Knows no layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

CHUNK = 64
_EPS = 1e-6
"""Added to the squared length of queries and keys, as checkpoints were trained."""


class DeltaInputs(NamedTuple):
    """Of rows of equal length. q, k: (rows, length, key_heads, key_dim), not normalised yet; v:
    (rows, length, value_heads, value_dim), a multiple of key_heads, neighbours sharing one; g: log
    of what is kept of the state, <= 0, and beta: (rows, length, value_heads)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


class DeltaOutputs(NamedTuple):
    """made: as v, in its dtype. state: float32 (rows, value_heads, key_dim, value_dim)."""

    made: torch.Tensor
    state: torch.Tensor


DeltaRule = Callable[[DeltaInputs, torch.Tensor | None], DeltaOutputs]
"""(inputs, state before them, None for zeros) -> outputs. Rows of one token or of many."""


def delta_rule_in_torch(inputs: DeltaInputs, state: torch.Tensor | None) -> DeltaOutputs:
    """A DeltaRule for any device. Asks nothing on the host but shapes."""
    wide = _prepared(inputs)
    if state is None:
        rows, _, heads, value_dim = inputs.v.shape
        state = wide.q.new_zeros((rows, heads, inputs.k.shape[-1], value_dim))
    compute = _one_token if inputs.q.shape[1] == 1 else _in_chunks
    made, after = compute(wide, state.float())
    return DeltaOutputs(made.to(inputs.v.dtype), after)


def _prepared(inputs: DeltaInputs) -> DeltaInputs:
    """In float32, heads before tokens; queries and keys of length 1, one for each value head,
    queries divided by the root of their size."""
    share = inputs.v.shape[2] // inputs.k.shape[2]

    def heads(x: torch.Tensor) -> torch.Tensor:
        wide = x.transpose(1, 2).float()
        unit = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _EPS)
        return unit.repeat_interleave(share, dim=1)

    q = heads(inputs.q) * inputs.q.shape[-1] ** -0.5
    others = (x.transpose(1, 2).float() for x in (inputs.v, inputs.g, inputs.beta))
    return DeltaInputs(q, heads(inputs.k), *others)


def _one_token(x: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: as _prepared, of one token a row."""
    kept = state * x.g.exp().unsqueeze(-1)
    wrong = (x.v - x.k @ kept) * x.beta.unsqueeze(-1)
    after = kept + x.k.transpose(-1, -2) @ wrong
    return (x.q @ after).transpose(1, 2), after


def _in_chunks(x: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: as _prepared. What a chunk's tokens do to each other is solved for all chunks at once."""
    length = x.q.shape[2]
    q, k, v = (_chunked(part) for part in (x.q, x.k, x.v))
    beta, until = _chunked(x.beta).unsqueeze(-1), _chunked(x.g).cumsum(-1)
    size = until.shape[-1]
    is_later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (until.unsqueeze(-1) - until.unsqueeze(-2)).masked_fill(is_later, -torch.inf).exp()
    corrections = (beta * k) @ k.transpose(-1, -2) * between
    begun = until.exp().unsqueeze(-1)
    wanted = torch.cat((beta * v, beta * begun * k), dim=-1)
    # Unit triangular: the diagonal of corrections is not read.
    solved = torch.linalg.solve_triangular(corrections, wanted, upper=False, unitriangular=True)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = q @ k.transpose(-1, -2) * between
    last = until[..., -1:]
    queries, keys = q * begun, (k * (last - until).exp().unsqueeze(-1)).transpose(-1, -2)
    made = torch.empty_like(v)
    for chunk in range(v.shape[2]):
        new = values[:, :, chunk] - reads[:, :, chunk] @ state
        made[:, :, chunk] = queries[:, :, chunk] @ state + seen[:, :, chunk] @ new
        state = state * last[:, :, chunk].exp().unsqueeze(-1) + keys[:, :, chunk] @ new
    return made.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, length, ...) -> (rows, heads, chunks, size, ...), zeros behind the end: these
    keep the state as it is."""
    length = x.shape[2]
    size = min(CHUNK, length)
    missing = -length % size
    padding = (0, 0) * (x.dim() - 3) + (0, missing)
    return functional.pad(x, padding).view(*x.shape[:2], -1, size, *x.shape[3:])
