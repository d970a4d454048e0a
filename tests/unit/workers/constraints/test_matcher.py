"""Grammars against the built-in model's tokenizer: what may follow, when a text is complete."""

import json
import random
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

from workers.builtin import builtin_model_path
from workers.constraints import templates as templates_module
from workers.constraints.compiler import GrammarCompiler, num_mask_threads
from workers.constraints.grammar_matcher import GrammarMatcher
from workers.constraints.mask_filler import MaskFiller
from workers.constraints.masks import AskedMasks, MaskRow, look_ahead
from workers.errors import ErrorCode, RequestRejectedError

TOKENIZER = AutoTokenizer.from_pretrained(builtin_model_path())
VOCAB_SIZE, EOS = len(TOKENIZER), TOKENIZER.eos_token_id
YES_OR_NO = LLMatcher.grammar_from_regex("(yes|no)")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(builtin_model_path(), VOCAB_SIZE, [EOS])


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Alone:
    """A request of which nothing but its matcher counts. seen: what must follow, as it was told."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self.matcher = matcher
        self.is_ended = False
        self.seen: list[int] = []

    def forced_token(self, position: int) -> int | None:
        return None

    def look_ahead(self, token_id: int) -> None:
        self.seen.append(token_id)


def allowed(compiler: GrammarCompiler, *matchers: GrammarMatcher) -> list[set[int]]:
    filler = MaskFiller(VOCAB_SIZE, compiler.fill)
    masks = filler.fill(
        3, [MaskRow(slot, 7, Alone(matcher)) for slot, matcher in enumerate(matchers)]
    ).masks
    assert (masks.step_id, masks.slots.tolist()) == (3, list(range(len(matchers))))
    assert masks.positions.tolist() == [7] * len(matchers)
    bits = (masks.rows[:, :, None] >> np.arange(32)) & 1
    return [set(np.flatnonzero(row).tolist()) for row in bits.reshape(len(matchers), -1)]


def test_a_mask_has_the_tokens_that_the_grammar_allows_next(compiler: GrammarCompiler):
    (first,) = allowed(compiler, compiler.compile(YES_OR_NO, []))
    assert {TOKENIZER.decode([token_id]) for token_id in first} == {"y", "n", "no"}


def test_rows_have_masks_of_their_own(compiler: GrammarCompiler):
    matchers = [compiler.compile(YES_OR_NO, ids("y")), compiler.compile(YES_OR_NO, ids("n"))]
    after_y, after_n = allowed(compiler, *matchers)
    assert {TOKENIZER.decode([token_id]) for token_id in after_y} == {"es"}
    assert {TOKENIZER.decode([token_id]) for token_id in after_n} == {"o"}


def test_who_has_one_token_left_is_told(compiler: GrammarCompiler):
    requests = [Alone(compiler.compile(YES_OR_NO, ids(text))) for text in ("", "y", "n", "no")]
    rows = [MaskRow(slot, 1, request) for slot, request in enumerate(requests)]
    look_ahead(rows, MaskFiller(VOCAB_SIZE, compiler.fill).fill(0, rows).masks)
    assert [request.seen for request in requests] == [[], ids("es"), ids("o"), [EOS]]


def texts_of(schema: dict[str, Any], compiler: GrammarCompiler, seed: int) -> tuple[str, int]:
    """A random text under the schema, and how many of its tokens were forced. Masks allow each of
    these alone, which is what makes them forced."""
    rng = random.Random(seed)
    matcher = compiler.compile(LLMatcher.grammar_from_json_schema(json.dumps(schema)), [])
    text: list[int] = []
    num_forced = 0
    while not matcher.is_complete:
        assert not matcher.failure
        (tokens,) = allowed(compiler, matcher)
        if len(tokens) == 1:
            token_by_token = GrammarMatcher(matcher.matcher.deep_copy())
            forced = matcher.take_forced(*tokens)
            for token_id in forced:
                assert allowed(compiler, token_by_token) == [{token_id}]
                token_by_token.consume(token_id)
            assert allowed(compiler, token_by_token) == allowed(compiler, matcher) or not forced
            text += forced
            num_forced += len(forced)
            if forced:
                continue
        text.append(rng.choice(sorted(tokens)))
        matcher.consume(text[-1])
    return TOKENIZER.decode(text), num_forced


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS = [
    {"type": "object", "properties": {"first_name": DIGIT, "\u00fcber-\u540d of it": DIGIT}},
    {"enum": ["a longer text than that", "a longer text than this", "something else"]},
    {"type": "array", "items": {"const": {"kind": "point"}}, "minItems": 2, "maxItems": 3},
    {"type": "string", "pattern": "^order-[0-9]{2}/2024-[ab]{1,2} of the shop$"},
    {"type": "object", "properties": {"when": {"format": "date"}, "is_open": {"type": "boolean"}}},
]


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_masks_allow_every_forced_token_alone(compiler: GrammarCompiler, index: int):
    schema = {**SCHEMAS[index]}
    schema |= {"required": list(schema.get("properties", {})), "additionalProperties": False}
    forced = 0
    for seed in range(6):
        text, num_forced = texts_of(schema, compiler, seed)
        jsonschema.validate(json.loads(text), schema)
        forced += num_forced
    assert forced > 6


def test_a_complete_text_may_only_end(compiler: GrammarCompiler):
    matcher = compiler.compile(YES_OR_NO, [])
    for token_id in ids("yes"):
        assert not matcher.is_complete
        matcher.consume(token_id)
    assert matcher.is_complete
    assert allowed(compiler, matcher) == [{EOS}]


def test_what_is_not_allowed_is_a_failure(compiler: GrammarCompiler):
    matcher = compiler.compile(YES_OR_NO, [])
    assert matcher.failure == ""
    matcher.consume(ids("x")[0])
    assert matcher.failure != ""


def test_requests_of_one_grammar_do_not_share_where_they_stand(monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(builtin_model_path(), VOCAB_SIZE, [EOS])
    monkeypatch.setattr(templates_module, "MAX_TEMPLATES", 1)
    first, second = compiler.compile(YES_OR_NO, ids("yes")), compiler.compile(YES_OR_NO, [])
    assert (first.template, second.template) == (0, 0)
    assert first.is_complete
    assert not second.is_complete


def test_the_mask_of_a_row_is_its_own_whatever_the_order_of_templates():
    compiler = GrammarCompiler(builtin_model_path(), VOCAB_SIZE, [EOS])
    texts = ("", "y", "n", "ye", "yes", "no", "", "y", "ye", "n", "no", "yes")
    rows = [
        AskedMasks(compiler.compile(YES_OR_NO, ids(text)), row) for row, text in enumerate(texts)
    ]
    together = np.zeros((len(rows), -(-VOCAB_SIZE // 32)), dtype=np.int32)
    compiler.fill(rows, together)
    for matcher, row, _ in rows:
        alone = np.zeros_like(together[:1])
        compiler.fill([AskedMasks(matcher, 0)], alone)
        assert np.array_equal(together[row], alone[0]), texts[row]


@pytest.mark.parametrize(
    ("grammar", "so_far", "reason"),
    [
        ("junk", [], "Expected token"),
        (LLMatcher.grammar_from_regex("(a"), [], "grammar cannot be used"),
        (YES_OR_NO, ids("maybe"), "does not obey"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_its_reason(
    compiler: GrammarCompiler, grammar: str, so_far: list[int], reason: str
):
    for _ in range(2):
        with pytest.raises(RequestRejectedError, match=reason) as refused:
            compiler.compile(grammar, so_far)
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID_REQUEST, "grammar")


def test_a_folder_without_a_tokenizer_is_a_refusal(tmp_path):
    with pytest.raises(RequestRejectedError, match="tokenizer"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS]).compile(YES_OR_NO, [])


def test_an_ambiguous_grammar_fails_before_its_masks_take_long(compiler: GrammarCompiler):
    """By time of the process: with the library's own limits the 40th mask took seconds."""
    grammar = LLMatcher.grammar_from_lark('start: a\na: a a a | a a | /[a-z ]/ | ""')
    matcher, filler = compiler.compile(grammar, []), MaskFiller(VOCAB_SIZE, compiler.fill)
    started_s = time.process_time()
    for number in range(200):
        filler.fill(number, [MaskRow(0, number, Alone(matcher))])
        matcher.consume(ids("a")[0])
        if matcher.failure:
            break
    assert "items" in matcher.failure
    assert time.process_time() - started_s < 10


def test_no_more_threads_than_there_are_processors():
    assert [num_mask_threads(num) for num in (1, 2, 3, 4, 16, 18, 32)] == [1, 2, 2, 2, 14, 16, 16]
