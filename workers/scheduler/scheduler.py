"""The scheduler: which tokens run in the next step, and what became of the last one.

Knows requests, slots and page numbers; no tensors, no device, no text. Not thread-safe: one thread
owns it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from attention.memory.layout import EveryToken
from workers.constraints.masks import MaskRow
from workers.constraints.matcher import TokenMatcher
from workers.engine.protocol import AccountPages, EngineStats, GenerateRequest, StepOutput
from workers.errors import IntegrityError, id_in_use
from workers.kv_cache.page_allocator import PageAllocator
from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import NoPrefixCache, PrefixCache
from workers.kv_cache.radix_cache import RadixCache
from workers.kv_cache.snapshot_cache import SnapshotRadixCache
from workers.scheduler.adapter_memory import adapter_memories
from workers.scheduler.batch_policy import AlternatingBatches, BatchPolicy, MixedBatches
from workers.scheduler.bounded_memory import BoundedMemory
from workers.scheduler.commit import Committer
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.constrained_rows import ConstrainedRows
from workers.scheduler.decode_batch import DecodeBatcher
from workers.scheduler.encoder_memory import EncoderMemory
from workers.scheduler.forced_rows import ForcedRows
from workers.scheduler.integrity import check_pages
from workers.scheduler.ledger import Ledger
from workers.scheduler.media_memory import MediaMemory
from workers.scheduler.output_forecast import OutputForecast
from workers.scheduler.plan import PlanPart, StepPlan, StepResult
from workers.scheduler.plan_draft import PendingCommit, PlanDraft
from workers.scheduler.prefill_batch import Admission, PrefillBatcher
from workers.scheduler.prefills_under_way import PrefillsUnderWay
from workers.scheduler.request import NO_SLOT, ConstrainedRequest, PooledRequest, Request
from workers.scheduler.request_memory import RequestMemory
from workers.scheduler.retraction import Retractor
from workers.scheduler.run_batch import DecodeRowAdder, RunBatcher
from workers.scheduler.running_table import RunningTable
from workers.scheduler.snapshot_memory import SnapshotMemory
from workers.scheduler.step_budget import InterTokenTarget, NoTarget, StepTarget
from workers.scheduler.step_cost import StepCostModel
from workers.scheduler.step_filling import EvenSteps, FilledSteps
from workers.scheduler.step_work import StepWork
from workers.scheduler.submission import Submission
from workers.scheduler.waiting_queue import WaitingQueue
from workers.speculation.policies import make_policy
from workers.speculation.policy import DecodeShape

MAX_UNCOMMITTED_PLANS = 2


class Scheduler:
    """Continuous batching over paged memory.

    The step is schedule() -> run the plan -> commit(). One more plan may be scheduled while one is
    not committed; steps must run on the device in the order of their plans, because pages are
    reused as soon as the last plan that reads them has been handed out.

    Every accepted request yields exactly one StepOutput with a finish_reason: from commit(), or,
    when it was aborted, from the next commit() or take_outputs().
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._ledger = Ledger()
        self._waiting = WaitingQueue()
        self._submission = Submission(config, self._waiting, self._ledger)
        retentions = [account.retention for account in config.bounded]
        self._table = RunningTable(
            config.max_slots,
            config.max_pages_per_request,
            config.page_size,
            len(retentions),
            2 * config.max_draft_tokens + config.can_run_again,
        )
        self._cache, self._states = _build_cache(config, self._table, self._num_written_tokens)
        self._pool = PagePool(_allocators(config), self._cache)
        self._bounded = BoundedMemory(self._table, self._pool, self._cache, retentions)
        self._encoders = _encoder_memories(config)
        self._account_names = _account_names(config)
        self._media = _media_memories(config)
        self._adapters = adapter_memories(config.num_adapter_slots)
        beside: tuple[PlanPart, ...] = *self._media, *self._adapters
        self._plan_parts: tuple[PlanPart, ...] = *self._encoders, *self._states, *beside
        self._memory = RequestMemory(
            self._table,
            self._pool,
            self._cache,
            self._bounded,
            self._encoders,
            self._states,
            self._media,
            self._adapters,
        )
        self._forecast = OutputForecast()
        self._retractor = Retractor(
            self._table, self._memory, self._waiting, self._forecast, self._ledger.counters
        )
        self._prompt_step_costs = StepCostModel()
        self._drafts = make_policy(
            config.draft_policy, config.max_draft_tokens, config.has_draft_trees
        )
        self._policy = self._build_policy()
        self._committer = Committer(
            self._table, self._memory, self._ledger, self._forecast, clock, self._drafts
        )
        self._constrained_rows = ConstrainedRows(config.can_run_again, config.max_draft_tokens > 0)
        self._uncommitted: deque[PendingCommit] = deque()
        self._next_step_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is alive, a plan uncommitted or an output not handed out."""
        return bool(self._ledger.num_live or self._uncommitted or self._ledger.last_words)

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request. Raises RequestRejectedError; then nothing was kept of it."""
        pooling = request.pooling
        make = Request if pooling is None else partial(PooledRequest, pooling=pooling)
        self._submit(request, make)

    def submit_constrained(self, request: GenerateRequest, matcher: TokenMatcher) -> None:
        """As submit, of a request whose grammar has been compiled. matcher: it has gone past the
        output that the request brings. The grammar alone says when the output may end."""
        sampling = msgspec.structs.replace(request.sampling, min_tokens=0)
        request = msgspec.structs.replace(request, sampling=sampling)
        self._submit(request, partial(ConstrainedRequest, matcher=matcher))

    def check(self, request: GenerateRequest, num_elsewhere: int, tokens_elsewhere: int) -> None:
        """Raise RequestRejectedError where submit would. elsewhere: what waits to be submitted."""
        self._check_id(request.request_id)
        self._submission.check(request, num_elsewhere, tokens_elsewhere)

    def _submit(self, request: GenerateRequest, make: Callable[..., Request]) -> None:
        self._check_id(request.request_id)
        accepted = self._submission.accept(request, self._clock(), make)
        self._ledger.add(accepted)
        self._waiting.push(accepted)

    def _check_id(self, request_id: str) -> None:
        if self._ledger.is_known(request_id):
            raise id_in_use(request_id)

    def constrained_rows(self, plan: StepPlan) -> list[MaskRow]:
        """Rows of an uncommitted plan that sample under a grammar, every plan before it being
        committed. Those whose requests have ended are left out. plan: as it runs, with its drafts
        named."""
        (record,) = (one for one in self._uncommitted if one.step_id == plan.step_id)
        return self._constrained_rows.of(record, plan)

    def draft_less(self, rows: Sequence[MaskRow]) -> None:
        """These cannot run again, mostly for having drafts or room for some, and kept their step
        waiting: half as many drafts from now on."""
        self._table.max_drafts[[row.slot for row in rows]] //= 2

    def run_again(self, plan: StepPlan, rows: Sequence[MaskRow]) -> None:
        """Rows of an uncommitted plan, behind which none is scheduled, that have no mask: what they
        sample is nobody's, and the next plan has them again. Each must be able to."""
        (record,) = (one for one in self._uncommitted if one.step_id == plan.step_id)
        slots = {row.slot for row in rows}
        # A request's forced tokens stand before the one that waits for a mask.
        last = {one.slot: row for row, one in enumerate(record.sampling) if one.slot in slots}
        record.void_rows.update(last.values())
        for slot in last:
            self._table.take_back(slot)

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it is; its pages are back at once.

        False when no such request is alive. Its last output, with FinishReason.ABORT and no
        tokens, comes from the next commit() or take_outputs(); until then its id stays in use.
        """
        request = self._ledger.get(request_id)
        if request is None:
            return False
        if request.slot == NO_SLOT:
            self._waiting.remove(request)
        else:
            self._memory.release(request)
        self._ledger.end_aborted(request)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is none, or none before a plan is committed.

        Raises RuntimeError when two plans are uncommitted.
        """
        if len(self._uncommitted) == MAX_UNCOMMITTED_PLANS:
            raise RuntimeError(f"{MAX_UNCOMMITTED_PLANS} plans are uncommitted: commit one first")
        draft = self._compose()
        if draft.is_empty:
            return None
        plan, record = draft.build(self._memory.take_table_writes(), self._memory.take_cleared())
        for part in self._plan_parts:
            plan = part.add_to(plan)
        self._uncommitted.append(record)
        self._next_step_id += 1
        self._forecast.on_step()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        """Take in the result of the oldest uncommitted plan.

        Returns outputs of aborted requests, then one for each request that got a token.
        Raises RuntimeError when plan is not the oldest, ValueError when result does not fit it.
        """
        if not self._uncommitted or self._uncommitted[0].step_id != plan.step_id:
            expected = self._uncommitted[0].step_id if self._uncommitted else "none"
            raise RuntimeError(f"plan {plan.step_id} is not next to commit, {expected} is")
        for states in self._states:
            states.settle(plan.step_id)
        outputs = self._committer.commit(self._uncommitted.popleft(), result)
        return [*self._ledger.take_outputs(), *outputs] if self._ledger.last_words else outputs

    def observe_duration(self, plan: StepPlan, seconds: float, gap_s: float = 0.0) -> None:
        """Learn how long a plan took, from its first launch to its last token, in order of plans.
        gap_s: how long the device waited for the host before.

        Later steps are sized by it where SchedulerConfig.target_inter_token_s is set, and drafts
        are chosen by it.
        """
        grants = plan.encoder.grants
        has_read = bool(grants) and any(grant.source is not None for grant in grants)
        has_prompts = not plan.is_decode and bool((~plan.decode_rows).any())
        if (has_read or has_prompts or plan.media.added) and not plan.prompt_logprobs:
            self._prompt_step_costs.observe(StepWork.of(plan), seconds)
        elif self._config.max_draft_tokens and not has_prompts:
            num_drafts, num_keys = int(plan.num_new_tokens.max()) - 1, int(plan.prefix_lens.sum())
            shape = DecodeShape(plan.batch_size, num_drafts, num_keys)
            self._drafts.observe_step(shape, seconds, gap_s)

    def live_request_ids(self) -> list[str]:
        """Of requests whose last output is still to be made."""
        return self._ledger.live_ids()

    def forget_prefixes(self) -> None:
        """Nothing that is computed from now on begins with what was cached before."""
        self._pool.forget_cached()

    def take_outputs(self) -> list[StepOutput]:
        """Outputs of requests aborted since the last commit(), for when no step runs."""
        return self._ledger.take_outputs()

    def stats(self) -> EngineStats:
        """num_pages counts the pages that can be handed out: used, evictable and free ones, of the
        account of which most is used."""
        counters, horizon = self._ledger.counters, self._cache.eviction_horizon
        accounts = self._account_pages()
        fullest = max(accounts, key=lambda account: account.usage)
        return EngineStats(
            num_running=self._table.num_running,
            num_waiting=len(self._waiting),
            queued_tokens=self._waiting.num_tokens + self._table.num_prefill_tokens,
            running_tokens=int(self._table.seq_lens.sum()),
            num_pages=fullest.num_pages,
            num_used_pages=fullest.num_used,
            num_evictable_pages=fullest.num_evictable,
            evicted_ordinary=horizon.ordinary,
            evicted_shared=horizon.shared,
            step_prediction_error_s=self._prompt_step_costs.error_s,
            accounts=accounts,
            num_drafted_runs=sum(counters.num_runs_by_accepted),
            **counters.as_stats(),
            accepted_by_position=counters.accepted_by_position(self._config.max_draft_tokens),
        )

    def _account_pages(self) -> tuple[AccountPages, ...]:
        counts = [*self._pool.counts(), *(memory.counts() for memory in self._encoders)]
        return tuple(map(AccountPages, self._account_names, *zip(*counts, strict=True)))

    def _num_written_tokens(self) -> int:
        return self._ledger.counters.num_written_tokens

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pages, locks, slots and requests fit together exactly."""
        check_pages(self._table, self._pool, self._cache, self._bounded)
        for memory in self._encoders:
            memory.check_integrity(self._table.requests())
        for media in self._media:
            media.check_integrity(self._table.requests())
        for adapters in self._adapters:
            adapters.check_integrity(self._table.requests())
        for states in self._states:
            states.check_integrity()
        num_live = self._ledger.num_live
        if num_live != self._table.num_running + len(self._waiting):
            raise IntegrityError(
                f"{num_live} requests are alive, {self._table.num_running} run and "
                f"{len(self._waiting)} wait"
            )
        num_queued = sum(request.num_queued_tokens for request in self._waiting)
        if num_queued != self._waiting.num_tokens:
            raise IntegrityError(
                f"{num_queued} tokens wait, {self._waiting.num_tokens} are counted"
            )

    def _compose(self) -> PlanDraft:
        """Empty when nothing is alive, or when it takes a commit to go on.

        Raises IntegrityError otherwise. With every plan committed, each prefilled request decodes
        or is retracted for another; if there is none, a half-prefilled one, of which there is at
        most one, or the head of the queue finds the whole pool free, where it fits.
        """
        config = self._config
        sends_tokens = config.max_draft_tokens > 0
        draft = PlanDraft(self._next_step_id, config.max_step_tokens, sends_tokens)
        self._policy.compose(draft, can_retract=not self._uncommitted)
        if draft.is_empty and self._ledger.num_live and not self._uncommitted:
            raise IntegrityError(
                f"{self._table.num_running} requests run, {len(self._waiting)} wait and "
                f"{self._pool.num_available_pages} of {self._pool.num_usable_pages} pages are "
                "available, yet nothing can run"
            )
        return draft

    def _build_policy(self) -> BatchPolicy:
        config = self._config
        forced = None
        if config.can_repeat_slots:
            max_rows = min(config.max_slots, config.max_step_tokens)
            forced = ForcedRows(self._table, self._pool, max_rows)
        decode: DecodeRowAdder = DecodeBatcher(
            self._table, self._memory, self._pool, self._retractor, forced
        )
        if config.max_draft_tokens:
            decode = RunBatcher(
                decode, self._table, self._pool, config.max_step_tokens, self._drafts
            )
        admission = Admission(
            self._table,
            self._memory,
            self._waiting,
            self._pool,
            self._forecast,
            self._ledger.counters,
            self._under_way() if config.enable_prefix_cache else None,
            self._clock,
        )
        prefill = PrefillBatcher(self._table, self._memory, self._waiting, admission)
        if config.enable_mixed_batches:
            return MixedBatches(decode, prefill, self._build_target())
        return AlternatingBatches(decode, prefill, self._build_target())

    def _under_way(self) -> PrefillsUnderWay:
        return PrefillsUnderWay(self._config.page_size, self._states)

    def _build_target(self) -> StepTarget:
        target_s, product_s = self._config.target_inter_token_s, self._config.product_s
        if target_s is None:
            return NoTarget()
        filling = FilledSteps(product_s) if product_s else EvenSteps()
        return InterTokenTarget(target_s, self._prompt_step_costs, filling)


def _build_cache(
    config: SchedulerConfig, table: RunningTable, clock: Callable[[], int]
) -> tuple[PrefixCache, tuple[SnapshotMemory, ...]]:
    retentions = [account.retention for account in config.bounded]
    if not config.enable_prefix_cache:
        return NoPrefixCache(len(retentions)), ()
    if not config.num_snapshots:
        return RadixCache(config.page_size, clock, retentions), ()
    cache = SnapshotRadixCache(config.page_size, clock, config.num_snapshots, retentions)
    return cache, (SnapshotMemory(table, cache),)


def _encoder_memories(config: SchedulerConfig) -> tuple[EncoderMemory, ...]:
    """One where the model has an encoder."""
    account = config.encoder
    if account is None:
        return ()
    return (EncoderMemory(account.num_pages, config.page_size, config.enable_prefix_cache),)


def _account_names(config: SchedulerConfig) -> tuple[str, ...]:
    """As _account_pages orders them."""
    bounded = (account.retention.name for account in config.bounded)
    encoder = () if config.encoder is None else (config.encoder.retention.name,)
    return EveryToken().name, *bounded, *encoder


def _media_memories(config: SchedulerConfig) -> tuple[MediaMemory, ...]:
    """One where the model takes images."""
    return () if config.media is None else (MediaMemory(config.media.max_tokens),)


def _allocators(config: SchedulerConfig) -> list[PageAllocator]:
    """Of the account that keeps every token, then of the bounded ones."""
    all_pages = config.num_pages, *(account.num_pages for account in config.bounded)
    return [PageAllocator(num_pages, config.page_size) for num_pages in all_pages]
