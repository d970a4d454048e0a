"""One choice of one prompt: engine outputs in, ChoiceDeltas out.

Knows text, stop strings, log probabilities and counting. Knows no streams, clocks or protocols.
"""

from dataclasses import dataclass

from service.errors import ApiError, ApiErrorCode, from_output_error
from service.handler.events import ChoiceDelta, TokenLogprob, resolve_logprobs
from service.handler.repetition import RepetitionDetection, RepetitionDetector
from service.handler.requests import TextOptions
from service.tokenizer.detokenizer import make_detokenizer
from service.tokenizer.pieces import TokenPieces
from service.tokenizer.stop_strings import StopScan, StopScanner, StopStrings
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, StepOutput


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What all choices of a request share.

    stop_strings: None when there are none; they count only after min_tokens output tokens, and so
    does repetition. visible_stop_ids: stop ids that are worth naming as a stop_reason.
    """

    pieces: TokenPieces
    text: TextOptions
    stop_strings: StopStrings | None
    min_tokens: int
    visible_stop_ids: frozenset[int]
    is_scoring_only: bool = False
    repetition: RepetitionDetection | None = None


class ChoiceAssembler:
    """Feed it every StepOutput of a choice in order, until is_finished.

    num_chars: of the choice's text that come before what is generated.
    """

    def __init__(self, index: int, options: ChoiceOptions, num_chars: int = 0) -> None:
        self.index = index
        self.num_output_tokens = 0
        self.finish_reason: str | None = None
        self._options = options
        self._detokenizer = make_detokenizer(
            options.pieces, skip_special_tokens=options.text.skip_special_tokens
        )
        self._scanner: StopScanner | None = None
        if options.stop_strings is not None:
            self._scanner = StopScanner(
                options.stop_strings, include_stop=options.text.include_stop
            )
        self._num_chars = num_chars
        self._repetition = (
            None if options.repetition is None else RepetitionDetector(options.repetition)
        )

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, output: StepOutput) -> ChoiceDelta | None:
        """The delta of one output, or None while there is nothing to tell.

        output.prompt_logprobs is not looked at. Raises ApiError if the output says that the request
        failed.
        """
        if self._is_plain(output):
            return self._push_plain(output.token_ids)
        raise_if_failed(output)
        delta = ChoiceDelta(self.index)
        if output.logprobs is not None:
            delta.logprobs = []
        if not self._options.is_scoring_only:
            self._add_tokens(delta, output)
        if self.finish_reason is None and output.finish_reason is not None:
            self._finish(delta, output)
        delta.num_output_tokens = self.num_output_tokens
        is_empty = not (delta.text or delta.token_ids or delta.finish_reason)
        return None if is_empty else delta

    def _is_plain(self, output: StepOutput) -> bool:
        """Whether the output is tokens and nothing else, of a choice that only tokens end.

        So are nearly all outputs of nearly all streams: what they cost is what a token costs.
        """
        return (
            self._scanner is None
            and self._repetition is None
            and output.finish_reason is None
            and output.logprobs is None
            and not self._options.is_scoring_only
        )

    def _push_plain(self, token_ids: list[int]) -> ChoiceDelta | None:
        """What push() does, for a plain output."""
        if not token_ids:
            return None
        text = "".join(map(self._detokenizer.push, token_ids))
        self.num_output_tokens += len(token_ids)
        self._num_chars += len(text)
        num_output_tokens = self.num_output_tokens
        return ChoiceDelta(self.index, text, token_ids, num_output_tokens=num_output_tokens)

    def _add_tokens(self, delta: ChoiceDelta, output: StepOutput) -> None:
        token_ids = output.token_ids
        logprobs = output.logprobs
        shown: list[str] = []
        for position, token_id in enumerate(token_ids):
            self.num_output_tokens += 1
            if delta.logprobs is not None and logprobs is not None:
                self._add_logprob(delta.logprobs, token_id, logprobs[position])
            is_last = position == len(token_ids) - 1
            piece = self._text_of(token_id, output, is_last)
            shown.append(piece.text)
            delta.token_ids.append(token_id)
            if piece.stop is not None:
                self.finish_reason = delta.finish_reason = FinishReason.STOP.value
                delta.stop_reason = piece.stop
                break
            if self._repeats(token_id) and not (is_last and output.finish_reason is not None):
                self._end_repetition(delta, shown)
                break
        delta.text = "".join(shown)

    def _repeats(self, token_id: int) -> bool:
        return (
            self._repetition is not None
            and self._repetition.push(token_id)
            and self.num_output_tokens >= self._options.min_tokens
        )

    def _end_repetition(self, delta: ChoiceDelta, shown: list[str]) -> None:
        rest = self._detokenizer.flush()
        shown.append(rest if self._scanner is None else rest + self._scanner.flush())
        self.finish_reason = delta.finish_reason = "repetition"
        delta.stop_reason = "repetition_detected"

    def _text_of(self, token_id: int, output: StepOutput, is_last: bool) -> StopScan:
        is_end = is_last and output.finish_reason is not None
        is_stop_token = is_end and output.stop_token_id == token_id
        is_hidden = is_stop_token and not self._options.text.include_stop
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if is_end:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        return self._scan(text)

    def _scan(self, text: str) -> StopScan:
        if self._scanner is None or self.num_output_tokens <= self._options.min_tokens:
            return StopScan(text)
        return self._scanner.push(text)

    def _add_logprob(
        self, entries: list[TokenLogprob], token_id: int, entry: TokenLogprobs
    ) -> None:
        entries.append(resolve_logprobs(self._options.pieces, token_id, entry, self._num_chars))

    def _finish(self, delta: ChoiceDelta, output: StepOutput) -> None:
        # Only an output without tokens leaves something here for the detokenizer to flush.
        tail = self._scan(self._detokenizer.flush())
        delta.text += tail.text
        reason = output.finish_reason
        if tail.stop is not None:
            reason, delta.stop_reason = FinishReason.STOP, tail.stop
        elif self._scanner is not None:
            delta.text += self._scanner.flush()
        if self._options.is_scoring_only:
            reason = FinishReason.LENGTH
        elif output.stop_token_id in self._options.visible_stop_ids:
            delta.stop_reason = output.stop_token_id
        self.finish_reason = delta.finish_reason = reason.value if reason else None


def is_failure(output: StepOutput) -> bool:
    """Whether it says that the request failed."""
    return output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)


def raise_if_failed(output: StepOutput) -> None:
    """Raise ApiError if it does."""
    if output.finish_reason is FinishReason.ERROR:
        if output.error is None:
            raise ApiError(ApiErrorCode.INTERNAL, "the engine failed on this request")
        raise from_output_error(output.error)
    if output.finish_reason is FinishReason.ABORT:
        raise ApiError(ApiErrorCode.REPLICA_LOST, "the engine ended this request early")
