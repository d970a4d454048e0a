"""Ranks on CPU whose drafts are proposed as on CUDA: by who sends them plans. One replays steps."""

from dataclasses import replace

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.forward_batch import ForwardBatch
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.decode_step import TorchStepKernels
from workers.graphs.ring import StagingRing
from workers.graphs.verify_graphs import VerifiedStep, VerifyGraphs, verify_shapes
from workers.parallel.group import SingleRank
from workers.runner.drafting_executor import drafting_executor
from workers.runner.executor import StepExecutor
from workers.runner.model_runner import ModelRunner
from workers.runner.step_inputs import LaunchedStep
from workers.runner.step_pieces import ReadableStep
from workers.scheduler.plan import StepPlan
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS
from workers.speculation.chain import HostChainVerifier

CPU = torch.device("cpu")


class DraftedRunner(ModelRunner):
    """Knows nothing of drafts; who sends it plans does."""

    num_padding_slots = 1

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, SingleRank(), CPU, lambda done, total: None)
        self._config = config

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        speculation = self._config.speculation
        assert speculation is not None, "a runner of drafts is asked for with speculative"
        num_slots, max_context_len = self._req_to_token.shape
        verifier = HostChainVerifier()
        return drafting_executor(executor, speculation, num_slots, max_context_len, verifier)

    def engine(self) -> Engine:
        return Engine.of_runner(self._config, self)


class ReplayedVerifyBackend(TorchNativeBackend, GraphAttentionBackend):
    """torch_native whose metadata a replay renews from device tensors. Rows that pad a batch have
    the dummy page's keys."""

    captures_verify = True

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Nothing is static."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """record_step_tables makes everything."""

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        new_lens = forward_batch.extend_seq_lens_cpu
        seq_lens = np.maximum(forward_batch.seq_lens.numpy(), new_lens)
        self.init_forward_metadata(
            replace(
                forward_batch,
                seq_lens=torch.from_numpy(seq_lens),
                seq_lens_cpu=seq_lens,
                extend_prefix_lens_cpu=seq_lens - new_lens,
            )
        )


class ClosureCapturer:
    """A replay runs the closure again and puts its result where the capture's was."""

    def __init__(self) -> None:
        self.num_replays = 0

    def capture(self, run):
        out = run()

        def replay() -> None:
            self.num_replays += 1
            out.copy_(run())

        return replay, out


class ReplayingRunner(DraftedRunner):
    """Captures the graph of a step that went without one, as on CUDA."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._backend = ReplayedVerifyBackend(
            self._backend.config, self._backend.req_to_token_pool, self._backend.token_to_kv_pool
        )
        self._timer._backend = self._backend
        self.capturer = ClosureCapturer()
        tables = self._backend.req_to_token_pool.own_tables
        lengths = range(2, 2 + config.max_draft_tokens)
        shapes = verify_shapes(config.max_running_requests, lengths)
        max_tokens = max(one.rows * one.tokens_per_row for one in shapes)
        self.graphs = VerifyGraphs(
            self._model,
            self._backend,
            TorchStepKernels(tables, self._sampling.last_token_ids),
            self.capturer,
            StagingRing.on_host(max_tokens, MAX_UNCOMMITTED_PLANS, len(tables)),
            shapes,
            padding_slot=config.max_running_requests,
        )

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> ReadableStep:
        if not self.graphs.covers(plan) or len(plan.masked_slots):
            launched = super()._launch(plan)
            self.graphs.capture_after(plan)
            return launched
        self._sampling.admit(plan.admitted)
        self._inputs.apply_memory_writes(plan)
        step = self.graphs.run(plan, self._sampling)
        return step if isinstance(step, VerifiedStep) else LaunchedStep(step)
