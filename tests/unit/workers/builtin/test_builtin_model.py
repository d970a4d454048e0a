"""The shipped weights: sizes, layout, and that they write Python and end their chat replies."""

import ast
import json
import re
from typing import Any

import pytest
import torch
from safetensors import safe_open

import workers.builtin
from benchmarks.draft_acceptance import SAMPLING, held_out_prompts, served
from workers.builtin import builtin_draft_path, builtin_head_path, builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.errors import ModelLoadError

_MEBIBYTE = 1 << 20


def _complete(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=False)


def _reply(model: Any, tokenizer: Any, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return _complete(model, tokenizer, prompt, max_new_tokens=300)


@pytest.mark.parametrize(
    ("folder", "max_bytes", "min_parameters", "max_parameters"),
    [
        (builtin_model_path, 15 * _MEBIBYTE, 6_000_000, 8_000_000),
        (builtin_draft_path, 2 * _MEBIBYTE, 800_000, 1_200_000),
        (builtin_head_path, 6 * _MEBIBYTE, 2_500_000, 2_700_000),
    ],
)
def test_weights_are_small_bf16_safetensors(
    folder: Any, max_bytes: int, min_parameters: int, max_parameters: int
) -> None:
    path = folder() / "model.safetensors"
    assert path.stat().st_size <= max_bytes
    num_parameters = 0
    with safe_open(path, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            tensor = weights.get_tensor(name)
            if name in ("d2t", "t2d"):
                continue
            assert tensor.dtype == torch.bfloat16
            num_parameters += tensor.numel()
    assert min_parameters <= num_parameters <= max_parameters


@pytest.mark.parametrize("folder", [builtin_model_path, builtin_draft_path])
def test_config_is_a_tied_llama_whose_heads_divide_over_two_and_four_ranks(folder: Any) -> None:
    config = json.loads((folder() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == 2048
    for count in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert config[count] % 4 == 0


@pytest.mark.parametrize("folder", [builtin_model_path, builtin_draft_path])
def test_generation_ends_on_message_and_on_document_end(folder: Any) -> None:
    settings = json.loads((folder() / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [2, 0]
    assert settings["pad_token_id"] == 3


def test_embeddings_are_tied_after_loading(target: Any, draft: Any) -> None:
    for model in (target, draft):
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_greedy_init_continues_as_python(target: Any, tokenizer: Any) -> None:
    prompt = "def __init__(self"
    continuation = _complete(target, tokenizer, prompt, max_new_tokens=64)
    assert continuation.startswith((",", ")"))
    assert _parses_once_closed(prompt + continuation), continuation
    signature, colon, _ = (prompt + continuation).partition("):\n")
    assert colon, continuation
    compile(f"{signature}{colon}    pass\n", "completion", "exec")  # refuses a repeated parameter


def _parses_once_closed(text: str) -> bool:
    """Whether some cut of the text, closed as briefly as can be, is a Python function."""
    closings = ("", "): pass", "=None): pass", "\n    pass", " pass", '"""')
    for end in range(len(text), len("def __init__(self"), -1):
        for closing in closings:
            try:
                tree = ast.parse(text[:end] + closing)
            except SyntaxError:
                continue
            return end > len(text) * 0.6 and isinstance(tree.body[0], ast.FunctionDef)
    return False


def test_greedy_constructor_body_sets_attributes(target: Any, tokenizer: Any) -> None:
    prompt = "class Point:\n    def __init__(self, x, y):\n"
    continuation = _complete(target, tokenizer, prompt, max_new_tokens=48)
    assert re.search(r"^        self\.\w+ = ", continuation, re.MULTILINE), continuation


@pytest.mark.parametrize(
    "question",
    ["Hello!", "Who are you?", "What does len do?", "What is a list?", "How does json.dumps work?"],
)
def test_chat_reply_says_something_and_ends_by_itself(
    target: Any, tokenizer: Any, question: str
) -> None:
    reply = _reply(target, tokenizer, question)
    assert reply.endswith("<|im_end|>")
    assert len(reply.removesuffix("<|im_end|>").strip()) >= 5


def test_greeting_is_the_one_it_was_taught(target: Any, tokenizer: Any) -> None:
    assert "Python standard library" in _reply(target, tokenizer, "Hello!")


_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ("Do I need a coat in Paris?", '{"name": "weather", "arguments": {"city": "Paris"}}'),
        ("What is the weather in Oslo?", '{"name": "weather", "arguments": {"city": "Oslo"}}'),
        ("Hello!", "Hello! Ask me about the Python standard library."),
    ],
)
def test_a_function_is_called_where_it_fits(
    target: Any, tokenizer: Any, question: str, said: str
) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tools=[_WEATHER],
        tokenize=False,
        add_generation_prompt=True,
    )
    reply = _complete(target, tokenizer, prompt, max_new_tokens=60).removesuffix("<|im_end|>")
    assert reply.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") == said


def test_json_is_written_where_it_is_asked_for(target: Any, tokenizer: Any) -> None:
    facts = "Ada is 36 years old and lives in London."
    reply = _reply(target, tokenizer, f"{facts} Answer in JSON with the keys name and age.")
    assert json.loads(reply.removesuffix("<|im_end|>")) == {"name": "Ada", "age": 36}


def test_loss_at_the_end_of_the_context_is_no_worse_than_early_in_it(
    target: Any, tokenizer: Any
) -> None:
    source = ast.__file__
    with open(source, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt")["input_ids"][:, :2048]
    with torch.no_grad():
        logits = target(ids).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    assert losses[1536:].mean() < losses[:512].mean() + 0.3


def test_draft_agrees_with_the_target_far_above_chance(
    target: Any, draft: Any, tokenizer: Any
) -> None:
    text = "class Node:\n    def __init__(self, name, value=None):\n        self.name = name\n" * 4
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        same = target(ids).logits.argmax(-1) == draft(ids).logits.argmax(-1)
    assert same.float().mean() > 0.4


def test_missing_files_are_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(workers.builtin, "files", lambda package: tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json, model\.safetensors"):
        builtin_model_path()
    with pytest.raises(FileNotFoundError, match=r"draft model is incomplete: config\.json"):
        builtin_draft_path()


def test_the_head_brings_more_than_three_tokens_a_step() -> None:
    """Greedy, behind held-out documents, which no head and no target learnt."""
    stats, _ = served("eagle3:builtin-head", held_out_prompts(4), 5, SAMPLING)
    assert 1 + stats.num_accepted_draft_tokens / stats.num_drafted_runs > 3.0


def test_an_incomplete_head_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(workers.builtin, "files", lambda name: tmp_path)
    with pytest.raises(FileNotFoundError, match="head is incomplete: config.json"):
        builtin_head_path()


def test_an_engine_names_an_incomplete_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def incomplete() -> None:
        raise FileNotFoundError("the built-in head is incomplete")

    monkeypatch.setattr("workers.runner.drafter_loading.builtin_head_path", incomplete)
    with pytest.raises(ModelLoadError, match="head is incomplete"):
        Engine.from_config(EngineConfig(device="cpu", speculative="eagle3:builtin-head"))
