"""The in-process engine as a target: the same workload with no protocol between.

Readings are taken on the engine's thread, once a step. Knows no HTTP and no Ray.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import workers
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.transport import GenerationSettings, TargetError, TargetInfo
from service.bench.workload import BenchRequest
from workers.config import EngineConfig
from workers.engine.loop import EngineLoop, SteppableEngine
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ConfigError, ModelLoadError
from workers.sampling.params import SamplingParams


@dataclass(slots=True)
class _Live:
    trace: RequestTrace
    done: asyncio.Future[None]


def engine_factory(config: EngineConfig) -> Callable[[], SteppableEngine]:
    """A way to load the engine that says TargetError when it cannot be loaded.

    The engine's code, and torch with it, is imported only when it is called.
    """

    def load() -> SteppableEngine:
        from attention.capability import AttentionBackendError

        try:
            return workers.Engine.from_config(config)
        except (ConfigError, ModelLoadError, AttentionBackendError) as error:
            raise TargetError(f"the engine cannot start: {error}") from error

    return load


class EngineTransport:
    """Drives one engine with an EngineLoop of its own."""

    def __init__(
        self, load_engine: Callable[[], SteppableEngine], settings: GenerationSettings
    ) -> None:
        self._load_engine = load_engine
        self._settings = settings
        self._engine_loop: EngineLoop | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[str, _Live] = {}
        self._ids = itertools.count()

    async def connect(self) -> TargetInfo:
        self._event_loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(self._load_engine)
        self._engine_loop = EngineLoop(engine, self._on_outputs, self._on_failure)
        self._engine_loop.start()
        info = engine.info
        return TargetInfo(info.name, info.vocab_size, info.max_request_len)

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        engine_loop, event_loop = self._running()
        request_id = f"bench-{next(self._ids)}"
        trace.num_input_tokens = len(request.prompt_token_ids)
        live = _Live(trace, event_loop.create_future())
        self._live[request_id] = live
        engine_loop.submit([self._to_engine(request_id, request)])
        try:
            await live.done
        finally:
            del self._live[request_id]
            if live.done.cancelled():
                engine_loop.abort([request_id])

    async def aclose(self) -> None:
        if self._engine_loop is not None:
            await asyncio.to_thread(self._engine_loop.stop)

    def _running(self) -> tuple[EngineLoop, asyncio.AbstractEventLoop]:
        if self._engine_loop is None or self._event_loop is None:
            raise RuntimeError("connect() comes first")
        return self._engine_loop, self._event_loop

    def _to_engine(self, request_id: str, request: BenchRequest) -> GenerateRequest:
        sampling = SamplingParams(
            temperature=self._settings.temperature,
            max_tokens=request.max_tokens,
            ignore_eos=self._settings.ignore_eos,
        )
        return GenerateRequest(
            request_id,
            request.prompt_token_ids,
            sampling,
            cache_salt=self._settings.cache_salt,
        )

    def _on_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """On the engine's thread: note the time, and wake the event loop only for what ended."""
        now_s = time.perf_counter()
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                continue
            trace = live.trace
            trace.num_cached_tokens += output.num_cached_tokens
            if output.token_ids:
                trace.num_output_tokens += len(output.token_ids)
                trace.add_event(now_s, len(output.token_ids))
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended:
            self._call_soon(self._settle, ended)

    def _on_failure(self, failure: BaseException) -> None:
        self._call_soon(self._fail_all, failure)

    def _call_soon(self, call: Callable[..., None], argument: object) -> None:
        _, event_loop = self._running()
        event_loop.call_soon_threadsafe(call, argument)

    def _settle(self, ended: Sequence[StepOutput]) -> None:
        for output in ended:
            live = self._live.get(output.request_id)
            if live is None or live.done.done():
                continue
            if output.error is not None:
                failure = RequestFailedError(output.error.code.value, output.error.message)
                live.done.set_exception(failure)
            elif output.finish_reason is FinishReason.ABORT:
                live.done.set_exception(RequestFailedError("abort", "the engine aborted it"))
            else:
                live.done.set_result(None)

    def _fail_all(self, failure: BaseException) -> None:
        for live in self._live.values():
            if not live.done.done():
                live.done.set_exception(RequestFailedError("engine_failed", str(failure)))
