"""The grammar process: what is hostile ends there, with a typed error and in bounded time, and
costs nobody else anything. Time is that of processors, which a busy machine does not stretch."""

import asyncio
import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from service.errors import ApiError, ApiErrorCode
from service.tokenizer.constraints import Choices, JsonSchema, Lark, Regex
from service.tokenizer.fair_queue import Flow
from service.tokenizer.grammar_compiler import GrammarCompiler, GrammarCompilerConfig, _Outcomes
from service.tokenizer.grammar_worker import MAX_ADDRESS_SPACE_BYTES
from service.tokenizer.jobs import Compiled, EncodeText, Refused
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.grammar_texts import draw
from tests.fakes.tokenizer_folders import make_byte_level_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANNE = Flow("anne", "1")
SHORT_CPU_S = 0.1
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
POINT = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}}
POINT |= {"required": ["x"], "additionalProperties": False}


def schema(document):
    return JsonSchema(json.dumps(document))


# Half a kilobyte of these would take minutes and gigabytes.
ENDLESS = schema(
    {
        "allOf": [
            {"type": "string", "pattern": f"(a|b)*a(a|b){{{length}}}"} for length in range(8, 24)
        ]
    }
)


def chain(length):
    """Schemas that refer to one another, each a step deeper."""
    defs = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return schema({"$defs": {**defs, f"d{length}": True}, "$ref": "#/$defs/d0"})


SLOW = {
    "patterns of all at once": ENDLESS,
    "terminals that double": Lark(
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60)) + "\nT60: /a/"
    ),
    "terminals of all at once": Lark(
        "start: A\nA: " + " & ".join(f"/(.|\\n)*a(.|\\n){{{i}}}b(.|\\n)*/" for i in range(10, 30))
    ),
    "letters of every script": Regex("(?i)\\p{L}" * 6000),
}
DEEP = {
    "a schema of references": chain(1500),
    "a grammar of references": Lark(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'
    ),
}


@contextlib.asynccontextmanager
async def started_compiler(max_cpu_s=0.5):
    compiler = GrammarCompiler(GrammarCompilerConfig(max_cpu_s=max_cpu_s))
    await compiler.start()
    try:
        yield compiler
    finally:
        await compiler.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def compiler():
    """For tests that leave its process as it is."""
    async with started_compiler() as compiler:
        yield compiler


def worker_of(compiler):
    (worker,) = compiler._processes._lanes._idle
    return worker


def children_cpu_s(worker):
    """Of the forks that have ended. See proc_pid_stat(5)."""
    fields = Path(f"/proc/{worker.pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[13]) + int(fields[14])) / TICKS_PER_S


async def refusal_of(compiler, constraint):
    with pytest.raises(ApiError) as raised:
        await compiler.compile(constraint, "guided_json", ANNE)
    assert raised.value.param == "guided_json"
    assert raised.value.message.startswith("guided_json: ")
    return raised.value


async def test_constraints_become_grammars_and_bad_ones_the_clients_error(compiler):
    grammar = await compiler.compile(schema(POINT), "p", ANNE)
    jsonschema.validate(json.loads(draw(grammar, 1)), POINT)
    choices = Choices(tuple(f"a choice {i}" for i in range(1000)))
    assert draw(await compiler.compile(choices, "p", ANNE), 1).decode() in choices.texts
    assert len(await compiler.compile(schema({"enum": ["x" * 60_000]}), "p", ANNE)) > 60_000
    error = await refusal_of(compiler, schema({"type": "text"}))
    assert (error.code, error.message) == (
        ApiErrorCode.INVALID_REQUEST,
        "guided_json: Invalid type: text",
    )
    assert await compiler.compile(chain(50), "p", ANNE), "as deep as people write"


async def test_what_takes_too_long_ends_after_its_time_of_a_processor():
    async with started_compiler(SHORT_CPU_S) as compiler:
        worker, used_s = worker_of(compiler), 0.0
        for name, constraint in SLOW.items():
            error = await refusal_of(compiler, constraint)
            assert error.code is ApiErrorCode.LIMIT_EXCEEDED, name
            took_s, used_s = children_cpu_s(worker) - used_s, children_cpu_s(worker)
            assert took_s < SHORT_CPU_S + 0.2, name
        assert "takes more than 0.1 s" in error.message
        assert worker_of(compiler) is worker, "the process outlives them"
        assert await compiler.compile(schema(POINT), "p", ANNE)


async def test_what_is_too_deep_or_too_large_is_refused_and_the_process_stays(compiler):
    worker = worker_of(compiler)
    for name, constraint in DEEP.items():
        error = await refusal_of(compiler, constraint)
        assert error.code is ApiErrorCode.LIMIT_EXCEEDED, name
        assert "less deeply nested" in error.message
    # Its own ceilings are those of its start; only what it forks for a job has others.
    assert resource.prlimit(worker.pid, resource.RLIMIT_AS)[0] != MAX_ADDRESS_SPACE_BYTES
    assert worker_of(compiler) is worker


async def test_what_is_known_asks_no_process(compiler):
    grammar = await compiler.compile(schema(POINT), "p", ANNE)
    first = await refusal_of(compiler, ENDLESS)
    worker = worker_of(compiler)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        assert await compiler.compile(schema(POINT), "q", ANNE) == grammar
        assert (await refusal_of(compiler, ENDLESS)).message == first.message
    finally:
        os.kill(worker.pid, signal.SIGCONT)


async def test_a_process_that_is_lost_is_nobodys_fault_and_replaced():
    async with started_compiler() as compiler:
        worker = worker_of(compiler)
        os.kill(worker.pid, signal.SIGKILL)
        error = await refusal_of(compiler, schema(POINT))
        assert error.code is ApiErrorCode.TOKENIZER_FAILED
        assert error.retry_after_s is not None
        assert await compiler.compile(schema(POINT), "p", ANNE), "it was not kept as an answer"


async def test_prompts_do_not_wait_for_a_grammar(tmp_path):
    folder = make_byte_level_folder(tmp_path)
    grammars = GrammarCompilerConfig(max_cpu_s=60.0)
    pool = TokenizerPool(TokenizerPoolConfig(folder, grammars=grammars))
    await pool.start()
    hostile = asyncio.create_task(pool.make_grammar(ENDLESS, "p", ANNE))
    await asyncio.sleep(0.05)
    for _ in range(20):
        assert await pool.encode_text(EncodeText("hello world"), ANNE)
    assert not hostile.done()
    hostile.cancel()
    await pool.aclose()


async def test_outcomes_that_were_not_asked_for_again_make_room():
    known = _Outcomes(max_bytes=2 * (256 + 100))
    for name in (b"a", b"b"):
        known.put(name, Compiled("x" * 100))
    assert known.get(b"a") is not None
    known.put(b"c", Refused("y" * 100))
    assert known.get(b"b") is None
    assert known.get(b"a") == Compiled("x" * 100)
    assert known.get(b"c") == Refused("y" * 100)
    known.put(b"huge", Compiled("x" * 1000))
    assert known.get(b"huge") is None
