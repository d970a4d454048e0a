"""A paced engine without a model: every step gives each running request its next token.

Implements workers.engine.loop.SteppableEngine, so the real EngineLoop drives it. Token i of a
request is (last prompt token + 1 + i) modulo the vocabulary: deterministic and easy to check.
"""

import time
from dataclasses import dataclass, field

from workers.engine.protocol import (
    EngineStats,
    FinishReason,
    GenerateRequest,
    ModelInfo,
    StepOutput,
)
from workers.errors import ErrorCode, RequestRejectedError


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    arrived_s: float
    num_output_tokens: int = 0


@dataclass
class FakeEngine:
    """step_s: pace of the loop. max_running, max_waiting: admission as a real engine has it."""

    step_s: float = 0.0
    max_running: int = 256
    max_waiting: int = 4096
    vocab_size: int = 4096
    max_context_len: int = 1 << 16
    default_max_tokens: int = 16
    model_name: str = "fake"
    fail_after_steps: int | None = None
    waiting: list[_Running] = field(default_factory=list)
    running: dict[str, _Running] = field(default_factory=dict)
    num_steps: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    ended: list[StepOutput] = field(default_factory=list)
    next_step_s: float = 0.0
    num_preparations: int = 0
    max_preparations: int = 0
    sleep_level: int = 0
    sleep_obstacle: str = ""

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self.model_name,
            vocab_size=self.vocab_size,
            max_context_len=self.max_context_len,
            eos_token_ids=(0,),
            attention_backend="none",
            page_size=1,
            num_pages=1 << 20,
            tp_size=1,
            dtype="float32",
            max_request_len=self.max_context_len,
            sleep_obstacle=self.sleep_obstacle,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def submit(self, request: GenerateRequest) -> None:
        if len(self.waiting) >= self.max_waiting:
            raise RequestRejectedError(ErrorCode.QUEUE_FULL, "the queue is full")
        if len(request.prompt_token_ids) >= self.max_context_len:
            raise RequestRejectedError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long")
        resumed = len(request.resumed_token_ids)
        self.waiting.append(_Running(request, time.monotonic(), resumed))

    def abort(self, request_id: str) -> None:
        before = len(self.waiting) + len(self.running)
        self.waiting = [r for r in self.waiting if r.request.request_id != request_id]
        self.running.pop(request_id, None)
        if len(self.waiting) + len(self.running) < before:
            self.num_finished += 1
            self.ended.append(StepOutput(request_id, [], FinishReason.ABORT))

    def step(self) -> list[StepOutput]:
        self._pace()
        if self.fail_after_steps is not None and self.num_steps >= self.fail_after_steps:
            raise RuntimeError("the fake engine was told to fail")
        while self.waiting and len(self.running) < self.max_running:
            admitted = self.waiting.pop(0)
            self.running[admitted.request.request_id] = admitted
        outputs, self.ended = self.ended, []
        outputs += [self._advance(running) for running in list(self.running.values())]
        self.num_steps += 1
        return outputs

    def prepare_while_idle(self) -> bool:
        if self.num_preparations == self.max_preparations:
            return False
        self.num_preparations += 1
        return True

    def live_request_ids(self) -> list[str]:
        return [*(r.request.request_id for r in self.waiting), *self.running]

    def sleep(self, level: int) -> None:
        self.sleep_level = level

    def wake_up(self, on_progress) -> None:
        self.sleep_level = 0

    def stats(self) -> EngineStats:
        return EngineStats(
            sleep_level=self.sleep_level,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            queued_tokens=sum(len(r.request.known_token_ids) for r in self.waiting),
            running_tokens=sum(
                len(r.request.prompt_token_ids) + r.num_output_tokens for r in self.running.values()
            ),
            num_pages=1 << 20,
            num_steps=self.num_steps,
            num_output_tokens=self.num_output_tokens,
            num_finished=self.num_finished,
        )

    def close(self) -> None:
        self.waiting.clear()
        self.running.clear()

    def check_integrity(self) -> None:
        """There is nothing that could be lost."""

    def _pace(self) -> None:
        now = time.monotonic()
        if self.next_step_s > now:
            time.sleep(self.next_step_s - now)
        self.next_step_s = max(self.next_step_s, now - self.step_s) + self.step_s

    def _advance(self, running: _Running) -> StepOutput:
        request = running.request
        token_id = (request.prompt_token_ids[-1] + 1 + running.num_output_tokens) % self.vocab_size
        running.num_output_tokens += 1
        self.num_output_tokens += 1
        max_tokens = request.sampling.max_tokens or self.default_max_tokens
        is_last = running.num_output_tokens >= max_tokens
        if is_last:
            del self.running[request.request_id]
            self.num_finished += 1
        queue_s = time.monotonic() - running.arrived_s if running.num_output_tokens == 1 else 0.0
        return StepOutput(
            request.request_id,
            [token_id],
            FinishReason.LENGTH if is_last else None,
            queue_s=queue_s,
        )
