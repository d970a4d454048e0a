"""Requests with images: their ceilings, and the room that they take in an ingress. Knows no format.

An ingress keeps what engines were sent until a request ends, since it may go on at another one.
"""

from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, ImagePrompt, Prompt
from service.limits import Limits
from service.security.quota import Lease
from service.tokenizer.jobs import EncodeChat
from workers.engine.protocol import ModelInfo

PARAM = "messages.content"
_BYTES_PER_PIXEL = 3


def check_images(prompt: Prompt, limits: Limits, info: ModelInfo) -> None:
    """Raise ApiError where the model takes no images, or they are too many or too large."""
    if not (isinstance(prompt, EncodeChat) and prompt.images):
        return
    if info.media is None or not info.media.takes_pixels:
        message = f"{PARAM}: the engine of this model takes no images"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, PARAM)
    if len(prompt.images) > limits.max_images:
        raise _over_limit(f"at most {limits.max_images} images are allowed")
    if max(image.num_bytes for image in prompt.images) > limits.max_image_bytes:
        raise _over_limit(f"an image may have at most {limits.max_image_bytes} bytes")


def check_image_request(request: GenerationRequest, limits: Limits, info: ModelInfo) -> None:
    """Raise ApiError also where the request asks for what a prompt with images cannot have."""
    for prompt in request.prompts:
        check_images(prompt, limits, info)
    if not _has_images(request):
        return
    # Half an image has no digest; and every beam would send the images again with every step.
    for param, is_asked in (
        ("truncate_prompt_tokens", request.truncate_prompt_tokens is not None),
        ("use_beam_search", request.beams is not None),
    ):
        if is_asked:
            message = f"{param} cannot have this value beside images"
            raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, param)


class ImageRoom:
    """Bytes of images of all requests of one ingress and model that are under way. Use from one
    event loop."""

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.max_held_image_bytes
        self._max_file_bytes = limits.max_image_bytes
        self._shown_bytes = _BYTES_PER_PIXEL * limits.max_total_shown_pixels
        self.num_bytes = 0

    def lend(self, request: GenerationRequest, lease: Lease) -> Lease:
        """The lease, which gives the room back when it ends. As much is taken as the images may
        need at most, until settle() knows. Raises ApiError where there is none."""
        if not _has_images(request):
            return lease
        files = [image for prompt in _chats(request) for image in prompt.images]
        own_bytes = sum(file.num_bytes for file in files)
        fetched_bytes = self._max_file_bytes * sum(bool(file.url) for file in files)
        num_bytes = own_bytes + fetched_bytes + request.n * self._shown_bytes
        # Who comes when nobody else has any is never too large.
        if self.num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            message = "requests under way have as many images as this server holds"
            raise ApiError(ApiErrorCode.OVERLOADED, message)
        return _RoomLease(lease, self, num_bytes, own_bytes)

    def settle(self, request: GenerationRequest, lease: Lease) -> None:
        """request: with its images as engines get them. Each of its choices brings them."""
        if isinstance(lease, _RoomLease):
            items = [i for p in request.prompts if isinstance(p, ImagePrompt) for i in p.images]
            lease.settle(request.n * sum(len(item.values) for item in items))


class _RoomLease:
    """A Lease and so many bytes of the room. body_bytes: of its files as they came, which live as
    long as the request's body does."""

    def __init__(self, lease: Lease, room: ImageRoom, num_bytes: int, body_bytes: int) -> None:
        self._body_bytes = body_bytes
        self._lease = lease
        self._room = room
        self._num_bytes = num_bytes
        room.num_bytes += num_bytes

    def settle(self, shown_bytes: int) -> None:
        self._hold(self._body_bytes + shown_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._room.num_bytes += num_bytes - self._num_bytes
        self._num_bytes = num_bytes

    def take_sequences(self, num_sequences: int) -> None:
        self._lease.take_sequences(num_sequences)

    def take_up_to(self, num_sequences: int) -> int:
        return self._lease.take_up_to(num_sequences)

    def charge_prompt(self, num_tokens: int) -> None:
        self._lease.charge_prompt(num_tokens)

    def cancel(self) -> None:
        self._hold(0)
        self._lease.cancel()

    def end(self, num_output_tokens: int) -> None:
        self._hold(0)
        self._lease.end(num_output_tokens)


def _chats(request: GenerationRequest) -> list[EncodeChat]:
    return [prompt for prompt in request.prompts if isinstance(prompt, EncodeChat)]


def _has_images(request: GenerationRequest) -> bool:
    return any(prompt.images for prompt in _chats(request))


def _over_limit(message: str) -> ApiError:
    return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, PARAM)
