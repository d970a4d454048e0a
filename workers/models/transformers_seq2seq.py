"""Encoder-decoders of transformers: BART and its kin, Whisper. One rank only.

The model's own code computes everything but attention. Its decoder runs over a flat batch, as in
transformers_model.py; its encoder reads the input of one request at a time, and what the decoder's
cross-attention projects of that is kept in the encoder's account of KV memory.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from attention import ForwardBatch
from workers.engine.encoder_input import (
    DecoderStart,
    EncoderInfo,
    EncoderInput,
    FeatureEncoder,
    SourceFeatures,
    SpeechTokens,
    TextEncoder,
)
from workers.errors import ModelLoadError
from workers.models.base import CausalLM
from workers.models.request_encoder import EncoderKV
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.models.transformers_attention import (
    CALL_ARGUMENT,
    AttentionCall,
    LayerCall,
    alike,
    geometry_of,
)
from workers.models.transformers_cache_name import cache_name
from workers.models.transformers_head import GivenHiddenStates
from workers.models.transformers_seq2seq_calls import (
    DecoderStep,
    EncoderPass,
    SeenEncoder,
    Seq2SeqProbe,
    TakenKV,
    layer_of,
)
from workers.models.transformers_seq2seq_class import READS_AUDIO
from workers.sampling.transfer import upload

_NUM_POSITIONS_TRIED = 4


class TransformersSeq2Seq(CausalLM):
    """Takes a loaded model over: encoder, decoder and head are called apart from here on.

    hf_model: of a class that seq2seq_class gives, in eval mode, with attn_implementation
    ATTENTION_NAME. Raises ModelLoadError when its decoder is not as its class promises.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        super().__init__()
        body: Any = hf_model.base_model
        config, decoder = hf_model.config, body.decoder
        self.source, self.decoder = body.encoder, decoder
        self._positions = _GivenPositions(decoder.embed_positions)
        decoder.embed_positions = self._positions
        setattr(hf_model, hf_model.base_model_prefix, _GivenDecoderStates(body))
        self.head = hf_model
        cross_modules = [layer.encoder_attn for layer in decoder.layers]
        self._cache = SeenEncoder(config, len(cross_modules))
        self._cache_name = _cache_name(decoder)
        # The decoder looks whether there is an encoder's state, not at it.
        self._some_source = torch.zeros(1, 1, config.d_model, device=hf_model.device)

        info = _info_of(hf_model, body.encoder)
        calls = self._probe(Seq2SeqProbe(set(cross_modules), info.max_tokens))
        self.geometry = geometry_of(list(calls.values()))
        layers = [layer_of(call, layer_id) for layer_id, call in enumerate(calls.values())]
        self.attention_layers = nn.ModuleList(layers)
        self._layer_by_module: dict[nn.Module, nn.Module] = dict(zip(calls, layers, strict=True))
        layer_ids = dict(zip(calls, range(len(calls)), strict=True))
        self.encoder = _SourceReader(
            info, body.encoder, {layer_ids[module]: module for module in cross_modules}
        )

    @torch.inference_mode()
    def _probe(self, probe: Seq2SeqProbe) -> dict[nn.Module, LayerCall]:
        """Run a token twice at one position, then at several; returns the calls of attention."""
        name = type(self.head).__name__
        tokens = torch.ones(_NUM_POSITIONS_TRIED, dtype=torch.int64, device=self.head.device)
        hidden = self._run(tokens[:2], torch.zeros_like(tokens[:2]), probe)
        self.vocab_size = self.compute_logits(hidden).shape[-1]
        if not alike(hidden[0], hidden[1]):
            raise ModelLoadError(f"{name} has tokens depend on each other beside attention")
        backwards = torch.arange(len(tokens), device=tokens.device).flip(0)
        given = self._run(tokens, backwards, TakenKV())
        if not alike(self._run(tokens, None, TakenKV()), given.flip(0)):
            raise ModelLoadError(f"{name} does not count positions from 0")
        return probe.calls

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        call = DecoderStep(self._layer_by_module, forward_batch)
        return ModelOutput(self._run(tokens.ids, tokens.positions, call))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        outputs = self.head(decoder_inputs_embeds=hidden.unsqueeze(0), use_cache=False)
        logits: torch.Tensor = outputs.logits
        return logits.squeeze(0).float()

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None, call: AttentionCall
    ) -> torch.Tensor:
        """input_ids, positions int64 (n,) -> final states (n, hidden). positions None: the decoder
        counts them."""
        self._positions.given = positions
        outputs = self.decoder(
            input_ids=input_ids.unsqueeze(0),
            encoder_hidden_states=self._some_source,
            use_cache=True,
            **{CALL_ARGUMENT: call, self._cache_name: self._cache},
        )
        hidden: torch.Tensor = outputs.last_hidden_state.squeeze(0)
        return hidden


