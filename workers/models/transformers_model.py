"""Any other decoder of transformers, run through RadixAttention.

The model's own code computes everything but attention. Its batch is one flat sequence of the step's
tokens: positions are given, rows are told apart by the ForwardBatch, the mask is the backend's.
What the model is, is learnt from one probing pass of a single token, not guessed from its config.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from attention import ForwardBatch
from attention.memory.slot_states import SlotStates
from workers.errors import ModelLoadError
from workers.layers.sharding import ShardContext
from workers.loading.model_folder import text_config_of
from workers.models.base import CausalLM
from workers.models.capture_trial import NUM_TRIAL_TOKENS, capture_obstacle
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.models.transformers_attention import (
    ATTENTION_NAME,
    OWN_ATTENTION_NAME,
    AttentionProbe,
    NoAttention,
    PagedAttentionCall,
    alike,
    geometry_of,
    register_attention_interface,
)
from workers.models.transformers_body import FlatBody
from workers.models.transformers_class import (
    may_keep_states,
    obstacles_named,
    part_for_class,
)
from workers.models.transformers_decode_states import DecodeStates
from workers.models.transformers_head import logits_of
from workers.models.transformers_layer_types import Calls, check_layers, check_windows, with_chunks
from workers.models.transformers_parallel import part_of_rank
from workers.models.transformers_parts import BodyAndHead
from workers.models.transformers_probing import probing
from workers.models.transformers_seq2seq_class import served_class
from workers.models.transformers_state_probe import FreshTokens, StateProbe
from workers.models.transformers_states import StateCall, StateModule, StepStates
from workers.models.transformers_temperature import take_over_temperatures
from workers.models.transformers_vision import media_encoder_of

logger = logging.getLogger(__name__)


class TransformersCausalLM(CausalLM):
    """parts: in eval mode, on its device, with attn_implementation ATTENTION_NAME.

    Raises ModelLoadError when the model needs of attention what RadixAttention does not do. Then
    parts are as they were, unless they may keep states.
    """

    def __init__(self, parts: BodyAndHead) -> None:
        super().__init__()
        self.body, self.head = body, head = parts.body, parts.head
        text_config = text_config_of(head.config)
        self._states = SlotStates((), 0, head.device)
        self.media = media_encoder_of(body)

        state_probe, token_id = StateProbe(), _token_to_probe(text_config)
        with probing(f"{type(head).__name__} cannot run as a flat decoder"):
            keeps_states = may_keep_states(text_config, type(head))
            self._flat = FlatBody(body, text_config, keeps_states)
            state_modules = self._install_state_modules(token_id)
        attending, self.vocab_size = self._probe(state_probe, token_id)
        self.state_entries = tuple(state_probe.entries[one.index] for one in state_modules)
        _tell_of_slow_modules(state_modules)
        self.continues_states = all(one.continues_many for one in state_modules)
        check_layers(text_config, attending, {one.layer_id for one in state_modules})
        check_windows(text_config, attending)
        calls = with_chunks(text_config, attending)
        self.geometry = geometry_of(list(calls.values()))
        # Layers that attend have KV memory, in their order; the others have none.
        self.attention_layers = nn.ModuleList(
            call.radix_attention(layer_id) for layer_id, call in enumerate(calls.values())
        )
        self._attention_by_call = dict(zip(calls, self.attention_layers, strict=True))
        # Last: what was refused may still run in another way.
        self._temperatures = take_over_temperatures(body)

    @torch.inference_mode()
    def _install_state_modules(self, token_id: int) -> list[StateModule]:
        token = torch.full((1,), token_id, device=self.head.device)
        return self._flat.install_state_modules(token, AttentionProbe())

    @torch.inference_mode()
    def _probe(self, state_probe: StateProbe, token_id: int) -> tuple[Calls, int]:
        """Run one token, twice, through body and head; returns the calls of attention and the
        number of logits."""
        name, probe = type(self.head).__name__, AttentionProbe()
        tokens = torch.full((2,), token_id, device=self.head.device)
        with probing(f"{name} cannot run as a flat decoder"):
            hidden = self._flat.run(tokens, torch.zeros_like(tokens), probe, state_probe)
            uncounted = self._flat.run(tokens[:1], None, AttentionProbe(), FreshTokens(1))
            num_logits: int = self.compute_logits(hidden).shape[-1]
        if not alike(hidden[0], hidden[1]):
            raise ModelLoadError(f"{name} has tokens depend on each other beside attention")
        if not alike(hidden[0], uncounted[0]):
            raise ModelLoadError(f"{name} does not count positions from 0")
        return probe.calls, num_logits

    def keep_states(self, states: SlotStates) -> None:
        self._states = states

    @torch.inference_mode()
    def capture_obstacle(self, max_context_len: int) -> str:
        device = self.head.device
        tokens = torch.arange(NUM_TRIAL_TOKENS, device=device) % self.vocab_size
        starts, ends = torch.zeros_like(tokens), torch.full_like(tokens, max_context_len - 1)

        def run(tokens: torch.Tensor, positions: torch.Tensor) -> None:
            # Before the first step no slot's states are anybody's.
            slots = torch.zeros_like(tokens)
            state_call = DecodeStates(self._states, slots, self._states.write)
            self.local_logits(self._flat.run(tokens, positions, NoAttention(), state_call))

        run(tokens, ends)
        others = partial(run, tokens.flip(0), ends)
        return capture_obstacle(device, partial(run, tokens, starts), others)

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        attention_call = PagedAttentionCall(
            self._attention_by_call, self._temperatures, forward_batch
        )
        hidden = self._flat.run(
            tokens.ids,
            tokens.positions,
            attention_call,
            self._state_call(forward_batch),
            tokens.embeddings,
        )
        return ModelOutput(hidden)

    def _state_call(self, batch: ForwardBatch) -> StateCall:
        states = self._states
        if batch.is_captured:
            return DecodeStates(states, batch.req_pool_indices, states.write)
        has_state = bool(batch.extend_prefix_lens_cpu.all())
        if batch.forward_mode.is_decode and has_state and not states.wanted_snapshots:
            return DecodeStates(states, batch.req_pool_indices, states.stage)
        return StepStates(states, batch)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(self.head, hidden).float()

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Each decode graph keeps its own: not in float32."""
        return logits_of(self.head, hidden)


