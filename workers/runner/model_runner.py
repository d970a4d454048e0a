"""ModelRunner: one rank. Model, pools, backend and sampler; a StepPlan in, token ids out.

Knows no request, no scheduler and no Ray. Every rank of an engine runs the same plans in the same
order and samples the same tokens; only rank 0 reads them back.
"""

import time
from functools import partial
from typing import ClassVar

import numpy as np
import torch

from attention.memory.req_to_token_pool import ReqToTokenPool
from workers.adapters.stage import AdapterStage, adapter_stages, dress
from workers.config import EngineConfig
from workers.constraints.desk import GrammarDesk
from workers.engine.media import MediaInfo
from workers.engine.protocol import ModelInfo
from workers.engine.rest import NoRest, RestingMemory
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel, load_model, resolve_dtype
from workers.loading.weights import OnProgress
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.parallel.group import TPGroup
from workers.pooling.states import needs_all_states, pool_states
from workers.runner.cpu_threads import limit_cpu_threads
from workers.runner.deterministic import check_deterministic
from workers.runner.encoder_stage import encoder_stages, encoder_table_width
from workers.runner.executor import (
    StepExecutor,
    StepOutcome,
    ThreadStepExecutor,
    attention_records,
)
from workers.runner.expert_loads import expert_loads
from workers.runner.grammars import (
    can_repeat_slots,
    can_run_again,
    make_grammar_desk,
    why_no_grammars,
)
from workers.runner.kv_memory import create_kv_pool
from workers.runner.largest_step import largest_step, without_trace
from workers.runner.mask_inbox import MaskInbox, MaskSource
from workers.runner.media_stage import media_stages
from workers.runner.rest import HostRest, model_again, named_tensors, rest_obstacle
from workers.runner.sizing import AttentionPlan, attention_times, make_timer, plan_attention
from workers.runner.state_sizing import tell_of_states
from workers.runner.state_steps import begin_step, slot_states
from workers.runner.step_inputs import BegunStep, LaunchedStep, StepInputBuilder, StepInputs
from workers.runner.step_pieces import Launch, ReadableStep, launch_in_pieces
from workers.runner.value_check import value_checks
from workers.sampling.logprobs import LogprobTensors, prompt_logprobs
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens, SamplingState
from workers.sampling.token_masks import find_masks, rule_out
from workers.sampling.transfer import start_download
from workers.scheduler.config import BoundedAccount, EncoderAccount, SchedulerConfig
from workers.scheduler.plan import IntArray, PromptLogprobRow, StepPlan


