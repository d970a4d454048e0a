"""What a model hands over beside its final states, for drafters."""

from dataclasses import replace

import pytest
import torch

from tests.fakes.model_rows import make_batch, torch_native_backend
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
DEEP_LATENT = replace(
    LATENT["deepseek_v3"], changes={**LATENT["deepseek_v3"].changes, "num_hidden_layers": 4}
)


def load(tiny, tmp_path, **changes):
    folder = save_tiny_model(tiny, tmp_path)
    config = EngineConfig(model=str(folder), **changes)
    return folder, load_model(config, SingleRank(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("tiny", [DEEP, DEEP_LATENT], ids=["grouped", "latent"])
def test_taps_are_transformers_hidden_states_of_the_named_layers_and_of_every_token(tiny, tmp_path):
    folder, loaded = load(tiny, tmp_path)
    model, prompt = loaded.model, random_prompt(12)
    backend = torch_native_backend(loaded)
    batch = make_batch({0: prompt}, {0: 0}, backend)
    backend.init_forward_metadata(batch)
    tokens = TokenInputs(batch.input_ids, batch.positions)
    with torch.inference_mode():
        states = (
            eager_reference(folder)
            .model(torch.tensor([prompt]), output_hidden_states=True)
            .hidden_states
        )
        assert model(tokens, batch).taps == ()
        model.tap_layers([2, 0])
        outputs = model(tokens, batch)
        of_rows = model.forward_rows(tokens, batch, torch.tensor([11]))
    for output in (outputs, of_rows):
        assert len(output.taps) == 2
        for tap, layer in zip(output.taps, (0, 2), strict=True):
            torch.testing.assert_close(tap, states[layer + 1][0], rtol=0, atol=1e-4)
    torch.testing.assert_close(of_rows.hidden, outputs.hidden[11:])


def test_layers_that_there_are_not_and_models_that_hand_over_none_are_refused(tmp_path):
    _, native = load(DEEP, tmp_path / "native")
    with pytest.raises(ValueError, match=r"layers \[3\] are not in \[0, 3\)"):
        native.model.tap_layers([1, 3])
    _, bridged = load(DEEP, tmp_path / "bridged", model_impl="transformers")
    with pytest.raises(ConfigError, match="hands over no states"):
        bridged.model.tap_layers([0])
