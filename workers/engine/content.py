"""Where a prompt has placeholders for what is no text, and what stands behind them.

A msgspec struct with closed types, as in protocol.py. Knows no image and no sound.
"""

from collections.abc import Sequence

import msgspec

from workers.errors import ErrorCode, RequestRejectedError

DIGEST_BYTES = 16


class ContentSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens start .. start + num_tokens - 1 of a prompt stand for some content, as an image.

    digest: DIGEST_BYTES, equal for equal content that was prepared alike and for no other. Prefixes
    are shared only between prompts whose placeholders stand for equal content.
    """

    start: int
    num_tokens: int
    digest: bytes

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens


def check_spans(spans: Sequence[ContentSpan], num_prompt_tokens: int) -> None:
    """Raises RequestRejectedError unless they are in order, apart and within the prompt."""
    end = 0
    for span in spans:
        if len(span.digest) != DIGEST_BYTES:
            raise _refused(f"a digest has {DIGEST_BYTES} bytes, not {len(span.digest)}")
        if span.num_tokens < 1 or span.start < end or span.stop > num_prompt_tokens:
            raise _refused(
                f"{span.num_tokens} placeholders from token {span.start} on are not in order, or "
                f"not within the prompt's {num_prompt_tokens} tokens"
            )
        end = span.stop


def _refused(message: str) -> RequestRejectedError:
    return RequestRejectedError(ErrorCode.INVALID_REQUEST, message, "content_spans")
