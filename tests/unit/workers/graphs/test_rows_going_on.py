"""What the device makes of rows that go on, without the host: what the host would say."""

import numpy as np
import pytest
import torch

from tests.fakes.rows_going_on import GoingOn
from workers.graphs.draft_rows import IDS, POSITIONS, TORCH_ROW_KERNELS
from workers.speculation.chain import HostChainVerifier
from workers.speculation.verifier import NO_SAMPLE


@pytest.mark.parametrize("is_told", [False, True])
def test_rows_go_on_where_they_would_once_the_host_knows(is_told: bool) -> None:
    """is_told: what holds."""
    for seed in range(20):
        case = GoingOn.drawn(np.random.default_rng(seed), is_told, torch.device("cpu"))
        drafts, ends = case.rows_before.drafts, torch.full((3, 1), NO_SAMPLE)
        expected = torch.cat([drafts, ends], dim=1).flatten().int().numpy()
        drawn = case.rows_before.sampled.flatten().numpy()
        run_lens = HostChainVerifier().accept(drawn, expected, np.arange(3) * 4)
        if case.rows_before.run_lens is not None:
            run_lens = case.rows_before.run_lens.numpy()
        staged, table = case.staged.clone(), case.table.clone()
        TORCH_ROW_KERNELS.go_on(staged, 2, case.rows_before, table)
        for row, (slot, was) in enumerate([(4, 2), (3, 0)]):
            before, held = int(case.staged[POSITIONS, row]), int(run_lens[was])
            assert staged[POSITIONS, row] == before + held
            # What is no number has no embedding: another token stands for it.
            assert staged[IDS, row] == max(int(case.rows_before.sampled[was, held - 1]), 0)
            brought = case.staged[4:, row].tolist()
            assert table[slot, before + 4 :][:3].tolist() == brought
            assert staged[4:, row].tolist() == table[slot, before + held :][:3].tolist()
        # Padding stays what it is, and so does all else of the table.
        assert torch.equal(staged[:, 2:], case.staged[:, 2:])
        assert (table != case.table).sum() <= 6
