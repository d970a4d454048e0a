"""The running table as decode steps read it."""

import numpy as np

from workers.scheduler.running_table import RunningTable


def test_whatever_goes_into_a_plan_is_int32():
    table = RunningTable(max_slots=3, max_pages_per_request=4, page_size=2)
    columns = {name: value for name, value in vars(table).items() if isinstance(value, np.ndarray)}
    assert len(columns) == 8
    assert {name: value.dtype for name, value in columns.items()} == dict.fromkeys(
        columns, np.dtype(np.int32)
    )
    for lengths in (table.num_prompt_tokens(), table.max_new_tokens()):
        assert lengths.dtype == np.int32
        assert lengths.tolist() == [0, 0, 0]


def test_a_wide_request_widens_the_table_up_to_the_longest_one_and_keeps_what_is_in_it():
    table = RunningTable(max_slots=2, max_pages_per_request=200, page_size=2)
    assert table.page_table.shape == (2, 64)
    table.append_pages(1, (np.arange(1, 61, dtype=np.int32),))
    table.append_pages(1, (np.arange(61, 81, dtype=np.int32),))
    assert table.page_table.shape == (2, 128)
    table.append_pages(1, (np.arange(81, 151, dtype=np.int32),))
    assert table.page_table.shape == (2, 200), "no more than a request may have"
    assert table.page_table[1, :150].tolist() == list(range(1, 151))
    assert table.num_pages.tolist() == [0, 150]
    assert not table.page_table[0].any()
