"""Encoders of transformers in our batches: what transformers makes of each text alone."""

import json

import numpy as np
import pytest
import torch

from tests.fakes.tiny_encoders import (
    HIDDEN_SIZE,
    MAX_POSITIONS,
    VOCAB_SIZE,
    one_by_one,
    save_tiny_encoder,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.encoder_only.engine import EncoderOnlyEngine
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.engine.single_rank import build_engine
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import check_servable, model_facts
from workers.loading.sentence_modules import PROMPTS_FILE
from workers.models.features import ENCODER, ModelFeature
from workers.pooling.params import Activation, EmbeddingInfo, Pooling, PoolingParams
from workers.pooling.vectors import unpack_vector
from workers.sampling.params import SamplingParams

FAMILIES = ["bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert"]
OTHERS = ["distilbert", "mpnet", "electra", "deberta-v2"]
LENS = (5, 9, 30, 6, 31, 1, 12)
SECOND_START = 3
POOLED = {
    Pooling.CLS: lambda states: states[0],
    Pooling.LAST: lambda states: states[-1],
    Pooling.MEAN: lambda states: states.mean(axis=0),
    Pooling.MAX: lambda states: states.max(axis=0),
}
MODES = {
    "cls_token": Pooling.CLS,
    "lasttoken": Pooling.LAST,
    "mean_tokens": Pooling.MEAN,
    "max_tokens": Pooling.MAX,
}


def engine_of(folder, **settings):
    config = EngineConfig(model=str(folder), num_cpu_threads=1, **settings)
    return build_engine(config, lambda record: None, lambda done, total: None)


def random_texts(lens=LENS):
    random = np.random.default_rng(7)
    return [random.integers(5, VOCAB_SIZE, size=length).tolist() for length in lens]


def vectors_of(engine, texts, second_start=0, **options):
    """All of them waiting at once."""
    pooling = PoolingParams(engine.info.embedding.pooling, **{"is_normalised": False} | options)
    for index, text in enumerate(texts):
        engine.submit(
            GenerateRequest(
                str(index),
                text,
                SamplingParams(),
                pooling=pooling,
                second_text_start=second_start if len(text) > second_start else 0,
            )
        )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert all(one.finish_reason is FinishReason.STOP for one in outputs), outputs
    vectors = {one.request_id: unpack_vector(one.embedding) for one in outputs}
    engine.check_integrity()
    return [vectors[str(index)] for index in range(len(texts))]


def state_pooling(folder, mode):
    path = folder / "1_Pooling" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({f"pooling_mode_{one}": one == mode for one in MODES}))


@pytest.mark.parametrize("model_type", FAMILIES + OTHERS)
@serves(ENCODER.subject, ModelFeature.CPU)
def test_vectors_and_scores_are_those_of_transformers(tmp_path, model_type):
    longest = MAX_POSITIONS - 2 * (model_type in ("roberta", "xlm-roberta", "mpnet"))
    texts = random_texts((*LENS, longest))
    starts = [SECOND_START if len(text) > SECOND_START else 0 for text in texts]
    for kind in ("body", "classifier"):
        model = save_tiny_encoder(model_type, tmp_path / kind, kind, num_labels=3)
        engine = engine_of(tmp_path / kind)
        assert engine.info.max_context_len == longest
        expected = [
            one_by_one(model, [text], start)[0] for text, start in zip(texts, starts, strict=True)
        ]
        if kind == "body":
            expected = [states.mean(axis=0) for states in expected]
        found = vectors_of(engine, texts, SECOND_START)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
