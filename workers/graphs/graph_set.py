"""Puts a rank's graphs together for its device. The only place that knows CUDA's capture."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.forward_batch import StepShape
from attention.graph_timing import GraphAttentionTimer, new_graph_event, new_replay_mark
from workers.config import EngineConfig
from workers.graphs.decode_graphs import (
    AttentionTwins,
    DecodeGraphs,
    Replay,
    batch_size_ladder,
)
from workers.graphs.draft_graphs import DraftGraphs, draft_graph_lengths
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.measured_turns import MeasuredTurns
from workers.graphs.ring import StagingRing
from workers.graphs.segment_graphs import MAX_SEGMENT_TOKENS, SegmentGraphs, token_count_ladder
from workers.graphs.tree_draft_graphs import TreeDraftGraphs
from workers.graphs.verify_graphs import (
    MAX_TREE_TOKENS,
    MAX_VERIFY_TOKENS,
    VerifyGraphs,
    verify_shapes,
)
from workers.layers.embedding import VocabShard
from workers.models.base import CausalLM
from workers.models.segmented import SegmentedCausalLM
from workers.parallel.group import TPGroup
from workers.sampling.state import SamplingState
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS
from workers.speculation.config import SpeculativeConfig
from workers.speculation.device_chain import ChainDrafter
from workers.speculation.device_growth import TreeDrafter
from workers.speculation.policies import draft_lengths

logger = logging.getLogger(__name__)

MAX_GRAPH_BATCH_SIZE = 512

Out = TypeVar("Out")


class CudaGraphCapturer:
    """Captures on a stream of its own into one memory pool; nothing waits for the device.

    Only one graph's tensors are in use at a time, so that the graphs may share their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._device_index = torch.cuda.current_device() if device.index is None else device.index
        self._pool = torch.cuda.graph_pool_handle()
        self._latest: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Out]) -> tuple[Replay, Out]:
        self.try_out(run)
        return self.record(run)

    def try_out(self, run: Callable[[], Out]) -> Out:
        """Compiles kernels and lets libraries allocate their workspaces, which record cannot."""
        with self._beside():
            return run()

    def record(self, run: Callable[[], Out]) -> tuple[Replay, Out]:
        """What run raises ends the capture; others can be made after it."""
        graph = torch.cuda.CUDAGraph()
        with self._beside():
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                out = run()
            except BaseException:
                self._abandon(graph)
                raise
            graph.capture_end()
        # A pool that holds tensors still but whose graphs are gone is refused by torch: one stays.
        self._latest = graph
        return graph.replay, out

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that CUDA may have invalidated, which torch then ends by half: memory
        would go to the pool and random numbers to the graph for ever."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            logger.debug("an abandoned capture: %s", error)
            generator = torch.cuda.default_generators[self._device_index]
            generator.graphsafe_set_state(generator.clone_state())
            with suppress(RuntimeError):  # of a torch that has done it
                torch._C._cuda_endAllocateToPool(self._device_index, self._pool)
        # A pool that has been recorded for, of which no graph is left, takes no other one.
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream for captures, in the order of the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


def build_decode_graphs(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    sampling: SamplingState,
    padding_slot: int,
    tp: TPGroup,
    capturer: CudaGraphCapturer,
    run: GraphedModel | None = None,
) -> DecodeGraphs | None:
    """None where steps cannot be captured: backend, model or a flag do not allow it. run: what runs
    a step in the model's place."""
    if not (config.enable_cuda_graphs and isinstance(backend, GraphAttentionBackend)):
        return None
    obstacle = model.capture_obstacle(backend.config.max_context_len)
    if obstacle:
        logger.warning("decode steps run without CUDA graphs: %s", obstacle)
        return None
    # Triton comes with torch for CUDA only.
    from workers.layers.cuda.sharded_greedy import step_kernels

    sizes = batch_size_ladder(
        min(config.max_running_requests, config.max_step_tokens, MAX_GRAPH_BATCH_SIZE)
    )
    return DecodeGraphs(
        run or model,
        backend,
        step_kernels(
            backend.req_to_token_pool.own_tables,
            sampling.last_token_ids,
            tp,
            model.vocab_shard,
            sizes[-1],
        ),
        capturer,
        StagingRing.pinned(
            sizes[-1],
            MAX_UNCOMMITTED_PLANS,
            backend.config.device,
            len(backend.req_to_token_pool.own_tables),
        ),
        sizes,
        padding_slot,
        AttentionTwins(
            MeasuredTurns(config.attention_timing_interval_steps),
            lambda one: GraphAttentionTimer(one, new_graph_event, new_replay_mark),
        ),
    )


def build_adapted_graphs(
    config: EngineConfig,
    model: CausalLM,
    adapted: GraphedModel,
    backend: AttentionBackend,
    sampling: SamplingState,
    padding_slot: int,
    tp: TPGroup,
    capturer: CudaGraphCapturer,
) -> DecodeGraphs | None:
    """Of steps whose rows have adapters. Before any graph is captured: static buffers of backends
    are made anew. None where build_decode_graphs gives none, or where a backend plans for one graph
    of a size."""
    if isinstance(backend, GraphAttentionBackend) and backend.plans_on_host:
        logger.warning("%s: steps with adapters run eagerly", backend.capability.name)
        return None
    return build_decode_graphs(
        config, model, backend, sampling, padding_slot, tp, capturer, adapted
    )


