"""EncoderOnlyEngine: takes what waits, runs it, hands the vectors over. One step at a time.

A step begins when the one before has ended, so that whatever came meanwhile shares it: with nothing
kept between steps, what is gained by scheduling ahead is less than what a fuller batch gains.
"""

import time
from collections.abc import Callable, Sequence

from workers.config import EngineConfig
from workers.encoder_only.loading import load_runner
from workers.encoder_only.queue import TextQueue
from workers.encoder_only.runner import TextRunner
from workers.encoder_only.text import Text
from workers.engine.observer import OnStep, StepRecord
from workers.engine.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputError,
    StepOutput,
)
from workers.errors import ErrorCode, id_in_use
from workers.loading.weights import OnProgress
from workers.pooling.params import EmbeddingInfo, Pooling, PoolingParams
from workers.pooling.vectors import FloatArray, finish_scores, finish_vector, pack_vector
from workers.sampling.params import SamplingParams

_NO_VECTOR = OutputError(ErrorCode.INTERNAL, "the model produced no number for the text")
_OUT_OF_MEMORY = OutputError(
    ErrorCode.OUT_OF_MEMORY, "the engine ran out of memory for what this request asks"
)
_WARM_UP = "warm-up"


def _ignore_step(record: StepRecord) -> None:
    """Nobody watches."""


class EncoderOnlyEngine:
    """Not thread-safe: EngineLoop gives it a thread. After a step that raised it is of no more use
    than to be closed. clock: in seconds."""

    def __init__(
        self,
        info: ModelInfo,
        embedding: EmbeddingInfo,
        queue: TextQueue,
        runner: TextRunner,
        *,
        check_integrity_when_idle: bool = False,
        on_step: OnStep = _ignore_step,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._embedding = embedding
        self._queue = queue
        self._runner = runner
        self._check_integrity_when_idle = check_integrity_when_idle
        self._on_step = on_step
        self._clock = clock
        self._aborted: dict[str, StepOutput] = {}
        self._num_steps = 0
        self._num_tokens = 0
        self._num_finished = 0

    @classmethod
    def from_config(
        cls, config: EngineConfig, *, on_step: OnStep, on_progress: OnProgress
    ) -> "EncoderOnlyEngine":
        """Raises ConfigError and ModelLoadError."""
        loaded = load_runner(config, on_progress)
        queue = TextQueue(
            loaded.info,
            max_step_tokens=config.max_step_tokens,
            max_step_texts=config.max_running_requests,
            max_texts=config.max_waiting_requests,
            max_tokens=config.max_waiting_tokens,
        )
        return cls(
            loaded.info,
            loaded.embedding,
            queue,
            loaded.runner,
            check_integrity_when_idle=config.check_integrity_when_idle,
            on_step=on_step,
        )

    @property
    def has_work(self) -> bool:
        return bool(len(self._queue) or self._aborted)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestRejectedError; then nothing was kept of it."""
        if request.request_id in self._aborted:
            raise id_in_use(request.request_id)
        self._queue.push(request, self._clock())

    def abort(self, request_id: str) -> None:
        """End a request that waits; its output, which says ABORT, comes with the next step. Unknown
        ids are ignored."""
        if self._queue.remove(request_id):
            self._aborted[request_id] = StepOutput(request_id, [], FinishReason.ABORT)
            self._num_finished += 1

    def step(self) -> list[StepOutput]:
        """Run what waits, as much of it as a step takes. Returns the outputs of its texts, and of
        those that were aborted."""
        outputs = list(self._aborted.values())
        self._aborted.clear()
        texts = self._queue.take()
        if texts:
            outputs += self._run(texts)
        if self._check_integrity_when_idle and not self.has_work:
            self.check_integrity()
        return outputs

    def prepare_while_idle(self) -> bool:
        """There is nothing to prepare."""
        return False

    @property
    def sleep_level(self) -> int:
        """It never sleeps: its info says so."""
        return 0

    def live_request_ids(self) -> list[str]:
        """Nobody asks."""
        return []

    def sleep(self, level: int) -> None:
        raise RuntimeError("an engine of encoders cannot sleep")

    def wake_up(self, on_progress: OnProgress) -> None:
        """It is awake."""

    def stats(self) -> EngineStats:
        """There are no pages, and between steps nothing runs."""
        return EngineStats(
            num_waiting=len(self._queue),
            queued_tokens=self._queue.num_tokens,
            num_steps=self._num_steps,
            num_prompt_tokens=self._num_tokens,
            num_finished=self._num_finished,
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        self._queue.check_integrity()

    def close(self) -> None:
        """Nothing is held beside memory."""

    def warm_up(self) -> None:
        """Run one short text, so that no client pays for first-time initialisations."""
        params = PoolingParams(self._embedding.pooling, is_normalised=False)
        self.submit(GenerateRequest(_WARM_UP, [0], SamplingParams(), pooling=params))
        self.step()

    def _run(self, texts: Sequence[Text]) -> list[StepOutput]:
        started_s = self._clock()
        vectors = self._runner.run(texts)
        finished_s = self._clock()
        num_tokens = sum(len(text.token_ids) for text in texts)
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._num_finished += len(texts)
        self._on_step(
            StepRecord(
                phase="extend",
                step_s=finished_s - started_s,
                host_gap_s=0.0,
                batch_size=len(texts),
                num_prefill_tokens=num_tokens,
                attention=(),
            )
        )
        return [
            self._output(text, vector, started_s, finished_s)
            for text, vector in zip(texts, vectors, strict=True)
        ]

    def _output(
        self, text: Text, vector: FloatArray | None, started_s: float, finished_s: float
    ) -> StepOutput:
        if vector is None:
            return _failed(text, _OUT_OF_MEMORY)
        finished = self._finish(vector, text.pooling)
        if finished is None:
            return _failed(text, _NO_VECTOR)
        return StepOutput(
            text.request_id,
            [],
            FinishReason.STOP,
            embedding=pack_vector(finished),
            queue_s=started_s - text.submitted_s,
            prefill_s=finished_s - started_s,
        )

    def _finish(self, vector: FloatArray, params: PoolingParams) -> FloatArray | None:
        if self._embedding.pooling is Pooling.SCORES:
            return finish_scores(vector, params, self._embedding.activation)
        return finish_vector(vector, params)


def _failed(text: Text, error: OutputError) -> StepOutput:
    return StepOutput(text.request_id, [], FinishReason.ERROR, error=error)