@pytest.mark.parametrize(("mode", "pooling"), MODES.items())
def test_the_folder_says_how_it_is_pooled_and_batches_change_nothing(
    tmp_path, model_type, mode, pooling
):
    model, texts = save_tiny_encoder(model_type, tmp_path), random_texts()
    state_pooling(tmp_path, mode)
    engine = engine_of(tmp_path)
    assert engine.info.embedding == EmbeddingInfo(HIDDEN_SIZE, pooling)
    together = vectors_of(engine, texts)
    alone = [vectors_of(engine, [text])[0] for text in texts]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    expected = [POOLED[pooling](states) for states in one_by_one(model, texts)]
    np.testing.assert_allclose(together, expected, atol=1e-4)
    unit = [one[:7] / np.linalg.norm(one[:7]) for one in expected]
    found = vectors_of(engine, texts, dimensions=7, is_normalised=True)
    np.testing.assert_allclose(found, unit, atol=1e-5)


def test_the_body_of_a_masked_language_model_is_served(tmp_path):
    model, texts = save_tiny_encoder("bert", tmp_path, "masked"), random_texts()
    expected = [states.mean(axis=0) for states in one_by_one(model.bert, texts)]
    np.testing.assert_allclose(vectors_of(engine_of(tmp_path), texts), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("num_labels", "named", "activation", "made"),
    [
        (1, None, Activation.SIGMOID, lambda logits: 1 / (1 + np.exp(-logits))),
        (3, None, Activation.SOFTMAX, lambda logits: np.exp(logits) / np.exp(logits).sum()),
        (1, "torch.nn.modules.linear.Identity", Activation.NONE, lambda logits: logits),
        (3, "torch.nn.modules.activation.Sigmoid", Activation.SIGMOID, None),
    ],
)
def test_scores_have_the_activation_of_the_folder_or_of_their_number(
    tmp_path, num_labels, named, activation, made
):
    changes = {} if named is None else {"sentence_transformers": {"activation_fn": named}}
    model = save_tiny_encoder("bert", tmp_path, "classifier", num_labels=num_labels, **changes)
    engine, texts = engine_of(tmp_path), random_texts()
    assert engine.info.embedding == EmbeddingInfo(num_labels, Pooling.SCORES, activation)
    logits = one_by_one(model, texts)
    np.testing.assert_allclose(vectors_of(engine, texts), logits, atol=1e-4)
    made = made or (lambda logits: 1 / (1 + np.exp(-logits)))
    scores = vectors_of(engine, texts, is_normalised=True)
    np.testing.assert_allclose(scores, [made(one) for one in logits], atol=1e-5)


def test_a_family_whose_texts_see_their_padding_is_refused_by_name(tmp_path):
    save_tiny_encoder("convbert", tmp_path)
    with pytest.raises(ModelLoadError, match="ConvBertModel has texts of a batch depend on each"):
        engine_of(tmp_path)


def test_a_text_is_as_long_as_sentence_transformers_says_or_the_operator(tmp_path):
    save_tiny_encoder("roberta", tmp_path)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    assert engine_of(tmp_path).info.max_context_len == 40
    assert engine_of(tmp_path, max_context_len=64).info.max_context_len == 64
    with pytest.raises(ConfigError, match="exceeds the model's 64 tokens"):
        engine_of(tmp_path, max_context_len=65)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]', "asks for Dense"),
        ("modules.json", "{}x", "no list of modules"),
        ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "weightedmean"),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_max_tokens": true}',
            "cls_token and max_tokens",
        ),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "max"]}', "cls_token and max_tokens"),
        (
            "modules.json",
            '[{"type": "sentence_transformers.models.Pooling", "path": "2_Pooling"}]',
            "has Pooling in 2_Pooling",
        ),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
        (PROMPTS_FILE, '{"default_prompt_name": "q"}', "has no prompt 'q'"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path, name, text, message):
    save_tiny_encoder("bert", tmp_path)
    for other in ("1_Pooling", "modules"):
        (tmp_path / other).mkdir(exist_ok=True)
    (tmp_path / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer"},'
        ' {"type": "sentence_transformers.models.Pooling"},'
        ' {"type": "sentence_transformers.models.Normalize"}]'
    )
    check_servable(EngineConfig(model=str(tmp_path)))
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=message):
        check_servable(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("mode", ["cls", ["mean"], "max", "lasttoken"])
def test_newer_folders_name_one_pooling(tmp_path, mode):
    save_tiny_encoder("bert", tmp_path)
    state_pooling(tmp_path, "")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    name = mode if isinstance(mode, str) else mode[0]
    pooling = {"cls": Pooling.CLS, "mean": Pooling.MEAN, "max": Pooling.MAX}
    facts = model_facts(EngineConfig(model=str(tmp_path)))
    assert facts.embedding.pooling is pooling.get(name, Pooling.LAST)


def test_a_default_prompt_is_told_unless_it_would_not_be_pooled(tmp_path):
    save_tiny_encoder("bert", tmp_path)
    prompts = {"prompts": {"q": "query: ", "d": ""}, "default_prompt_name": "q"}
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(prompts))
    assert model_facts(EngineConfig(model=str(tmp_path))).embedding.prompt == "query: "
    state_pooling(tmp_path, "")
    stated = {"pooling_mode": "mean", "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelLoadError, match="include_prompt"):
        check_servable(EngineConfig(model=str(tmp_path)))
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(prompts | {"default_prompt_name": None}))
    assert model_facts(EngineConfig(model=str(tmp_path))).embedding.prompt == ""


