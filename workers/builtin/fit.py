"""Fitting a small Llama to a stream of tokens: shapes, batches, the loop, and held-out loss.

Knows tensors and the transformers Llama. Knows nothing of where the tokens come from, of files, or
of what is reported.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

from workers.builtin.tokenizer import (
    END_OF_TEXT_ID,
    MAX_CONTEXT_TOKENS,
    MESSAGE_END_ID,
    PAD_ID,
    VOCAB_SIZE,
)

EVAL_WINDOW_TOKENS = 1024
_LONG_WINDOW_ONE_IN = 4
_DOCUMENT_START_SHARE = 0.25
_WARMUP_FRACTION = 0.04
_FINAL_LR_FRACTION = 0.02
GRADIENT_CLIP = 1.0
CHOICE_TOLERANCE = 1.02

# Without cuDNN's, whose backward pass is not promised to repeat bit for bit.
_REPEATABLE_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(inputs (B, T) int64, logits (B, T, V), labels (B, T) int64) -> scalar, in nats per token."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What tells the target from the draft; everything else of the architecture is shared."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model is fitted.

    `budget_s` is a wall-clock ceiling: a run that lags behind it at half time is annealed by the
    clock instead of by its steps, so that it still ends annealed.
    """

    steps: int
    batch_tokens: int
    learning_rate: float
    weight_decay: float
    dropout: float
    eval_every_steps: int
    budget_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Losses in nats per token; `held_out` is measured on the weights after `step` updates."""

    step: int
    elapsed_s: float
    train: float
    held_out: float


@dataclass(frozen=True, slots=True)
class FitResult:
    """The model holds the weights of `chosen`: the last point of the curve whose held-out loss is
    within CHOICE_TOLERANCE of the lowest. Between equals the annealed weights write better text."""

    curve: list[CurvePoint]
    chosen: CurvePoint
    wall_s: float


def build_model(shape: ModelShape, seed: int) -> LlamaForCausalLM:
    """A freshly initialised Llama in float32 with tied embeddings; residual outputs start small."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[MESSAGE_END_ID, END_OF_TEXT_ID],
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * shape.num_layers))
    return model


