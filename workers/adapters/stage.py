"""Adapters in a rank's steps: which slots of requests wear which, and what that adds.

Knows plans, no request. What is loaded, and for how long, the plans say: see
scheduler/adapter_memory.py.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from workers.adapters.banks import Banks
from workers.adapters.desk import NO_ADAPTERS_DESK, AdapterDesk, ReadingDesk
from workers.adapters.host import AdapterReader
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.adapters.sites import AdapterTargets, adapter_info, sites_of
from workers.adapters.store import AdapterStore
from workers.adapters.worn import Bank, Group, WornAdapters
from workers.config import EngineConfig
from workers.graphs.graphed_model import GraphedModel
from workers.loading.loader import LoadedModel
from workers.parallel.group import TPGroup
from workers.scheduler.adapter_plan import AdapterPlan
from workers.scheduler.plan import IntArray, StepPlan


class AdapterStage:
    """One rank's. info: of the adapters that it takes. model: what runs steps with adapters, None
    where the model itself does. is_dressed: whether the step that was dressed last is one."""

    model: GraphedModel | None = None
    is_dressed = False

    def __init__(
        self,
        info: AdapterInfo,
        store: AdapterStore,
        banks: Sequence[Bank],
        worn: WornAdapters,
        num_request_slots: int,
    ) -> None:
        """worn: what the model's layers look at."""
        self.info = info
        self._store = store
        self._banks = banks
        self._worn = worn
        # Of each adapter slot, whose matrices it has; "" while it is being filled.
        self._keys = [""] * (info.num_slots + 1)
        # By slot, what plans said and is not there yet: a step that finds no memory leaves some.
        self._due: dict[int, AdapterRef] = {}
        # Of each request's slot, its adapter's; 0 for none.
        self._slots: IntArray = np.zeros(num_request_slots, dtype=np.int32)

    def desk(self) -> AdapterDesk:
        """Where requests wait for what this rank reads."""
        return ReadingDesk(self._store)

    def apply(self, plan: AdapterPlan) -> None:
        """Carry the plan out, before its step and after all earlier ones. Again: nothing more.

        Where it raises torch.OutOfMemoryError, the next call does what is left."""
        _change(self._slots, plan)
        self._due |= {load.slot: load.adapter for load in plan.loads}
        for slot, adapter in tuple(self._due.items()):
            self._fill(slot, adapter)
            del self._due[slot]

    def _fill(self, slot: int, ref: AdapterRef) -> None:
        if self._keys[slot] == ref.key:
            return
        adapter = self._store.get(ref)
        self._keys[slot] = ""
        for bank in self._banks:
            bank.fill(slot, adapter)
        self._keys[slot] = ref.key

    def wears(self, plan: StepPlan) -> bool:
        """Whether a row of the plan, which may have been carried out, has an adapter."""
        of_slots = self._slots
        if plan.adapters.bare or plan.adapters.worn:
            of_slots = of_slots.copy()
            _change(of_slots, plan.adapters)
        return bool(of_slots[plan.slots].any())

    def dress(self, plan: StepPlan) -> bool:
        """The model's layers are about to run the plan, which has been carried out; whether a row
        of it has an adapter."""
        of_rows = self._slots[plan.slots]
        self.is_dressed = bool(of_rows.any())
        if not self.is_dressed:
            self._worn.groups = ()
            return False
        of_tokens = np.repeat(of_rows, plan.num_new_tokens)
        self._worn.groups = [
            _group(of_tokens, slot) for slot in np.unique(of_rows).tolist() if slot
        ]
        return True


def _change(of_slots: IntArray, plan: AdapterPlan) -> None:
    for slot in plan.bare:
        of_slots[slot] = 0
    for worn in plan.worn:
        of_slots[worn.request_slot] = worn.slot


def _group(of_tokens: IntArray, slot: int) -> Group:
    return slot, torch.from_numpy(np.flatnonzero(of_tokens == slot))


def adapter_stages(
    config: EngineConfig, loaded: LoadedModel, tp: TPGroup, num_request_slots: int
) -> tuple[AdapterStage, ...]:
    """One where adapters are served. Before the model's prepare. Raises ConfigError where the model
    takes none."""
    if not config.max_loras:
        return ()
    dtype, device = loaded.dtype, loaded.device
    targets = AdapterTargets(config.lora_embeddings, config.lora_experts)
    sites = sites_of(loaded.model, loaded.facts.architecture, targets)
    info = adapter_info(sites, config.max_lora_rank, config.max_loras)
    banks = Banks.of(sites, info.num_slots, info.max_rank, dtype, device)
    reader = AdapterReader(sites, info, dtype, device)
    store = AdapterStore(reader.read, config.max_cpu_loras)
    if device.type == "cuda":
        # Triton comes with torch for CUDA only.
        from workers.adapters.device_stage import DeviceStage

        return (
            DeviceStage.of(
                loaded.model, tp, info, store, banks, num_request_slots, config.deterministic
            ),
        )
    worn = WornAdapters()
    for bank in banks.all():
        bank.hook(worn, tp)
    return (AdapterStage(info, store, banks.all(), worn, num_request_slots),)


def dress(stages: Sequence[AdapterStage], plan: StepPlan) -> bool:
    """Carry out what the plan says of adapters; whether a row of it has one."""
    is_dressed = False
    for stage in stages:
        stage.apply(plan.adapters)
        is_dressed |= stage.dress(plan)
    return is_dressed


def dressed_models(
    stages: Sequence[AdapterStage], *, of_step: bool = False
) -> Iterator[GraphedModel]:
    """What runs steps with adapters in the model's place. of_step: where the step that was dressed
    last is one."""
    for stage in stages:
        if stage.model is not None and (stage.is_dressed or not of_step):
            yield stage.model


def desk_of(stages: Sequence[AdapterStage]) -> AdapterDesk:
    return stages[0].desk() if stages else NO_ADAPTERS_DESK
