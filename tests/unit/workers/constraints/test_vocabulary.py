"""The tokens that grammars are matched with: tokenizer.json's, read when an engine starts."""

import logging
import shutil
import threading

import pytest
from tokenizers import Tokenizer

from tests.unit.workers.engine.test_grammars import ANSWER, request_of, run
from workers import Engine
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.constraints import compiler as compiler_module
from workers.constraints.compiler import GrammarCompiler
from workers.constraints.desk import CompilingDesk
from workers.constraints.vocabulary import read_vocabulary
from workers.errors import RequestRejectedError

VOCAB_SIZE = 4096
TEXT = '{"name": "Ada Lovelace", "age": 36}'


def test_tokens_are_those_of_the_file(tmp_path) -> None:
    """Also where the file asks for batches of one length."""
    folder = builtin_model_path()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
    shutil.copy(folder / "tokenizer.json", tmp_path)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    (tmp_path / "padded").mkdir()
    tokenizer.save(str(tmp_path / "padded" / "tokenizer.json"))
    for place in (tmp_path, tmp_path / "padded"):
        vocabulary = read_vocabulary(place, VOCAB_SIZE, [2])
        assert vocabulary.tokenize_str(TEXT) == expected
        assert vocabulary.decode_bytes(expected) == TEXT.encode()


@pytest.mark.parametrize("content", ["", "garbage", "[]", "{}", '{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_told_of_at_the_start_and_refused(
    content: str, tmp_path, caplog
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, [2])
    with caplog.at_level(logging.WARNING):
        CompilingDesk(compiler).prepare()()
    assert "grammar will be refused" in caplog.text
    with pytest.raises(RequestRejectedError, match="tokenizer cannot be used"):
        compiler.compile(ANSWER, [])


def test_a_warm_engine_reads_nothing_at_its_first_grammar(monkeypatch) -> None:
    read = []

    def reading(*arguments):
        read.append(threading.current_thread())
        return read_vocabulary(*arguments)

    monkeypatch.setattr(compiler_module, "read_vocabulary", reading)
    engine = Engine.from_config(EngineConfig(num_cpu_threads=1))
    try:
        assert not read
        engine.warm_up()
        assert len(read) == 1
        assert read[0] is not threading.current_thread()
        (result,) = run(engine, request_of(1, ANSWER))
        assert result.error is None
        assert len(read) == 1
    finally:
        engine.close()


def test_an_engine_without_a_tokenizer_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("workers.runner.grammars.TOKENIZER_FILE", "nothing.json")
    engine = Engine.from_config(EngineConfig(num_cpu_threads=1))
    engine.warm_up()
    engine.close()
