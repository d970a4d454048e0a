"""An EAGLE-3 head at the end of 32k tokens: its positions and what it sees are right there."""

import json
import random
from pathlib import Path

from transformers import AutoModelForCausalLM

from tests.fakes.eagle_heads import HeadOracle, save_head
from tests.fakes.tiny_models import NATIVE, TinyModel, save_tiny_model
from tests.unit.workers.engine.test_eagle import DRAFT_IDS, recorded_run

NUM_TOKENS = 32_000
LONG = TinyModel(
    "qwen3",
    {
        **NATIVE["qwen3"].changes,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 32_768,
    },
)


def test_drafts_behind_32k_tokens_are_the_published_heads(tmp_path: Path) -> None:
    target = save_tiny_model(LONG, tmp_path / "target")
    head = save_head(tmp_path / "head", json.loads((target / "config.json").read_text()), DRAFT_IDS)
    rng = random.Random(4)
    prompt = [rng.randrange(3, 120) for _ in range(NUM_TOKENS)]
    asked, stats = recorded_run(
        target, head, [prompt], page_size=64, num_pages=1200, max_step_tokens=2048
    )
    assert stats.num_cached_prompt_tokens > 0.9 * NUM_TOKENS
    # Not eager: its scores of all tokens at once would be 16 GB a layer.
    reference = AutoModelForCausalLM.from_pretrained(target, attn_implementation="sdpa")
    oracle = HeadOracle(head, reference)
    for one in asked[:1] + asked[-1:]:
        assert one.drafts == oracle.drafts(one.token_ids, len(one.drafts))
