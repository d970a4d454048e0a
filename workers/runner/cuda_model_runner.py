"""ModelRunner on a CUDA device: launches that wait for nothing, and graphs for decode steps.

A decode step that a captured graph covers replays it; other steps of few tokens replay the graphs
between their layers' attention, the rest run eagerly. While the device is busy with a step that
lacked a graph, the host captures it. An idle engine captures the rest.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from attention.timing import UntimedAttention
from workers.adapters.stage import dress, dressed_models
from workers.config import EngineConfig
from workers.engine.observer import AttentionRecord
from workers.graphs.capture_attempts import CaptureAttempts
from workers.graphs.decode_graphs import DecodeGraphs, DrawSamples, GraphedStep
from workers.graphs.graph_set import (
    CudaGraphCapturer,
    build_adapted_graphs,
    build_decode_graphs,
    build_segment_graphs,
    build_verify_graphs,
)
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.segment_graphs import SegmentGraphs
from workers.graphs.verify_graphs import VerifiedStep, VerifyGraphs
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.parallel.group import TPGroup
from workers.runner.cuda_executor import (
    NEVER_SUBMITTED_S,
    CudaPendingStep,
    CudaStepExecutor,
    DeviceClock,
    HalfLaunchedStep,
    StepEvents,
)
from workers.runner.drafting_executor import drafting_executor
from workers.runner.executor import PendingStep, StepExecutor, StepOutcome, attention_records
from workers.runner.model_runner import ModelRunner
from workers.runner.speculative_runner import check_forgets
from workers.runner.state_steps import begin_replay, save_behind_replay
from workers.runner.step_inputs import LaunchedStep, StepInputs
from workers.runner.step_pieces import ReadableStep, launch_in_pieces
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens
from workers.sampling.token_masks import find_masks
from workers.scheduler.plan import IntArray, StepPlan
from workers.scheduler.step_filling import TILE_TOKENS
from workers.speculation.chain import HostChainVerifier

logger = logging.getLogger(__name__)

StepGraphs = DecodeGraphs | VerifyGraphs

LaunchSamples = Callable[[], ReadableStep]
"""Waits for the masks of the step whose samples it launches."""

MAX_TIMED_TOKENS = 4096
"""With more, every number of tokens fills the device nearly as well."""


class CudaModelRunner(ModelRunner):
    """Runs plans on one CUDA device, in launch order on its current stream. One thread calls it."""

    num_padding_slots: ClassVar[int] = 1
    _verify_class: ClassVar[type[VerifyGraphs]] = VerifyGraphs
    _verify_graphs: VerifyGraphs | None = None
    _adapted_graphs: tuple[DecodeGraphs | None, ...] = ()

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        torch.cuda.set_device(device)
        super().__init__(config, tp, device, on_progress)
        if config.speculation is not None:
            check_forgets(config, self._model, self.facts.architecture)
        self._speculation = config.speculation
        if config.attention_timing_interval_steps == 0:
            self._timer = UntimedAttention(self._backend)
        self._clock = DeviceClock(time.perf_counter)
        padding_slot = config.max_running_requests
        capturer = CudaGraphCapturer(device)
        self._captures = CaptureAttempts(self._is_alone, self._free_memory)
        self._graphs = build_decode_graphs(
            config,
            self._model,
            self._backend,
            self._sampling,
            padding_slot,
            tp,
            capturer,
            self._decode_model(),
        )
        self._adapted_graphs = tuple(
            build_adapted_graphs(
                config,
                self._model,
                adapted,
                self._backend,
                self._sampling,
                padding_slot,
                tp,
                capturer,
            )
            for adapted in dressed_models(self.adapters)
        )
        if self._graphs is not None:
            self._verify_graphs = build_verify_graphs(
                config,
                self._verify_model(),
                self._model.vocab_shard,
                self._backend,
                self._sampling,
                tp,
                capturer,
                self._verify_class,
            )
        self._segments = self._segment_graphs(config, capturer)
        self._measure_largest_step(config)
        self._product_s = self._time_products(config)

    def _decode_model(self) -> GraphedModel:
        """What graphs of decode steps run."""
        return self._model

    def _verify_model(self) -> GraphedModel:
        """What graphs of steps that verify drafts run."""
        return self._model

    def _segment_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> SegmentGraphs | None:
        return build_segment_graphs(config, self._model, self._backend, capturer)

    def _measure_largest_step(self, config: EngineConfig) -> None:
        """Prove at the start, not under load, that memory suffices. Raises ConfigError."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.try_largest_step(config)
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        logger.info(
            "the largest step took %.2f GB beside weights and KV memory; %.2f GB are free",
            (peak - before) / 1e9,
            free / 1e9,
        )

    def _time_products(self, config: EngineConfig) -> tuple[float, ...]:
        """For the target for streams, without which nothing asks. Empty where the device has no
        memory for it beside the pool: a start does not fail of what only makes steps better."""
        most = min(config.max_step_tokens, MAX_TIMED_TOKENS)
        if config.target_inter_token_ms is None or most < 2 * TILE_TOKENS:
            return ()
        start_s = time.perf_counter()
        seconds: tuple[float, ...] = ()
        try:
            seconds = self._model.product_seconds(range(TILE_TOKENS, most + 1, TILE_TOKENS))
        except torch.OutOfMemoryError as error:
            logger.warning("no memory to time products, which steps then do not fill: %s", error)
        torch.cuda.empty_cache()
        logger.info("products were timed in %.2f s: %s", time.perf_counter() - start_s, seconds)
        return seconds

    def make_executor(self) -> StepExecutor:
        return CudaStepExecutor(self.launch, self._masks, self.prepare_while_idle, self.close)

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        if self._speculation is None:
            return executor
        num_slots, max_context_len = self._req_to_token.shape
        return drafting_executor(
            executor, self._speculation, num_slots, max_context_len, HostChainVerifier()
        )

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch a plan; its results are on their way to the host when this returns. Of one that
        waits for masks the forward pass: a HalfLaunchedStep."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        graphs = self._graphs_of(plan)
        start.record()
        if plan.has_masks:
            finish = self._begin_within_memory(plan)
            submitted_s = NEVER_SUBMITTED_S if graphs is None else graphs.replayed_s
            return HalfLaunchedStep(lambda: self._end(plan, finish(), start, submitted_s))
        step = self._launch_within_memory(plan, partial(self._launch_by, graphs))
        submitted_s = NEVER_SUBMITTED_S if graphs is None else graphs.replayed_s
        return self._end(plan, step, start, submitted_s)

    def _end(
        self, plan: StepPlan, step: ReadableStep, start: torch.cuda.Event, submitted_s: float
    ) -> PendingStep:
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        loads = self._expert_loads
        read_experts = None if loads is None else loads.after_launch()
        end.record()
        events = StepEvents(start, end, submitted_s)
        # Before a capture, whose trial run leaves other states in static tensors.
        self._behind_samples()
        # Behind the samples, on every rank: both may hold collectives.
        self._capture_after(plan)
        return CudaPendingStep(step, events, self._clock, self._drain_attention, read_experts)

    def run(self, plan: StepPlan) -> StepOutcome:
        return self.launch(plan).outcome()

    def run_follower(self, plan: StepPlan) -> None:
        self._launch_by(self._graphs_of(plan), plan)
        self._behind_samples()
        self._capture_after(plan)
        self._drain_attention()

    @torch.inference_mode()
    def _launch_by(self, graphs: StepGraphs | None, plan: StepPlan) -> ReadableStep:
        """graphs: _graphs_of the plan."""
        if plan.has_masks:
            return self._begin_any(plan)()
        if graphs is None:
            return self._launch(plan)
        self._prepare_replay(graphs, plan)
        step = self._within_replay(graphs, plan, lambda: graphs.run(plan, self._sampling))
        self._behind_replay(graphs, plan)
        return step

    def _prepare_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        for media in self._media:
            media.apply(plan.media)
        if self.adapters:
            dress(self.adapters, plan)
        for states in self._states:
            begin_replay(states, plan, self._device)
        self._sampling.admit(plan.admitted)
        self._inputs.apply_memory_writes(plan)

    def _behind_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        for states in self._states:
            save_behind_replay(states, plan, self._device)

    def _behind_samples(self) -> None:
        """Launch what is left of the step that was launched last: nobody who reads its samples
        waits for that."""

    def _begin_within_memory(self, plan: StepPlan) -> LaunchSamples:
        """Launch the forward pass of a plan that waits for masks. What is returned launches the
        samples once these are there; where memory lacked, all of it, in pieces."""
        try:
            finish = self._begin_any(plan)
        except torch.OutOfMemoryError:
            if not self._is_alone:
                raise
            return lambda: launch_in_pieces(plan, self._launch, self._free_memory)
        return lambda: self._launch_within_memory(plan, lambda _: finish())

    @torch.inference_mode()
    def _begin_any(self, plan: StepPlan) -> LaunchSamples:
        graphs = self._graphs_of(plan)
        if graphs is None:
            begun = self._begin(plan)
            return lambda: self._finish(begun)
        self._prepare_replay(graphs, plan)
        graphs.replay(plan)
        self._behind_replay(graphs, plan)
        return lambda: self._finish_replay(graphs, plan)

    @torch.inference_mode()
    def _finish_replay(self, graphs: StepGraphs, plan: StepPlan) -> ReadableStep:
        draw = self._draw(graphs, plan)
        return self._within_replay(graphs, plan, lambda: graphs.finish(plan, self._sampling, draw))

    def _draw(self, graphs: StepGraphs, plan: StepPlan) -> DrawSamples:
        drafts = graphs.run_drafts(plan) if isinstance(graphs, VerifyGraphs) else None
        if plan.has_masks:
            return partial(self._sample_masked, plan.step_id, plan.masked_slots, drafts)
        return partial(self._sampling.sample, drafts=drafts)

    def _sample_masked(
        self,
        step_id: int,
        masked_slots: IntArray,
        drafts: RunDrafts | None,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
    ) -> SampledTokens:
        # Triton comes with torch for CUDA only.
        from workers.layers.cuda.token_masks import greedy, rule_out, upload_masks

        of_step = self._mask_source.wait(step_id)
        found = find_masks(slots, positions, masked_slots, of_step)
        masks = upload_masks(len(slots), found, of_step, self._device)
        if masks is None:
            return self._sampling.sample_from(logits, logits, slots, positions, found.void, drafts)
        if self._sampling.is_plainly_greedy(slots, positions, found.void):
            return SampledTokens(*greedy(logits, masks), None)
        return self._sampling.sample_from(
            rule_out(logits, masks), logits, slots, positions, found.void, drafts
        )

    def _graphs_of(self, plan: StepPlan) -> StepGraphs | None:
        """Those that can run the plan. They have no positions but those of tokens in their
        sequences, which those of a prompt with images are not."""
        graphs: StepGraphs | None = self._verify_graphs if plan.has_runs else self._graphs
        for stage, adapted in zip(self.adapters, self._adapted_graphs, strict=True):
            if stage.wears(plan):
                graphs = None if plan.has_runs else adapted
        if graphs is None or not graphs.covers(plan):
            return None
        return None if any(media.shows_in(plan) for media in self._media) else graphs

    def _within_replay(
        self,
        graphs: StepGraphs,
        plan: StepPlan,
        finish: Callable[[], GraphedStep | VerifiedStep | SampledTokens],
    ) -> ReadableStep:
        try:
            step = finish()
        except torch.OutOfMemoryError:
            if not (self._states and self._is_alone):
                raise
        else:
            if isinstance(step, GraphedStep | VerifiedStep):
                return step
            return LaunchedStep(step.start_download())
        # The states have moved on: only what lacked memory is repeated, the choice of tokens.
        return launch_in_pieces(plan, partial(self._sample_replayed, graphs), self._free_memory)

    def _sample_replayed(self, graphs: StepGraphs, plan: StepPlan) -> ReadableStep:
        sampled = graphs.sample(plan, self._sampling, self._draw(graphs, plan))
        return LaunchedStep(sampled.start_download())

    def _final_states(self, inputs: StepInputs, wants_all: bool) -> torch.Tensor:
        for adapted in dressed_models(self.adapters, of_step=True) if self.adapters else ():
            batch = inputs.batch
            output: ModelOutput = adapted(TokenInputs(batch.input_ids, inputs.positions), batch)
            return output.hidden
        segments = self._segments
        if wants_all or segments is None or not segments.covers(inputs.batch.num_tokens):
            return super()._final_states(inputs, wants_all)
        return segments.run(inputs.batch, inputs.state_indices)

    def _capture_after(self, plan: StepPlan) -> None:
        self._captures.attempt(partial(self._capture_missing, plan))

    def _capture_missing(self, plan: StepPlan) -> bool:
        if self._verify_graphs is not None and self._verify_graphs.capture_after(plan):
            return True
        for stage, adapted in zip(self.adapters, self._adapted_graphs, strict=True):
            if adapted is not None and stage.wears(plan):
                adapted.capture_after(plan)
                return True
        if self._graphs is not None:
            self._graphs.capture_after(plan)
        if self._segments is not None and not plan.is_decode:
            self._segments.capture_after(plan.num_tokens)
        return True

    @torch.inference_mode()
    def prepare_while_idle(self) -> bool:
        """Graphs first, whose captures all ranks share; what the model does each does alone."""
        return self._captures.attempt(self._capture_next) or self._model.prepare_while_idle()

    def _capture_next(self) -> bool:
        if self._graphs is not None and self._graphs.capture_next():
            return True
        if self._verify_graphs is not None and self._verify_graphs.capture_next():
            return True
        if self._segments is not None and self._segments.capture_next():
            return True
        return any(one.capture_next() for one in self._adapted_graphs if one is not None)

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self._device)
        finally:
            # A communicator does not end while a graph holds calls of it.
            self._graphs = None
            self._verify_graphs = None
            self._segments = None
            self._adapted_graphs = ()

    def _free_memory(self) -> None:
        torch.cuda.empty_cache()

    def _drain_attention(self) -> tuple[AttentionRecord, ...]:
        timings = self._timer.drain()
        if self._graphs is not None:
            timings += self._graphs.drain_attention()
        for adapted in self._adapted_graphs:
            timings += [] if adapted is None else adapted.drain_attention()
        return attention_records(timings)
