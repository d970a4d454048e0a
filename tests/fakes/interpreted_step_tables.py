"""What a step's tables are filled by, in Triton's interpreter, against plain torch.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch

from attention.kernels.page_lists import PageLists
from attention.kernels.step_tables import StepTables
from attention.kernels.triton_page_lists import fill_page_lists
from attention.kernels.triton_step_tables import fill_step_tables
from tests.fakes import flash_attention as described
from tests.fakes import flash_infer as described_lists
from workers.graphs.decode_step import StepRows, TokenRows, TorchStepKernels
from workers.graphs.ring import StagingRing
from workers.layers.cuda.greedy import TritonStepKernels

CPU = torch.device("cpu")


def check_tables(num_rows, page_size, window, max_len=90):
    table = torch.randint(0, 10**6, (num_rows + 2, max_len)).int()
    slots = torch.randperm(num_rows + 2)[:num_rows]
    seq_lens = torch.randint(0, max_len + 1, (num_rows,)).int()
    new = torch.minimum(torch.randint(0, 40, (num_rows,)).int(), seq_lens)
    filled = []
    for fill in (fill_step_tables, described.fill_step_tables):
        tables = StepTables.allocate(num_rows + 3, -(-max_len // page_size), CPU)
        tables.page_table.fill_(-7)
        fill(table, slots, seq_lens, new, tables, page_size, int(seq_lens.max()), window)
        filled.append(tables)
    for name in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "page_table"):
        assert torch.equal(*(getattr(one, name) for one in filled)), name
    first = (seq_lens - new.clamp(min=1) - window + 1).clamp(min=0) // page_size
    is_hidden = torch.arange(filled[0].page_table.shape[1]) < first[:, None]
    assert window == 0 or not filled[0].page_table[:num_rows][is_hidden].any()


def check_page_lists(num_rows, page_size, window, max_len=90):
    """Rows without keys among them, more rows than a pass sums up and pages than a program has."""
    table = torch.randint(0, 10**6, (num_rows + 2, max_len)).int()
    slots = torch.randperm(num_rows + 2)[:num_rows]
    seq_lens = torch.randint(0, max_len + 1, (num_rows,)).int()
    seq_lens[[0, -1]] = torch.tensor([0, max_len]).int()
    new = torch.minimum(torch.randint(0, 40, (num_rows,)).int(), seq_lens)
    filled = []
    for fill in (fill_page_lists, described_lists.fill_page_lists):
        lists = PageLists.allocate(num_rows + 3, num_rows * -(-max_len // page_size), CPU)
        lists.indices.fill_(-7)
        fill(table, slots, seq_lens, new, lists, page_size, max_len, window)
        filled.append(lists)
    for name in ("indptr", "last_page_lens", "indices"):
        assert torch.equal(*(getattr(one, name) for one in filled)), name


def check_begin(num_rows, num_accounts, num_slots=12):
    """Rows of the second slot of a ring, some of whose tokens the device knows."""
    outcomes = []
    slots = torch.randperm(num_slots)[:num_rows].int()
    lengths, tokens = torch.arange(num_rows).int(), torch.arange(num_rows).int() % 3 - 1
    places = [slots * (2 + account) + account for account in range(num_accounts)]
    for kind in (TorchStepKernels, TritonStepKernels):
        tables = tuple(torch.zeros(num_slots, 64, dtype=torch.int32) for _ in range(num_accounts))
        rows = StepRows.allocate(num_rows, CPU, num_accounts)
        staging = StagingRing.on_host(num_rows + 5, 1, num_accounts)
        staging.take()
        slot = staging.take()
        slot.rows[:, :num_rows] = torch.stack([slots, lengths, tokens, *places]).numpy()
        staging.point_device_at(slot)
        kind(tables, torch.arange(num_slots)).begin(staging.ring, rows)
        static = (rows.slots, rows.input_ids, rows.positions, rows.seq_lens, rows.prefix_lens)
        locs = (rows.out_cache_loc, *rows.bounded_cache_locs)
        outcomes.append((*tables, *static, *locs, staging.ring.current))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    assert [loc.tolist() for loc in locs] == [place.tolist() for place in places]


def check_gather(num_rows, tokens_per_row, has_named):
    """Into rows among more of them."""
    num_tokens = num_rows * tokens_per_row
    drawn = torch.randint(0, 10**6, (5, num_tokens))
    named = torch.randint(-1, 2, (num_tokens,)) * torch.randint(0, 99, (num_tokens,))
    outcomes = []
    for kind in (TorchStepKernels, TritonStepKernels):
        tokens = StepRows.allocate(num_tokens, CPU, 1)
        static = (tokens.slots, tokens.input_ids, tokens.positions)
        for own, values in zip((*static, tokens.seq_lens, tokens.prefix_lens), drawn, strict=True):
            own.copy_(values)
        rows = TokenRows.allocate(num_rows + 2, CPU)
        kernels = kind((torch.zeros((1, 1), dtype=torch.int32),), torch.zeros(1).long())
        kernels.gather_rows(tokens, named if has_named else None, rows.first(num_rows))
        outcomes.append((tokens.input_ids, rows.slots, rows.seq_lens, rows.prefix_lens))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    assert torch.equal(outcomes[0][0], drawn[1]) != (has_named and bool((named >= 0).any()))
    assert not any(own[num_rows:].any() for own in outcomes[0][1:])


if __name__ == "__main__":
    torch.manual_seed(0)
    for page_size in (1, 16, 24):
        for window in (0, 1, 20):
            check_tables(5, page_size, window)
            check_page_lists(5, page_size, window)
    check_page_lists(300, page_size=16, window=20, max_len=20)
    check_page_lists(2, page_size=1, window=0, max_len=600)
    for num_accounts in (1, 2, 3):
        check_begin(7, num_accounts)
    for has_named in (False, True):
        check_gather(1, 4, has_named)
        check_gather(7, 3, has_named)
        check_gather(300, 4, has_named)
    print("all equal")
