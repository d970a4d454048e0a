"""What is read of a model folder, which file wins, and what is said of one that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.pieces import _byte_alphabet
from workers.errors import ModelLoadError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes('{"é": 1}'.encode())
    return tmp_path


def write(folder, name, value):
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    (folder / name).write_bytes(text.encode())


def test_the_tokenizer_is_enough(folder):
    files = read_tokenizer_files(folder)
    assert files.tokenizer_json == '{"é": 1}'
    assert (files.chat_template, files.named_tokens) == (None, {})


def test_the_chat_template_of_the_most_particular_file_wins(folder):
    for name, value, expected in (
        ("tokenizer_config.json", {"chat_template": "of the config é"}, "of the config é"),
        ("chat_template.json", {"chat_template": "of its json"}, "of its json"),
        ("chat_template.jinja", "of its own é", "of its own é"),
    ):
        write(folder, name, value)
        assert read_tokenizer_files(folder).chat_template == expected


def test_files_are_utf_8_whatever_the_locale_is(folder):
    write(folder, "chat_template.jinja", "of its own é")
    write(folder, "tokenizer_config.json", {"eos_token": "</é>"})
    code = (
        "import sys; from pathlib import Path; "
        "from service.tokenizer.folder import read_tokenizer_files; "
        "print(ascii(read_tokenizer_files(Path(sys.argv[1]))))"
    )
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    read = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        env={**os.environ, **plain},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
    )
    assert read.stdout.strip() == ascii(read_tokenizer_files(folder))


def test_of_several_templates_the_default_is_read(folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", {"chat_template": named})
    assert read_tokenizer_files(folder).chat_template == "d"
    write(folder, "tokenizer_config.json", {"chat_template": named[:1]})
    assert read_tokenizer_files(folder).chat_template is None
    write(folder, "tokenizer_config.json", {"chat_template": {"default": "d"}})
    with pytest.raises(ModelLoadError, match="must be a string or a list"):
        read_tokenizer_files(folder)


NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]


def test_named_tokens_are_text_however_they_are_written(folder):
    written = {name: {"content": f"<{name}>", "lstrip": False} for name in NAMES}
    write(folder, "special_tokens_map.json", {**written, "bos_token": "<map>", "other": "x"})
    assert read_tokenizer_files(folder).named_tokens == {
        **{name: f"<{name}>" for name in NAMES},
        "bos_token": "<map>",
    }
    write(folder, "tokenizer_config.json", {"bos_token": "<config>", "eos_token": None})
    named = read_tokenizer_files(folder).named_tokens
    assert named["bos_token"] == "<config>"
    assert "eos_token" not in named
    assert named["mask_token"] == "<mask_token>"


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(("text", "match"), [("{", "is not JSON"), ("[]", "JSON object")])
def test_a_file_that_is_not_what_it_should_be_is_named(folder, name, text, match):
    write(folder, name, text)
    with pytest.raises(ModelLoadError, match=f"{name} .*{match}"):
        read_tokenizer_files(folder)


@pytest.mark.parametrize(
    "slow", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model"]
)
def test_a_folder_without_a_fast_tokenizer_is_told_what_it_has(tmp_path, slow):
    with pytest.raises(ModelLoadError, match=f"{tmp_path.name} .*it has no tokenizer at all"):
        read_tokenizer_files(tmp_path)
    write(tmp_path, slow, "x")
    with pytest.raises(ModelLoadError, match=f"it only has {slow}, .*save_pretrained"):
        read_tokenizer_files(tmp_path)


def test_every_byte_has_the_character_that_gpt_2_writes_for_it():
    """Printable ones stand for themselves, the others for characters from U+0100 on."""
    alphabet = _byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["!"], alphabet["~"], alphabet["¡"], alphabet["ÿ"]) == (33, 126, 161, 255)
    shifted = {"Ā": 0, "Ċ": 10, "Ġ": 32, "ġ": 127, "ł": 160, "Ń": 173}
    assert {char: alphabet[char] for char in shifted} == shifted
