"""SamplingState: the sampling side of one rank, per-slot parameters on the device.

Turns one step's logits into token ids without waiting for the device. Knows slots, not requests'
ids nor the scheduler; every tensor-parallel rank holds an equal copy and draws equal tokens.

Order of what happens to a row of logits: logit_bias, min_tokens mask, bad words, penalties, tokens
that are not allowed, temperature, min_p, top_k, top_p, draw. (transformers and vLLM both add the
bias before the penalties.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.bad_words import BadWords
from workers.sampling.device_rows import DeviceRows, piece_ends
from workers.sampling.filters import MIN_TEMPERATURE, TOP_P_OFF
from workers.sampling.logprobs import LogprobTensors, SampledLogprobs, compute_logprobs
from workers.sampling.params import SamplingParams
from workers.sampling.penalties import PenaltyState
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.sampler import RowGroup, RowParameters, sample_candidates, sample_dense
from workers.sampling.slot_parameters import (
    NO_ROWS,
    HostRows,
    RowIndices,
    RowUse,
    SlotParameters,
)
from workers.sampling.sparse_bias import SparseBias
from workers.sampling.token_id_table import TokenIdTable
from workers.sampling.transfer import start_download, upload
from workers.scheduler.plan import NAN_TOKEN, AdmittedRequest, IntArray, StepResult

# Columns of the per-slot floats: temperature, top_p, log_min_p, repetition, presence, frequency.
_NUM_FLOATS = 6


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What a step drew, on the device.

    token_ids: int64 (n,), always valid ids. has_nan: bool (n,), the row's logits held a NaN and
    its token means nothing. logprobs: None if no row asked.
    """

    token_ids: Tensor
    has_nan: Tensor
    logprobs: SampledLogprobs | None

    def start_download(self) -> "SampledTokens":
        """Host copies, readable once the device's stream has passed here."""
        return SampledTokens(
            start_download(self.token_ids),
            start_download(self.has_nan),
            None if self.logprobs is None else self.logprobs.start_download(),
        )

    def read(self) -> StepResult:
        """From host copies."""
        token_ids = self.token_ids.numpy().astype(np.int32)
        token_ids[self.has_nan.numpy()] = NAN_TOKEN
        return StepResult(token_ids, () if self.logprobs is None else self.logprobs.read())