class _SourceReader:
    """A RequestEncoder. cross_modules: cross-attention by its layer of KV memory."""

    def __init__(
        self, info: EncoderInfo, source: nn.Module, cross_modules: dict[int, nn.Module]
    ) -> None:
        self.info = info
        self._source = source
        self._cross_modules = cross_modules

    def encode(self, source: EncoderInput) -> Iterator[EncoderKV]:
        parameter = next(self._source.parameters())
        if isinstance(source, SourceFeatures):
            (values,) = upload([source.array], parameter.device)
            given = {"input_features": values.to(parameter.dtype).unsqueeze(0)}
        else:
            (ids,) = upload([np.array(source.token_ids, dtype=np.int64)], parameter.device)
            given = {"input_ids": ids.unsqueeze(0)}
        states = self._source(**given, **{CALL_ARGUMENT: EncoderPass()}).last_hidden_state
        # Queries are nobody's: what the module projects of the encoder's states is all.
        query = torch.zeros_like(states[:, :1])
        for layer_id, module in self._cross_modules.items():
            taken = TakenKV()
            module(hidden_states=query, key_value_states=states, **{CALL_ARGUMENT: taken})
            yield EncoderKV(layer_id, *taken.kv)


class _GivenPositions(nn.Module):
    """A decoder's embedding of positions, of those that are given in place of what it would count.

    given: int64 (n,) of the tokens of the next pass; None: as the decoder counts.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.given: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.given is not None:
            kwargs["position_ids"] = self.given
        embedded: torch.Tensor = self.embedding(*args, **kwargs)
        return embedded


class _GivenDecoderStates(GivenHiddenStates):
    """In a body's place: gives back the states that it is given as its decoder's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=kwargs["decoder_inputs_embeds"])


def _cache_name(decoder: nn.Module) -> str:
    name = cache_name(decoder.forward)
    if name is None:
        raise ModelLoadError(f"{type(decoder).__name__} takes no cache")
    return name


def _info_of(hf_model: PreTrainedModel, source: Any) -> EncoderInfo:
    config: Any = hf_model.config
    start = _start_of(hf_model.generation_config, config)
    if type(hf_model).__name__ not in READS_AUDIO:
        return TextEncoder(config.max_position_embeddings, config.vocab_size, start)
    num_frames = config.max_source_positions * source.conv1.stride[0] * source.conv2.stride[0]
    speech = _speech_of(hf_model.generation_config)
    bins = config.num_mel_bins
    return FeatureEncoder(config.max_source_positions, bins, num_frames, start, speech)


def _speech_of(generation: Any) -> SpeechTokens:
    """As Whisper's own generate() finds them. A model of one language has neither languages nor
    tasks."""
    is_multilingual = getattr(generation, "is_multilingual", True)
    languages = (getattr(generation, "lang_to_id", None) or {}) if is_multilingual else {}
    tasks = (getattr(generation, "task_to_id", None) or {}) if is_multilingual else {}
    return SpeechTokens(
        {name.strip("<|>"): token_id for name, token_id in languages.items()},
        tasks.get("transcribe"),
        getattr(generation, "no_timestamps_token_id", None),
        getattr(generation, "prev_sot_token_id", None),
    )


def _start_of(generation: Any, config: Any) -> DecoderStart:
    """As transformers' generate() begins: with the start token, then the one that is forced next.

    Of what it rules out, whole words of several tokens are not."""
    ids = (generation.decoder_start_token_id, config.decoder_start_token_id)
    first = next((one for one in (*ids, generation.bos_token_id) if one is not None), None)
    if not isinstance(first, int):
        raise ModelLoadError(f"the config names no decoder_start_token_id, but {first}")
    forced = generation.forced_bos_token_id
    words = generation.bad_words_ids or []
    singles = [word[0] for word in words if len(word) == 1]
    excluded = sorted({*(generation.suppress_tokens or ()), *singles})
    ends = generation.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ruled_out_first = generation.begin_suppress_tokens or ()
    return DecoderStart(
        (first,) if forced is None else (first, forced),
        tuple(excluded),
        may_be_empty=not set(ends) & set(ruled_out_first),
    )
