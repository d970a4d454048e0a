"""Which images' embeddings the ranks hold: those that rows of the next steps show, and no others.

A step that first reaches an image takes it along, the ranks make its embeddings before the rows
run, and the first step behind the image's last placeholder drops them. Prompts are cut where an
image does not fit beside those that the step has already; one that was retracted, or is aborted
halfway, holds nothing, and brings its images again when it comes back. Decision 0078.
"""

from collections.abc import Iterable

import msgspec

from workers.engine.media import MAX_IMAGE_BYTES, MediaSpan
from workers.errors import IntegrityError
from workers.scheduler.media_plan import (
    NO_MEDIA,
    AddedMedia,
    MediaGrant,
    MediaPlan,
    PlacedMedia,
)
from workers.scheduler.plan import StepPlan
from workers.scheduler.request import Request


class MediaMemory:
    """max_tokens: placeholders of all contents that ranks may hold embeddings for at a time.

    Contents are known by their digest. A request whose largest image fits alone always goes on: of
    all requests one at most is half prefilled, so that nobody holds what another one waits for.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # What ranks hold once the last plan has run, and its tokens.
        self._stored: dict[bytes, int] = {}
        # What rows of the plan that is being made show.
        self._shown: dict[bytes, MediaSpan] = {}
        # Contents in the middle of which the last chunk of a slot ended.
        self._halfway: dict[int, MediaSpan] = {}
        self._slots: set[int] = set()
        self._grants: list[MediaGrant] = []
        self._ended: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Placeholders whose embeddings the ranks hold once the last plan has run."""
        return sum(self._stored.values())

    def open(self, request: Request) -> None:
        """The request has just got its slot."""
        if request.media:
            self._slots.add(request.slot)
            self._grants.append(MediaGrant(request.slot, tuple(map(_placed, request.media))))

    def reach(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of num_tokens tokens from start on a chunk may have, given that embeddings count
        as tokens of its step. An image at the chunk's start is taken whatever it counts.

        0 where the first image has no room beside what the step shows already.
        """
        room, new = num_tokens, dict[bytes, MediaSpan]()
        for span in request.media:
            num_before = max(0, span.start - start)
            if span.stop <= start:
                continue
            if num_before >= room:
                break
            digest = span.item.digest
            if digest in new or self._is_needed(digest):
                continue
            cost = 0 if digest in self._stored else span.num_tokens
            if not self._has_room(span, new) or (num_before and num_before + cost > room):
                return num_before
            new[digest] = span
            room -= cost
        return min(num_tokens, max(1, room))

    def take(self, request: Request, start: int, stop: int) -> int:
        """The plan has these tokens of the request; returns how many embeddings it makes for
        them."""
        num_made = 0
        self._halfway.pop(request.slot, None)
        for span in request.media:
            if span.stop <= start or span.start >= stop:
                continue
            digest = span.item.digest
            if digest not in self._stored and digest not in self._shown:
                num_made += span.num_tokens
            self._shown[digest] = span
            if span.stop > stop:
                self._halfway[request.slot] = span
        return num_made

    def close(self, request: Request) -> None:
        """The request gives its slot, which it still has, back."""
        slot = request.slot
        self._halfway.pop(slot, None)
        if slot not in self._slots:
            return
        self._slots.remove(slot)
        self._ended.append(slot)
        # A plan that has not been made yet must not grant to whoever gets the slot next.
        self._grants = [grant for grant in self._grants if grant.slot != slot]

    def add_to(self, plan: StepPlan) -> StepPlan:
        """The plan, with what ranks must take in and forget."""
        if not (self._stored or self._shown or self._grants or self._ended):
            return plan
        needed = {span.item.digest: span for span in self._halfway.values()} | self._shown
        media = MediaPlan(
            dropped=tuple(self._stored.keys() - needed.keys()),
            ended=tuple(self._ended),
            grants=tuple(self._grants),
            added=tuple(
                AddedMedia(span.num_tokens, span.item)
                for digest, span in needed.items()
                if digest not in self._stored
            ),
        )
        self._stored = {digest: span.num_tokens for digest, span in needed.items()}
        self._shown, self._grants, self._ended = {}, [], []
        return plan if media == NO_MEDIA else msgspec.structs.replace(plan, media=media)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless what is held is held for running requests."""
        slots = {request.slot for request in running if request.media}
        if slots != self._slots or not self._halfway.keys() <= slots:
            raise IntegrityError(
                f"slots {sorted(slots)} show images, {sorted(self._slots)} are known and "
                f"{sorted(self._halfway)} hold some"
            )
        if self.num_tokens > self._max_tokens:
            raise IntegrityError(f"{self.num_tokens} embeddings of {self._max_tokens} are held")

    def _is_needed(self, digest: bytes) -> bool:
        """Whether the plan that is being made counts it already."""
        return digest in self._shown or any(
            span.item.digest == digest for span in self._halfway.values()
        )

    def _has_room(self, span: MediaSpan, new: dict[bytes, MediaSpan]) -> bool:
        """new: what the chunk takes before span."""
        others = {one.item.digest: one for one in self._halfway.values()} | self._shown | new
        num_tokens = span.num_tokens + sum(one.num_tokens for one in others.values())
        added = (one for digest, one in others.items() if digest not in self._stored)
        num_bytes = sum(len(one.item.values) for one in added)
        is_sendable = not num_bytes or num_bytes + len(span.item.values) <= MAX_IMAGE_BYTES
        return num_tokens <= self._max_tokens and is_sendable


def _placed(span: MediaSpan) -> PlacedMedia:
    item = span.item
    return PlacedMedia(span.start, span.num_tokens, item.digest, item.grid_height, item.grid_width)
