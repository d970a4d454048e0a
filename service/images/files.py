"""An image file on its way to a tokenizer process, and what such a process may spend on it."""

import msgspec

_BYTES_PER_PIXEL = 32
_PROGRAM_BYTES = 256 << 20


class ImageFile(msgspec.Struct, frozen=True):
    """A file as it came: its bytes, or their base64. url: where neither is here yet. max_pixels: of
    the prepared image, where the client wants fewer than there may be; 0: it does not say."""

    data: bytes = b""
    base64: str = ""
    url: str = ""
    max_pixels: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the file, or a little more."""
        return len(self.data) or len(self.base64) * 3 // 4


class ImageCeilings(msgspec.Struct, frozen=True):
    """max_pixels: of a file, as its header says; max_total_pixels: of all files of a prompt.
    max_shown_pixels: of a prepared image, larger ones are made smaller; max_total_shown_pixels: of
    all of a prompt."""

    max_pixels: int = 1 << 24
    max_total_pixels: int = 1 << 26
    max_shown_pixels: int = 1 << 22
    max_total_shown_pixels: int = 1 << 22

    @property
    def memory_bytes(self) -> int:
        """What the process may grow by for one prompt."""
        return _BYTES_PER_PIXEL * self.max_pixels + _PROGRAM_BYTES
