"""Adapters of one small projection, and the registry's board without a registry."""

import json

import torch
from safetensors.torch import save_file

from service.adapters.lease import FolderLease
from service.adapters.table import AdapterBoard, action_of
from workers.adapters.ref import AdapterInfo

Q = "model.layers.0.self_attn.q_proj"
TAKEN = AdapterInfo(max_rank=4, num_slots=2, modules={Q: (6, 10)})


def save(folder, rank=2, value=1.0):
    """value: of every number. Returns the folder as text."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    pair = {"A": torch.full((rank, 6), value), "B": torch.full((10, rank), value)}
    save_file(
        {f"base_model.model.{Q}.lora_{part}.weight": tensor for part, tensor in pair.items()},
        folder / "adapter_model.safetensors",
    )
    return str(folder)


class LocalBoard:
    """The registry's board in this process. actions: what the audit log has. is_holder: of
    the lease of every folder. device: on which adapters were seen last."""

    def __init__(self):
        self.board = AdapterBoard()
        self.actions = []
        self.is_holder = True
        self.device = None

    async def set(self, entry, known, action, by):
        self.actions.append(action)
        return self.board.set([entry], known)

    async def restore(self, table):
        self.board.restore(table)

    async def audit(self, action, by):
        self.actions.append(action)

    async def lease_folder(self, model, for_s, device):
        self.device = self.device if device is None else device
        return FolderLease(self.is_holder, self.device)

    async def set_from_folder(self, model, entries, known):
        news = self.board.news(entries, known)
        self.actions += map(action_of, news)
        return self.board.set(news, known) if news else self.board.table
