"""What a token adds to text, by the steps of its tokenizer's decoder."""

import json
from dataclasses import dataclass

import pytest
from tokenizers import pre_tokenizers

from service.tokenizer.detokenizer import decode_all
from service.tokenizer.pieces import BYTE_OF_CHAR, build_token_pieces, sample_token_ids
from workers.errors import ModelLoadError


@dataclass
class Added:
    special: bool


class Vocabulary:
    """What is asked of a tokenizer; ids may have gaps."""

    def __init__(self, tokens, added=None):
        self.tokens, self.added = tokens, added or {}

    def get_vocab(self, with_added_tokens):
        assert with_added_tokens
        return {token: token_id for token_id, token in self.tokens.items()}

    def id_to_token(self, token_id):
        return self.tokens.get(token_id)

    def get_added_tokens_decoder(self):
        return {token_id: Added(special) for token_id, special in self.added.items()}


REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*steps):
    return {"type": "Sequence", "decoders": list(steps)}


def built(decoder, tokens, added=None):
    vocabulary = Vocabulary(dict(tokens), added)
    return build_token_pieces(vocabulary, json.dumps({"decoder": decoder}))


def test_a_byte_level_token_is_its_bytes_and_a_special_one_its_text():
    tokens = {0: "Ġa", 2: "Ã", 3: "<|é|>", 4: "Ċ"}
    pieces = built({"type": "ByteLevel"}, tokens, {3: True, 4: False})
    assert pieces.is_byte_level
    # é is a character of GPT-2's alphabet for the byte 0xE9.
    assert pieces.pieces == (b" a", b"", b"\xc3", b"<|\xe9|>", b"\n")
    assert pieces.visible_pieces == (b" a", b"", b"\xc3", b"", b"\n")
    assert pieces.special_ids == {3}
    assert [pieces.token_bytes(i) for i in (-1, 0, 1, 4, 5)] == [b"", b" a", b"", b"\n", b""]
    unwritable = built({"type": "ByteLevel"}, {0: "東京"})
    assert unwritable.token_bytes(0) == "東京".encode()


def test_text_tokens_have_their_replacements_and_bytes_in_the_decoders_order():
    tokens = {0: "▁hi", 1: "<0x41>", 2: "<0xzz>", 3: "<0x4>", 4: "x<0x41", 5: "▁▁", 7: "é"}
    decoder = sequence(REPLACE, BYTES, FUSE, {**STRIP, "start": 2})
    pieces = built(decoder, tokens, {7: True})
    assert not pieces.is_byte_level
    assert pieces.pieces == (" hi", b"A", "<0xzz>", "<0x4>", "x<0x41", "  ", "", "é")
    assert pieces.special_ids == {7}
    assert pieces.max_strip_left == 2
    assert pieces.first == {}
    assert pieces.token_bytes(7) == "é".encode()
    assert decode_all(pieces, [0, 5, 0], skip_special_tokens=True) == "hi   hi"
    assert decode_all(pieces, [5, 5, 0], skip_special_tokens=True) == "   hi"
    assert decode_all(pieces, [7, 1, 7], skip_special_tokens=True) == "A"
    assert decode_all(pieces, [7, 1, 7], skip_special_tokens=False) == "éAé"


def test_without_fallback_a_bytes_name_is_text():
    assert built(sequence(REPLACE, FUSE), {0: "<0x41>"}).pieces == ("<0x41>",)


def test_several_replacements_follow_each_other():
    second = {"type": "Replace", "pattern": {"String": " "}, "content": "_"}
    assert built(sequence(REPLACE, second), {0: "a▁b"}).pieces == ("a_b",)


@pytest.mark.parametrize(
    ("scheme", "first"),
    [({}, {0: "hi", 2: "hihi"}), ({"prepend_scheme": "first"}, {0: "hi", 2: "hihi"}),
     ({"prepend_scheme": "never"}, {})],
)  # fmt: skip
def test_a_metaspace_decoder_drops_what_stands_for_spaces_in_the_first_token(scheme, first):
    decoder = {"type": "Metaspace", "replacement": "▁", **scheme}
    pieces = built(decoder, {0: "▁hi", 1: "lo", 2: "▁hi▁hi"})
    assert pieces.pieces == (" hi", "lo", " hi hi")
    assert pieces.first == first
    beginning = "hi hi" if first else " hi hi"
    assert decode_all(pieces, [0, 0], skip_special_tokens=True) == beginning


@pytest.mark.parametrize(
    "decoder",
    [
        sequence(BYTES, REPLACE),
        sequence(FUSE, REPLACE),
        sequence(FUSE, {"type": "Metaspace", "replacement": "▁"}),
        sequence(STRIP, FUSE),
        sequence(FUSE, {**STRIP, "stop": 1}),
        sequence(FUSE, {**STRIP, "content": "_"}),
        sequence({**REPLACE, "pattern": {"Regex": "a+"}}),
        sequence({"type": "ByteLevel"}, FUSE),
        sequence({"type": "WordPiece"}, FUSE),
    ],
)
def test_steps_in_another_order_or_of_another_kind_are_refused_by_name(decoder):
    with pytest.raises(ModelLoadError, match="decoder step .* is not one"):
        built(decoder, {0: "a"})


def test_a_tokenizer_without_a_decoder_is_refused():
    with pytest.raises(ModelLoadError, match="has no decoder"):
        built(None, {0: "a"})


def test_samples_are_the_same_every_time_and_of_known_ids():
    pieces = built({"type": "ByteLevel"}, dict(enumerate("abcdefgh")))
    samples = sample_token_ids(pieces, num_sequences=5, length=40)
    assert samples == sample_token_ids(pieces, num_sequences=5, length=40)
    assert [len(sample) for sample in samples] == [40] * 5
    assert {token_id for sample in samples for token_id in sample} == set(range(8))


def test_an_empty_vocabulary_has_no_pieces():
    assert built({"type": "ByteLevel"}, {}).pieces == ()


def test_every_byte_has_the_character_that_tokenizers_write_for_it():
    assert set(BYTE_OF_CHAR) == set(pre_tokenizers.ByteLevel.alphabet())
    write = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    text = "".join(map(chr, range(0x800))) + "\U00010000\U00040000\U00100000" + "\u0fff\ud7ff\uffff"
    ((written, _),) = write(text)
    assert bytes(BYTE_OF_CHAR[char] for char in written) == text.encode()
