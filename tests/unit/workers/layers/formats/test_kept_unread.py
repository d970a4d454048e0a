"""What formats say from shapes alone that they keep is what they keep of real tensors."""

import pytest
import torch

from workers.layers.formats.awq import Awq
from workers.layers.formats.format import Cut
from workers.layers.formats.gptq import Gptq
from workers.layers.formats.mxfp4 import Mxfp4
from workers.layers.formats.packed import Packed
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.scaled import FP8, RoundedToFp8, Scaled
from workers.layers.formats.scaling import PerBlock, PerChannel, PerTensor
from workers.layers.formats.stored import StoredWeight
from workers.layers.kept.weight import join_kept

CPU = torch.device("cpu")
WHOLE = 256, 512
CUTS = {
    "whole": Cut(WHOLE, slice(0, 256), slice(0, 512)),
    "rows": Cut(WHOLE, slice(128, 256), slice(0, 512)),
    "columns": Cut(WHOLE, slice(0, 256), slice(256, 512)),
}
KEPT = [
    RoundedToFp8(),
    Scaled(FP8, PerTensor()),
    Scaled(FP8, PerChannel()),
    Scaled(FP8, PerBlock(128, 128)),
    Awq(64),
    Gptq(4, 64, has_act_order=False, zero_offset=1, is_symmetric=True),
    Gptq(4, 64, has_act_order=True, zero_offset=1, is_symmetric=False),
    Packed(4, 128, is_symmetric=True, has_act_order=False),
    Packed(4, 64, is_symmetric=False, has_act_order=False),
]
NOT_KEPT = [
    PLAIN,
    Mxfp4(),
    Scaled(torch.int8, PerChannel()),
    Scaled(FP8, PerBlock(64, 128)),
    Awq(32),
    Gptq(8, 64, has_act_order=False, zero_offset=1, is_symmetric=True),
]


def _source(weight: StoredWeight, part: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tensor = weight.filled(part, generator)
    return tensor[torch.randperm(len(tensor), generator=generator)] if part == "g_idx" else tensor


def _read(one, cut):
    weight = StoredWeight("module", one, cut, CPU)
    for part in weight.shapes():
        weight.load(part, _source(weight, part))
    return weight.kept()


def _shapes(kept):
    if kept is None:
        return None
    return type(kept), {name: (x.shape, x.dtype) for name, x in kept.named_buffers()}


@pytest.mark.parametrize("one", [*KEPT, *NOT_KEPT], ids=lambda one: one.title)
def test_shapes_alone_say_what_is_kept(one) -> None:
    for cut in CUTS.values():
        want, told = _read(one, cut), one.kept_unread(cut)
        assert _shapes(told) == _shapes(want)
        assert told is None or all(x.is_meta for x in told.buffers())
    assert (one.kept_unread(CUTS["whole"]) is None) is (one in NOT_KEPT)
    want, told = (
        join_kept([read(CUTS["whole"]), read(CUTS["rows"])], torch.bfloat16)
        for read in (lambda cut: _read(one, cut), one.kept_unread)
    )
    assert _shapes(told) == _shapes(want)
