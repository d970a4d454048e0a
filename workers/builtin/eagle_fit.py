"""Fitting an EAGLE-3 head to what its target says, and how many of its drafts would be right.

Knows batches as the target read them. Knows no text and no file.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.builtin import fit
from workers.builtin.eagle_data import IGNORED, ReadBatch
from workers.builtin.eagle_model import TrainedHead

STEP_WEIGHT = 0.8
"""Of a step's loss, by that of the step before."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """by_position: how often the first j + 1 drafts of a run are all right, on greedy texts.
    length: tokens that a step with so many drafts brings."""

    by_position: list[float]
    length: float


@dataclass(frozen=True, slots=True)
class HeadPoint:
    """train: the loss, in nats. acceptance: on held-out texts, behind `step` updates."""

    step: int
    elapsed_s: float
    train: float
    acceptance: Acceptance


def unrolled_loss(head: TrainedHead, batch: ReadBatch, num_steps: int) -> Tensor:
    """Cross entropy to the target's distribution over the draft vocabulary, where its likeliest
    token is of it; summed over the steps by their weights."""
    loss = torch.zeros((), device=batch.token_ids.device)
    for step, logits in enumerate(head(batch.token_ids, batch.taps.float(), num_steps)):
        stop = logits.shape[1] - step
        wanted = batch.logits[:, 1 + step :].float().softmax(-1)
        counts = batch.likeliest[:, 1 + step :] != IGNORED
        entropy = -(wanted * functional.log_softmax(logits[:, :stop].float(), -1)).sum(-1)
        loss = loss + STEP_WEIGHT**step * (entropy * counts).sum() / counts.sum().clamp(min=1)
    return loss


@torch.no_grad()
def acceptance(head: TrainedHead, batches: Sequence[ReadBatch], num_drafts: int) -> Acceptance:
    """Of greedy chains over what the target said, run after run as in use: each begins behind the
    token that the one before it ended with. A draft is right if it is the text's, and what follows
    a right one is read as in a chain."""
    head.eval()
    runs: list[int] = []
    for batch in batches:
        steps = head(batch.token_ids, batch.taps.float(), num_drafts)
        anchors = steps[0].shape[1]
        are_right = torch.ones_like(batch.is_said[:, 1:])
        num_right = torch.zeros_like(batch.token_ids[:, 1:])
        for step, logits in enumerate(steps):
            own = functional.pad(batch.likeliest[:, 1 + step :], (0, step), value=IGNORED)
            are_right &= logits.argmax(-1) == own[:, :anchors]
            num_right += are_right
        for row, is_said in zip(num_right.tolist(), batch.is_said[:, 1:].tolist(), strict=True):
            runs += _runs_of(row, is_said)
    by_position = [sum(run > place for run in runs) / len(runs) for place in range(num_drafts)]
    return Acceptance([round(one, 4) for one in by_position], round(1 + sum(by_position), 3))


def _runs_of(num_right: Sequence[int], is_said: Sequence[bool]) -> Iterator[int]:
    """Right drafts of each run of a text, by how many there are at each anchor. is_said: whether
    the token that an anchor's first draft stands for is the target's own."""
    anchor = is_said.index(True) if True in is_said else len(is_said)
    while anchor < len(is_said) and is_said[anchor]:
        yield num_right[anchor]
        anchor += num_right[anchor] + 1


def fit_head(
    head: TrainedHead,
    batches: Sequence[ReadBatch],
    held_out: Sequence[ReadBatch],
    recipe: fit.Recipe,
    num_steps: int,
    report: Callable[[HeadPoint], None],
) -> list[HeadPoint]:
    """Trains the head in place, over the batches again and again, in recipe.steps updates or until
    recipe.budget_s is spent. num_steps: how deep it is unrolled, and judged."""
    started, order = time.monotonic(), random.Random(recipe.seed)
    optimizer = fit.optimizer_of(head, recipe)
    curve: list[HeadPoint] = []
    left: list[ReadBatch] = []
    step, progress = 0, 0.0
    while progress < 1.0:
        left = left or order.sample(list(batches), len(batches))
        head.train()
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * fit.lr_fraction(progress)
        with fit.autocast(left[-1].token_ids.device):
            loss = unrolled_loss(head, left.pop(), num_steps)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(head.parameters(), fit.GRADIENT_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        elapsed_s = time.monotonic() - started
        progress = fit.progress_of(step / recipe.steps, elapsed_s / recipe.budget_s)
        if step % recipe.eval_every_steps == 0 or progress >= 1.0:
            point = HeadPoint(step, elapsed_s, loss.item(), acceptance(head, held_out, num_steps))
            curve.append(point)
            report(point)
    return curve
