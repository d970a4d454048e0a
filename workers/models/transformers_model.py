"""Any other decoder of transformers, run through RadixAttention. One rank only.

The model's own code computes everything but attention. Its batch is one flat sequence of the step's
tokens: positions are given, rows are told apart by the ForwardBatch, the mask is the backend's.
What the model is, is learnt from one probing pass of a single token, not guessed from its config.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from attention import ForwardBatch
from workers.errors import ConfigError, ModelLoadError
from workers.models.base import CausalLM
from workers.models.transformers_attention import (
    ATTENTION_NAME,
    CALL_ARGUMENT,
    AttentionCall,
    AttentionProbe,
    PagedAttentionCall,
    geometry_of,
    register_attention_interface,
)

_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass
class _BodyOutput(MoeModelOutputWithPast):
    """The fields that any family's head reads of its body's output."""

    cross_attentions: Any = None


class _GivenHiddenStates(nn.Module):
    """Stands in for a model's body, so that calling the model runs its head alone.

    The head of a family is more than a matrix: Gemma2 caps its logits, Cohere scales them. Running
    the family's own code keeps all of that.
    """

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


class TransformersCausalLM(CausalLM):
    """Takes a loaded model over: its body and its head are called apart from here on.

    hf_model: in eval mode, on its device, with attn_implementation ATTENTION_NAME.
    Raises ModelLoadError when the model needs of attention what RadixAttention does not do.
    """

    def __init__(self, hf_model: PreTrainedModel, max_context_len: int) -> None:
        super().__init__()
        body = hf_model.base_model
        if body is hf_model:
            raise ModelLoadError(f"{type(hf_model).__name__} has no body apart from its head")
        text_config = hf_model.config.get_text_config()
        _fix_rope(body, text_config, max_context_len)
        self.body = body
        setattr(hf_model, hf_model.base_model_prefix, _GivenHiddenStates())
        self.head = hf_model

        probe = AttentionProbe()
        self.vocab_size = self._probe(probe, hf_model.device)
        calls = probe.layers(text_config.num_hidden_layers)
        self.geometry = geometry_of(calls)
        self.attention_layers = nn.ModuleList(
            call.radix_attention(layer_id) for layer_id, call in enumerate(calls)
        )
        _check_windows(text_config, [c.config.sliding_window_size for c in calls])

    @torch.inference_mode()
    def _probe(self, probe: AttentionProbe, device: torch.device) -> int:
        """Run one token through body and head; returns the number of logits."""
        token = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            return self.compute_logits(self._run_body(token, token, probe)).shape[-1]
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            name = type(self.head).__name__
            raise ModelLoadError(f"{name} cannot run as a flat decoder: {error}") from error

    def _run_body(
        self, input_ids: torch.Tensor, positions: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        outputs = self.body(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            **{CALL_ARGUMENT: call},
        )
        hidden: torch.Tensor = outputs.last_hidden_state.squeeze(0)
        return hidden

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        call = PagedAttentionCall(self.attention_layers, forward_batch)
        return self._run_body(input_ids, positions, call)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0).float()


def _fix_rope(body: nn.Module, config: Any, max_context_len: int) -> None:
    """Make rotary frequencies independent of what else is in the batch.

    transformers picks them by the highest position of the whole call. longrope: the set that
    max_context_len calls for serves every position. dynamic: refused beyond the range in which it
    is the identity.
    """
    for module in body.modules():
        rope_type = getattr(module, "rope_type", "default")
        if isinstance(rope_type, dict):
            if {"dynamic", "longrope"} & set(rope_type.values()):
                raise ModelLoadError(f"{type(module).__name__} mixes rope types {rope_type}")
        elif rope_type == "dynamic" and max_context_len > config.max_position_embeddings:
            raise ConfigError(
                f"dynamic rope beyond {config.max_position_embeddings} tokens is not supported "
                f"here; lower max_context_len={max_context_len}"
            )
        elif rope_type == "longrope":
            original = config.rope_parameters["original_max_position_embeddings"]
            if max_context_len > original:
                inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=original + 1)
                module.get_buffer("original_inv_freq").copy_(inv_freq)


def _check_windows(config: Any, windows: list[int]) -> None:
    """Refuse a model whose sliding windows exist in its mask only, which is never built here."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        is_windowed = getattr(config, "sliding_window", None) is not None
        if is_windowed and all(window == -1 for window in windows):
            raise ModelLoadError("the model does not tell attention of its sliding window")
        return
    for layer_id, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if (kind == "sliding_attention") != (window != -1):
            raise ModelLoadError(f"layer {layer_id} is {kind}, but attends with window {window}")


def causal_lm_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the config. Raises ModelLoadError if RadixAttention cannot serve it.

    Refused: encoder-decoders, recurrent and hybrid models, layers with chunked or linear attention,
    shared KV layers, models outside the attention interface, and heads other than language models.
    """
    text: Any = config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{config.model_type} is an encoder-decoder, not a causal model")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"transformers has no causal language model for {config.model_type!r}")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        raise ModelLoadError(f"transformers has more than one class for {config.model_type!r}")
    name = model_class.__name__
    if name not in (config.architectures or [name]):
        raise ModelLoadError(f"{config.architectures} is not {name}, a causal language model")
    if getattr(model_class, "_is_stateful", False):
        raise ModelLoadError(f"{name} keeps recurrent state, which is not supported")
    if not model_class._supports_attention_backend:
        raise ModelLoadError(f"{name} does not go through transformers' attention interface")
    odd_layers = set(getattr(text, "layer_types", None) or set()) - _SERVED_LAYER_TYPES
    if odd_layers:
        raise ModelLoadError(f"{name} has unsupported layers: {', '.join(sorted(odd_layers))}")
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelLoadError(f"{name} has layers that share the KV cache of others")
    return model_class


def load_transformers_model(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model with its safetensors weights, through transformers' own key mapping.

    Raises ModelLoadError when a tensor is missing, left over or of another shape.
    """
    model_class = causal_lm_class(config)
    register_attention_interface()
    model, info = model_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported in info, and refused below
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            keys = ", ".join(sorted(str(key) for key in info[problem])[:5])
            raise ModelLoadError(f"{folder}: {problem.replace('_', ' ')}: {keys}")
    loaded: PreTrainedModel = model.to(device)
    return loaded


def random_transformers_model(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, seed: int
) -> PreTrainedModel:
    """The model with its family's own random initialisation, the same for the same seed."""
    model_class = causal_lm_class(config)
    register_attention_interface()
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
        torch.manual_seed(seed)
        model = model_class._from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    loaded: PreTrainedModel = model.eval()
    return loaded
