"""A runner without a model: what it stores for a token depends on everything that the page table
reaches before it, so that one wrongly shared, reused or forgotten page changes the output. Each
account with a bounded retention stores values of its own, of what a token can see there. So does
a state, which a token gets from the one before it. What an encoder made of a request's input counts
as what stands before all of its tokens.
"""

from dataclasses import dataclass

import numpy as np

from attention.memory.layout import EveryToken
from tests.fakes.logprobs import pack
from tests.unit.workers.scheduler.encoder_history import EncoderHistory, encoded
from tests.unit.workers.scheduler.history_states import HistoryStates, StateWindow
from workers.engine.logprobs import PackedLogprobs, TokenLogprobs
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.kv_cache.bounded_pages import Retention
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import (
    DRAFT_TOKEN,
    LAST_SAMPLED_TOKEN,
    AdmittedRequest,
    StepPlan,
    StepResult,
    TableWrite,
)

MASK = (1 << 64) - 1
_WEIGHTS = np.random.default_rng(7).integers(1, 2**63, size=4096, dtype=np.uint64) | np.uint64(1)


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def attend(values: np.ndarray) -> int:
    """A number that depends on every value, uint64 (n,), and on its place."""
    return int((values * _WEIGHTS[: len(values)]).sum(dtype=np.uint64))


def value_of(token_id: int, before: np.ndarray) -> int:
    """What stands in the pool for a token after the values before it."""
    return _mix(attend(before) + (token_id + 1) * 0x9E3779B97F4A7C15 & MASK)


def next_token(values: np.ndarray, seed: int, vocab_size: int, masked: frozenset[int]) -> int:
    """Keyed on seed and absolute position, as real seeded sampling is."""
    key = _mix(attend(values) ^ _mix((seed & MASK) + len(values)))
    token_id = key % vocab_size
    while token_id in masked:
        token_id = (token_id + 1) % vocab_size
    return token_id


def retentions_of(config: SchedulerConfig) -> list[Retention]:
    """Of every account; the first keeps every token."""
    return [EveryToken(), *(account.retention for account in config.bounded)]


def all_retentions(config: SchedulerConfig) -> list[Retention]:
    """As retentions_of; a state, where the model keeps one, sees what was just before."""
    states = [StateWindow()] if config.num_snapshots else []
    return [*retentions_of(config), *states]


def visible(retention: Retention, length: int) -> slice:
    """What the last of so many tokens sees, itself included."""
    return slice(retention.first_visible(max(length - 1, 0)), length)


def joined(
    config: SchedulerConfig, values: list[np.ndarray], length: int, source: np.ndarray
) -> np.ndarray:
    """What a final state is made of: all that the last of so many tokens sees in any account.

    values: by account, uint64 (at least length,). source: what the encoder made.
    """
    seen = zip(all_retentions(config), values, strict=True)
    own_tokens = [own[visible(retention, length)] for retention, own in seen]
    return np.concatenate([source, *own_tokens])


def add_token(
    config: SchedulerConfig, values: list[np.ndarray], token_id: int, source: np.ndarray
) -> list[np.ndarray]:
    """values with one more token's."""
    length = len(values[0])
    return [
        np.append(own, np.uint64(value_of(token_id, np.concatenate([source, own[first:]]))))
        for first, own in (
            (retention.first_visible(length), own)
            for retention, own in zip(all_retentions(config), values, strict=True)
        )
    ]


def prompt_logprob(values: np.ndarray, target_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(_mix(attend(values) + target_id) % 1000), 1, [], [])


def output_logprob(values: np.ndarray) -> TokenLogprobs:
    return TokenLogprobs(-float(_mix(attend(values)) % 1000), 1, [], [])


def all_locations(plan: StepPlan) -> tuple[np.ndarray, ...]:
    """Where each account's values of the new tokens go."""
    return plan.out_cache_loc, *plan.bounded_cache_locs


@dataclass
class Reference:
    token_ids: list[int]
    finish_reason: FinishReason
    stop_token_id: int | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs | None]