class WindowSampler:
    """Endless training windows over a set of documents, reshuffled and re-cut in every epoch.

    `documents` are int arrays that end with the end-of-text token. A quarter of the windows is
    moved to the start of a document, as requests are; one batch in four has windows of the full
    context, the others of half of it.
    """

    def __init__(
        self, documents: Sequence[npt.NDArray[np.int64]], seed: int, device: torch.device
    ) -> None:
        self._documents = documents
        self._rng = np.random.default_rng(seed)
        self._device = device

    def batches(self, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of inputs and labels, each (B, T) int64, labels one token ahead."""
        index = 0
        while True:
            order = self._rng.permutation(len(self._documents))
            stream = np.concatenate([self._documents[i] for i in order])
            starts = np.cumsum([0, *(len(self._documents[i]) for i in order[:-1])])
            tokens = torch.from_numpy(stream).to(self._device)
            half = MAX_CONTEXT_TOKENS // 2
            for offsets in self._offsets(starts, len(stream), batch_tokens // half):
                is_long = index % _LONG_WINDOW_ONE_IN == 0
                length = MAX_CONTEXT_TOKENS if is_long else half
                chosen = offsets[:: length // half]
                where = torch.from_numpy(chosen).to(self._device)[:, None]
                window = tokens[where + torch.arange(length + 1, device=self._device)]
                yield window[:, :-1], window[:, 1:]
                index += 1

    def _offsets(
        self, starts: npt.NDArray[np.int64], num_tokens: int, batch_size: int
    ) -> Iterator[npt.NDArray[np.int64]]:
        half = MAX_CONTEXT_TOKENS // 2
        last = num_tokens - MAX_CONTEXT_TOKENS - 1
        offsets = np.arange(self._rng.integers(half), last, half, dtype=np.int64)
        previous = starts[np.searchsorted(starts, offsets, side="right") - 1]
        is_moved = self._rng.random(len(offsets)) < _DOCUMENT_START_SHARE
        is_moved &= offsets - previous < half
        offsets = self._rng.permutation(np.where(is_moved, previous, offsets))
        for first in range(0, len(offsets) - batch_size + 1, batch_size):
            yield offsets[first : first + batch_size]


def next_token_loss(inputs: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Plain cross entropy, in nats per token."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def distillation_loss(teacher: nn.Module, hard_share: float) -> Loss:
    """Cross entropy mixed with the divergence from a frozen teacher (Hinton et al., 2015), at
    temperature 1: a draft is worth what it agrees with its target."""
    teacher.eval()

    def loss(inputs: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = functional.log_softmax(_logits(teacher, inputs).float(), dim=-1).flatten(0, 1)
        draft = functional.log_softmax(logits.float(), dim=-1).flatten(0, 1)
        soft = functional.kl_div(draft, target, reduction="batchmean", log_target=True)
        return hard_share * functional.nll_loss(draft, labels.flatten()) + (1 - hard_share) * soft

    return loss


def fit(
    model: nn.Module,
    sampler: WindowSampler,
    held_out: Tensor,
    recipe: Recipe,
    loss_of: Loss,
    report: Callable[[CurvePoint], None],
) -> FitResult:
    """Trains `model` in place and leaves it with the weights that FitResult calls chosen.

    `held_out` is (N, EVAL_WINDOW_TOKENS + 1) int64 on the model's device.
    """
    torch.manual_seed(recipe.seed)
    started = time.monotonic()
    handles = _add_dropout(model, recipe.dropout)
    optimizer = optimizer_of(model, recipe.learning_rate, recipe.weight_decay)
    curve: list[CurvePoint] = []
    weights_at: dict[int, dict[str, Tensor]] = {}
    batches = sampler.batches(recipe.batch_tokens)
    step, progress = 0, 0.0
    while progress < 1.0:
        with sdpa_kernel(_REPEATABLE_ATTENTION):
            train_loss = _update(model, optimizer, next(batches), recipe, progress, loss_of)
        step += 1
        elapsed_s = time.monotonic() - started
        progress = progress_of(step / recipe.steps, elapsed_s / recipe.budget_s)
        if step % recipe.eval_every_steps == 0 or progress >= 1.0:
            point = CurvePoint(step, elapsed_s, train_loss.item(), held_out_loss(model, held_out))
            curve.append(point)
            weights_at[step] = {k: v.detach().clone() for k, v in model.state_dict().items()}
            report(point)
    for handle in handles:
        handle.remove()
    chosen = choose(curve)
    model.load_state_dict(weights_at[chosen.step])
    return FitResult(curve, chosen, time.monotonic() - started)


def choose(curve: Sequence[CurvePoint]) -> CurvePoint:
    """The last point within CHOICE_TOLERANCE of the lowest held-out loss."""
    ceiling = min(point.held_out for point in curve) * CHOICE_TOLERANCE
    return [point for point in curve if point.held_out <= ceiling][-1]


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Tensor) -> float:
    """Mean cross entropy over every token of `windows` (N, T + 1), in nats per token."""
    model.eval()
    total = 0.0
    for window in torch.split(windows, 8):
        with autocast(windows.device):
            logits = _logits(model, window[:, :-1])
        total += next_token_loss(window, logits, window[:, 1:]).item() * len(window)
    return total / len(windows)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a draft follows its target on real text, per position.

    `greedy` is the share of equal argmax tokens. `sampled` is the mean of sum(min(p, q)), the
    acceptance probability of speculative sampling (Leviathan et al., 2023, corollary 3.6).
    """

    greedy: float
    sampled: float


@torch.no_grad()
def agreement(target: nn.Module, draft: nn.Module, windows: Tensor) -> Agreement:
    """Agreement over `windows` (N, T + 1) int64, teacher forced."""
    target.eval()
    draft.eval()
    greedy, sampled = 0.0, 0.0
    for window in torch.split(windows, 8):
        with autocast(windows.device):
            p = _logits(target, window[:, :-1]).float().softmax(-1)
            q = _logits(draft, window[:, :-1]).float().softmax(-1)
        greedy += (p.argmax(-1) == q.argmax(-1)).float().mean().item() * len(window)
        sampled += torch.minimum(p, q).sum(-1).mean().item() * len(window)
    return Agreement(greedy / len(windows), sampled / len(windows))


def _update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    recipe: Recipe,
    progress: float,
    loss_of: Loss,
) -> Tensor:
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate * lr_fraction(progress)
    inputs, labels = batch
    with autocast(inputs.device):
        logits = _logits(model, inputs)
        loss = loss_of(inputs, logits, labels)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def progress_of(steps_done: float, time_used: float) -> float:
    """Follows the steps alone, so that runs repeat exactly, unless past half time they lag."""
    return max(steps_done, time_used) if time_used > 0.5 else steps_done


def lr_fraction(progress: float) -> float:
    """Linear warm-up, then a cosine down to a small remainder, over progress in [0, 1]."""
    if progress < _WARMUP_FRACTION:
        return max(progress, 1e-3) / _WARMUP_FRACTION
    phase = (progress - _WARMUP_FRACTION) / (1 - _WARMUP_FRACTION)
    return _FINAL_LR_FRACTION + (1 - _FINAL_LR_FRACTION) * 0.5 * (1 + math.cos(math.pi * phase))


def optimizer_of(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Of what is trained of the model; norms' gains do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    gains = [p for p in trained if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )


def _add_dropout(model: nn.Module, probability: float) -> list[torch.utils.hooks.RemovableHandle]:
    """Dropout on the embeddings and on what each block adds to the residual stream.

    transformers' Llama has none of its own, and its layout is what the weights must keep.
    """

    def drop(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return functional.dropout(output, probability, training=module.training)

    return [
        module.register_forward_hook(drop)
        for name, module in model.named_modules()
        if name.endswith(("embed_tokens", "o_proj", "down_proj"))
    ]


def _logits(model: nn.Module, inputs: Tensor) -> Tensor:
    """(B, T) int64 -> (B, T, VOCAB_SIZE)."""
    logits: Tensor = model(inputs, use_cache=False).logits
    return logits


def autocast(device: torch.device) -> torch.autocast:
    """bf16 products on a GPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
