"""What a service says when it serves: its addresses, and a command that its first model obeys."""

import io
import json
import shlex

import pytest
from rich.console import Console

from service.api.openai.completions import CompletionRequest
from service.api.openai.embeddings import EmbeddingRequest
from service.api.openai.pooling import PoolingRequest
from service.api.openai.scores import RerankRequest
from service.command.announcement import announce
from service.config import parse_config
from service.handler.task import Task

BODIES = {
    Task.GENERATE: ("/v1/completions", CompletionRequest),
    Task.EMBED: ("/v1/embeddings", EmbeddingRequest),
    Task.SCORE: ("/v1/rerank", RerankRequest),
    Task.CLASSIFY: ("/pooling", PoolingRequest),
}
TWO_MODELS = {"models": {"small": {}, "org/large": {}}}


def printed(settings, tasks):
    console = Console(file=io.StringIO(), width=20)
    announce(parse_config(settings), tasks, console)
    return console.file.getvalue()


def words(settings, tasks):
    """Of the command, as a shell reads it."""
    return shlex.split(printed(settings, tasks).splitlines()[-1])


def test_a_key_is_carried_when_one_is_wanted():
    said = printed({"auth": {"api_keys": "secret"}}, {})
    assert '-H "Authorization: Bearer $API_KEY"' in said
    assert "secret" not in said


def test_every_model_is_named_and_the_first_one_asked():
    said = printed(TWO_MODELS, {"small": Task.GENERATE, "org/large": Task.EMBED})
    assert "Tessera serves small, org/large\n" in said
    assert '"model": "small"' in said
    assert "/v1/completions" in said


@pytest.mark.parametrize("task", BODIES)
def test_the_command_is_a_request_that_such_a_model_answers(task):
    path, body_class = BODIES[task]
    command = words(TWO_MODELS, {"small": task})
    assert command[:2] == ["curl", f"http://127.0.0.1:8000{path}"]
    request = body_class.model_validate(json.loads(command[-1]))
    assert request.model == "small"


def test_a_model_that_hears_is_sent_a_file():
    command = words(TWO_MODELS, {"small": Task.TRANSCRIBE})
    assert command[1].endswith("/v1/audio/transcriptions")
    assert command[2:] == ["-F", "model=small", "-F", "file=@speech.wav"]


def test_a_model_that_nobody_has_seen_is_asked_for_a_text():
    assert words(TWO_MODELS, {})[1].endswith("/v1/completions")