def test_a_classifier_with_a_default_prompt_is_refused_by_name(tmp_path):
    save_tiny_encoder("bert", tmp_path, "classifier", num_labels=1)
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(prompts))
    with pytest.raises(ModelLoadError, match="default prompt"):
        check_servable(EngineConfig(model=str(tmp_path)))


def test_an_activation_that_is_not_served_is_refused_by_name(tmp_path):
    odd = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.GELU"}
    save_tiny_encoder("bert", tmp_path, "classifier", num_labels=1, **odd)
    with pytest.raises(ModelLoadError, match="GELU"):
        check_servable(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("tp_size", 2), ("speculative", "ngram"), ("page_size", 16), ("attention_backend", "triton")],
)
def test_settings_of_decoders_are_refused_by_name(tmp_path, setting, value):
    save_tiny_encoder("bert", tmp_path)
    config = EngineConfig(model=str(tmp_path), **{setting: value})
    with pytest.raises(ConfigError, match=setting):
        check_servable(config)
    with pytest.raises(ConfigError, match=setting):
        EncoderOnlyEngine.from_config(
            config, on_step=lambda record: None, on_progress=lambda done, total: None
        )


def test_weights_that_are_missing_or_of_another_model_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_tiny_encoder("bert", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    spare = {"encoder.layer.9.output.dense.bias": torch.zeros(HIDDEN_SIZE)}
    save_file(weights | spare, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected keys: encoder\.layer\.9"):
        engine_of(tmp_path)
    weights.pop("embeddings.word_embeddings.weight")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="missing keys"):
        engine_of(tmp_path)


def test_weights_may_come_from_the_nodes_cache_or_be_noise(tmp_path):
    model, texts = save_tiny_encoder("bert", tmp_path / "model"), random_texts()
    expected = [states.mean(axis=0) for states in one_by_one(model, texts)]
    cached = engine_of(tmp_path / "model", weights_cache_dir=str(tmp_path / "cache"))
    np.testing.assert_allclose(vectors_of(cached, texts), expected, atol=1e-4)
    noise = [
        vectors_of(engine_of(tmp_path / "model", load_format="dummy", dummy_weights_seed=3), texts)
        for _ in range(2)
    ]
    np.testing.assert_array_equal(noise[0], noise[1])
    assert not np.allclose(noise[0], expected, atol=1e-2)


def test_decoders_stay_decoders(tmp_path):
    """Of a family that has both: architectures says which one a folder is."""
    save_tiny_encoder("bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["BertLMHeadModel"], "is_decoder": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from workers.loading.model_folder import model_facts

    assert not model_facts(EngineConfig(model=str(tmp_path))).is_encoder_only
