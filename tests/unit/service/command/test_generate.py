"""`tessera generate` on the draft model that ships: streams, JSON, and readable failures."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from service.command.generate import generate
from service.command.offline import OfflineText
from tests.fakes.served_seq2seq import tiny_bart
from tests.fakes.tokenizer_folders import make_byte_level_folder

app = typer.Typer()
app.command("generate")(generate)


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, arguments, input=stdin)


SMALL = ("builtin-draft", "--max-tokens", "12", "--engine", "kv_cache_bytes=4194304")


def test_streamed_text_and_json_agree_and_standard_input_is_a_prompt() -> None:
    streamed = run(*SMALL, "--prompt", "def __init__(self")
    assert streamed.exit_code == 0, streamed.output
    as_json = run(*SMALL, "--prompt", "-", "--json", stdin="def __init__(self")
    result = json.loads(as_json.stdout)
    assert streamed.stdout == result["text"] + "\n"
    assert result["num_output_tokens"] == len(result["token_ids"]) == 12
    assert result["finish_reason"] == "length"


def test_chat_takes_the_template_and_a_seed_repeats_itself() -> None:
    chat = ("--prompt", "Hi", "--chat", "--system", "Be brief.", "--json", "--ignore-eos")
    sampled = ("--temperature", "1", "--seed", "7")
    one, two = (json.loads(run(*SMALL, *chat, *sampled).stdout) for _ in range(2))
    assert one["token_ids"] == two["token_ids"]
    plain = json.loads(run(*SMALL, "--prompt", "Hi", "--json").stdout)
    assert one["num_prompt_tokens"] > plain["num_prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("/no/such/folder", "--prompt", "x"), 1, "neither builtin"),
        ((*SMALL, "--prompt", "x", "--top-p", "7"), 1, "top_p must be"),
        ((*SMALL, "--prompt", "x", "--stop", ""), 2, "--stop"),
        ((*SMALL, "--prompt", "x", "--system", "y"), 2, "--chat"),
        ((*SMALL, "--prompt", "x", "--engine", "no_such_key=1"), 2, "no_such_key"),
        ((), 2, "--prompt"),
    ],
)
def test_failures_are_one_readable_message(
    arguments: tuple[str, ...], exit_code: int, message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == exit_code, result.output
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_the_prompt_of_an_encoder_decoder_is_its_source(tmp_path) -> None:
    folder = make_byte_level_folder(tmp_path, chat_template=None)
    model = tiny_bart()
    model.save_pretrained(folder)
    arguments = ("--max-tokens", "20", "--json", "--engine", "num_pages=32")
    result = run(str(folder), "--prompt", "hello world", *arguments)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    source = OfflineText.load(folder).encode("hello world", is_chat=False)
    expected = model.generate(
        torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=21
    )
    assert answer["token_ids"] == expected[0, 2:].tolist()
    assert answer["num_prompt_tokens"] == len(source)
