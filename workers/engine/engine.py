"""Engine: schedule, launch, commit. One model, its scheduler and the executor of its steps.

Works in process without Ray. Knows token ids only: no text, no sockets, no HTTP.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from workers.adapters.desk import NO_ADAPTERS_DESK, AdapterDesk
from workers.adapters.ref import AdapterRef
from workers.adapters.stage import desk_of
from workers.config import EngineConfig
from workers.constraints.desk import NO_GRAMMARS, GrammarDesk
from workers.constraints.mask_filler import BegunMasks, MaskFiller
from workers.constraints.masks import StepMasks, look_ahead
from workers.engine.clock import StepClock
from workers.engine.encoder_input import EncoderInput
from workers.engine.mask_patience import MaskPatience
from workers.engine.observer import OnStep, StepRecord
from workers.engine.protocol import EngineStats, GenerateRequest, ModelInfo, StepOutput
from workers.engine.rest import NoRest, RestingMemory
from workers.engine.results import GenerateResult, ResultCollector
from workers.errors import ConfigError, RequestRejectedError, id_in_use
from workers.kv_cache.radix_node import EMPTY
from workers.loading.weights import OnProgress
from workers.parallel.group import SingleRank
from workers.pooling.params import PoolingParams
from workers.runner.executor import PendingStep, StepExecutor
from workers.runner.factory import make_model_runner
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import StepPlan
from workers.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_COMPILE_WAIT_S = 0.01


def _ignore_progress(bytes_done: int, bytes_total: int) -> None:
    """Nobody watches."""


def _ignore_step(record: StepRecord) -> None:
    """Nobody watches."""


class Engine:
    """Turns requests into tokens. Not thread-safe: EngineLoop gives it a thread.

    At most one step is in flight: while the device runs step N, step() schedules and launches
    N + 1, then commits N. A plan that needs tokens the host has not seen names their slot instead.
    After a step that raised the engine is of no more use than to be closed.
    """

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        executor: StepExecutor,
        *,
        grammars: GrammarDesk = NO_GRAMMARS,
        adapters: AdapterDesk = NO_ADAPTERS_DESK,
        enable_overlap: bool = True,
        check_integrity_when_idle: bool = False,
        on_step: OnStep = _ignore_step,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._executor = executor
        self._grammars = grammars
        self._adapters = adapters
        self._filler = MaskFiller(info.vocab_size, grammars.fill)
        self._enable_overlap = enable_overlap
        self._check_integrity_when_idle = check_integrity_when_idle
        self._clock = StepClock(on_step)
        self._patience = MaskPatience(self._clock.decode_durations_s)
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._masks_under_way: tuple[StepPlan, BegunMasks] | None = None
        self._has_failed = False
        self._is_closed = False
        self._rest: RestingMemory = NoRest()

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        on_step: OnStep = _ignore_step,
        on_progress: OnProgress = _ignore_progress,
    ) -> "Engine":
        """Load the model on one rank in this process.

        Raises ConfigError (also for tp_size > 1: see workers/parallel), ModelLoadError and
        AttentionBackendError.
        """
        if config.tp_size != 1:
            raise ConfigError("an in-process engine has one rank; tp_size > 1 takes more processes")
        runner = make_model_runner(config, SingleRank(), resolve_device(config), on_progress)
        return cls.of_runner(config, runner, on_step=on_step)

    @classmethod
    def of_runner(
        cls,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        wrap_executor: Callable[[StepExecutor], StepExecutor] | None = None,
        on_step: OnStep = _ignore_step,
    ) -> "Engine":
        """An engine around rank 0's runner; wrap_executor adds what tensor parallelism needs."""
        executor = runner.make_executor()
        if wrap_executor is not None:
            executor = wrap_executor(executor)
        executor = runner.with_drafts(executor)
        engine = cls(
            runner.model_info(config),
            Scheduler(runner.scheduler_config(config)),
            executor,
            grammars=runner.grammar_desk(),
            adapters=desk_of(runner.adapters),
            enable_overlap=config.enable_overlap,
            check_integrity_when_idle=config.check_integrity_when_idle,
            on_step=on_step,
        )
        engine._rest = runner.resting_memory(config)
        return engine

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._scheduler.has_work or self._num_prepared)

    @property
    def _num_prepared(self) -> int:
        """Requests that wait for what they need before they are queued."""
        return self._grammars.num_waiting + self._adapters.num_waiting

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestRejectedError if it is invalid or can never fit; one with
        a grammar may be refused by an output, too, once that has been compiled."""
        if any(desk.is_known(request.request_id) for desk in (self._grammars, self._adapters)):
            raise id_in_use(request.request_id)
        if request.adapter is None:
            self._queue(request)
            return
        self._check(request)
        self._adapters.start(request)

    def _queue(self, request: GenerateRequest) -> None:
        """Of a request whose adapter, if it has one, is there. Raises as submit does."""
        if not request.grammar:
            self._scheduler.submit(request)
            return
        self._check(request)
        self._grammars.start(request)

    def _check(self, request: GenerateRequest) -> None:
        desks = self._grammars, self._adapters
        num_tokens = sum(desk.num_waiting_tokens for desk in desks)
        self._scheduler.check(request, self._num_prepared, num_tokens)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its last output says ABORT. Unknown ids are ignored."""
        if not (self._adapters.abort(request_id) or self._grammars.abort(request_id)):
            self._scheduler.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Schedule and launch the next step, then commit the one before. Returns its outputs.

        Masks that the launched step waits for are made meanwhile, and provided by the next call."""
        try:
            return self._step()
        except BaseException:
            self._has_failed = True
            raise

    def _step(self) -> list[StepOutput]:
        had_masks = self._masks_under_way is not None
        self._provide_masks()
        refused: list[StepOutput] = []
        if self._adapters.num_waiting:
            refused = self._adapters.hand_over(self._queue)
        if self._grammars.num_waiting:
            refused += self._grammars.hand_over(self._scheduler.submit_constrained)
        num_before = len(self._in_flight)
        plan = self._scheduler.schedule()
        if plan is not None:
            self._in_flight.append((plan, self._executor.launch(plan)))
            if had_masks or plan.has_masks:
                self._patience.on_launch(plan)
        outputs = self._commit_next() if num_before else self._scheduler.take_outputs()
        if plan is not None and plan.has_masks:
            self._begin_masks(plan)
        if not self._in_flight:
            self._wait_for_desks()
        outputs += refused
        if self._in_flight and not self._enable_overlap:
            self._provide_masks()
            outputs += self._commit_next()
        if self._adapters.num_live:
            self._adapters.settle(outputs)
        if self._check_integrity_when_idle and not self.has_work:
            self.check_integrity()
        return outputs

    def _wait_for_desks(self) -> None:
        """No step is under way: a moment for what requests wait for."""
        if self._adapters.num_waiting:
            self._adapters.wait(_COMPILE_WAIT_S)
        self._grammars.wait(_COMPILE_WAIT_S)

    def _begin_masks(self, plan: StepPlan) -> None:
        """Every plan before this one is committed, so that all tokens before its own are known, and
        nobody reads masks of theirs any more."""
        if len(self._in_flight) != 1:
            raise RuntimeError(f"masks of step {plan.step_id} are begun before others' are read")
        as_it_runs = self._executor.named(plan) if plan.has_runs else plan
        rows = self._scheduler.constrained_rows(as_it_runs)
        if rows:
            masks = self._filler.begin(plan.step_id, rows, self._patience.deadline(plan))
            self._masks_under_way = plan, masks
        else:
            self._executor.provide(StepMasks(plan.step_id, EMPTY, EMPTY, EMPTY))

    def _provide_masks(self) -> None:
        """To the step launched last, before anything else is done for the next one. What the step
        before has sampled has been told by then: nobody waits for masks of tokens to come."""
        if self._masks_under_way is None:
            return
        plan, masks = self._masks_under_way
        self._masks_under_way = None
        filled = self._filler.finish(masks)
        self._patience.on_masks(masks.last_until_s)
        if filled.late:
            self._scheduler.run_again(plan, filled.late)
        if filled.slow:
            self._scheduler.draft_less(filled.slow)
        self._executor.provide(filled.masks)
        # The step goes on meanwhile.
        look_ahead(filled.rows, filled.masks)

    def prepare_while_idle(self) -> bool:
        """Use a moment without work for one piece of preparation; whether there was any left."""
        return not self.has_work and self._executor.prepare_while_idle()

    @property
    def sleep_level(self) -> int:
        """0 for awake; as SleepOrder."""
        return self._rest.level

    def live_request_ids(self) -> list[str]:
        """Of requests that abort() would end."""
        prepared = [*self._grammars.waiting_ids(), *self._adapters.waiting_ids()]
        return [*self._scheduler.live_request_ids(), *prepared]

    def sleep(self, level: int) -> None:
        """Give memory back and forget cached prefixes, without work only. Nothing may be submitted
        until wake_up(). Where info has an obstacle, RuntimeError."""
        if self.has_work:
            raise RuntimeError("an engine with work was told to sleep")
        self._scheduler.forget_prefixes()
        self._rest.release(level)

    def wake_up(self, on_progress: OnProgress) -> None:
        """Raises what loading weights raises; the engine is of no more use then."""
        self._rest.restore(on_progress)

    def stats(self) -> EngineStats:
        stats, level = self._stats(), self._rest.level
        return msgspec.structs.replace(stats, sleep_level=level) if level else stats

    def _stats(self) -> EngineStats:
        stats, num_prepared = self._scheduler.stats(), self._num_prepared
        if not num_prepared:
            return stats
        desks = self._grammars, self._adapters
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + num_prepared,
            queued_tokens=stats.queued_tokens + sum(desk.num_waiting_tokens for desk in desks),
        )

    def check_integrity(self) -> None:
        """Prove that no page is lost or shared wrongly. Raises IntegrityError."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Wait for steps in flight, drop their results and release the executor.

        After a step that raised, what others in flight and the failed device raise is logged. A
        second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._grammars.close()
        self._adapters.close()
        self._filler.close()
        self._executor.forget_masks()
        while self._in_flight:
            plan, pending = self._in_flight.popleft()
            try:
                pending.outcome()
            except Exception:
                self._has_failed = True
                logger.exception("step %d failed while its engine was closed", plan.step_id)
        try:
            self._executor.close()
        except Exception:
            if not self._has_failed:
                raise
            logger.exception("what was left of a failed engine was not released in order")

    def warm_up(self) -> None:
        """Run one short request, so that no client pays for first-time initialisations, and read
        beside it what grammars need."""
        wait_for_grammars = self._grammars.prepare()
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        encoder = self.info.encoder
        self.generate([[0]], sampling, () if encoder is None else [encoder.shortest()])
        wait_for_grammars()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        sources: Sequence[EncoderInput] = (),
        adapters: Sequence[AdapterRef | None] = (),
    ) -> list[GenerateResult]:
        """Run prompts to their end and return results in the prompts' order. sources: what the
        encoder reads for each of them, where the model has one. adapters: what is added to the
        model for each of them, where it is not served as it is.

        Offline convenience: must not run while an EngineLoop drives this engine. Raises
        RequestRejectedError if one of them is refused, after ending the others, and ValueError if
        there are not as many sampling parameters, sources or adapters as prompts.
        """
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        read: Sequence[EncoderInput | None] = sources or [None] * len(prompts)
        worn: Sequence[AdapterRef | None] = adapters or [None] * len(prompts)
        parts = enumerate(zip(prompts, params, read, worn, strict=True))
        requests = [
            GenerateRequest(
                f"generate-{index}", list(prompt), one, encoder_input=source, adapter=adapter
            )
            for index, (prompt, one, source, adapter) in parts
        ]
        return self._run(requests)

    def embed(
        self, prompts: Sequence[Sequence[int]], pooling: PoolingParams
    ) -> list[GenerateResult]:
        """As generate, of a vector for each prompt."""
        sampling = SamplingParams()
        return self._run(
            [
                GenerateRequest(f"embed-{index}", list(prompt), sampling, pooling=pooling)
                for index, prompt in enumerate(prompts)
            ]
        )

    def _run(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        collector = ResultCollector()
        try:
            for request in requests:
                self.submit(request)
                collector.expect(request.request_id)
        except RequestRejectedError:
            for request in requests:
                self.abort(request.request_id)
            self._run_out()
            raise
        while collector.is_waiting:
            collector.add(self.step())
        self._run_out()
        return collector.results()

    def _run_out(self) -> None:
        while self.has_work:
            self.step()

    def _commit_next(self) -> list[StepOutput]:
        """Of the oldest step in flight."""
        plan, pending = self._in_flight.popleft()
        outcome = pending.outcome()
        outputs = self._scheduler.commit(plan, outcome.result)
        gap_s = self._clock.place(plan, outcome)
        self._scheduler.observe_duration(plan, outcome.finished_s - outcome.started_s, gap_s)
        if plan.has_masks or (self._in_flight and self._in_flight[-1][0].has_masks):
            self._patience.on_finish(outcome)
        return outputs
