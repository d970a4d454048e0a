"""FP8 experts' rows by expert, by Triton's interpreter.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch

from workers.layers.cuda.expert_routing import counted, group
from workers.layers.quantised.expert_rows import place_rows
from workers.layers.quantised.fp8_rounding import round_groups

IDS = [[0, 2], [1, 0], [2, 1]]
"""Of three experts, the last of which is another rank's."""


def check_rows():
    """Blocks and pairs are those of group; rows are a token's, rounded, at its pairs' places."""
    x, ids = torch.randn(3, 256), torch.tensor(IDS, dtype=torch.int32)
    chosen = counted(torch.rand(3, 2), ids, 3)
    rows, grouped = place_rows(x, chosen, 2, 2)
    want = group(chosen, 2, 1)
    assert torch.equal(grouped.num_blocks, want.num_blocks)
    # Two rows of each expert, and none of the third's block.
    assert grouped.blocks[:, : int(grouped.num_blocks)].tolist() == [[0, 1], [0, 2], [2, 2]]
    assert torch.equal(grouped.blocks[:, :2], want.blocks[:, :2])
    assert torch.equal(grouped.pairs, want.pairs)
    assert rows.scales.stride() == (1, 6)
    # Rows of the third are not written.
    tokens = grouped.pairs[:4].long() // 2
    of_tokens = round_groups(x)
    assert torch.equal(rows.values[:4].float(), of_tokens.values[tokens].float())
    assert torch.equal(rows.scales[:4], of_tokens.scales[tokens])


if __name__ == "__main__":
    torch.manual_seed(0)
    check_rows()
    print("all equal")