def build_verify_graphs(
    config: EngineConfig,
    model: GraphedModel,
    vocab_shard: VocabShard | None,
    backend: AttentionBackend,
    sampling: SamplingState,
    tp: TPGroup,
    capturer: CudaGraphCapturer,
    graphs_class: type[VerifyGraphs] = VerifyGraphs,
) -> VerifyGraphs | None:
    """Behind build_decode_graphs, which made the backend's static buffers. vocab_shard: the
    model's. None where there are no drafts, or where their steps cannot be captured: they run
    eagerly then."""
    speculation = config.speculation
    if speculation is None or not isinstance(backend, GraphAttentionBackend):
        return None
    if not backend.captures_verify:
        logger.warning("%s: steps that verify drafts run eagerly", backend.capability.name)
        return None
    from workers.layers.cuda.sharded_greedy import step_kernels

    max_rows = min(config.max_running_requests, config.max_step_tokens, MAX_GRAPH_BATCH_SIZE)
    lengths = [1 + own for own in draft_lengths(speculation) if own]
    shapes = verify_shapes(max_rows, lengths, max_verify_tokens(speculation))
    max_tokens = max(shape.rows * shape.tokens_per_row for shape in shapes)
    device = backend.config.device
    tables = backend.req_to_token_pool.own_tables
    return graphs_class(
        model,
        backend,
        step_kernels(tables, sampling.last_token_ids, tp, vocab_shard, max_tokens),
        capturer,
        StagingRing.pinned(max_tokens, MAX_UNCOMMITTED_PLANS, device, len(tables)),
        shapes,
        config.max_running_requests,
    )


def build_draft_graphs(
    config: EngineConfig, drafter: ChainDrafter, padding_slot: int, capturer: CudaGraphCapturer
) -> DraftGraphs | None:
    """None where drafts are made eagerly, which the log says: the drafter, its backend or a flag do
    not allow it."""
    backend, speculation = _draft_backend(config, drafter), config.speculation
    if backend is None or speculation is None:
        return None
    from workers.layers.cuda.draft_rows import CUDA_ROW_KERNELS

    shapes = _draft_shapes(config, drafter, speculation)
    return DraftGraphs(drafter, backend, capturer, shapes, padding_slot, CUDA_ROW_KERNELS)


def build_tree_draft_graphs(
    config: EngineConfig, drafter: TreeDrafter, padding_slot: int, capturer: CudaGraphCapturer
) -> TreeDraftGraphs | None:
    """As build_draft_graphs."""
    backend, speculation = _draft_backend(config, drafter), config.speculation
    if backend is None or speculation is None:
        return None
    if not backend.captures_verify:
        logger.warning(
            "drafts are made without CUDA graphs: passes over trees by %s cannot be captured",
            backend.capability.name,
        )
        return None
    from workers.layers.cuda.draft_rows import CUDA_ROW_KERNELS

    shapes = _draft_shapes(config, drafter, speculation)
    return TreeDraftGraphs(
        drafter, backend, capturer, shapes, padding_slot, CUDA_ROW_KERNELS, speculation.tree
    )


def _draft_backend(config: EngineConfig, drafter: ChainDrafter) -> GraphAttentionBackend | None:
    """None, and a line in the log, where passes of the drafter cannot be captured."""
    backend = drafter.backend
    if config.speculation is None:
        return None
    if not config.enable_cuda_graphs:
        logger.info("drafts are made without CUDA graphs: enable_cuda_graphs is off")
        return None
    obstacle = drafter.capture_obstacle(backend.config.max_context_len)
    if not isinstance(backend, GraphAttentionBackend):
        obstacle = f"{backend.capability.name} cannot be captured"
    elif backend.plans_on_host:
        obstacle = f"{backend.capability.name} plans every pass on the host"
    elif not obstacle:
        return backend
    logger.warning("drafts are made without CUDA graphs: %s", obstacle)
    return None


def _draft_shapes(
    config: EngineConfig, drafter: ChainDrafter, speculation: SpeculativeConfig
) -> list[StepShape]:
    max_rows = min(config.max_running_requests, config.max_step_tokens, MAX_GRAPH_BATCH_SIZE)
    lengths = draft_graph_lengths(drafter, speculation)
    return verify_shapes(max_rows, lengths, max_verify_tokens(speculation))


def max_verify_tokens(speculation: SpeculativeConfig) -> int:
    """Of a graphed step that verifies drafts."""
    return MAX_TREE_TOKENS if speculation.tree else MAX_VERIFY_TOKENS


def build_segment_graphs(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    capturer: CudaGraphCapturer,
) -> SegmentGraphs | None:
    """None where a flag forbids graphs or the model cannot be cut. Attention may be any."""
    if not (config.enable_cuda_graphs and isinstance(model, SegmentedCausalLM)):
        return None
    sizes = token_count_ladder(min(config.max_step_tokens, MAX_SEGMENT_TOKENS))
    num_accounts = len(backend.req_to_token_pool.own_tables)
    dtype = backend.config.dtype
    return SegmentGraphs(model, capturer, sizes, dtype, capturer.device, num_accounts)
