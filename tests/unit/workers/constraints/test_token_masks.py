"""Masks on logits, and how they reach a step."""

import threading

import numpy as np
import torch

from workers.constraints.masks import StepMasks
from workers.kv_cache.radix_node import EMPTY
from workers.runner.mask_inbox import MaskInbox
from workers.sampling.token_masks import find_masks
from workers.sampling.token_masks import rule_out as rule_out_found


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def rule_out(logits, slots, positions, masks):
    return rule_out_found(logits, find_masks(slots, positions, masks.slots, masks), masks)


def test_rows_lose_what_their_masks_rule_out_and_others_nothing():
    logits = torch.arange(3 * 40, dtype=torch.float32).view(3, 40)
    # Slot 7 may have tokens 0 and 33, slot 9 every one, the slot of the middle row has no mask.
    masks = StepMasks(0, int32(9, 4, 7), int32(2, 2, 6), int32(-1, -1, 0, 0, 1, 2))
    found = rule_out(logits, int32(7, 5, 9), int32(6, 6, 2), masks)
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == [0, 33]
    assert torch.equal(found[0][[0, 33]], logits[0][[0, 33]])
    assert torch.equal(found[1:], logits[1:])
    assert torch.isfinite(logits).all()


def test_the_highest_bit_of_a_word_counts():
    masks = StepMasks(0, int32(0), int32(3), int32(-(2**31), 0))
    found = rule_out(torch.zeros(1, 40), int32(0), int32(3), masks)
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == [31]


def test_rows_of_one_slot_have_masks_by_their_position():
    masks = StepMasks(0, int32(5, 5), int32(8, 9), int32(1, 0, 2, 0))
    found = rule_out(torch.zeros(2, 40), int32(5, 5), int32(9, 8), masks)
    assert [torch.isfinite(row).nonzero().item() for row in found] == [1, 0]


def test_rows_that_wait_for_masks_and_have_none_are_void():
    # Of slot 5, tokens at 8 and 9 are forced and the mask of the one at 10 is late; so is slot 7's
    # in whole. Slot 3 has no grammar, slot 9 is in another half of the step.
    masks = StepMasks(0, int32(5, 5, 2, 9), int32(8, 9, 4, 1), np.zeros(8, dtype=np.int32))
    slots, positions = int32(3, 5, 5, 5, 7, 2), int32(9, 8, 9, 10, 6, 4)
    found = find_masks(slots, positions, int32(2, 5, 7, 9), masks)
    assert found.rows[np.argsort(found.rows)].tolist() == [1, 2, 5]
    assert found.void.tolist() == [3, 4]


def test_masks_of_nobody_change_nothing():
    logits = torch.zeros(2, 40)
    masks = StepMasks(0, EMPTY, EMPTY, EMPTY)
    assert rule_out(logits, int32(0, 1), int32(4, 4), masks) is logits


def test_a_step_waits_for_its_own_masks_and_may_ask_again():
    inbox = MaskInbox()
    inbox.put(StepMasks(3, int32(0), int32(5), int32(1)))
    found: list[StepMasks] = []
    waiting = threading.Thread(target=lambda: found.append(inbox.wait(4)))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    inbox.put(StepMasks(4, int32(0), int32(6), int32(2)))
    waiting.join(60)
    assert found[0].bits.tolist() == inbox.wait(4).bits.tolist() == [2]


def test_a_closed_inbox_lets_steps_end():
    inbox = MaskInbox()
    found: list[StepMasks] = []
    waiting = threading.Thread(target=lambda: found.append(inbox.wait(4)))
    waiting.start()
    inbox.close()
    waiting.join(60)
    assert len(found[0].slots) == 0
