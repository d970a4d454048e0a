"""Rows gathered by expert and blocks in order, by Triton's interpreter.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch

from workers.layers.cuda.expert_gather import gather_rows
from workers.layers.cuda.expert_routing import counted, group

STEP = 4


def check(num_tokens, width, num_experts, num_elsewhere):
    x = torch.randn(num_tokens, width)
    ids = (torch.rand(num_tokens, 3) ** 2 * num_experts).int()
    grouped = group(counted(torch.rand(num_tokens, 3), ids, num_experts), 16, num_elsewhere)
    rows, blocks = gather_rows(x, grouped, 3, STEP)
    assert torch.equal(rows, x[(grouped.pairs // 3).long()])
    num_blocks = int(grouped.num_blocks)
    assert num_blocks > 1
    there = grouped.blocks[:, :num_blocks]
    steps = -(there[2] // -STEP)
    wanted = there[:, torch.sort(steps, descending=True, stable=True).indices]
    assert torch.equal(blocks[:, :num_blocks], wanted)
    return steps.tolist()


if __name__ == "__main__":
    torch.manual_seed(0)
    found = [check(50, 520, 5, 0), check(41, 64, 7, 1), check(7, 1032, 4, 0)]
    assert any(0 < a < b for one in found for a, b in zip(one, one[1:], strict=False))
    print("all equal")
