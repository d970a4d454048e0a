"""A tokenizer without processes and a handler on a fake backend, for tests of what lies above."""

import shutil
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from service.audio.features import feature_reader_of
from service.chat.format import make_chat_format
from service.chat.settings import ChatSettings
from service.errors import ApiError, ApiErrorCode
from service.handler.chats import Chats
from service.handler.directory import ModelDirectory, ServedModel
from service.handler.handler import Handler
from service.images.files import ImageCeilings
from service.images.reader import image_reader_of
from service.limits import Limits
from service.remote.fetcher import Fetcher, NoFetcher
from service.tokenizer.constraints import Constraint
from service.tokenizer.encoder import EncodeRefusedError, TextEncoder, load_tokenizer
from service.tokenizer.fair_queue import Flow
from service.tokenizer.fetching import FetchingTokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from service.tokenizer.jobs import (
    AudioFeatures,
    EncodeChat,
    EncodedTexts,
    EncodeText,
    EncodeTexts,
    ReadAudio,
    Refused,
    Seen,
    pack_token_ids,
)
from service.tokenizer.pieces import TokenPieces
from service.tokenizer.worker import Tools, run_job
from tests.fakes.backend import MODEL_INFO, FakeBackend, Script, make_outputs
from tests.fakes.tokenizer_folders import CHATML_TEMPLATE, make_byte_level_folder
from workers.engine.protocol import ModelInfo

ANSWER = "hello world, naïve 🙂 café\n"


@dataclass(frozen=True)
class TextTools:
    """What is made of a folder's tokenizer, and has no state."""

    encoder: TextEncoder
    pieces: TokenPieces
    chats: Chats

    @classmethod
    def of(cls, folder: Path) -> "TextTools":
        files = read_tokenizer_files(folder)
        tokenizer, pieces = load_tokenizer(files)
        chats = make_chat_format(files.chat_template, tokenizer, pieces, ChatSettings())
        return cls(TextEncoder(folder, max_rendered_bytes=1 << 20), pieces, Chats(chats))


class InlineTokenizer:
    """Implements service.tokenizer.pool.Tokenizer in the calling process."""

    def __init__(self, folder: Path, tools: TextTools | None = None) -> None:
        self.folder = folder
        tools = tools or TextTools.of(folder)
        self.encoder, self.pieces, self.chats = tools.encoder, tools.pieces, tools.chats

    async def encode_texts(self, job: EncodeTexts, flow: Flow) -> EncodedTexts:
        try:
            token_ids, second_start = self.encoder.encode_texts(job)
        except EncodeRefusedError as error:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, error.message, error.param) from error
        return EncodedTexts(pack_token_ids(token_ids), second_start)

    async def encode_text(self, job: EncodeText, flow: Flow) -> list[int]:
        try:
            return self.encoder.encode_text(job)
        except EncodeRefusedError as error:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, error.message, error.param) from error

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> list[int]:
        try:
            return self.encoder.encode_chat(job)
        except EncodeRefusedError as error:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, error.message, error.param) from error

    async def encode_images(self, job: EncodeChat, flow: Flow) -> Seen:
        images = image_reader_of(self.folder, ImageCeilings())
        reply = run_job(Tools(self.encoder, None, images), job)
        if isinstance(reply, Refused):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, reply.message, reply.param)
        assert isinstance(reply, Seen)
        return reply

    async def decode(self, token_ids: list[int], flow: Flow, *, skip_special_tokens: bool) -> str:
        return self.encoder.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def make_grammar(self, constraint: Constraint, param: str, flow: Flow) -> str:
        try:
            return GrammarMaker().make(constraint)
        except GrammarRefusedError as error:
            message = f"{param}: {error}"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, param) from error

    async def read_audio(self, job: ReadAudio, flow: Flow) -> AudioFeatures:
        tools = Tools(self.encoder, feature_reader_of(self.folder))
        reply = run_job(tools, job)
        if isinstance(reply, Refused):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, reply.message, reply.param)
        assert isinstance(reply, AudioFeatures)
        return reply

    def ids(self, text: str) -> list[int]:
        return self.encoder.encode_text(EncodeText(text))


@dataclass
class RecordingMetrics:
    """Implements RequestMetrics by remembering every call as (name, arguments)."""

    calls: list[tuple[str, Any]] = field(default_factory=list)

    def on_accepted(self, num_prompt_tokens, num_choices):
        self.calls.append(("accepted", (num_prompt_tokens, num_choices)))

    def on_first_token(self, seconds, queue_s, prefill_s):
        self.calls.append(("first_token", (seconds, queue_s, prefill_s)))

    def on_vector(self, queue_s, prefill_s):
        self.calls.append(("vector", (queue_s, prefill_s)))

    def on_tokens(self, count, inter_token_s):
        self.calls.append(("tokens", (count, inter_token_s)))

    def on_finished(self, reason, **numbers):
        self.calls.append(("finished", (reason, numbers)))

    def on_rejected(self, code):
        self.calls.append(("rejected", code))

    def named(self, name):
        return [arguments for call, arguments in self.calls if call == name]


@dataclass
class Bench:
    """A handler with all its collaborators at hand."""

    handler: Handler
    backend: FakeBackend
    tokenizer: InlineTokenizer
    metrics: RecordingMetrics

    @property
    def served(self) -> ServedModel:
        return ServedModel(self.backend.info.name, self.handler, lambda: True, "org/tiny")

    @property
    def models(self) -> ModelDirectory:
        """The handler's model alone; refusals count among its metrics."""
        return ModelDirectory([self.served], self.handler.limits, self.metrics)


@cache
def byte_level_tools(chat_template: str) -> tuple[TemporaryDirectory[str], TextTools]:
    """The folder that they were made of, and they: most of the time of a test that has a bench."""
    folder = TemporaryDirectory(prefix="tokenizer-")
    return folder, TextTools.of(make_byte_level_folder(Path(folder.name), chat_template))


def make_bench(
    folder: Path,
    script: Script | None = None,
    limits: Limits | None = None,
    info: ModelInfo = MODEL_INFO,
    chat_template: str = CHATML_TEMPLATE,
) -> Bench:
    """By default the backend answers every request with ANSWER and the end-of-sequence token."""
    made_of, tools = byte_level_tools(chat_template)
    shutil.copytree(made_of.name, folder, dirs_exist_ok=True)
    return bench_over(InlineTokenizer(folder, tools), script, limits, info)


def bench_over(
    tokenizer: InlineTokenizer,
    script: Script | None,
    limits: Limits | None,
    info: ModelInfo,
    fetcher: Fetcher | None = None,
) -> Bench:
    answer = [*tokenizer.ids(ANSWER), 2]
    backend = FakeBackend(script or (lambda request: make_outputs(request, answer)), info)
    metrics = RecordingMetrics()
    pieces, chats = tokenizer.pieces, tokenizer.chats
    limits = limits or Limits()
    fetching = FetchingTokenizer(tokenizer, fetcher or NoFetcher(), limits)
    handler = Handler(backend, fetching, pieces, limits, metrics, chats)
    return Bench(handler, backend, tokenizer, metrics)
