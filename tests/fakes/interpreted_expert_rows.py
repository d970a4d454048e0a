"""FP8 experts' products over rows by expert, by Triton's interpreter, with the library's product in
torch: what it is handed has to say where everything lies.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import sys
from types import SimpleNamespace

import torch

from tests.fakes.interpreted_quantised import check_close, fp8_stack
from workers.layers.cuda.expert_routing import counted, group
from workers.layers.kept.experts import KeptExperts
from workers.layers.quantised.expert_cutlass import GroupedCutlass
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_rows import place_rows
from workers.layers.routed_experts import SILU, Gating

BLOCK = 128
IDS = [[0, 3], [1, 0], [3, 1], [0, 1], [3, 0], [0, 4], [4, 3]]
"""Of five experts, of which a rank has four; nobody chose the third."""


def memory_of(tensor):
    """All that a pointer to its first element reaches."""
    return torch.as_strided(
        tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
    )


def grouped_mm(
    out, a_at, b_at, out_at, a_scales_at, b_scales_at, a, b, a_scales, b_scales, a_strides,
    b_strides, out_strides, a_layout, b_layout, sizes, first_rows, workspace,
):  # fmt: skip
    """As the kernel: of a's rows, b (experts, n, k) and scales only memory and sizes are known."""
    num = len(sizes)
    buffers = (a_at, b_at, out_at, a_scales_at, b_scales_at, a_strides, b_strides, out_strides)
    assert all(one.dtype == torch.int64 and one.shape == (num,) for one in buffers)
    assert a_layout.shape == b_layout.shape == (num, 5)
    assert sizes.dtype == first_rows.dtype == a_layout.dtype == b_layout.dtype == torch.int32
    assert sizes.shape == (num, 3)
    assert first_rows.shape == (num,)
    assert workspace.dtype == torch.uint8
    memories = [memory_of(one) for one in (a, b, a_scales, b_scales, out)]
    of_a, of_b, of_a_scales, of_b_scales, of_out = memories
    for expert, ((m, n, k), first) in enumerate(
        zip(sizes.tolist(), first_rows.tolist(), strict=True)
    ):
        assert a_strides[expert] == b_strides[expert] == k
        assert out_strides[expert] == n
        groups = k // BLOCK
        rows = of_a[first * k :][: m * k].view(m, k).double()
        rows *= (
            of_a_scales[first * groups :][: m * groups].view(m, groups).repeat_interleave(BLOCK, 1)
        )
        weight = of_b[expert * n * k :][: n * k].view(n, k).double()
        scales = of_b_scales[expert * n * k // BLOCK**2 :][: n * k // BLOCK**2]
        spread = scales.view(n // BLOCK, groups).repeat_interleave(BLOCK, 0)
        weight *= spread.repeat_interleave(BLOCK, 1)
        of_out[first * n :][: m * n].view(m, n).copy_(rows @ weight.t())


def check(way, hidden_size, width, gating, num_counted):
    """As tiles of pointers, which round alike. num_counted: experts that are chosen among, of which
    the first four are here."""
    gate_up, down = fp8_stack(4, 2 * width, hidden_size), fp8_stack(4, hidden_size, width)
    ids = torch.tensor([one for one in IDS if max(one) < num_counted], dtype=torch.int32)
    x, weights = torch.randn(len(ids), hidden_size), torch.rand(ids.shape)
    kept = KeptExperts(gate_up, down, gating, None, None)
    chosen, num_parts = counted(weights, ids, num_counted), num_counted - 3
    parts = way.products(x, chosen, kept, num_parts)
    assert parts.shape[1:] == x.shape
    want = RoundedTiles(16, 1, 4).products(x, chosen, kept, num_parts)
    check_close(parts.sum(0), want.sum(0), 1e-5)


def check_layouts():
    """Scales of a row or of a group side by side are the same."""
    x, ids = torch.randn(3, 256), torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    chosen = counted(torch.rand(3, 2), ids, 3)
    (one, grouped), (two, _) = (place_rows(x, chosen, 2, 2, by_row) for by_row in (True, False))
    want = group(chosen, 2, 1)
    assert torch.equal(grouped.num_blocks, want.num_blocks)
    assert torch.equal(grouped.blocks[:, :2], want.blocks[:, :2])
    assert torch.equal(grouped.pairs, want.pairs)
    assert (one.scales.stride(), two.scales.stride()) == ((2, 1), (1, 6))
    # The third expert is another rank's: its rows are not written.
    assert torch.equal(one.scales[:4], two.scales[:4])
    assert torch.equal(one.values[:4].float(), two.values[:4].float())


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.modules["sgl_kernel"] = SimpleNamespace(fp8_blockwise_scaled_grouped_mm=grouped_mm)
    for sizes in ((256, 128), (384, 256)):
        for num_counted in (4, 5):
            check(GroupedCutlass(), *sizes, SILU, num_counted)
            check(GroupedCutlass(), *sizes, Gating(1.702, 7.0), num_counted)
    check_layouts()
    print("all equal")
