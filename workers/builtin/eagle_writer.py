"""Writes heads as folders in SpecForge's layout. Knows no training and no engine."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.builtin import report
from workers.builtin.eagle_fit import HeadPoint
from workers.builtin.eagle_model import TrainedHead

_WEIGHTS = "model.safetensors"


class BestHead:
    """Of one run: the folder holds the best head so far from its first point on, and a report of
    all points, of which `held_out` is the written head's."""

    def __init__(
        self,
        head: TrainedHead,
        draft_ids: Sequence[int],
        folder: Path,
        config: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:
        """draft_ids: see save_head. config: HeadShape.config. facts: what the report says on
        top."""
        self._head = head
        self._draft_ids = draft_ids
        self._folder = folder
        self._config = config
        self._facts = facts
        self._started = time.monotonic()
        self._curve: list[HeadPoint] = []
        self._best: HeadPoint | None = None

    def see(self, point: HeadPoint) -> None:
        """The head is as it was at the point."""
        self._curve.append(point)
        if self._best is None or point.acceptance.length >= self._best.acceptance.length:
            self._best = point
            save_head(self._head, self._draft_ids, self._folder, self._config)
        facts = self._facts | {
            "weights_bytes": (self._folder / _WEIGHTS).stat().st_size,
            "update": self._best.update,
            "held_out": asdict(self._best.acceptance),
            "curve": [asdict(one) for one in self._curve],
            "wall_s": round(time.monotonic() - self._started, 1),
        }
        report.write(facts, self._folder / "training_report.json")


def save_head(
    head: TrainedHead, draft_ids: Sequence[int], folder: Path, config: dict[str, Any]
) -> None:
    """In bf16; what is there is replaced whole. draft_ids: ascending, the target's of the head's
    tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = torch.tensor(draft_ids)
    known = torch.zeros(config["vocab_size"], dtype=torch.bool)
    known[ids] = True
    tensors: dict[str, Tensor] = {
        name: tensor.detach().cpu().bfloat16().contiguous()
        for name, tensor in head.state_dict().items()
    }
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": known}
    part = folder / f"{_WEIGHTS}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    part.replace(folder / _WEIGHTS)