def _token_to_probe(config: Any) -> int:
    """One that is no padding, which some embeddings and position counts leave out."""
    return 1 if getattr(config, "pad_token_id", None) == 0 else 0


def _tell_of_slow_modules(state_modules: Sequence[StateModule]) -> None:
    names = sorted({one.name for one in state_modules if not one.continues_many})
    if names:
        logger.warning(
            "%s cannot take several tokens on top of a state: prompts longer than a step are "
            "computed token by token",
            ", ".join(names),
        )


def _attention_implementations(config: PreTrainedConfig, of_text: str) -> dict[str, str]:
    """By part of the config: of_text for the language model, eager for parts that never run here.

    What sees and hears may choose among implementations of its own.
    """
    text_config = text_config_of(config)
    chosen = {"": of_text}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            is_text = part is text_config or text_config_of(part) is text_config
            chosen[name] = of_text if is_text else OWN_ATTENTION_NAME
    return chosen


def with_attention(config: PreTrainedConfig, build: Callable[[dict[str, str]], Any]) -> Any:
    """What build makes of attention implementations by part of the config: with ours for the
    language model, or where its class picks from a table that has none but transformers' own, with
    one of these."""
    try:
        return build(_attention_implementations(config, ATTENTION_NAME))
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        return build(_attention_implementations(config, OWN_ATTENTION_NAME))


def load_transformers_model(
    folder: Path, config: PreTrainedConfig, shard: ShardContext
) -> PreTrainedModel:
    """This rank's share of the model with its safetensors weights, through transformers' own key
    mapping.

    Raises ModelLoadError when a tensor is missing, left over or of another shape, or a package is.
    """
    model_class = served_class(config)
    part = part_of_rank(model_class, shard.tp)
    config = part_for_class(config, model_class)
    register_attention_interface()
    with obstacles_named(model_class):
        model, info = with_attention(
            config,
            lambda attention: part.model_class.from_pretrained(
                folder,
                config=config,
                dtype=shard.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported in info, and refused below
            ),
        )
    part.join(model)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            keys = ", ".join(sorted(str(key) for key in info[problem])[:5])
            raise ModelLoadError(f"{folder}: {problem.replace('_', ' ')}: {keys}")
    loaded: PreTrainedModel = model.to(shard.device)
    return loaded


def random_transformers_model(
    config: PreTrainedConfig, shard: ShardContext, seed: int
) -> PreTrainedModel:
    """This rank's share of the model with its family's own random initialisation, the same for the
    same seed. The whole model is in memory until it is cut.

    Raises ModelLoadError when it needs a package that is missing.
    """
    model_class = served_class(config)
    part, device = part_of_rank(model_class, shard.tp), shard.device
    config = part_for_class(config, model_class)
    register_attention_interface()

    def build(attention: dict[str, str]) -> PreTrainedModel:
        torch.manual_seed(seed)
        built: PreTrainedModel = part.model_class._from_config(
            config, dtype=shard.dtype, attn_implementation=attention
        )
        return built

    cuda_devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=cuda_devices),
        torch.device(device),
        obstacles_named(model_class),
    ):
        model = with_attention(config, build)
    part.join(model)
    # What ranks have a share of was cut on the CPU.
    loaded: PreTrainedModel = model.eval().to(device)
    return loaded