class ModelRunner:
    """Runs plans on one device, each to its end before run returns.

    num_padding_slots: rows of the slots' tables beyond max_running_requests, which no request owns.
    Raises ConfigError, ModelLoadError or AttentionBackendError if the model, the flags and the
    device do not fit together.
    """

    num_padding_slots: ClassVar[int] = 0
    adapters: tuple[AdapterStage, ...] = ()

    def __init__(
        self, config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
    ) -> None:
        limit_cpu_threads(config, device)
        loaded = load_model(config, tp, device, resolve_dtype(config, device), on_progress)
        if config.deterministic:
            check_deterministic(loaded)
        num_slots = config.max_running_requests + self.num_padding_slots
        # Before what takes the rest of the device's memory.
        self.adapters = adapter_stages(config, loaded, tp, num_slots)
        attention = self._plan_attention(config, loaded, tp, on_progress)
        self.facts = loaded.facts
        self.dtype = loaded.dtype
        self.page_size = attention.config.page_size
        self._retentions = attention.config.bounded_retentions
        self.pages_by_account = tuple(map(tp.all_reduce_min, attention.pages_by_account))
        self.num_pages = self.pages_by_account[0]
        self._model = loaded.model
        self._weights = named_tensors(loaded.model)
        self._rest_obstacle = rest_obstacle(config, device, loaded.model.encoder is not None)
        self._weights_lease = loaded.lease
        req_to_token_pool = ReqToTokenPool(
            num_slots,
            attention.config.max_context_len,
            device,
            attention.config.encoder_account,
            encoder_table_width(attention.config),
        )
        token_to_kv_pool = create_kv_pool(attention.config, self.pages_by_account, loaded.kv_scales)
        self._token_to_kv_pool = token_to_kv_pool
        self._backend = attention.build(req_to_token_pool, token_to_kv_pool)
        self._attention_times = attention_times(attention.routes)
        self._model.prepare(req_to_token_pool, token_to_kv_pool)
        self._num_snapshots = tp.all_reduce_min(attention.num_snapshots)
        self._states = slot_states(self._model, num_slots, device, self._num_snapshots)
        tell_of_states(config, self._model, self.facts.architecture, self._states)
        self._encoders = encoder_stages(
            self._model.encoder, attention.config, req_to_token_pool, token_to_kv_pool
        )
        self._media = media_stages(self._model.media, device)
        self._value_checks = value_checks(attention.config, token_to_kv_pool)
        self._timer = make_timer(self._backend, device)
        self._req_to_token = req_to_token_pool.req_to_token
        self._inputs = StepInputBuilder(req_to_token_pool, token_to_kv_pool, device)
        self._sampling = SamplingState(
            num_slots, self.facts.vocab_size, self.facts.eos_token_ids, device
        )
        self._device = device
        self._is_alone = tp.size == 1
        self._product_s: tuple[float, ...] = ()
        self._expert_loads = expert_loads(config, self._model, device)
        self._masks = MaskInbox()
        self._mask_source: MaskSource = self._masks
        self._place_beside(config)

    def _place_beside(self, config: EngineConfig) -> None:
        """Give memory to what stands beside the model. Nothing has been launched or captured."""

    def _plan_attention(
        self, config: EngineConfig, loaded: LoadedModel, tp: TPGroup, on_progress: OnProgress
    ) -> AttentionPlan:
        """on_progress: of what is loaded beside the model."""
        return plan_attention(config, loaded, self.num_padding_slots, tp)

    def model_info(self, config: EngineConfig) -> ModelInfo:
        return ModelInfo(
            name=config.served_model_name or self.facts.name,
            vocab_size=self.facts.vocab_size,
            max_context_len=self.facts.max_context_len,
            eos_token_ids=self.facts.eos_token_ids,
            attention_backend=self._backend.capability.name,
            page_size=self.page_size,
            num_pages=self.num_pages,
            tp_size=config.tp_size,
            dtype=str(self.dtype).removeprefix("torch."),
            max_request_len=self.scheduler_config(config).max_request_len,
            has_prefix_cache=self.scheduler_config(config).enable_prefix_cache,
            has_grammars=not why_no_grammars(self.facts),
            encoder=None if self._model.encoder is None else self._model.encoder.info,
            embedding=self.facts.embedding,
            media=self._media_info(config),
            attention_times=self._attention_times,
            adapters=self.adapters[0].info if self.adapters else None,
            sleep_obstacle=self._rest_obstacle,
        )

    def resting_memory(self, config: EngineConfig) -> RestingMemory:
        """What an engine around this runner gives back while it sleeps."""
        if self._rest_obstacle:
            return NoRest()
        states = (tensor for kept in self._states for tensor in kept.tensors())
        kept = (*self._token_to_kv_pool.tensors(), *states)
        load = partial(model_again, config, self._device, self.dtype)
        return HostRest(kept, self._weights, load)

    def scheduler_config(self, config: EngineConfig) -> SchedulerConfig:
        return SchedulerConfig(
            page_size=self.page_size,
            num_pages=self.num_pages,
            max_running_requests=config.max_running_requests,
            max_context_len=self.facts.max_context_len,
            max_step_tokens=config.max_step_tokens,
            target_inter_token_s=config.target_inter_token_s,
            max_waiting_requests=config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
            enable_prefix_cache=self._has_prefix_cache(config),
            enable_mixed_batches=config.enable_mixed_batches,
            eos_token_ids=self.facts.eos_token_ids,
            vocab_size=self.facts.vocab_size,
            seed=config.seed,
            bounded=tuple(map(BoundedAccount, self._retentions, self.pages_by_account[1:])),
            max_draft_tokens=config.speculation.max_draft_tokens if config.speculation else 0,
            draft_policy=config.draft_policy,
            has_draft_trees=bool(config.draft_tree),
            can_repeat_slots=can_repeat_slots(config, self._model) and not self._retentions,
            can_run_again=can_run_again(self._model),
            encoder=self._encoder_account(),
            num_snapshots=self._num_snapshots,
            product_s=self._product_s,
            embedding_size=0 if self.facts.embedding is None else self.facts.embedding.size,
            media=self._media_info(config),
            max_media_bytes=config.max_media_bytes,
            num_adapter_slots=config.max_loras,
        )

    def _media_info(self, config: EngineConfig) -> MediaInfo | None:
        encoder = self._model.media
        return None if encoder is None else encoder.info(config.media_store_bytes)

    def _encoder_account(self) -> EncoderAccount | None:
        encoder = self._model.encoder
        return None if encoder is None else EncoderAccount(self.pages_by_account[-1], encoder.info)

    def _has_prefix_cache(self, config: EngineConfig) -> bool:
        has_states = bool(self._model.state_entries)
        return config.enable_prefix_cache and (self._num_snapshots > 0 or not has_states)

    def make_executor(self) -> StepExecutor:
        """What runs this runner's steps beside the engine's thread."""
        return ThreadStepExecutor(self.run, self._masks)

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        """Around what sends plans to all ranks: who proposes drafts, where no rank does."""
        return executor

    def take_masks_from(self, source: MaskSource) -> None:
        """On a follower: rank 0's masks come from elsewhere."""
        self._mask_source = source

    def grammar_desk(self) -> GrammarDesk:
        """Where requests with grammars are prepared for this runner's steps."""
        return make_grammar_desk(self.facts)

    def run(self, plan: StepPlan) -> StepOutcome:
        """Run a plan and wait for its tokens."""
        started_s = time.perf_counter()
        result = self._launch_within_memory(plan, self._launch).read()
        finished_s = time.perf_counter()
        attention = attention_records(self._timer.drain())
        experts = None if self._expert_loads is None else self._expert_loads.read_now()
        return StepOutcome(result, started_s, finished_s, attention, experts=experts)

    def run_follower(self, plan: StepPlan) -> None:
        """Run a plan for its side effects on this rank: KV, sampled tokens, penalties."""
        self._launch(plan)
        self._timer.drain()

    def prepare_while_idle(self) -> bool:
        """As StepExecutor's. All ranks of a group call it alike."""
        return False

    def close(self) -> None:
        """Wait for all steps. None may be launched afterwards."""

    def try_largest_step(self, config: EngineConfig) -> None:
        """Run the step that takes the most memory, before any request comes. Leaves the pool clear
        and the tables of sampling that few requests need as they were: not made.

        Raises ConfigError when there is not enough beside weights and KV memory.
        """
        plan = largest_step(self.scheduler_config(config))
        try:
            self._launch(plan)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"beside weights and {self.num_pages} pages of KV memory a step of "
                f"{plan.num_tokens} tokens in {plan.batch_size} rows has no room: lower "
                "gpu_memory_fraction, num_pages, max_step_tokens or max_running_requests"
            ) from error
        self._timer.drain()
        self._sampling.release()
        clearing = without_trace(plan, self.page_size)
        self._inputs.apply_memory_writes(clearing)
        for encoder in self._encoders:
            encoder.apply(clearing.encoder)

    def _launch_within_memory(self, plan: StepPlan, launch: Launch) -> ReadableStep:
        """In pieces where the plan does not fit, without graphs: a plan has one slot of their ring.
        Ranks that wait for each other cannot agree on it: there the step fails (decision 0044).
        """
        try:
            return launch(plan)
        except torch.OutOfMemoryError:
            if not self._is_alone:
                raise
        # Not before the error is gone: its frames hold the step's tensors.
        return launch_in_pieces(plan, self._launch, self._free_memory)

    def _free_memory(self) -> None:
        """Give memory back that the allocator only keeps."""

    def _launch(self, plan: StepPlan) -> ReadableStep:
        return self._finish(self._begin(plan))

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> BegunStep:
        """All of a step but what waits for its masks."""
        for states in self._states:
            begin_step(states, plan, self._device)
        self._sampling.admit(plan.admitted)
        for encoder in self._encoders:
            encoder.apply(plan.encoder)
        for media in self._media:
            media.apply(plan.media)
        inputs = self._inputs.build(plan, self._timer)
        for encoder in self._encoders:
            inputs.batch.encoder_lens_cpu = encoder.lens(plan.slots)
        for media in self._media:
            inputs = media.place(plan, inputs)
        wants_all = bool(plan.prompt_logprobs or (plan.pooled and needs_all_states(plan.pooled)))
        if self.adapters:
            # Layers know a step's tokens by their number, so that none leaves some out.
            wants_all |= dress(self.adapters, plan)
        every = hidden = self._forward(inputs, wants_all)
        prompt = tuple(
            (row, self._prompt_logprobs(hidden, plan, row)) for row in plan.prompt_logprobs
        )
        if wants_all:
            hidden = hidden.index_select(0, inputs.state_indices)
        for check in self._value_checks:
            hidden = check.mark(hidden, inputs.batch, inputs.state_indices)
        num_sampling = len(inputs.sample_slots)
        unfinished = hidden[num_sampling:]
        chunk_has_nan = start_download(unfinished.isnan().any(dim=-1)) if len(unfinished) else None
        pooled = pool_states(plan, every, unfinished) if plan.pooled else None
        logits = self._model.compute_logits(hidden[:num_sampling]) if num_sampling else None
        return BegunStep(inputs, logits, prompt, chunk_has_nan, pooled)

    @torch.inference_mode()
    def _finish(self, begun: BegunStep) -> LaunchedStep:
        # Behind all that takes memory: a launch that fails must not have counted its tokens.
        sampled = self._sample(begun)
        launched = LaunchedStep(
            sampled.start_download(), begun.prompt_logprobs, begun.chunk_has_nan, begun.pooled
        )
        # Last, so that a launch that fails can be repeated: see launch_in_pieces.
        for states in self._states:
            states.commit()
        return launched

    def _forward(self, inputs: StepInputs, wants_all: bool) -> torch.Tensor:
        """Final states of all new tokens, or of every row's last one only, sampling rows first."""
        batch = inputs.batch
        batch.input_ids = self._sampling.resolve(batch.input_ids, inputs.token_slots)
        self._timer.begin_step(batch)
        try:
            self._backend.init_forward_metadata(batch)
            return self._final_states(inputs, wants_all)
        finally:
            self._timer.end_step()

    def _final_states(self, inputs: StepInputs, wants_all: bool) -> torch.Tensor:
        return self._model_output(inputs, wants_all).hidden

    def _model_output(self, inputs: StepInputs, wants_all: bool) -> ModelOutput:
        batch = inputs.batch
        tokens = TokenInputs(batch.input_ids, inputs.positions, inputs.embeddings)
        if wants_all:
            every: ModelOutput = self._model(tokens, batch)
            return every
        return self._model.forward_rows(tokens, batch, inputs.state_indices)

    def _sample(self, begun: BegunStep) -> SampledTokens:
        inputs, logits = begun.inputs, begun.logits
        if logits is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return SampledTokens(nothing, nothing.bool(), None)
        slots, positions = inputs.sample_slots, inputs.sample_positions
        if len(inputs.masked_slots):
            sampled = self._sample_masked(
                inputs.step_id, inputs.masked_slots, inputs.drafts, logits, slots, positions
            )
        else:
            sampled = self._sampling.sample(logits, slots, positions, inputs.drafts)
        return self._take_samples(sampled, inputs)

    def _sample_masked(
        self,
        step_id: int,
        masked_slots: IntArray,
        drafts: RunDrafts | None,
        logits: torch.Tensor,
        slots: IntArray,
        positions: IntArray,
    ) -> SampledTokens:
        """Waits for the masks of the step."""
        masks = self._mask_source.wait(step_id)
        found = find_masks(slots, positions, masked_slots, masks)
        allowed = rule_out(logits, found, masks)
        return self._sampling.sample_from(allowed, logits, slots, positions, found.void, drafts)

    def _take_samples(self, sampled: SampledTokens, inputs: StepInputs) -> SampledTokens:
        """Keep what later steps go on from; returns what the host is told."""
        slots = inputs.sample_slots_device
        self._sampling.remember_last(inputs.sample_slots, slots, sampled.token_ids)
        return sampled

    def _prompt_logprobs(
        self, hidden: torch.Tensor, plan: StepPlan, row: PromptLogprobRow
    ) -> LogprobTensors:
        start = int(plan.num_new_tokens[: row.row].sum())
        ids = torch.from_numpy(row.target_ids.astype(np.int64))
        targets = ids.to(self._device, non_blocking=True)
        own = hidden[start : start + len(row.target_ids)]
        head, vocab_size = self._model.compute_logits, self.facts.vocab_size
        return prompt_logprobs(head, own, targets, row.num_top, vocab_size).start_download()
