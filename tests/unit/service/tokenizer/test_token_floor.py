"""The floor is never above what the tokenizer makes of a text, and is there where it can be."""

import json
import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from service.model_names import model_folder
from service.tokenizer.token_floor import _COMPOSABLE, build_token_floor
from tests.fakes.tokenizer_folders import make_byte_level_folder, make_sentencepiece_like_folder

KINDS = ("byte_level", "nfc", "sentencepiece", "metaspace", "builtin")
PARTS = ["hello", " world", "▁", "<|im_end|>", "<0x41>", "  ", "\u0301", "\u212a", "e\u0301", "\n"]


def _tokenizers(folder):
    def load(path):
        return Tokenizer.from_file(str(path / "tokenizer.json"))

    nfc = load(make_byte_level_folder(folder / "nfc"))
    nfc.normalizer = normalizers.NFC()
    metaspace = make_sentencepiece_like_folder(folder / "metaspace", is_metaspace_decoder=True)
    return {
        "byte_level": load(make_byte_level_folder(folder / "byte_level")),
        "nfc": nfc,
        "sentencepiece": load(make_sentencepiece_like_folder(folder / "sentencepiece")),
        "metaspace": load(metaspace),
        "builtin": load(model_folder("builtin")),
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    for kind in KINDS:
        (folder / kind).mkdir()
    return _tokenizers(folder)


def floor_of(tokenizer):
    document = json.loads(tokenizer.to_str())
    return build_token_floor(document, document["decoder"]["type"] == "ByteLevel")


@pytest.mark.parametrize("kind", KINDS)
def test_the_floor_is_never_above_the_tokens(kind, tokenizers):
    tokenizer = tokenizers[kind]
    floor = floor_of(tokenizer)
    assert floor is not None

    @settings(max_examples=120, deadline=None)
    @given(st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=40).map("".join))
    @example("\u212b" * 50)
    @example("A\u030a" * 50)
    @example("hello world" * 50)
    def check(text):
        assert floor.count(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_repeating_any_one_token_is_not_refused_either(kind, tokenizers):
    tokenizer = tokenizers[kind]
    floor = floor_of(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id], skip_special_tokens=False) * 30
        assert floor.count(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_has_a_floor_that_refuses_a_lot(kind, tokenizers):
    text = "def main(argv): return [word for word in argv if word]\n" * 200
    num_tokens = len(tokenizers[kind].encode(text).ids)
    assert num_tokens / 12 < floor_of(tokenizers[kind]).count(text)


def _change(tokenizer, what):
    if what == "nfkc":
        tokenizer.normalizer = normalizers.NFKC()
    elif what == "strip":
        tokenizer.normalizer = normalizers.Strip()
    elif what == "shrinking replace":
        tokenizer.normalizer = normalizers.Replace("  ", " ")
    elif what == "removed":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    elif what == "whitespace":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
        )
    else:
        tokenizer.add_special_tokens([AddedToken("<|x|>", rstrip=True)])


@pytest.mark.parametrize(
    "what", ["nfkc", "strip", "shrinking replace", "removed", "whitespace", "rstrip"]
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_where_text_may_vanish_there_is_no_floor(what, kind, tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers[kind].to_str())
    _change(tokenizer, what)
    assert floor_of(tokenizer) is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation(),
        pre_tokenizers.Split("a", "isolated"),
        pre_tokenizers.Split("a", "merged_with_previous"),
    ],
)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_split_that_keeps_everything_keeps_the_floor(pre_tokenizer, kind, tokenizers):
    tokenizer = Tokenizer.from_str(tokenizers[kind].to_str())
    own = [] if tokenizer.pre_tokenizer is None else [tokenizer.pre_tokenizer]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, *own])
    text = "hello world, 123 tokens! " * 40
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert 0 < floor_of(tokenizer).count(text) <= num_tokens


def test_half_a_surrogate_counts_as_the_bytes_that_it_would_be(tokenizers):
    floor = floor_of(tokenizers["byte_level"])
    assert floor.count("\ud800" * 100) == floor.count("\ud800" * 50 + "\ud800" * 50) > 0


def test_a_long_text_has_the_floor_of_its_parts(tokenizers):
    floor = floor_of(tokenizers["byte_level"])
    part = "The quick brown fox jumps over the lazy dog. Größe 🙂\n" * 500
    parts = [floor.count(part)] * 8
    assert sum(parts) <= floor.count(part * 8) <= sum(parts) + 8
    assert floor.count("") == 0


def test_a_vocabulary_without_every_byte_has_no_floor(tokenizers):
    for kind, removed in (("byte_level", "Ġ"), ("sentencepiece", "<0x20>")):
        document = json.loads(tokenizers[kind].to_str())
        del document["model"]["vocab"][removed]
        assert build_token_floor(document, kind == "byte_level") is None


def test_a_vocabulary_whose_bytes_are_no_fallback_has_no_floor(tokenizers):
    """Unknown characters are fused then: a thousand of them are one token."""
    document = json.loads(tokenizers["sentencepiece"].to_str())
    document["model"] |= {"byte_fallback": False, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(document))
    assert len(tokenizer.encode("\u3042" * 1000, add_special_tokens=False).ids) < 10
    assert build_token_floor(document, False) is None


def test_the_composable_characters_are_all_there_are():
    decomposed = (unicodedata.normalize("NFD", chr(point)) for point in range(sys.maxunicode + 1))
    found = {text[0] for text in decomposed if len(text) > 1 and ord(text[0]) < 128}
    assert found == _COMPOSABLE


def test_all_that_normalizers_write_alike_counts_like_it():
    """Eight spaces, or eight tabs, are one token, though the vocabulary has a space of its own."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), " ", "\t", "▁", "▁" * 8]
    document = {
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": char}, "content": "▁"} for char in " \t"
            ],
        },
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {token: token_id for token_id, token in enumerate(vocabulary)},
        },
    }
    floor = build_token_floor(document, False)
    assert 0 < floor.count(" " * 800) <= 100
    assert 0 < floor.count("\t" * 800) <= 100
