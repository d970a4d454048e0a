"""What a model hands over beside its final states, for drafters."""

import pytest
import torch

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import make_batch
from tests.fakes.tiny_models import (
    LATENT,
    NATIVE,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
)
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.loader import load_model
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import SingleRank

DEEP = TinyModel("qwen3", {**NATIVE["qwen3"].changes, "num_hidden_layers": 4})


def load(tiny, tmp_path):
    folder = save_tiny_model(tiny, tmp_path)
    config = EngineConfig(model=str(folder))
    model = load_model(config, SingleRank(), torch.device("cpu"), torch.float32).model
    return folder, model


def test_taps_are_transformers_hidden_states_of_the_named_layers_and_of_every_token(tmp_path):
    folder, model = load(DEEP, tmp_path)
    prompt = random_prompt(12)
    batch = make_batch({0: prompt}, {0: 0}, DenseAttention())
    tokens = TokenInputs(batch.input_ids, batch.positions)
    with torch.inference_mode():
        states = (
            eager_reference(folder)
            .model(torch.tensor([prompt]), output_hidden_states=True)
            .hidden_states
        )
        assert model(tokens, batch).taps == ()
        model.tap_layers([2, 0])
        batch.attn_backend = DenseAttention()
        outputs = model(tokens, batch)
        batch.attn_backend = DenseAttention()
        of_rows = model.forward_rows(tokens, batch, torch.tensor([11]))
    for output in (outputs, of_rows):
        assert len(output.taps) == 2
        for tap, layer in zip(output.taps, (0, 2), strict=True):
            torch.testing.assert_close(tap, states[layer + 1][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(of_rows.hidden, outputs.hidden[11:])


def test_layers_that_there_are_not_and_models_that_hand_over_none_are_refused(tmp_path):
    _, llama = load(DEEP, tmp_path / "llama")
    with pytest.raises(ValueError, match=r"layers \[3\] are not in \[0, 3\)"):
        llama.tap_layers([1, 3])
    _, latent = load(LATENT["deepseek_v3"], tmp_path / "latent")
    with pytest.raises(ConfigError, match="hands over no states"):
        latent.tap_layers([0])
