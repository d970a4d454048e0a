"""Tiny encoder-decoders over the byte-level tokenizer's vocabulary, with what generate() reads of a
generation config.
"""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

VOCAB_SIZE = 420
EOS = 2
BART_EXCLUDED = 77
START, ENGLISH, GERMAN, TRANSCRIBE, NO_TIMESTAMPS, PREVIOUS, SUPPRESSED = range(3, 10)
RATE_HZ = 16_000

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": EOS,
}


def tiny_bart() -> BartForConditionalGeneration:
    """With a start, a forced and an excluded token. Its texts would be that token alone if it were
    not excluded."""
    torch.manual_seed(1)
    config = BartConfig(
        **_SHAPE,
        max_position_embeddings=64,
        init_std=0.4,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config).eval()
    model.final_logits_bias[0, BART_EXCLUDED] = 50.0
    model.generation_config = GenerationConfig(
        decoder_start_token_id=EOS,
        forced_bos_token_id=1,
        bad_words_ids=[[BART_EXCLUDED], [5, 6]],
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return model


def tiny_whisper() -> WhisperForConditionalGeneration:
    """Of two languages. It hears a second, as tiny_extractor() gives it."""
    torch.manual_seed(2)
    config = WhisperConfig(
        **_SHAPE,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=64,
        init_std=0.5,
        bos_token_id=EOS,
        decoder_start_token_id=START,
    )
    model = WhisperForConditionalGeneration(config).eval()
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        eos_token_id=EOS,
        pad_token_id=0,
        is_multilingual=True,
        lang_to_id={"<|en|>": ENGLISH, "<|de|>": GERMAN},
        task_to_id={"transcribe": TRANSCRIBE},
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        suppress_tokens=[SUPPRESSED],
        begin_suppress_tokens=[EOS],
    )
    return model


def tiny_extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=8, chunk_length=1)
