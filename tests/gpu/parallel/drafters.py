"""Drafters for engines of several ranks on GPUs, and what they are to draft."""

import json

import numpy as np

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.tiny_models import LATENT, MIXTURES, eager_reference, save_tiny_model
from tests.gpu.parallel.cases import GREEDY, SEEDED
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_mtp import Oracle, save_target

FIXED = {"tp_size": 2, "draft_policy": "fixed", "max_draft_tokens": 3}
FLOAT32 = {"dtype": "float32", "attention_backend": "torch_native", "page_size": 4}
FEW = {"page_size": 4, "num_pages": 40, "max_step_tokens": 24, "max_running_requests": 4}
SHARED = [[*range(20, 50), 60 + index] for index in range(4)]
ALLOWED = {**GREEDY, "max_tokens": 20, "allowed_token_ids": DRAFT_IDS}
SEEDED_ALLOWED = {**SEEDED, "max_tokens": 20, "allowed_token_ids": DRAFT_IDS}


def made_in(folder):
    """A folder that is there."""
    folder.mkdir()
    return folder


def save_eagle(folder):
    target = save_tiny_model(DEEP, folder / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(folder / "head", own, DRAFT_IDS)
    return target, f"eagle3:{head}", HeadOracle(head, eager_reference(target))


def save_mtp(tiny, folder):
    target = made_in(folder / "target")
    whole = save_target(tiny, target)
    return target, "mtp", Oracle(target, whole)


HEADS = {
    "eagle": save_eagle,
    "latents": lambda folder: save_mtp(LATENT["deepseek_v3"], folder),
    "mixture": lambda folder: save_mtp(MIXTURES["glm4_moe"], folder),
}


def share_right(told, oracle):
    """Of every third row's drafts, which are alike to those that the published head makes."""
    pairs = told.texts[::3]
    assert len(pairs) > 6
    return np.mean([drafts == oracle.drafts(text, len(drafts)) for text, drafts in pairs])
