"""Images in a step: embeddings that the rank keeps of them, and where its rows show them.

Knows plans, no request and no particular model. What is kept, and for how long, the plans say: see
scheduler/media_memory.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from workers.models.media_encoder import MediaEncoder
from workers.models.mrope import RotaryPositions
from workers.models.token_inputs import PlacedEmbeddings
from workers.runner.step_inputs import StepInputs
from workers.sampling.transfer import upload
from workers.scheduler.media_plan import MediaPlan, PlacedMedia
from workers.scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True)
class _Slot:
    """Of a slot whose prompt has images."""

    spans: tuple[PlacedMedia, ...]
    positions: RotaryPositions


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a step whose slot has images: its tokens start .. stop - 1, which are the step's
    from first on."""

    slot: _Slot
    first: int
    start: int
    stop: int

    @property
    def tokens(self) -> slice:
        """Among the step's."""
        return slice(self.first, self.first + self.stop - self.start)


class MediaStage:
    """One rank's."""

    def __init__(self, encoder: MediaEncoder, device: torch.device) -> None:
        self._encoder = encoder
        self._device = device
        self._slots: dict[int, _Slot] = {}
        # By digest, (placeholders, hidden_size).
        self._embeddings: dict[bytes, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Of the embeddings that it keeps."""
        return sum(one.nbytes for one in self._embeddings.values())

    @property
    def num_slots(self) -> int:
        """Whose request has images."""
        return len(self._slots)

    def apply(self, plan: MediaPlan) -> None:
        """Carry the plan out, before its step and after all earlier ones."""
        for digest in plan.dropped:
            self._embeddings.pop(digest, None)
        for slot in plan.ended:
            self._slots.pop(slot, None)
        for grant in plan.grants:
            self._slots[grant.slot] = _Slot(grant.spans, self._encoder.positions(grant.spans))
        for one in plan.added:
            if one.item.digest not in self._embeddings:
                self._embeddings[one.item.digest] = self._encoder.encode(one.item)

    def place(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """The inputs, with positions of three rows and embeddings where a row of the plan, whose
        media have been applied, has images. Others stay as they are."""
        rows = self._rows_of(plan) if self._slots else []
        if not rows:
            return inputs
        positions = inputs.positions.repeat(3, 1)
        for row in rows:
            (own,) = upload([row.slot.positions.of_tokens(row.start, row.stop)], self._device)
            positions[:, row.tokens] = own
        return replace(inputs, positions=positions, embeddings=self._embeddings_of(rows))

    def shows_in(self, plan: StepPlan) -> bool:
        """Whether some row's slot has images, so that its tokens are not where they are counted.
        The plan's media may have been applied."""
        granted = {grant.slot for grant in plan.media.grants}
        with_images = (self._slots.keys() - set(plan.media.ended)) | granted
        return bool(with_images) and not with_images.isdisjoint(plan.slots.tolist())

    def _rows_of(self, plan: StepPlan) -> list[_Row]:
        firsts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        stops = plan.prefix_lens + plan.num_new_tokens
        arrays = (plan.slots, firsts, plan.prefix_lens, stops)
        rows = zip(*(array.tolist() for array in arrays), strict=True)
        return [_Row(self._slots[slot], *where) for slot, *where in rows if slot in self._slots]

    def _embeddings_of(self, rows: Sequence[_Row]) -> PlacedEmbeddings | None:
        places: list[torch.Tensor] = []
        states: list[torch.Tensor] = []
        for row in rows:
            for span in row.slot.spans:
                start, stop = max(span.start, row.start), min(span.stop, row.stop)
                if start < stop:
                    shift = row.first - row.start
                    places.append(torch.arange(start + shift, stop + shift, device=self._device))
                    of_span = slice(start - span.start, stop - span.start)
                    states.append(self._embeddings_at(span)[of_span])
        return PlacedEmbeddings(torch.cat(places), torch.cat(states)) if places else None

    def _embeddings_at(self, span: PlacedMedia) -> torch.Tensor:
        """Raises torch.OutOfMemoryError where there was no memory to make them: the row then ends
        for lack of memory, as the step that should have made them did."""
        if span.digest not in self._embeddings:
            raise torch.OutOfMemoryError("the embeddings of an image found no memory")
        return self._embeddings[span.digest]


def media_stages(encoder: MediaEncoder | None, device: torch.device) -> tuple[MediaStage, ...]:
    """encoder: the model's. One stage where there is one."""
    return () if encoder is None else (MediaStage(encoder, device),)
