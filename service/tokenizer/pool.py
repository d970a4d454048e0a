"""The tokenizer processes of one model, and the one that makes grammars.

Encoding holds the interpreter lock and a template can loop, so neither may run in the ingress
process; a worker that is stuck or dies is replaced, and its job ends with a typed error
(docs/decisions/0010-tokenizer-processes.md has the figures). Knows no request.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageCeilings
from service.tokenizer.constraints import Constraint
from service.tokenizer.fair_queue import Flow
from service.tokenizer.grammar_compiler import GrammarCompiler, GrammarCompilerConfig
from service.tokenizer.jobs import (
    AudioFeatures,
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodedTexts,
    EncodeText,
    EncodeTexts,
    ModelJob,
    ReadAudio,
    Refused,
    Reply,
    Seen,
    TooLong,
    job_bytes,
    pack_token_ids,
    unpack_token_ids,
)
from service.tokenizer.lanes import Work
from service.tokenizer.process_pool import JobTimedOutError, ProcessPool, ProcessPoolConfig
from service.tokenizer.worker_process import WorkerLostError, WorkerOptions

# A job that had this share of its time limit as CPU took so long by itself; one that had less
# waited for a busy machine.
_OWN_FAULT_CPU_SHARE = 0.1
# Takes 50 ms to encode or so.
MAX_SHORT_BYTES = 64 << 10


class Tokenizer(Protocol):
    """What the handler needs of a tokenizer. Every method may raise ApiError.

    flow: for whom, so that callers and requests take turns.
    """

    async def encode_text(self, job: EncodeText, flow: Flow) -> Sequence[int]: ...

    async def encode_texts(self, job: EncodeTexts, flow: Flow) -> EncodedTexts: ...

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> Sequence[int]: ...

    async def encode_images(self, job: EncodeChat, flow: Flow) -> Seen:
        """A conversation with images."""
        ...

    async def decode(
        self, token_ids: Sequence[int], flow: Flow, *, skip_special_tokens: bool
    ) -> str: ...

    async def make_grammar(self, constraint: Constraint, param: str, flow: Flow) -> str:
        """In llguidance's serialised form. param: what the client calls the constraint."""
        ...

    async def read_audio(self, job: ReadAudio, flow: Flow) -> AudioFeatures: ...


@dataclass(frozen=True, slots=True)
class TokenizerPoolConfig:
    """num_workers: for jobs of any size; one more is kept for those of up to max_short_bytes.

    timeout_s: wall clock of one job in its worker. queue_timeout_s: waiting for a worker.
    start_timeout_s: loading of a tokenizer. max_pending_jobs: of all callers; one caller may have
    as many waiting as there is room left.
    """

    folder: Path
    num_workers: int = 1
    timeout_s: float = 10.0
    queue_timeout_s: float = 30.0
    start_timeout_s: float = 60.0
    max_pending_jobs: int = 1024
    max_rendered_bytes: int = 8 << 20
    max_short_bytes: int = MAX_SHORT_BYTES
    images: ImageCeilings = ImageCeilings()
    grammars: GrammarCompilerConfig = GrammarCompilerConfig()


