"""A model of transformers that is an encoder alone, over padded batches of whole texts.

The class runs as it is, with the attention that it has itself; nothing of it is known here but what
it takes and gives. That texts of a batch do not see each other's tokens, nor their padding, is
tried out when the model is loaded.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from workers.errors import ModelLoadError
from workers.loading.encoder_only import is_classifier
from workers.models.transformers_attention import alike
from workers.models.transformers_class import obstacles_named
from workers.models.transformers_probing import probing

_PROBE_LENS = (3, 11)


class EncoderOnlyModel(nn.Module):
    """model: of an encoder's class or of a classifier's, in eval mode, on its device.

    Raises ModelLoadError where a text's states depend on what it shares a batch with, or a token's
    on the ones before it alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._model = model
        config: Any = model.config
        self._output = "logits" if is_classifier(type(model)) else "last_hidden_state"
        self.pad_token_id = int(config.pad_token_id or 0)
        takes = inspect.signature(model.forward).parameters
        # With one kind of token there is nothing to tell texts of a pair apart by.
        self._has_types = "token_type_ids" in takes and (config.type_vocab_size or 0) > 1
        self.attention = str(config._attn_implementation)
        with probing(f"{type(model).__name__} cannot read texts in batches"):
            self._check_batches(config)

    @property
    def device(self) -> torch.device:
        return self._model.device

    def forward(
        self, input_ids: torch.Tensor, mask: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """input_ids int64, mask int64 (1: a token, 0: padding), token_types int64 (1: of a pair's
        second text), all (n, length). Padding stands behind the texts. Returns final states (n,
        length, hidden_size), or a classifier's logits (n, num_labels)."""
        types = {"token_type_ids": token_types} if self._has_types else {}
        output = self._model(input_ids=input_ids, attention_mask=mask, **types)
        value: torch.Tensor = getattr(output, self._output)
        return value

    @torch.inference_mode()
    def _check_batches(self, config: Any) -> None:
        short, long = _PROBE_LENS
        usable = [i for i in range(config.vocab_size) if i != self.pad_token_id][: long + 1]
        ids = torch.tensor(usable * (long + 1), device=self.device)
        both = torch.full((2, long), self.pad_token_id, device=self.device)
        both[0, :short], both[1] = ids[:short], ids[1 : long + 1]
        mask = torch.ones_like(both)
        mask[0, short:] = 0
        types = torch.zeros_like(both)
        together = self(both, mask, types)
        alone = self(both[:1, :short], mask[:1, :short], types[:1, :short])
        name = type(self._model).__name__
        padded = together[:1] if self._output == "logits" else together[:1, :short]
        if not alike(alone, padded):
            raise ModelLoadError(f"{name} has texts of a batch depend on each other")
        if self._output == "logits":
            return
        other = both[1:].clone()
        other[0, -1] = ids[0]
        if torch.equal(self(other, mask[1:], types[1:])[0, 0], together[1, 0]):
            raise ModelLoadError(f"{name} does not attend to later tokens: it is no encoder")


@torch.inference_mode()
def check_positions(model: PreTrainedModel, num_tokens: int) -> None:
    """Raise ModelLoadError where the model cannot count so many tokens. On the CPU: a GPU is of no
    more use once it has looked a position up that is not there."""
    name = type(model).__name__
    embeddings = getattr(model.base_model, "embeddings", None)
    if not isinstance(embeddings, nn.Module):
        return  # positions are not looked up
    config: Any = model.config
    token_id = config.vocab_size - (2 if config.pad_token_id == config.vocab_size - 1 else 1)
    with probing(f"{name} cannot count {num_tokens} tokens"):
        embeddings(torch.full((1, num_tokens), token_id))


def load_encoder_only(
    folder: Path, config: PreTrainedConfig, model_class: Any, dtype: torch.dtype
) -> PreTrainedModel:
    """The model with its safetensors weights, through transformers' own key mapping, on the CPU.

    Raises ModelLoadError when a tensor is missing or of another shape, or one of the encoder's is
    left over, or a package is missing.
    """
    with obstacles_named(model_class):
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported in info, and refused below
            **_build_options(model_class),
        )
    leftover = [key for key in info["unexpected_keys"] if _is_of_model(model, str(key))]
    problems = (
        ("missing keys", info["missing_keys"]),
        ("unexpected keys", leftover),
        ("mismatched keys", info["mismatched_keys"]),
    )
    for problem, keys in problems:
        if keys:
            shown = ", ".join(sorted(map(str, keys))[:5])
            raise ModelLoadError(f"{folder}: {problem}: {shown}")
    loaded: PreTrainedModel = model.eval()
    return loaded


def random_encoder_only(
    config: PreTrainedConfig, model_class: Any, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """With its family's own random initialisation, the same for the same seed, on the CPU."""
    with torch.random.fork_rng(devices=[]), obstacles_named(model_class):
        torch.manual_seed(seed)
        options = _build_options(model_class)
        built: PreTrainedModel = model_class._from_config(config, dtype=dtype, **options).eval()
    return built


def _build_options(model_class: Any) -> dict[str, Any]:
    """What a class has beside its states, such as BERT's pooler of its first token, is not used."""
    options: dict[str, Any] = {
        "attn_implementation": "sdpa" if model_class._supports_sdpa else "eager"
    }
    if "add_pooling_layer" in inspect.signature(model_class).parameters:
        options["add_pooling_layer"] = False
    return options


def _is_of_model(model: PreTrainedModel, key: str) -> bool:
    """Whether a tensor that was left over belongs to a part that runs. Heads of a masked language
    model do not, nor counted positions, which older versions of transformers saved."""
    if key.endswith("position_ids"):
        return False
    parts = {name for name, _ in model.named_children()}
    return key.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in parts
