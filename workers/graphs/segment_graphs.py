"""Steps of few new tokens that are no decode steps: graphs between the layers' attention.

A prompt of some hundred tokens, alone or beside decoding rows, keeps the device busy for less time
than the host needs to launch every kernel of it. All that lies between two layers' attention takes
each token by itself: it is captured for a ladder of token counts, tokens beyond the step's being
padding that writes to the dummy page. Attention, which depends on the rows' lengths, is launched
between the replays. The idea is known as piecewise CUDA graphs (vLLM, SGLang).

All graphs share one memory pool and one set of static tensors. Knows no plan and no scheduler; how
a graph is captured is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch

from attention.forward_batch import ForwardBatch
from workers.models.segmented import AttentionInputs, SegmentedCausalLM, TokenPlaces

MAX_SEGMENT_TOKENS = 1024
"""Beyond that the device is busy for longer than the launches take, but for the smallest models."""

Replay = Callable[[], None]
Out = TypeVar("Out")


class SegmentCapturer(Protocol):
    """Records launches once, to repeat them without the host. Neither method waits."""

    def try_out(self, run: Callable[[], Out]) -> Out:
        """Run what is to be recorded, so that kernels are compiled and workspaces allocated."""

    def record(self, run: Callable[[], Out]) -> tuple[Replay, Out]:
        """Record run without running it: its replay, and what each replay fills."""


def token_count_ladder(max_tokens: int) -> list[int]:
    """Sizes to capture, ascending. GEMMs take rows by tiles of up to 128: finer steps further up
    would save nothing."""
    ladder = [16, 32, *range(64, 129, 32), *range(192, 513, 64), *range(640, max_tokens, 128)]
    return [*(size for size in ladder if size < max_tokens), max_tokens]


class _StaticTensors:
    """NewTensor for what a layer's attention takes: the same memory in every segment.

    A layer's attention has read it before the next segment writes it. max_tokens: the most rows.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buffers: list[torch.Tensor] = []
        self._num_taken = 0

    def rewind(self) -> None:
        """A segment begins."""
        self._num_taken = 0

    def __call__(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self._num_taken == len(self._buffers):
            shape = (self._max_tokens, *size[1:])
            self._buffers.append(torch.empty(shape, dtype=dtype, device=device))
        buffer = self._buffers[self._num_taken]
        self._num_taken += 1
        if buffer.shape[1:] != size[1:] or buffer.dtype != dtype:
            raise ValueError(f"segments differ: {tuple(buffer.shape)} {buffer.dtype}, now {size}")
        return buffer[: size[0]]


@dataclass(frozen=True, slots=True)
class _StepGraphs:
    """Of one number of tokens. inputs: the first layer's and all others' attention inputs."""

    replays: tuple[Replay, ...]
    inputs: AttentionInputs
    residual: torch.Tensor


class SegmentGraphs:
    """The segment graphs of one rank. No method waits for the device.

    sizes: numbers of tokens, ascending. dtype: the model's. num_accounts: of KV memory.
    """

    def __init__(
        self,
        model: SegmentedCausalLM,
        capturer: SegmentCapturer,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        num_accounts: int,
    ) -> None:
        self._model = model
        self._capturer = capturer
        self._sizes = np.array(sizes)
        self._missing = list(sizes)
        self._graphs: dict[int, _StepGraphs] = {}
        self._new = _StaticTensors(sizes[-1])
        geometry = model.geometry
        width = geometry.tp_q_head_num * geometry.v_head_dim
        self._attended = torch.zeros((sizes[-1], width), dtype=dtype, device=device)
        # Input ids, positions and, by account, cache indices of each token.
        self._tokens = torch.zeros((2 + num_accounts, sizes[-1]), dtype=torch.int64, device=device)

    @property
    def captured_sizes(self) -> list[int]:
        return sorted(self._graphs)

    def covers(self, num_tokens: int) -> bool:
        """Whether captured graphs can run a step of so many new tokens."""
        return 0 < num_tokens <= self._sizes[-1] and self._size_for(num_tokens) in self._graphs

    def run(self, batch: ForwardBatch, rows: torch.Tensor) -> torch.Tensor:
        """The hidden of the model's forward_rows, for a batch that is covered."""
        size = self._size_for(batch.num_tokens)
        graphs, last = self._graphs[size], self._model.geometry.num_layers - 1
        self._fill_in(batch, size)
        attended = self._attended[: batch.num_tokens]
        batch.attention_out = attended
        inputs = tuple(tensor[: batch.num_tokens] for tensor in graphs.inputs)
        for layer, replay in enumerate(graphs.replays):
            replay()
            out = self._model.attend(layer, inputs, batch)
            if layer < last and out.data_ptr() != attended.data_ptr():
                attended.copy_(out)
        return self._model.finish_rows(out, graphs.residual, rows)

    def capture_next(self) -> bool:
        """Capture the largest missing size; whether there was one."""
        if not self._missing:
            return False
        self.capture(self._missing[-1])
        return True

    def capture_after(self, num_tokens: int) -> None:
        """Capture the size that a step of so many new tokens has just missed, if it did.

        Depends on plans only, so that all ranks of a group capture alike.
        """
        if 0 < num_tokens <= self._sizes[-1] and self._size_for(num_tokens) in self._missing:
            self.capture(self._size_for(num_tokens))

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture one of the sizes."""
        self._missing.remove(size)
        # The trials' tokens are all padding: they write to the dummy page, which holds numbers.
        self._tokens[:, :size].zero_()
        self._attended[:size].zero_()
        _, residual = self._capturer.try_out(lambda: self._begin(size))
        num_advances = self._model.geometry.num_layers - 1
        # Between them they launch what the others do: where layers differ, the first ones do.
        unlike = self._model.unlike_layers() | {0, num_advances - 1}
        for layer in sorted(unlike & set(range(num_advances))):
            self._capturer.try_out(partial(self._advance, layer, size, residual))
        first, (inputs, residual) = self._capturer.record(lambda: self._begin(size))
        others = [self._record_advance(layer, size, residual) for layer in range(num_advances)]
        self._graphs[size] = _StepGraphs((first, *others), inputs, residual)

    def _record_advance(self, layer: int, size: int, residual: torch.Tensor) -> Replay:
        replay, _ = self._capturer.record(lambda: self._advance(layer, size, residual))
        return replay

    def _begin(self, size: int) -> tuple[AttentionInputs, torch.Tensor]:
        self._new.rewind()
        residual, hidden = self._model.begin(self._tokens[0, :size])
        return self._inputs(0, size, hidden), residual

    def _advance(self, layer: int, size: int, residual: torch.Tensor) -> AttentionInputs:
        self._new.rewind()
        hidden = self._model.finish(layer, self._attended[:size], residual)
        return self._inputs(layer + 1, size, hidden)

    def _inputs(self, layer: int, size: int, hidden: torch.Tensor) -> AttentionInputs:
        positions, *cache_locs = self._tokens[1:, :size]
        places = TokenPlaces(positions, tuple(cache_locs))
        return self._model.attention_inputs(layer, hidden, places, self._new)

    def _size_for(self, num_tokens: int) -> int:
        return int(self._sizes[np.searchsorted(self._sizes, num_tokens)])

    def _fill_in(self, batch: ForwardBatch, size: int) -> None:
        """The step's tokens, and padding up to size.

        Padding attends to nothing: what an earlier step left in its rows could be no numbers, and
        kernels may load the dummy page, where padding writes, beside a row's own.
        """
        num_tokens = batch.num_tokens
        fields = (batch.input_ids, batch.positions, *batch.locs_by_account)
        for row, values in zip(self._tokens, fields, strict=True):
            row[:num_tokens].copy_(values)
        self._tokens[:, num_tokens:size].zero_()
        self._attended[num_tokens:size].zero_()
