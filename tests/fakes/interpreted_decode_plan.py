"""Decode plans by Triton's interpreter: chunks are those that plain arithmetic says.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import torch

from attention.kernels.triton_decode_plan import plan_chunks_kernel

HEADER, FIELDS = 8, 8
BLOCK_KEYS, KV_HEADS = 64, 8
UNLIMITED = 1 << 30


def ceil_div(a, b):
    return -(-a // b)


def cut(length, chunk, slack, window):
    """A row's first key, chunk size and number of chunks."""
    first = max(length - window, 0) // BLOCK_KEYS * BLOCK_KEYS
    keys = length - first
    wanted = max(ceil_div(keys - slack, chunk), 1)
    size = ceil_div(max(ceil_div(keys, wanted), 1), BLOCK_KEYS) * BLOCK_KEYS
    return first, size, max(ceil_div(keys, size), 1)


def load_of(lengths, chunk, slack, window):
    """In 256ths of a place."""
    load = 0
    for length in lengths:
        first, _, num_chunks = cut(length, chunk, slack, window)
        share = min((length - first) * 256 // chunk, 256)
        load += num_chunks * 256 if num_chunks > 1 else share
    return load


def expected(lengths, window, slack_eighths, min_chunk, target):
    """Each row's first key, size and number of chunks, and by how much the ideal chunk grew."""
    keys = sum(length - cut(length, 1, 0, window)[0] for length in lengths)
    ideal = fitting = max(ceil_div(keys, target), min_chunk)
    for _ in range(8):
        if load_of(lengths, fitting, fitting * slack_eighths // 8, window) > target * 256:
            fitting += ideal // 16
    slack = fitting * slack_eighths // 8
    return [cut(length, fitting, slack, window) for length in lengths], fitting - ideal


def check(lengths, window=UNLIMITED, slack_eighths=4, min_chunk=128, target=17):
    """By how much the ideal chunk grew."""
    num_rows, max_items = len(lengths), len(lengths) + target
    plan = torch.full((HEADER + max_items * FIELDS + num_rows * KV_HEADS,), -1, dtype=torch.int32)
    block_rows = 1 << (num_rows - 1).bit_length()
    plan_chunks_kernel[(1,)](
        torch.tensor(lengths, dtype=torch.int32), plan, num_rows, max_items, window, target,
        min_chunk, slack_eighths, block_keys=BLOCK_KEYS, kv_heads=KV_HEADS, block_rows=block_rows,
        compared_rows=min(4, block_rows), max_waves=1, is_dependent=False, num_warps=4,
    )  # fmt: skip
    values = plan.tolist()
    rows, growth = expected(lengths, window, slack_eighths, min_chunk, target)
    wanted = {
        (row, first + i * size, min(first + (i + 1) * size, lengths[row]))
        for row, (first, size, num_chunks) in enumerate(rows)
        for i in range(num_chunks)
    }
    items = [values[HEADER + i * FIELDS :][:3] for i in range(values[0])]
    assert {tuple(item) for item in items} == wanted
    assert len(items) == len(wanted)
    return growth


if __name__ == "__main__":
    random = torch.Generator().manual_seed(0)
    growths = []
    for num_rows in (1, 2, 3, 7, 20):
        for most in (40, 900, 9000):
            lengths = torch.randint(0, most, (num_rows,), generator=random).tolist()
            growths.append(check(lengths))
            growths.append(check(lengths, window=300, slack_eighths=0, min_chunk=64, target=9))
    # Among them some that fit at once, and some that grow a little and as far as they may.
    growths.append(check([4177, 4844, 2429], window=5000, slack_eighths=0, min_chunk=64, target=4))
    assert min(growths) == 0
    assert len(set(growths)) > 3, growths
    print("all equal")