class TokenizerPool:
    """Implements Tokenizer over processes. start() before use, aclose() after."""

    def __init__(self, config: TokenizerPoolConfig) -> None:
        self._timeout_s = config.timeout_s
        self._processes = ProcessPool(
            ProcessPoolConfig(
                name="tokenizer",
                worker=_worker_options(config),
                num_workers=config.num_workers,
                num_short_workers=1,
                max_short_bytes=config.max_short_bytes,
                timeout_s=config.timeout_s,
                queue_timeout_s=config.queue_timeout_s,
                max_pending_jobs=config.max_pending_jobs,
            )
        )
        self._grammars = GrammarCompiler(config.grammars)

    async def start(self) -> None:
        """Start every worker. Raises ModelLoadError if the folder's tokenizer cannot be served."""
        starts = (self._processes.start(), self._grammars.start())
        for result in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(result, BaseException):
                await self.aclose()
                raise result

    async def aclose(self) -> None:
        """End every worker. Jobs under way end with a typed error."""
        await asyncio.gather(self._processes.aclose(), self._grammars.aclose())

    async def encode_text(self, job: EncodeText, flow: Flow) -> Sequence[int]:
        return await self._encode(job, flow)

    async def encode_texts(self, job: EncodeTexts, flow: Flow) -> EncodedTexts:
        reply = await self._run(job, flow)
        if isinstance(reply, TooLong):
            raise _too_long(job, reply)
        if not isinstance(reply, EncodedTexts):
            raise _worker_failed()
        return reply

    async def encode_chat(self, job: EncodeChat, flow: Flow) -> Sequence[int]:
        return await self._encode(job, flow)

    async def encode_images(self, job: EncodeChat, flow: Flow) -> Seen:
        reply = await self._run(job, flow)
        if isinstance(reply, TooLong):
            raise _too_long(job, reply)
        if not isinstance(reply, Seen):
            raise _worker_failed()
        return reply

    async def decode(
        self, token_ids: Sequence[int], flow: Flow, *, skip_special_tokens: bool
    ) -> str:
        job = DecodeTokens(pack_token_ids(token_ids), skip_special_tokens)
        reply = await self._run(job, flow)
        if not isinstance(reply, Decoded):
            raise _worker_failed()
        return reply.text

    async def make_grammar(self, constraint: Constraint, param: str, flow: Flow) -> str:
        return await self._grammars.compile(constraint, param, flow)

    async def read_audio(self, job: ReadAudio, flow: Flow) -> AudioFeatures:
        reply = await self._run(job, flow)
        if not isinstance(reply, AudioFeatures):
            raise _worker_failed()
        return reply

    async def _encode(self, job: EncodeText | EncodeChat, flow: Flow) -> Sequence[int]:
        reply = await self._run(job, flow)
        if isinstance(reply, TooLong):
            raise _too_long(job, reply)
        if not isinstance(reply, Encoded):
            raise _worker_failed()
        return unpack_token_ids(reply.token_ids)

    async def _run(self, job: ModelJob, flow: Flow) -> Reply:
        try:
            reply = await self._processes.run(job, Work(flow, job_bytes(job)))
        except JobTimedOutError as error:
            raise self._took_too_long(job, error.cpu_s) from None
        except WorkerLostError:
            raise _worker_failed() from None
        if isinstance(reply, Refused):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, reply.message, reply.param)
        return reply

    def _took_too_long(self, job: ModelJob, cpu_s: float) -> ApiError:
        timeout_s = self._timeout_s
        if cpu_s < _OWN_FAULT_CPU_SHARE * timeout_s:
            message = f"this machine is too busy: a prompt was not tokenised in {timeout_s:g} s"
            return ApiError(ApiErrorCode.TOKENIZER_FAILED, message)
        return ApiError(
            ApiErrorCode.LIMIT_EXCEEDED,
            f"tokenising this prompt takes longer than {timeout_s:g} s",
            _PARAMS[type(job)],
        )


def _worker_options(config: TokenizerPoolConfig) -> WorkerOptions:
    arguments = (
        str(config.folder.resolve()),
        str(config.max_rendered_bytes),
        msgspec.json.encode(config.images).decode(),
    )
    return WorkerOptions("service.tokenizer.worker", arguments, config.start_timeout_s)


_PARAMS: dict[type[ModelJob], str] = {
    EncodeText: "prompt",
    EncodeTexts: "prompt",
    EncodeChat: "messages",
    DecodeTokens: "tokens",
    ReadAudio: "file",
}


def _too_long(job: EncodeText | EncodeTexts | EncodeChat, reply: TooLong) -> ApiError:
    return ApiError(
        ApiErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"the context has room for {job.max_tokens} prompt tokens; the prompt has at least "
        f"{reply.min_tokens}",
        _PARAMS[type(job)],
    )


def _worker_failed() -> ApiError:
    return ApiError(ApiErrorCode.TOKENIZER_FAILED, "the tokenizer process failed on this prompt")
