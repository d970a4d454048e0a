"""Encoder-decoders on a GPU: tokens are those of transformers' own code on it, however their inputs
are batched, cut and cached."""

import pytest
import torch

from tests.fakes import tiny_seq2seq
from tests.gpu.beside_transformers import GpuEngine, compare
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.encoder_input import SourceFeatures
from workers.models.features import SEQ2SEQ, ModelFeature
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUM_TOKENS = 64
TOLD = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
START = 2
LONG = [START, *range(10, 50)]
PROMPTS = [[START], LONG, [START, 7, 9], LONG[:17]]
# convolutions of Whisper in TF32, as transformers' own
MAX_ERROR = 1e-3
MAX_GAP_BF16 = 0.5
MIN_LIKELIEST_BF16 = 0.85


@pytest.fixture(scope="module", params=["bart", "marian", "whisper"])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return str(tiny_seq2seq.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def sources(family):
    lengths = (5, 60, 1, 33)
    return [tiny_seq2seq.random_source(family, n, seed=n) for n in lengths]


def start(folder, **changes):
    settings = {"dtype": "float32", "num_pages": 1024, "max_running_requests": 4, **changes}
    return GpuEngine(EngineConfig(model=folder, max_context_len=128, **settings))


def logits_of(family, sources, dtype):
    reference = tiny_seq2seq.build(family).to(CUDA, dtype)

    def of_tokens(index, tokens):
        source = sources[index]
        if isinstance(source, SourceFeatures):
            array = torch.from_numpy(source.array.copy()).to(CUDA, dtype)
            given = {"input_features": array[None]}
        else:
            given = {"input_ids": torch.tensor([source.token_ids], device=CUDA)}
        decoder_ids = torch.tensor([tokens], device=CUDA)
        return reference(**given, decoder_input_ids=decoder_ids, use_cache=False).logits[0]

    return of_tokens


def assert_equal(comparison):
    print("float32:", comparison)
    assert comparison.gaps.max() < MAX_ERROR, comparison
    assert comparison.errors.max() < MAX_ERROR, comparison


def test_float32_tokens_are_those_of_transformers(family, folder, sources):
    """Batched, in chunks, alone, and again when the input has been read; pages of 1, 16, 64."""
    of_tokens = logits_of(family, sources, torch.float32)
    for changes in (
        {"page_size": 1},
        {"page_size": 16, "max_step_tokens": 16},
        {"page_size": 64, "max_running_requests": 1},
    ):
        engine = start(folder, **changes)
        for _ in range(2):
            results = engine.generate(PROMPTS, TOLD, sources)
            assert_equal(compare(of_tokens, PROMPTS, results))
        engine.close()


def test_float32_requests_that_were_retracted_go_on(family, folder, sources):
    engine = start(folder, page_size=16, num_pages=10)
    results = engine.generate(PROMPTS * 2, TOLD, sources * 2)
    assert engine.engine.stats().num_preemptions > 0
    comparison = compare(logits_of(family, sources * 2, torch.float32), PROMPTS * 2, results)
    assert_equal(comparison)
    engine.close()


@NEEDS_FA3
@serves(SEQ2SEQ.subject, ModelFeature.GPU)
def test_bfloat16_tokens_are_near_ties_apart(family, folder, sources):
    """Self-attention through FlashAttention-3, cross-attention through torch, over one pool."""
    of_tokens = logits_of(family, sources, torch.bfloat16)
    for page_size in (1, 16, 64):
        engine = start(folder, dtype="bfloat16", page_size=page_size)
        assert engine.engine.info.attention_backend == "fa3_triton+torch_native"
        results = engine.generate(PROMPTS, TOLD, sources)
        comparison = compare(of_tokens, PROMPTS, results)
        print("bfloat16:", comparison)
        assert comparison.gaps.max() < MAX_GAP_BF16, comparison
        assert (comparison.gaps == 0).mean() > MIN_LIKELIEST_BF16, comparison
        engine.close()
