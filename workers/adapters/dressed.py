"""A fused model for steps whose rows have adapters: the same one, over layers that add to it.

Who has which adapter the device looks up by the rows' slots, so that a captured step replays with
any. Needs Triton.
"""

import torch

from attention import ForwardBatch
from attention.memory.slot_states import StateEntry
from workers.adapters.adapted_products import AdapterWays, StepGroups
from workers.adapters.bank import SiteBank
from workers.adapters.banks import Banks
from workers.adapters.embedded import AddedToEmbedding
from workers.adapters.mixtures import adapted_mixture
from workers.layers.cuda.adapter_groups import group_tokens
from workers.layers.cuda.adapter_products import AdapterMatrices, OutputBlocks
from workers.layers.formats.layer import LinearLayer
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.models.cuda_stream import FusedStreamCausalLM, LayerAdapters
from workers.models.token_inputs import ModelOutput, TokenInputs


class DressedModel:
    """Of one rank. Runs what DecodeGraphs and eager steps ask of a model. adapter_of_slot: int32
    (request slots,), 0 for none; written to between steps."""

    def __init__(
        self,
        model: FusedStreamCausalLM,
        banks: Banks,
        adapter_of_slot: torch.Tensor,
        ways: AdapterWays,
    ) -> None:
        self._ways = ways
        self.state_entries: tuple[StateEntry, ...] = model.state_entries
        self._model = model
        self._num_slots = banks.projections[0].a.shape[0] - 1
        self._adapter_of_slot = adapter_of_slot
        self._step = StepGroups()
        self._needs_slots = banks.embedding is not None or bool(banks.experts)
        self._bank_of = {bank.site.layer: bank for bank in banks.projections}
        self._experts_of = {bank.site.experts: bank for bank in banks.experts}
        embedding = banks.embedding
        embedded = None if embedding is None else AddedToEmbedding.of(embedding, self._step)
        model.expect_adapters(LayerAdapters(self._adapt, self._adapt_mixture, embedded))

    def _adapt(self, layer: LinearLayer, products: PartialProducts) -> PartialProducts:
        bank = self._bank_of[layer]
        add = self._ways.over_ranks if bank.site.sums_ranks else self._ways.own
        return add(products, _matrices(bank), self._step)

    def _adapt_mixture(self, mixture: MixtureOfExperts, is_summed: bool) -> PartialProducts | None:
        bank = self._experts_of.get(mixture.experts)
        return None if bank is None else adapted_mixture(mixture, bank, self._step, is_summed)

    def __call__(self, tokens: TokenInputs, batch: ForwardBatch) -> ModelOutput:
        slots = batch.req_pool_indices
        if not batch.forward_mode.is_decode:
            # Its length given, it waits for nothing.
            slots = torch.repeat_interleave(
                slots, batch.extend_seq_lens, output_size=batch.num_tokens
            )
        self._step.of_pass = group_tokens(self._adapter_of_slot, slots, self._num_slots)
        if self._needs_slots:
            self._step.slot_of_token = self._adapter_of_slot[slots]
        try:
            with self._model.adapted():
                output: ModelOutput = self._model(tokens, batch)
        finally:
            self._step.of_pass = self._step.slot_of_token = None
        return output

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.local_logits(hidden)

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self._model.whole_logits(local)


def _matrices(bank: SiteBank) -> AdapterMatrices:
    blocks = OutputBlocks.of([part.rows for part in bank.site.parts], bank.a.device)
    return AdapterMatrices(bank.a, bank.b, bank.ranks.on_device, blocks)
