"""Adapters in the steps of a GPU: slots of requests in its memory, a model for steps with adapters.

Needs Triton.
"""

import torch

from workers.adapters.adapted_products import AdapterWays, AddedBehind
from workers.adapters.added_beside import ways_beside
from workers.adapters.banks import NOT_FUSED, Banks
from workers.adapters.dressed import DressedModel
from workers.adapters.ref import AdapterInfo
from workers.adapters.stage import AdapterStage
from workers.adapters.store import AdapterStore
from workers.adapters.worn import WornAdapters
from workers.errors import ConfigError
from workers.models.base import CausalLM
from workers.models.cuda_stream import FusedStreamCausalLM
from workers.parallel.group import TPGroup
from workers.sampling.transfer import upload
from workers.scheduler.adapter_plan import AdapterPlan
from workers.scheduler.plan import StepPlan


class DeviceStage(AdapterStage):
    """On a GPU, where a model of its own runs steps with adapters."""

    def __init__(
        self,
        info: AdapterInfo,
        store: AdapterStore,
        banks: Banks,
        model: FusedStreamCausalLM,
        num_request_slots: int,
        ways: AdapterWays,
    ) -> None:
        super().__init__(info, store, banks.all(), WornAdapters(), num_request_slots)
        device = banks.projections[0].a.device
        self._on_device = torch.zeros(num_request_slots, dtype=torch.int32, device=device)
        self._is_uploaded = True
        self.model = DressedModel(model, banks, self._on_device, ways)

    @classmethod
    def of(
        cls,
        model: CausalLM,
        tp: TPGroup,
        info: AdapterInfo,
        store: AdapterStore,
        banks: Banks,
        num_request_slots: int,
        is_deterministic: bool,
    ) -> "DeviceStage":
        """Before the model's prepare. is_deterministic: a row's bits must not depend on the number
        of rows, as the way that pays does. Raises ConfigError where the model takes none here."""
        if not isinstance(model, FusedStreamCausalLM):
            raise ConfigError(NOT_FUSED)
        banks.check_on_gpu(tp.size)
        device = banks.projections[0].a.device
        behind = AdapterWays(AddedBehind, AddedBehind)
        ways = behind if is_deterministic else ways_beside(device, tp.size)
        return cls(info, store, banks, model, num_request_slots, ways)

    def apply(self, plan: AdapterPlan) -> None:
        self._is_uploaded &= not (plan.bare or plan.worn)
        super().apply(plan)
        if not self._is_uploaded:
            (slots,) = upload([self._slots], self._on_device.device)
            self._on_device.copy_(slots)
            self._is_uploaded = True

    def dress(self, plan: StepPlan) -> bool:
        self.is_dressed = bool(self._slots[plan.slots].any())
        return self.is_dressed
