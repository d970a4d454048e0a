"""Which texts of a step run as one padded batch. Knows lengths only."""

from collections.abc import Sequence

# What a batch costs beside its tokens, in tokens.
_TOKENS_OF_A_BATCH = 32
_MAX_PADDING_SHARE = 0.02


def batches_of(lens: Sequence[int]) -> list[list[int]]:
    """Indices of texts by batch, each in one. lens: in tokens, all positive.

    Neighbours in length share a batch for as long as what they are padded with costs less than a
    batch of its own, or next to nothing beside the texts themselves.
    """
    batches: list[list[int]] = []
    num_tokens = 0
    for index in sorted(range(len(lens)), key=lambda index: lens[index]):
        length = lens[index]
        size = len(batches[-1]) + 1 if batches else 1
        num_padded = length * size - (num_tokens + length)
        allowed = max(_TOKENS_OF_A_BATCH, int(_MAX_PADDING_SHARE * num_tokens))
        if not batches or num_padded > allowed:
            batches.append([])
            num_tokens = 0
        batches[-1].append(index)
        num_tokens += length
    return batches
