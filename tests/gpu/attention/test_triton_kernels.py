"""The Triton kernels around attention give what their description in torch gives, bit for bit."""

import pytest
import torch

from attention.kernels.providers import load_triton_kernels
from attention.kernels.step_tables import StepTables
from tests.fakes import flash_attention as described
from tests.gpu.needs import NEEDS_GPU

pytestmark = NEEDS_GPU

DEVICE = torch.device("cuda")


@pytest.mark.parametrize("page_size", [1, 16, 24, 128, 256])
@pytest.mark.parametrize("num_rows", [1, 7, 600])
@pytest.mark.parametrize("window", [0, 1, 700])
def test_step_tables(num_rows, page_size, window):
    generator = torch.Generator().manual_seed(num_rows * page_size)
    max_len = 3000
    table = torch.randint(0, 10**6, (num_rows + 2, max_len), generator=generator).int().to(DEVICE)
    slots = torch.randperm(num_rows + 2, generator=generator)[:num_rows].to(DEVICE)
    seq_lens = torch.randint(0, max_len + 1, (num_rows,), generator=generator).int().to(DEVICE)
    new = torch.randint(0, 9, (num_rows,), generator=generator).int().to(DEVICE)
    filled = []
    for fill in (load_triton_kernels().fill_step_tables, described.fill_step_tables):
        tables = StepTables.allocate(num_rows + 5, -(-max_len // page_size), DEVICE)
        tables.page_table.fill_(-7)
        fill(table, slots, seq_lens, new, tables, page_size, int(seq_lens.max()), window)
        filled.append(tables)
    assert torch.equal(filled[0].cache_seqlens, filled[1].cache_seqlens)
    assert torch.equal(filled[0].cu_seqlens_q, filled[1].cu_seqlens_q)
    assert torch.equal(filled[0].cu_seqlens_k, filled[1].cu_seqlens_k)
    assert torch.equal(filled[0].page_table, filled[1].page_table)


def new_tokens(num_tokens: int, heads: int, head_dim: int, v_head_dim: int):
    """Slices of a fused projection, with values beyond what e4m3 holds, and distinct places."""
    generator = torch.Generator().manual_seed(num_tokens)
    width = heads * (head_dim + v_head_dim)
    fused = torch.randn((num_tokens, width + 8), generator=generator) * 200.0
    fused = fused.to(DEVICE, torch.bfloat16)
    k = fused[:, : heads * head_dim].unflatten(1, (heads, head_dim))
    v = fused[:, heads * head_dim : width].unflatten(1, (heads, v_head_dim))
    places = torch.randperm(7 * 16, generator=generator)[:num_tokens].to(DEVICE)
    return k, v, places


@pytest.mark.parametrize(("heads", "head_dim", "v_head_dim"), [(8, 128, 128), (1, 24, 16)])
@pytest.mark.parametrize("num_tokens", [0, 1, 65])
def test_kv_writes(num_tokens, heads, head_dim, v_head_dim):
    k, v, places = new_tokens(num_tokens, heads, head_dim, v_head_dim)
    kernels = load_triton_kernels()
    scales = torch.tensor([0.37, 2.1], device=DEVICE)
    for dtype, ours, theirs, extra in (
        (torch.bfloat16, kernels.copy_kv, described.copy_kv, ()),
        (torch.float8_e4m3fn, kernels.quantise_kv, described.quantise_kv, (scales,)),
    ):
        written = []
        for write in (ours, theirs):
            pages = [
                torch.zeros((7, 16, heads, dim), device=DEVICE).to(dtype)
                for dim in (head_dim, v_head_dim)
            ]
            write(k, v, *pages, places, *extra)
            written.append([page.float() for page in pages])
        assert torch.equal(written[0][0], written[1][0])
        assert torch.equal(written[0][1], written[1][1])


def test_quantised_queries_are_dense_and_saturated():
    k, _, _ = new_tokens(65, 8, 128, 128)
    out = load_triton_kernels().quantise_queries(k)
    assert out.is_contiguous()
    assert torch.equal(out.float(), described.quantise_queries(k).float())
