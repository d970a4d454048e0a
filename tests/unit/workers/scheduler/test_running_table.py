"""The running table as decode steps read it."""

import numpy as np

from workers.scheduler.running_table import RunningTable


def test_whatever_goes_into_a_plan_is_int32():
    table = RunningTable(max_slots=3, max_pages_per_request=4, page_size=2)
    both = vars(table) | vars(table.pages)
    columns = {name: value for name, value in both.items() if isinstance(value, np.ndarray)}
    assert len(columns) == 8
    assert {name: value.dtype for name, value in columns.items()} == dict.fromkeys(
        columns, np.dtype(np.int32)
    )
    for lengths in (table.num_prompt_tokens(), table.max_new_tokens()):
        assert lengths.dtype == np.int32
        assert lengths.tolist() == [0, 0, 0]
