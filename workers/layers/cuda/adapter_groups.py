"""The tokens of a step by the adapter that they have, found on the device: one launch a step.

A captured step runs it over its rows' slots, so that a graph replays with any adapters.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """order: int32 (num_slots + 1, num_tokens), whose row s begins with the tokens that have the
    adapter in slot s, ascending; what follows them means nothing. counts: int32 (num_slots + 1,).
    Row 0 is of the tokens that have none."""

    order: torch.Tensor
    counts: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.counts.shape[0] - 1


def _group_tokens(
    adapter_of_slot: tl.tensor,
    token_slots: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    adapter = tl.program_id(0)
    begin_dependent(IS_DEPENDENT)
    own_order = order + adapter.to(tl.int64) * num_tokens
    num_found = 0
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        is_real = tokens < num_tokens
        slots = tl.load(token_slots + tokens, mask=is_real, other=0)
        found = tl.load(adapter_of_slot + slots, mask=is_real, other=0)
        is_own = ((found == adapter) & is_real).to(tl.int32)
        places = num_found + tl.cumsum(is_own, 0) - 1
        tl.store(own_order + places, tokens, mask=is_own != 0)
        num_found += tl.sum(is_own, 0)
    tl.store(counts + adapter, num_found)


_group_tokens_kernel = triton.jit(_group_tokens)


def group_tokens(
    adapter_of_slot: torch.Tensor, token_slots: torch.Tensor, num_slots: int
) -> TokenGroups:
    """adapter_of_slot: int32 (request slots,), 0 for none. token_slots: int64 (num_tokens,), the
    request's slot of each token. num_slots: of adapters."""
    num_tokens, device = token_slots.shape[0], token_slots.device
    order = torch.empty((num_slots + 1, num_tokens), dtype=torch.int32, device=device)
    counts = torch.empty(num_slots + 1, dtype=torch.int32, device=device)
    is_dependent = dependent_launch(token_slots)
    _group_tokens_kernel[(num_slots + 1,)](
        adapter_of_slot,
        token_slots,
        order,
        counts,
        num_tokens,
        BLOCK=_BLOCK,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return TokenGroups(order, counts)
