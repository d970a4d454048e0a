"""A decode plan covers every visible key once, longest chunks first, and its counters are zero."""

import pytest
import torch

from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning
from attention.kernels.paged_decode import DecodePlan, PagedDecode
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]

DEVICE = torch.device("cuda")
KV_HEADS = 8
BLOCK_KEYS = 64
HEADER, FIELDS = 8, 8


def plan_of(lengths: list[int], window: int, slack_eighths: int, min_chunk: int) -> DecodePlan:
    geometry = DecodeGeometry(KV_HEADS, 4, 128, 128)
    tuning = DecodeTuning(
        block_keys=BLOCK_KEYS, min_chunk_tokens=min_chunk, slack_eighths=slack_eighths
    )
    decode = PagedDecode(geometry, DEVICE, lambda num_rows: tuning)
    return decode.plan(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), window)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 30, 55, 64, 256, 700])
@pytest.mark.parametrize("window", [-1, 1, 300, 5000])
@pytest.mark.parametrize(("slack_eighths", "min_chunk"), [(0, 64), (4, 128), (8, 256)])
def test_plans(num_rows, window, slack_eighths, min_chunk):
    generator = torch.Generator().manual_seed(num_rows + slack_eighths)
    lengths = torch.randint(0, 9000, (num_rows,), generator=generator).tolist()
    lengths[0] = 0 if num_rows > 1 else lengths[0]
    plan = plan_of(lengths, window, slack_eighths, min_chunk)
    values = plan.tensor.tolist()
    num_items = values[0]
    assert num_rows <= num_items <= plan.max_items
    counters = values[HEADER + plan.max_items * FIELDS :]
    assert counters == [0] * (num_rows * KV_HEADS)
    items = [values[HEADER + i * FIELDS :][:6] for i in range(num_items)]
    by_row: dict[int, list[tuple[int, list[int]]]] = {row: [] for row in range(num_rows)}
    for index, item in enumerate(items):
        by_row[item[0]].append((index, item))
    for row, chunks in by_row.items():
        length = lengths[row]
        visible_from = max(length - window, 0) if window > 0 else 0
        first_index = chunks[0][0]
        stops = [visible_from // BLOCK_KEYS * BLOCK_KEYS]
        for order, (index, (_, start, stop, num_chunks, first_item, num_keys)) in enumerate(chunks):
            assert (num_chunks, first_item, num_keys) == (len(chunks), first_index, length)
            assert index == first_index + order
            assert start == stops[-1]
            assert stop > start or length == 0
            stops.append(stop)
        assert stops[-1] == length
    sizes = [by_row[item[0]][0][1][2] - by_row[item[0]][0][1][1] for item in items]
    rounded = [max(1, -(-size // BLOCK_KEYS)) for size in sizes]
    assert rounded == sorted(rounded, reverse=True)
