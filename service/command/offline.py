"""One generation by an engine in this process, from text to text. Knows no flags and no Ray.

Text goes through the same encoder, detokeniser and stop-string scanner as it does in the service.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from service.handler.choice import ChoiceAssembler, ChoiceOptions
from service.handler.events import ChoiceDelta
from service.handler.requests import TextOptions
from service.handler.sources import request_of_text
from service.limits import Limits
from service.tokenizer.encoder import TextEncoder, load_tokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.jobs import EncodeChat, EncodeText
from service.tokenizer.pieces import TokenPieces
from service.tokenizer.stop_strings import StopStrings
from workers.engine.loop import SteppableEngine
from workers.engine.protocol import StepOutput
from workers.sampling.params import SamplingParams

_REQUEST_ID = "generate"


@dataclass(frozen=True, slots=True)
class OfflineText:
    """A model folder's way from text to tokens and back."""

    encoder: TextEncoder
    pieces: TokenPieces

    @classmethod
    def load(cls, folder: Path) -> "OfflineText":
        """Raises ModelLoadError if the folder's tokenizer cannot be used."""
        _, pieces = load_tokenizer(read_tokenizer_files(folder))
        return cls(TextEncoder(folder, Limits().max_rendered_bytes), pieces)

    def encode(self, prompt: str, *, is_chat: bool, system: str | None = None) -> list[int]:
        """Token ids of a prompt or of a conversation of one turn. Raises EncodeRefusedError."""
        if not is_chat:
            return self.encoder.encode_text(EncodeText(prompt))
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        return self.encoder.encode_chat(EncodeChat(messages))


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """stop_reason: the stop string or stop token id that ended it, if one did. Times in seconds."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    elapsed_s: float


class OfflineGenerator:
    """Drives an engine that nobody else drives."""

    def __init__(self, engine: SteppableEngine, pieces: TokenPieces) -> None:
        self._engine = engine
        self._pieces = pieces

    def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        text_options: TextOptions,
        on_text: Callable[[str], None],
    ) -> OfflineResult:
        """Run one request to its end; on_text gets each part of the text as it becomes certain.

        Raises RequestRejectedError if the engine refuses it and ApiError if it fails on the way.
        """
        started_s = time.perf_counter()
        first_s: float | None = None
        texts: list[str] = []
        token_ids: list[int] = []
        last = ChoiceDelta(0)
        for last in self._deltas(prompt_token_ids, sampling, text_options):
            first_s = first_s or time.perf_counter()
            texts.append(last.text)
            token_ids += last.token_ids
            on_text(last.text)
        ended_s = time.perf_counter()
        return OfflineResult(
            text="".join(texts),
            token_ids=token_ids,
            finish_reason=last.finish_reason or "",
            stop_reason=last.stop_reason,
            num_prompt_tokens=len(prompt_token_ids),
            num_output_tokens=len(token_ids),
            time_to_first_token_s=(first_s or ended_s) - started_s,
            elapsed_s=ended_s - started_s,
        )

    def _deltas(
        self, prompt_token_ids: list[int], sampling: SamplingParams, text_options: TextOptions
    ) -> Iterator[ChoiceDelta]:
        stops = StopStrings(text_options.stop) if text_options.stop else None
        choice = ChoiceAssembler(
            0,
            ChoiceOptions(
                self._pieces,
                text_options,
                stops,
                sampling.min_tokens,
                frozenset(sampling.stop_token_ids),
            ),
        )
        info = self._engine.info
        self._engine.submit(request_of_text(_REQUEST_ID, prompt_token_ids, sampling, info))
        while self._engine.has_work:
            for output in self._engine.step():
                delta = None if choice.is_finished else self._push(choice, output)
                if delta is not None:
                    yield delta

    def _push(self, choice: ChoiceAssembler, output: StepOutput) -> ChoiceDelta | None:
        delta = choice.push(output)
        if choice.is_finished and output.finish_reason is None:
            self._engine.abort(_REQUEST_ID)
        return delta
