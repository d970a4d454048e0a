"""Requests of one grammar have templates of their own, as long as memory and time allow."""

import time
from collections import Counter
from typing import Any

import pytest
from llguidance import LLMatcher

from workers.builtin import builtin_model_path
from workers.constraints import compiler as compiler_module
from workers.constraints import templates as templates_module
from workers.constraints.compiler import GrammarCompiler
from workers.constraints.grammar_matcher import GrammarMatcher
from workers.errors import RequestRejectedError

YES_OR_NO = LLMatcher.grammar_from_regex("(yes|no)")
VOCAB_SIZE, EOS = 4096, 2


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(builtin_model_path(), VOCAB_SIZE, [EOS])


def regex(number: int) -> str:
    return LLMatcher.grammar_from_regex(f"a{number:03}")


def num_templates(compiler: GrammarCompiler) -> dict[str, int]:
    return {text: len(one.known) for text, one in compiler._templates._by_text.items()}


def numbers(matchers: list[GrammarMatcher]) -> Counter[int]:
    return Counter(one.template for one in matchers)


def test_requests_that_run_at_once_share_no_template(compiler: GrammarCompiler) -> None:
    """In copies of one template threads wait for each other."""
    running = [compiler.compile(YES_OR_NO, []) for _ in range(12)]
    assert numbers(running) == dict.fromkeys(range(12), 1)
    (templates,) = compiler._templates._by_text.values()
    assert len({id(one.matcher) for one in templates.known}) == 12


def test_who_has_ended_gives_its_template_to_the_next(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = [compiler.compile(YES_OR_NO, []) for _ in range(4)]
    del running[2]
    # Making a further template would be noticed.
    monkeypatch.setattr(compiler_module, "LLMatcher", None)
    running.append(compiler.compile(YES_OR_NO, []))
    assert numbers(running) == dict.fromkeys(range(4), 1)


def test_beyond_the_limit_the_least_used_is_shared(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates_module, "MAX_TEMPLATES", 3)
    running = [compiler.compile(YES_OR_NO, []) for _ in range(9)]
    assert numbers(running) == dict.fromkeys(range(3), 3)
    running = [one for one in running if one.template != 1]
    running += [compiler.compile(YES_OR_NO, []) for _ in range(3)]
    assert numbers(running) == dict.fromkeys(range(3), 3)


def test_requests_of_a_slow_grammar_share_rather_than_wait(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled = 0

    def slow(*arguments: Any, **options: Any) -> LLMatcher:
        nonlocal num_compiled
        num_compiled += 1
        until_s = time.thread_time() + 2 * templates_module.SLOW_COMPILE_S
        while time.thread_time() < until_s:
            pass
        return LLMatcher(*arguments, **options)

    monkeypatch.setattr(compiler_module, "LLMatcher", slow)
    running = [compiler.compile(YES_OR_NO, []) for _ in range(24)]
    assert num_compiled == templates_module.MAX_SLOW_TEMPLATES
    assert set(numbers(running).values()) == {3}


def test_a_large_grammar_leaves_half_of_the_memory_to_others(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates_module, "MAX_CACHED_TEXT_BYTES", 7 * len(YES_OR_NO))
    running = [compiler.compile(YES_OR_NO, []) for _ in range(6)]
    assert numbers(running) == {0: 2, 1: 2, 2: 2}
    compiler.compile(regex(0), [])
    assert num_templates(compiler) == {YES_OR_NO: 3, regex(0): 1}


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        ("MAX_CACHED_GRAMMARS", 2),
        ("MAX_CACHED_TEMPLATES", 2),
        ("MAX_CACHED_TEXT_BYTES", 3 * len(regex(0)) - 1),
    ],
)
def test_what_was_asked_for_longest_ago_is_forgotten(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(templates_module, limit, most)
    for number in (0, 1, 0, 2):
        compiler.compile(regex(number), [])
    assert num_templates(compiler) == {regex(0): 1, regex(2): 1}


def test_nothing_is_kept_of_what_cannot_be_compiled(compiler: GrammarCompiler) -> None:
    for _ in range(2):
        with pytest.raises(RequestRejectedError):
            compiler.compile(LLMatcher.grammar_from_regex("(a"), [])
    assert not num_templates(compiler)