def stop_ids_of(config: SchedulerConfig, request: GenerateRequest) -> frozenset[int]:
    eos = () if request.sampling.ignore_eos else config.eos_token_ids
    return frozenset((*eos, *request.sampling.stop_token_ids))


def run_alone(config: SchedulerConfig, request: GenerateRequest) -> Reference:
    """The request's result by the definition: no pages, no batch, no scheduler. Needs a seed."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    stop_ids = stop_ids_of(config, request)
    limit = config.max_request_len - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    values = [np.zeros(0, dtype=np.uint64) for _ in all_retentions(config)]
    source = encoded(request.encoder_input)
    prompt_logprobs: list[TokenLogprobs | None] = [None]
    for position, token_id in enumerate(prompt):
        values = add_token(config, values, token_id, source)
        if position + 1 < len(prompt):
            state = joined(config, values, position + 1, source)
            prompt_logprobs.append(prompt_logprob(state, prompt[position + 1]))
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while True:
        masked = stop_ids if len(output) < sampling.min_tokens else frozenset()
        state = joined(config, values, len(values[0]), source)
        logprobs.append(output_logprob(state))
        output.append(next_token(state, sampling.seed or 0, config.vocab_size, masked))
        if output[-1] in stop_ids and not masked:
            return Reference(output, FinishReason.STOP, output[-1], logprobs, prompt_logprobs)
        if len(output) == limit:
            return Reference(output, FinishReason.LENGTH, None, logprobs, prompt_logprobs)
        values = add_token(config, values, output[-1], source)


def cache_indices_of(write: TableWrite, page_size: int) -> np.ndarray:
    """What a table write stands for, int32 (n,)."""
    offsets = np.arange(page_size, dtype=np.int32)
    return (write.pages[:, None] * np.int32(page_size) + offsets).ravel()


class HistoryRunner:
    """Carries plans out in order, as a device would, and distrusts them."""

    def __init__(self, config: SchedulerConfig) -> None:
        rng = np.random.default_rng(1)
        all_pages = config.num_pages, *(account.num_pages for account in config.bounded)
        self._config = config
        self._retentions = retentions_of(config)
        self._pools = [
            rng.integers(0, 2**63, num_pages * config.page_size, dtype=np.uint64)
            for num_pages in all_pages
        ]
        shape = config.max_running_requests, config.max_context_len
        self.states = HistoryStates(config.num_snapshots, value_of)
        self._tables = [np.zeros(shape, dtype=np.int32) for _ in all_pages]
        self.encoders = EncoderHistory(config)
        self._admitted: dict[int, AdmittedRequest] = {}
        self._lens: dict[int, int] = {}
        self._last_sampled: dict[int, int] = {}
        self._luck = np.random.default_rng(2)
        self.failing_row: int | None = None
        self.has_nan_chunks = False

    def run(self, plan: StepPlan) -> StepResult:
        """The device has no memory for failing_row, if the plan has one, in this step alone."""
        self._check(plan)
        failed_row, self.failing_row = self.failing_row, None
        self._prepare(plan)
        wanted = {entry.row: entry for entry in plan.prompt_logprobs}
        token_ids: list[int] = []
        run_lens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, PackedLogprobs] = {}
        chunk_has_nan = (self.has_nan_chunks,) * int((plan.samples == 0).sum())
        first = 0
        for row, slot in enumerate(plan.slots.tolist()):
            stop = first + int(plan.num_new_tokens[row])
            start_position = int(plan.prefix_lens[row])
            locations = [locs[first:stop] for locs in all_locations(plan)]
            if plan.samples[row] > 1:
                token_ids += self._run(slot, start_position, locations, logprobs)
                run_lens.append(len(token_ids) - sum(run_lens))
                first = stop
                continue
            locations = self._at_true_positions(slot, start_position, locations)
            self._write(slot, plan.input_ids[first:stop], locations)
            if row in wanted:
                prompt_logprobs[row] = pack(
                    [
                        prompt_logprob(self._values(slot, start_position + j + 1), target)
                        for j, target in enumerate(wanted[row].target_ids.tolist())
                    ]
                )
            if plan.samples[row]:
                run_lens.append(1)
                token_ids.append(self._sample(slot))
                logprobs.append(self._logprob(slot))
            first = stop
        self.states.save(plan)
        failed_rows = () if failed_row is None or failed_row >= plan.batch_size else (failed_row,)
        for row in failed_rows:
            self._spoil(plan, row)
            prompt_logprobs.pop(row, None)
        return StepResult(
            np.array(token_ids, dtype=np.int32),
            tuple(logprobs),
            prompt_logprobs,
            chunk_has_nan,
            failed_rows,
            np.array(run_lens if plan.has_runs else [], dtype=np.int32),
        )

    def _prepare(self, plan: StepPlan) -> None:
        for pool, cleared in zip(self._pools, (plan.cleared, *plan.bounded_cleared), strict=True):
            pool[cleared] = 0
        for admitted in plan.admitted:
            self._admit(admitted)
        assert all(self._lens[grant.slot] == 0 for grant in plan.encoder.grants)
        self.encoders.apply(plan.encoder)
        for write in plan.table_writes:
            start = write.first_page * self._config.page_size
            indices = cache_indices_of(write, self._config.page_size)
            for slot in write.slots.tolist():
                stop = start + len(indices)
                self._tables[write.account][slot, start:stop] = indices
                if write.account == 0:
                    self._lens[slot] = max(self._lens[slot], stop)
        self.states.restore(plan)

    def _run(
        self,
        slot: int,
        bound: int,
        locations: list[np.ndarray],
        logprobs: list[TokenLogprobs | None],
    ) -> list[int]:
        """Drafts are right by chance; what a wrong one and those behind it leave is anything."""
        own = self._at_true_positions(slot, bound, locations)
        token_ids: list[int] = []
        for index in range(len(own[0])):
            input_ids = np.array(token_ids[-1:] or [LAST_SAMPLED_TOKEN])
            self._write(slot, input_ids, [of_account[index : index + 1] for of_account in own])
            token_ids.append(self._sample(slot))
            logprobs.append(self._logprob(slot))
            if self._luck.random() < 0.4:
                break
        for pool, of_account in zip(self._pools, own, strict=True):
            pool[of_account[len(token_ids) :]] ^= np.uint64(MASK)
        return token_ids

    def _logprob(self, slot: int) -> TokenLogprobs | None:
        asked = self._admitted[slot].sampling.logprobs is not None
        return output_logprob(self._values(slot)) if asked else None

    def _at_true_positions(
        self, slot: int, bound: int, locations: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Where tokens stand whose plan says that they begin at bound, or earlier."""
        own = []
        for table, of_account in zip(self._tables, locations, strict=True):
            table[slot, bound : bound + len(of_account)] = of_account
            start = self._lens[slot]
            own.append(table[slot, start : start + len(of_account)].copy())
        return own

    def _spoil(self, plan: StepPlan, row: int) -> None:
        """Nobody knows how far a failed row came: what it should have written is anything."""
        self.states.spoil_slot(plan, int(plan.slots[row]))
        stop = int(plan.num_new_tokens[: row + 1].sum())
        start = stop - int(plan.num_new_tokens[row])
        for pool, locations in zip(self._pools, all_locations(plan), strict=True):
            pool[locations[start:stop]] ^= np.uint64(MASK)
        self.encoders.spoil(plan.encoder, int(plan.slots[row]))

    def _admit(self, admitted: AdmittedRequest) -> None:
        slot = admitted.slot
        self._admitted[slot] = admitted
        self._lens[slot] = 0
        self.states.admit(slot)
        self._last_sampled.pop(slot, None)
        self.encoders.forget(slot)
        for table in self._tables:
            table[slot] = 0

    def _write(self, slot: int, input_ids: np.ndarray, locations: list[np.ndarray]) -> None:
        start, source = self._lens[slot], self.encoders.values(slot)
        if self._config.num_snapshots:
            self.states.start(slot, start)
        for index, token_id in enumerate(input_ids.tolist()):
            position = start + index
            actual = self._last_sampled[slot] if token_id == LAST_SAMPLED_TOKEN else token_id
            accounts = zip(self._retentions, self._tables, self._pools, locations, strict=True)
            for retention, table, pool, of_account in accounts:
                table[slot, position] = of_account[index]
                before = pool[table[slot, retention.first_visible(position) : position]]
                before = np.concatenate([source, before])
                pool[of_account[index]] = value_of(actual, before)
            if self._config.num_snapshots:
                self.states.add(slot, position, actual)
            self._lens[slot] = position + 1

    def _values(self, slot: int, length: int | None = None) -> np.ndarray:
        """What the final state of the last of so many tokens is made of."""
        length = self._lens[slot] if length is None else length
        accounts = zip(self._retentions, self._tables, self._pools, strict=True)
        own = [pool[table[slot, visible(retention, length)]] for retention, table, pool in accounts]
        states = [self.states.at(slot, length)] if self._config.num_snapshots else []
        return np.concatenate([self.encoders.values(slot), *own, *states])

    def _sample(self, slot: int) -> int:
        admitted = self._admitted[slot]
        sampling = admitted.sampling
        eos = () if sampling.ignore_eos else self._config.eos_token_ids
        masked = frozenset((*eos, *sampling.stop_token_ids))
        values = self._values(slot)
        if self._lens[slot] - admitted.num_prompt_tokens >= sampling.min_tokens:
            masked = frozenset()
        token_id = next_token(values, admitted.seed, self._config.vocab_size, masked)
        self._last_sampled[slot] = token_id
        return token_id

    def _check(self, plan: StepPlan) -> None:
        doubt = 2 * self._config.max_draft_tokens
        is_run = plan.samples > 1
        runs = np.repeat(is_run, plan.num_new_tokens)
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        assert (plan.samples == plan.num_new_tokens)[is_run].all()
        assert (plan.input_ids[starts[is_run]] == LAST_SAMPLED_TOKEN).all()
        assert (plan.input_ids == DRAFT_TOKEN).sum() == runs.sum() - is_run.sum()
        assert plan.num_new_tokens.max(where=is_run, initial=1) <= 1 + self._config.max_draft_tokens
        arrays = (plan.slots, plan.num_new_tokens, plan.prefix_lens, plan.samples)
        assert all(array.dtype == np.int32 for array in arrays)
        assert plan.input_ids.dtype == np.int32
        assert all(len(array) == plan.batch_size for array in arrays)
        assert plan.num_new_tokens.min() >= 1
        assert plan.num_tokens == plan.num_new_tokens.sum()
        num_encoded = plan.encoder.lengths
        assert plan.num_tokens <= self._config.max_step_tokens
        # A step's first input may be longer than what is left of the budget.
        assert (
            plan.num_tokens + sum(num_encoded) <= self._config.max_step_tokens
            or len(num_encoded) == 1
        )
        assert plan.is_decode == bool((plan.num_new_tokens == 1).all())
        assert len(set(plan.slots.tolist())) == plan.batch_size
        assert plan.slots.max() < self._config.max_running_requests
        assert len(all_locations(plan)) == len(self._pools)
        for locations in all_locations(plan):
            assert locations.dtype == np.int32
            assert len(locations) == len(set(locations.tolist())) == plan.num_tokens
            assert locations.min() >= self._config.page_size, "page 0 is for padding"
        num_cached = {admitted.slot: 0 for admitted in plan.admitted}
        for write in plan.table_writes:
            assert len(set(write.slots.tolist())) == len(write.slots) > 0
            if write.account:
                assert write.pages.all(), "a page that is not there"
                continue
            for slot in num_cached.keys() & set(write.slots.tolist()):
                assert write.first_page * self._config.page_size == num_cached[slot], "a gap"
                num_cached[slot] += len(write.pages) * self._config.page_size
        for slot, prefix_len in zip(plan.slots.tolist(), plan.prefix_lens.tolist(), strict=True):
            if slot in num_cached:
                assert prefix_len == num_cached[slot]
            else:
                assert 0 <= prefix_len - self._lens[slot] <= doubt
