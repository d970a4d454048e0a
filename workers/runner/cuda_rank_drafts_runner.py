"""A CUDA rank that makes drafts by a model or a head beside its own."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.graphs.decode_graphs import GraphedStep
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.drafted_verify_graphs import DraftedVerifyGraphs
from workers.graphs.graph_set import CudaGraphCapturer, build_draft_graphs
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.segment_graphs import SegmentGraphs
from workers.graphs.tapped_model import ReadBesideLogits, StaticTaps, TappedModel
from workers.graphs.verify_graphs import MAX_VERIFY_TOKENS, VerifiedStep, VerifyGraphs
from workers.layers.cuda.side_stream import CudaSideStream, SideStream
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.ahead_drafts import AheadDrafts
from workers.runner.ahead_executor import ahead_drafting_executor
from workers.runner.cuda_model_runner import CudaModelRunner, LaunchSamples, StepGraphs
from workers.runner.executor import PendingStep, StepExecutor
from workers.runner.rank_drafts_runner import RankDraftsRunner
from workers.runner.step_pieces import ReadableStep
from workers.sampling.state import SampledTokens
from workers.sampling.transfer import upload
from workers.scheduler.plan import StepPlan
from workers.speculation.device_step import DeviceDrafts, DrafterStep, RunRows
from workers.speculation.draft_mailbox import Passed

logger = logging.getLogger(__name__)


class CudaRankDraftsRunner(RankDraftsRunner, CudaModelRunner):
    """As RankDraftsRunner and CudaModelRunner. Drafts are made ahead of a replay; what the target's
    graph hands over of them is read behind it.

    Where a head reads states of the target, graphs of plain decode steps read them, too, beside the
    product by the vocabulary where there is one rank, so that replaying one takes the host no more
    than without a head, and the device little. Steps with prompts have no graphs between their
    layers' attention then: these hand over no states.
    """

    _verify_class: ClassVar[type[VerifyGraphs]] = DraftedVerifyGraphs
    _max_verify_tokens: ClassVar[int] = MAX_VERIFY_TOKENS
    _static_taps: StaticTaps | None = None
    _replayed_step: DrafterStep | None = None
    _unread: tuple[DrafterStep, StepGraphs] | None = None
    _draft_graphs: DraftGraphs | None = None
    _ahead: AheadDrafts | None = None

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        super().__init__(config, tp, device, on_progress)
        self._draft_graphs = self._build_draft_graphs(config, CudaGraphCapturer(device))

    def _build_draft_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> DraftGraphs | None:
        padding_slot = config.max_running_requests
        return build_draft_graphs(config, self._device_drafter, padding_slot, capturer)

    def _place_beside(self, config: EngineConfig) -> None:
        super()._place_beside(config)
        if self.adapters and self._device_drafter.reads_target:
            raise ConfigError(
                f"speculative={config.speculative!r} and max_loras={config.max_loras}: on GPUs, "
                "steps with adapters hand over no states for a head; take draft:MODEL, ngram or "
                "suffix, or leave adapters out"
            )

    def _new_mark(self) -> Passed:
        event: Passed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def _decode_model(self) -> GraphedModel:
        if not self._device_drafter.reads_target:
            return super()._decode_model()
        read, taps_final = self._device_drafter.behind_decode, self._drafter.taps_final_states
        if not self._is_alone:
            return TappedModel(self._model, read, taps_final)
        return ReadBesideLogits(self._model, read, taps_final, self._side_stream())

    def _side_stream(self) -> SideStream:
        return CudaSideStream.on(self._device)

    def _verify_model(self) -> GraphedModel:
        if not self._device_drafter.reads_target:
            return super()._verify_model()
        shape = self._max_verify_tokens, self._model.input_embedding().shape[1]
        self._static_taps = taps = StaticTaps(
            [
                torch.zeros(shape, dtype=self.dtype, device=self._device)
                for _ in range(self._drafter.num_taps)
            ]
        )
        return TappedModel(self._model, taps, self._drafter.taps_final_states)

    def _segment_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> SegmentGraphs | None:
        if self._device_drafter.reads_target:
            return None
        return super()._segment_graphs(config, capturer)

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        """One rank alone makes drafts ahead: others would have to be told of the plan twice."""
        if self._draft_graphs is None or not self._is_alone:
            return super().with_drafts(executor)
        self._ahead = AheadDrafts(self._draft_graphs, self._mailbox.send)
        num_slots, max_context_len = self._req_to_token.shape
        return ahead_drafting_executor(
            executor, num_slots, max_context_len, self._mailbox.named, self._ahead
        )

    def launch(self, plan: StepPlan) -> PendingStep:
        with self._mailbox.launching(plan.step_id):
            return super().launch(plan)

    def _begin_within_memory(self, plan: StepPlan) -> LaunchSamples:
        """Masks are made behind drafts: where there was no memory to make these, any tokens stand
        for them, in the pieces of the step as well."""
        finish = super()._begin_within_memory(plan)
        runs = RunRows.of(plan)
        if len(runs) and self._mailbox.made(plan.step_id, runs.slots) is None:
            # Drafts behind one token of a tree differ.
            any_tokens = torch.arange(runs.width, device=self._device).expand(len(runs), -1)
            sent = self._mailbox.send(DeviceDrafts(any_tokens))
            self._mailbox.put(plan.step_id, runs.slots, sent)
            self._mailbox.end(plan.step_id)
        return finish

    def _make_drafts(self, step: DrafterStep) -> None:
        graphs, plan, runs, ahead = self._draft_graphs, step.plan, step.runs, self._ahead
        is_again = len(runs) > 0 and self._mailbox.made(plan.step_id, runs.slots) is not None
        sent = None if ahead is None or is_again else ahead.take(step)
        if sent is None:
            if graphs is None or is_again or not graphs.covers(plan):
                super()._make_drafts(step)
                return
            drafts = graphs.run(step)
            if not len(runs):
                # It has read tokens, and made none that anybody waits for.
                return
            sent = self._mailbox.send(drafts)
        self._mailbox.put(plan.step_id, runs.slots, sent)
        self._mailbox.end(plan.step_id)
        step.name(sent.drafts)
        if ahead is not None:
            ahead.verifies(step, sent.drafts)

    def _within_replay(
        self,
        graphs: StepGraphs,
        plan: StepPlan,
        finish: Callable[[], GraphedStep | VerifiedStep | SampledTokens],
    ) -> ReadableStep:
        ahead = self._ahead
        if ahead is None:
            return super()._within_replay(graphs, plan, finish)

        def kept() -> GraphedStep | VerifiedStep | SampledTokens:
            drawn = finish()
            if not isinstance(drawn, GraphedStep):
                ahead.draws(plan, drawn)
            return drawn

        return super()._within_replay(graphs, plan, kept)

    def _capture_missing(self, plan: StepPlan) -> bool:
        with self._failure_told():
            if self._draft_graphs is not None:
                self._draft_graphs.capture_after(plan)
            return super()._capture_missing(plan)

    def _capture_next(self) -> bool:
        with self._failure_told():
            if super()._capture_next():
                return True
            return self._draft_graphs is not None and self._draft_graphs.capture_next()

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        """After a capture that fails, of whatever graph, no other is tried (CaptureAttempts)."""
        try:
            yield
        except RuntimeError as error:
            graphs = self._draft_graphs
            if graphs is not None and graphs.num_captured < graphs.num_shapes:
                logger.warning(
                    "%d of %d graphs of drafts are captured, other drafts are made pass by pass: "
                    "%s",
                    graphs.num_captured,
                    graphs.num_shapes,
                    error,
                )
            raise

    def close(self) -> None:
        super().close()
        self._draft_graphs = self._ahead = None

    def _prepare_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        super()._prepare_replay(graphs, plan)
        self._unread = self._replayed_step = None
        if self._reads_within(graphs):
            self._clear_tokens(plan.cleared)
            return
        self._replayed_step = step = self._name_drafts(plan)
        if isinstance(graphs, DraftedVerifyGraphs):
            graphs.name_tokens(step)

    def _reads_within(self, graphs: StepGraphs) -> bool:
        """Whether the drafter has nothing to do about a replay but what the graph itself does: it
        drafts ahead of steps with drafts alone, and reads what the target makes of others."""
        is_plain = not isinstance(graphs, VerifyGraphs)
        return is_plain and self._device_drafter.reads_target

    def _behind_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        super()._behind_replay(graphs, plan)
        if self._reads_within(graphs):
            return
        step, self._replayed_step = self._replayed_step, None
        if step is None:
            raise RuntimeError("a step was replayed whose drafts nobody has made")
        self._unread = step, graphs
        # Steps without drafts are launched ahead, trees are lined up behind what is read of them,
        # and masks take longer to come.
        if not plan.has_runs or plan.has_trees or plan.has_masks:
            self._behind_samples()

    @torch.inference_mode()
    def _behind_samples(self) -> None:
        """The step that follows drafts waits for the samples: the device reads the target's states
        while the host takes these in."""
        super()._behind_samples()
        unread, self._unread = self._unread, None
        if unread is None:
            return
        step, graphs = unread
        if not self._read_behind(step, graphs, step.plan):
            # Not before the error is gone: its frames hold tensors.
            self._free_memory()

    def _read_behind(self, step: DrafterStep, graphs: StepGraphs, plan: StepPlan) -> bool:
        """Whether there was memory for it. By now a step has been sampled, and must not run again:
        a drafter that has missed tokens makes worse drafts of their rows, which change no text."""
        try:
            self._device_drafter.behind(step, self._taps_of_replay(graphs, plan))
        except torch.OutOfMemoryError as error:
            if not self._is_alone:
                raise
            logger.warning(
                "no memory for what drafts of step %d's %d rows are made of, later ones are worse: "
                "%s",
                plan.step_id,
                plan.batch_size,
                error,
            )
            return False
        return True

    def _taps_of_replay(self, graphs: StepGraphs, plan: StepPlan) -> tuple[torch.Tensor, ...]:
        """Of the plan's tokens. Where these have no padding between them, views, to be read before
        the next replay."""
        if self._static_taps is None or not isinstance(graphs, VerifyGraphs):
            return ()
        num_tokens = len(graphs.replayed_places)
        if graphs.replayed_places[-1] == num_tokens - 1:
            return tuple(tap[:num_tokens] for tap in self._static_taps.tensors)
        (places,) = upload([graphs.replayed_places], self._device)
        return tuple(tap.index_select(0, places) for tap in self._static_taps.tensors)
