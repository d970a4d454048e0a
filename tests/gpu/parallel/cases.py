"""What ranks are asked on GPUs, and what one rank says to it."""

from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from tests.gpu import engines
from tests.gpu.engines import NEAR_TIE, NUM_TOKENS, gaps_to_likeliest, prompts_of, share_equal
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True}
BUILTIN = {**engines.BUILTIN, "num_pages": 400}
PROMPTS = prompts_of(21, 4000)
TINY_PROMPTS = prompts_of(6, VOCAB_SIZE, longest=60)
TINY_SAMPLING = [GREEDY, SEEDED] * 3


def tiny_config(name, folder):
    """Of an engine of a tiny model, saved in folder, in float32."""
    model = str(save_tiny_model(NATIVE[name], folder))
    tiny = {"dtype": "float32", "attention_backend": "torch_native", "num_pages": 400}
    return {**tiny, "page_size": 4, "model": model}


def alone(config, prompts, sampling):
    """What one rank says, in this process."""
    config = EngineConfig(**config, tp_size=1)
    return engines.generate(config, prompts, [SamplingParams(**one) for one in sampling])


def assert_likeliest(rounds):
    """rounds: three of greedy tokens for PROMPTS."""
    gaps = gaps_to_likeliest(PROMPTS, rounds[-1])
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert share_equal(rounds[1], rounds[2]) > 0.95
