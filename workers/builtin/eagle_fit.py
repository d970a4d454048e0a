"""Fitting an EAGLE-3 head to what its target says, and how many of its drafts would be right.

Knows texts in batches and who reads them. Knows no file.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.builtin import fit
from workers.builtin.eagle_data import IGNORED, ReadBatch, TextBatches, TextReader, TokenBatch
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
class HeadRecipe:
    """How a head is fitted.

    num_drafts: how deep it is unrolled, and judged. num_updates, budget_s: whichever is spent first
    ends the run, and the learning rate falls by the share of it that is. eval_every_s: between two
    points of the curve. products: dtype of matrix products, of the target's reading as well.
    """

    num_updates: int
    num_drafts: int
    batch_tokens: int
    learning_rate: float
    weight_decay: float
    eval_every_s: float
    budget_s: float
    products: str
    seed: int


@dataclass(frozen=True, slots=True)
class HeadPoint:
    """train: mean loss since the point before, in nats. acceptance: on held-out texts, behind
    `update` updates over train_tokens, filling included."""

    update: int
    train_tokens: int
    elapsed_s: float
    train: float
    acceptance: Acceptance


def unrolled_loss(head: TrainedHead, batch: ReadBatch, num_drafts: int) -> Tensor:
    """Cross entropy to the target's distribution over the draft vocabulary, where its likeliest
    token is of it; summed over the steps by their weights."""
    loss = torch.zeros((), device=batch.token_ids.device)
    wanted = batch.logits.float().softmax(-1)
    counted = batch.likeliest != IGNORED
    for step, logits in enumerate(head(batch.token_ids, batch.taps, num_drafts)):
        known = logits[:, : logits.shape[1] - step].float()
        # Minus the sum of wanted * log_softmax, as wanted's sum is 1.
        entropy = known.logsumexp(-1) - (wanted[:, 1 + step :] * known).sum(-1)
        counts = counted[:, 1 + step :]
        loss = loss + STEP_WEIGHT**step * (entropy * counts).sum() / counts.sum().clamp(min=1)
    return loss


@torch.no_grad()
def acceptance(head: TrainedHead, batches: Iterable[ReadBatch], num_drafts: int) -> Acceptance:
    """Of greedy chains over what the target said, run after run as in use: the first behind its
    first token, each other one behind the token that the one before it ended with. A draft is right
    if it is the text's, and what follows a right one is read as in a chain. As in use of texts that
    end by their length, the last token is never a draft's."""
    head.eval()
    runs: list[int] = []
    for batch in batches:
        steps = head(batch.token_ids, batch.taps, num_drafts)
        anchors = steps[0].shape[1]
        # Of an anchor's first draft: whether the token before it and the one behind it are said.
        is_said = functional.pad(batch.is_said, (0, 1))
        has_run = is_said[:, :anchors] & is_said[:, 2 : 2 + anchors]
        are_right = torch.ones_like(has_run)
        num_right = torch.zeros_like(batch.token_ids[:, 1:])
        for step, logits in enumerate(steps):
            own = functional.pad(batch.likeliest[:, 1 + step :], (0, step), value=IGNORED)
            is_last = ~functional.pad(is_said[:, 2 + step :], (0, step))[:, :anchors]
            are_right &= (logits.argmax(-1) == own[:, :anchors]) & ~is_last
            num_right += are_right
        for row, may_begin in zip(num_right.tolist(), has_run.tolist(), strict=True):
            runs += _runs_of(row, may_begin)
    by_position = [sum(run > place for run in runs) / len(runs) for place in range(num_drafts)]
    return Acceptance([round(one, 4) for one in by_position], round(1 + sum(by_position), 3))


def _runs_of(num_right: Sequence[int], has_run: Sequence[bool]) -> Iterator[int]:
    """Right drafts of each run of a text, by how many there are at each anchor. has_run: where one
    may stand."""
    anchor = has_run.index(True) if True in has_run else len(has_run)
    while anchor < len(has_run) and has_run[anchor]:
        yield num_right[anchor]
        anchor += num_right[anchor] + 1


class HeadFit:
    """A head beside the texts that it learns from and those that judge it."""

    def __init__(
        self,
        head: TrainedHead,
        reader: TextReader,
        train: TextBatches,
        held_out: TextBatches,
        recipe: HeadRecipe,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: in seconds."""
        self._clock = clock
        self._head = head
        self._reader = reader
        self._train = train
        self._held_out = held_out
        self._recipe = recipe
        self._optimizer = fit.optimizer_of(head, recipe.learning_rate, recipe.weight_decay)

    def run(self, report: Callable[[HeadPoint], None]) -> None:
        """Trains the head in place. report: sees each point with the head as it is then; the last
        one is annealed."""
        started, recipe = self._clock(), self._recipe
        batches = self._train.shuffled(recipe.seed)
        losses, reported_s = list[Tensor](), 0.0
        update, num_tokens, progress = 0, 0, 0.0
        while progress < 1.0:
            batch = next(batches)
            losses.append(self._update(batch, progress))
            update, num_tokens = update + 1, num_tokens + batch.token_ids.numel()
            elapsed_s = self._clock() - started
            progress = max(update / recipe.num_updates, elapsed_s / recipe.budget_s)
            if elapsed_s - reported_s >= recipe.eval_every_s or progress >= 1.0:
                mean = torch.stack(losses).mean().item()
                report(HeadPoint(update, num_tokens, elapsed_s, mean, self.acceptance()))
                losses, reported_s = [], elapsed_s

    def acceptance(self) -> Acceptance:
        """Of the held-out texts."""
        with self._products():
            read = map(self._reader.read, self._held_out.in_order())
            return acceptance(self._head, read, self._recipe.num_drafts)

    def _update(self, batch: TokenBatch, progress: float) -> Tensor:
        self._head.train()
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.learning_rate * fit.lr_fraction(progress)
        with self._products():
            loss = unrolled_loss(self._head, self._reader.read(batch), self._recipe.num_drafts)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._head.parameters(), fit.GRADIENT_CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _products(self) -> torch.autocast:
        device = next(self._head.parameters()).device
        dtype: torch.dtype = getattr(torch, self._recipe.products)
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
