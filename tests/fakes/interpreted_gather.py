"""Rows gathered by expert and blocks in order, by Triton's interpreter.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch

from workers.layers.cuda.expert_gather import gather_rows
from workers.layers.cuda.expert_routing import (
    ExpertPlaces,
    choose_by_softmax,
    counted,
    group,
)

STEP = 4
NO_TOKEN = 0x3F803F80
"""What memory may hold that two numbers of bfloat16 were in."""


def check(num_tokens, width, num_experts, num_elsewhere):
    ids = (torch.rand(num_tokens, 3) ** 2 * num_experts).int()
    chosen = counted(torch.rand(num_tokens, 3), ids, num_experts)
    return check_chosen(torch.randn(num_tokens, width), chosen, num_elsewhere)


def check_chosen(x, chosen, num_elsewhere):
    grouped = group(chosen, 16, num_elsewhere)
    num_here = chosen.counts.shape[0] - num_elsewhere
    num_placed = int((chosen.ids < num_here).sum())
    assert grouped.num_placed.tolist() == [num_placed]
    rows, blocks = gather_rows(x, grouped, 3, STEP)
    placed = grouped.pairs[:num_placed].long()
    assert placed.unique().shape == placed.shape
    assert torch.equal(rows[:num_placed], x[placed // 3])
    num_blocks = int(grouped.num_blocks)
    assert num_blocks > 1
    there = grouped.blocks[:, :num_blocks]
    steps = -(there[2] // -STEP)
    wanted = there[:, torch.sort(steps, descending=True, stable=True).indices]
    assert torch.equal(blocks[:, :num_blocks], wanted)
    return steps.tolist()


def check_places():
    """Half of the experts are other ranks', whose pairs are not counted: memory of pairs is what it
    was before."""
    num_experts, num_kept = 8, 4
    places = torch.cat((torch.full((4,), num_kept), torch.arange(num_kept)))
    logits = torch.randn(64, num_experts)
    make = torch.empty

    def used(*size, **options):
        made = make(*size, **options)
        return made.fill_(NO_TOKEN) if made.dtype == torch.int32 else made

    torch.empty = used
    try:
        chosen = choose_by_softmax(logits, 3, 0, 1.0, here=ExpertPlaces(places, num_kept))
        check_chosen(torch.randn(64, 24), chosen, 1)
    finally:
        torch.empty = make


if __name__ == "__main__":
    torch.manual_seed(0)
    found = [check(50, 520, 5, 0), check(41, 64, 7, 1), check(7, 1032, 4, 0)]
    check_places()
    assert any(0 < a < b for one in found for a, b in zip(one, one[1:], strict=False))
    print("all equal")
