"""The radix select agrees with a sort, whatever the weights."""

import torch

from workers.sampling.select import descending_keys, select_key

LARGEST = 2**31 - 1


def _by_sort(keys: list[int], weights: list[int], target: int) -> int:
    reached = 0
    for key, weight in sorted(zip(keys, weights, strict=True)):
        reached += weight
        if reached >= target:
            return key
    return LARGEST


def test_keys_ascend_as_values_descend() -> None:
    values = torch.tensor([[0.0, -0.0, -1e-30, -0.5, -1.0, -88.0, -3e38, -float("inf")]])
    keys = descending_keys(values)
    assert keys.tolist() == sorted(keys.tolist())
    assert keys[0, 0] == keys[0, 1] == 0
    assert keys[0, -1] == 0x7F800000


def test_selected_key_is_where_a_sort_reaches_the_target() -> None:
    generator = torch.Generator().manual_seed(3)
    for spread in (2**4, 2**12, 2**22, 2**31 - 1):
        keys = torch.randint(0, spread, (40, 97), generator=generator).to(torch.int32)
        weights = torch.randint(0, 50, (40, 97), generator=generator)
        targets = torch.randint(1, 3000, (40, 1), generator=generator)
        selected = select_key(keys, weights, targets)
        for row in range(40):
            target = targets[row].item()
            expected = _by_sort(keys[row].tolist(), weights[row].tolist(), target)
            assert selected[row].item() == expected


def test_a_row_with_equal_keys_selects_that_key() -> None:
    keys = torch.full((1, 9), 123456789, dtype=torch.int32)
    selected = select_key(keys, torch.ones(1, 9, dtype=torch.int64), torch.tensor([[4]]))
    assert selected.item() == 123456789


def test_a_target_out_of_reach_selects_everything() -> None:
    keys = torch.tensor([[5, 1, 0x7F800000]], dtype=torch.int32)
    selected = select_key(keys, torch.ones(1, 3, dtype=torch.int64), torch.tensor([[4]]))
    assert selected.item() == LARGEST
