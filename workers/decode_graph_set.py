"""Puts a rank's decode graphs together for its device. The only place that knows CUDA's capture."""

import torch

from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.graph_timing import GraphAttentionTimer, new_graph_event, new_replay_mark
from workers.config import EngineConfig
from workers.cuda_graph_runner import (
    AttentionTwins,
    DecodeGraphs,
    Replay,
    RunStep,
    batch_size_ladder,
)
from workers.measured_turns import MeasuredTurns
from workers.models.base import CausalLM, NativeCausalLM
from workers.parallel.group import TPGroup
from workers.sampling.state import SamplingState
from workers.staging import StagingRing

MAX_GRAPH_BATCH_SIZE = 512


class CudaGraphCapturer:
    """Captures on a stream of its own into one memory pool; nothing waits for the device.

    Only one graph's tensors are in use at a time, so that the graphs may share their memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: RunStep) -> tuple[Replay, torch.Tensor]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Compiles kernels and lets libraries allocate their workspaces, which a capture cannot.
            run()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)
        return graph.replay, out


def build_decode_graphs(
    config: EngineConfig,
    model: CausalLM,
    backend: AttentionBackend,
    sampling: SamplingState,
    padding_slot: int,
    tp: TPGroup,
) -> DecodeGraphs | None:
    """None where steps cannot be captured: the backend or the model does not allow it, or a flag.

    A model that transformers runs may do on the host what a graph would not repeat.
    """
    if not (
        config.enable_cuda_graphs
        and isinstance(backend, GraphAttentionBackend)
        and isinstance(model, NativeCausalLM)
    ):
        return None
    # Triton comes with torch for CUDA only.
    from workers.layers.cuda.sharded_greedy import step_kernels

    sizes = batch_size_ladder(
        min(config.max_running_requests, config.max_step_tokens, MAX_GRAPH_BATCH_SIZE)
    )
    return DecodeGraphs(
        model,
        backend,
        step_kernels(
            backend.req_to_token_pool.req_to_token,
            sampling.last_token_ids,
            tp,
            model.vocab_shard,
            sizes[-1],
        ),
        CudaGraphCapturer(backend.config.device),
        StagingRing.pinned(sizes[-1], backend.config.device),
        sizes,
        padding_slot,
        AttentionTwins(
            MeasuredTurns(config.attention_timing_interval_steps),
            lambda: GraphAttentionTimer(backend, new_graph_event, new_replay_mark),
        ),
    )