class SamplingState:
    """Per-slot sampling state. No method waits for the device.

    last_token_ids: int64 (max_running_requests,), what each slot sampled last.
    """

    def __init__(
        self,
        max_running_requests: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._vocab_size = vocab_size
        # An id the head cannot produce needs no mask.
        self._eos_token_ids = tuple(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._device = device
        self._slots = SlotParameters(max_running_requests, vocab_size)
        self._floats = torch.zeros(max_running_requests, _NUM_FLOATS, device=device)
        self._top_k = torch.ones(max_running_requests, 1, dtype=torch.int64, device=device)
        self._penalties = PenaltyState(max_running_requests, vocab_size, device)
        self._logit_bias = SparseBias(max_running_requests, vocab_size, device)
        self._stop_mask = SparseBias(max_running_requests, vocab_size, device)
        self._allowed = AllowedTokens(max_running_requests, vocab_size, device)
        self._bad_words = BadWords(max_running_requests, vocab_size, device)
        self._asked_ids = TokenIdTable(max_running_requests, device)
        self.last_token_ids = torch.zeros(max_running_requests, dtype=torch.int64, device=device)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Take over the slots of requests, each slot once; earlier contents of a slot are void.

        A request that comes back after a retraction brings what its penalties count.
        """
        if not requests:
            return
        self._slots.admit(requests)
        slots, floats, top_k = upload(
            [
                np.array([request.slot for request in requests], dtype=np.int64),
                np.array([_float_row(request.sampling) for request in requests], dtype=np.float32),
                np.array(
                    [[_effective_top_k(request.sampling, self._vocab_size)] for request in requests]
                ),
            ],
            self._device,
        )
        self._floats.index_copy_(0, slots, floats)
        self._top_k.index_copy_(0, slots, top_k)
        self._admit_penalties([r for r in requests if r.sampling.has_penalties])
        self._admit_logit_bias([r for r in requests if r.sampling.logit_bias])
        self._admit_stop_mask([r for r in requests if r.sampling.min_tokens > 0])
        self._admit_rules(requests)

    def release(self) -> None:
        """Give back tables of all slots and tokens, before requests come: the first that needs one
        makes it anew."""
        self._penalties.release()
        self._allowed.release()

    def is_plainly_greedy(
        self, slots: IntArray, seq_lens: IntArray, void: RowIndices = NO_ROWS
    ) -> bool:
        """Whether sample_from, called with these, would take every row's argmax and do nothing
        else."""
        return self._slots.describe(slots, seq_lens, void) is None

    def sample(
        self,
        logits: Tensor,
        slots: IntArray,
        seq_lens: IntArray,
        drafts: RunDrafts | None = None,
    ) -> SampledTokens:
        """One token per row; counts it for the slots that have penalties. See sample_from."""
        return self.sample_from(logits, logits, slots, seq_lens, drafts=drafts)

    def sample_from(
        self,
        logits: Tensor,
        raw: Tensor,
        slots: IntArray,
        seq_lens: IntArray,
        void: RowIndices = NO_ROWS,
        drafts: RunDrafts | None = None,
    ) -> SampledTokens:
        """One token per row; counts it for the slots that have penalties.

        void: rows whose token is nobody's: it is any, and leaves no trace. drafts: where several
        rows are of one slot, what each is sampled behind; of these the ones that hold are counted.
        logits: float (n, vocab_size), left as they are. raw: the same, but with every token, which
        log probabilities are of. slots: host int32 (n,), admitted.
        seq_lens: host int32 (n,), tokens known before the sampled one: its absolute position.
        Raises ValueError on a shape that does not fit.
        """
        if logits.shape != (len(slots), self._vocab_size) or slots.shape != seq_lens.shape:
            raise ValueError(
                f"expected logits ({len(slots)}, {self._vocab_size}) and {len(slots)} lengths, "
                f"got {tuple(logits.shape)} and {len(seq_lens)}"
            )
        host_rows = self._slots.describe(slots, seq_lens, void)
        if host_rows is None:
            row_max, token_ids = logits.max(dim=-1)
            return SampledTokens(token_ids, row_max.isnan(), None)
        bounds = pairwise((0, *piece_ends(len(slots), drafts)))
        pieces = [
            self._sample_piece(logits[start:end], host_rows, start, drafts) for start, end in bounds
        ]
        token_ids = _joined([piece.token_ids for piece in pieces])
        logprobs = self._logprobs(raw, pieces, host_rows)
        # Last: until here a call that ran out of memory can be made again.
        for piece in pieces:
            self._count_output(piece, token_ids)
        return SampledTokens(token_ids, _joined([piece.has_nan for piece in pieces]), logprobs)

    def _sample_piece(
        self, logits: Tensor, host: HostRows, start: int, drafts: RunDrafts | None
    ) -> "_SampledPiece":
        """Of the step's rows from start on that logits, (m, vocab_size), are of."""
        rows = DeviceRows.of(host.part(start, start + len(logits)), self._device, start, drafts)
        adjusted = self._adjust(logits, rows)
        row_max, token_ids = adjusted.max(dim=-1, keepdim=True)
        token_ids = self._draw(adjusted, row_max, token_ids.squeeze(1), rows)
        return _SampledPiece(start, rows, token_ids, row_max.squeeze(1).isnan())

    def remember(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keep token_ids as what the slots sampled last; both int64 (n,) on the device."""
        self.last_token_ids.index_copy_(0, slots, token_ids)

    def remember_last(self, host_slots: IntArray, slots: Tensor, token_ids: Tensor) -> None:
        """As remember, of rows among which those of one slot follow each other: the last counts.
        host_slots: int32 (n,), slots on the host."""
        ends = np.append(host_slots[1:] != host_slots[:-1], True)
        self._remember_some(ends, slots, token_ids)

    def remember_first(self, host_slots: IntArray, slots: Tensor, token_ids: Tensor) -> None:
        """As remember_last, but the first counts."""
        starts = np.append(True, host_slots[1:] != host_slots[:-1])
        self._remember_some(starts, slots, token_ids)

    def _remember_some(
        self, counts: npt.NDArray[np.bool_], slots: Tensor, token_ids: Tensor
    ) -> None:
        if counts.all():
            self.remember(slots, token_ids)
            return
        (rows,) = upload([np.flatnonzero(counts)], self._device)
        self.remember(slots.index_select(0, rows), token_ids.index_select(0, rows))

    def resolve(self, input_ids: Tensor, token_slots: Tensor) -> Tensor:
        """input_ids with each negative one replaced by what its slot sampled last.

        input_ids, token_slots: int64 (num_tokens,) on the device.
        """
        last = self.last_token_ids.index_select(0, token_slots)
        return torch.where(input_ids < 0, last, input_ids)

    def _adjust(self, logits: Tensor, rows: DeviceRows) -> Tensor:
        """Biased, masked and penalised logits, float32; a copy if anything had to be changed."""
        bias, mask = rows.groups.get(RowUse.LOGIT_BIAS), rows.groups.get(RowUse.MIN_TOKENS)
        penalised, allowed = rows.groups.get(RowUse.PENALTIES), rows.groups.get(RowUse.ALLOWED)
        worded = rows.groups.get(RowUse.BAD_WORDS)
        if not any((bias, mask, penalised, allowed, worded)):
            return logits.float()
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if bias is not None:
            self._logit_bias.add_to_(logits, bias.indices, bias.take(rows.slots))
        if mask is not None:
            self._stop_mask.add_to_(logits, mask.indices, mask.take(rows.slots))
        if worded is not None:
            slots, before = worded.take(rows.slots), rows.drafts_of(RowUse.BAD_WORDS)
            self._bad_words.rule_out_(logits, worded.indices, slots, before)
        if penalised is not None:
            slots = penalised.take(rows.slots)
            penalties = self._floats.index_select(0, slots)[:, 3:6]
            penalised_rows = self._penalties.apply(
                penalised.take(logits), slots, penalties, rows.drafts_of(RowUse.PENALTIES)
            )
            logits = penalised.put_(logits, penalised_rows)
        if allowed is not None:
            kept = self._allowed.ruled_out(allowed.take(logits), allowed.take(rows.slots))
            logits = allowed.put_(logits, kept)
        return logits

    def _draw(
        self, logits: Tensor, row_max: Tensor, greedy_token_ids: Tensor, rows: DeviceRows
    ) -> Tensor:
        token_ids = greedy_token_ids
        candidates, dense = rows.groups.get(RowUse.CANDIDATES), rows.groups.get(RowUse.DENSE)
        if candidates is not None:
            params = self._row_parameters(rows, candidates)
            drawn = sample_candidates(candidates.take(logits), params)
            token_ids = candidates.put_(token_ids, drawn)
        if dense is not None:
            drawn = sample_dense(
                dense.take(logits),
                dense.take(row_max),
                self._row_parameters(rows, dense),
                rows.filter_groups(),
            )
            token_ids = dense.put_(token_ids, drawn)
        return token_ids

    def _row_parameters(self, rows: DeviceRows, group: RowGroup) -> RowParameters:
        slots = group.take(rows.slots)
        floats = self._floats.index_select(0, slots)
        return RowParameters(
            temperature=floats[:, 0:1],
            top_k=self._top_k.index_select(0, slots),
            top_p=floats[:, 1:2],
            log_min_p=floats[:, 2:3],
            noise_keys=group.take(rows.noise_keys),
        )

    def _count_output(self, piece: "_SampledPiece", token_ids: Tensor) -> None:
        """token_ids: int64 (n,), of all of the step's rows."""
        rows = piece.rows
        counters = ((RowUse.PENALTIES, self._penalties), (RowUse.BAD_WORDS, self._bad_words))
        for use, counter in counters:
            group = rows.groups.get(use)
            if group is not None:
                held = [drafts.held(token_ids) for drafts in rows.drafts_of(use)]
                counter.add(group.take(rows.slots), group.take(piece.token_ids), *held)

    def _logprobs(
        self, logits: Tensor, pieces: "Sequence[_SampledPiece]", host: HostRows
    ) -> SampledLogprobs | None:
        """logits: (n, vocab_size), of all of the step's rows."""
        if RowUse.LOGPROBS not in host.rows:
            return None
        num_top = min(int(host.num_top.max()), self._vocab_size)
        has_asked = bool(host.num_asked.any())
        tensors = []
        for piece in pieces:
            group = piece.rows.groups.get(RowUse.LOGPROBS)
            if group is not None:
                asked = self._asked_ids.take(group.take(piece.rows.slots)) if has_asked else None
                own = group.take(logits[piece.start : piece.start + len(piece.token_ids)])
                tensors.append(compute_logprobs(own, group.take(piece.token_ids), num_top, asked))
        joined = tensors[0] if len(tensors) == 1 else LogprobTensors.joined(tensors)
        return SampledLogprobs(joined, host.num_top, host.num_asked, num_top)

    def _admit_penalties(self, requests: Sequence[AdmittedRequest]) -> None:
        if not requests:
            return
        self._penalties.reset(
            np.array([request.slot for request in requests], dtype=np.int64),
            [request.prompt_ids for request in requests],
            [request.output_ids for request in requests],
        )

    def _admit_logit_bias(self, requests: Sequence[AdmittedRequest]) -> None:
        if not requests:
            return
        self._logit_bias.set({request.slot: request.sampling.logit_bias for request in requests})

    def _admit_rules(self, requests: Sequence[AdmittedRequest]) -> None:
        allowed = {
            request.slot: ids for request in requests if (ids := request.sampling.allowed_token_ids)
        }
        if allowed:
            self._allowed.set(allowed)
        asked = {
            request.slot: ids for request in requests if (ids := request.sampling.logprob_token_ids)
        }
        if asked:
            self._asked_ids.set(asked)
        worded = [request for request in requests if request.sampling.bad_words]
        if worded:
            self._bad_words.set(
                [request.slot for request in worded],
                [request.sampling.bad_words for request in worded],
                [request.output_ids for request in worded],
            )

    def _admit_stop_mask(self, requests: Sequence[AdmittedRequest]) -> None:
        if not requests:
            return
        self._stop_mask.set(
            {
                request.slot: dict.fromkeys(self._ending_token_ids(request.sampling), -math.inf)
                for request in requests
            }
        )

    def _ending_token_ids(self, sampling: SamplingParams) -> tuple[int, ...]:
        """What would end the request: an ignored end of sequence is a token like any other."""
        return sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)


@dataclass(frozen=True, slots=True)
class _SampledPiece:
    """Of the step's rows from start on. token_ids: int64 (m,), has_nan: bool (m,)."""

    start: int
    rows: DeviceRows
    token_ids: Tensor
    has_nan: Tensor


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _float_row(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        max(sampling.temperature, MIN_TEMPERATURE),
        sampling.top_p if sampling.top_p < 1.0 else TOP_P_OFF,
        math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )


def _effective_top_k(sampling: SamplingParams, vocab_size: int) -> int:
    return min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
