"""Incremental detokenisation equals the tokenizer's own decode, on any token sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from service.tokenizer.detokenizer import decode_all, make_detokenizer
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.pieces import build_token_pieces
from tests.fakes.tokenizer_folders import make_byte_level_folder, make_sentencepiece_like_folder
from workers.errors import ModelLoadError

KINDS = ("byte_level", "byte_fallback", "metaspace")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    folders = {
        "byte_level": make_byte_level_folder(root / "a"),
        "byte_fallback": make_sentencepiece_like_folder(root / "b"),
        "metaspace": make_sentencepiece_like_folder(root / "c", is_metaspace_decoder=True),
    }
    return {kind: load_tokenizer(read_tokenizer_files(path)) for kind, path in folders.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=120, deadline=None)
def test_concatenated_chunks_equal_the_decoded_whole(loaded, kind, data, skip):
    tokenizer, pieces = loaded[kind]
    ids = st.integers(0, len(pieces.pieces) + 3)
    byte_ids = st.integers(3, 258)
    token_ids = data.draw(st.lists(ids | byte_ids, max_size=60))
    detokenizer = make_detokenizer(pieces, skip_special_tokens=skip)
    chunks = [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]
    assert "".join(chunks) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=st.text(min_size=1, max_size=40))
@settings(max_examples=120, deadline=None)
def test_no_character_is_ever_split_over_two_chunks(loaded, kind, text):
    tokenizer, pieces = loaded[kind]
    detokenizer = make_detokenizer(pieces, skip_special_tokens=True)
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    chunks = [detokenizer.push(token_id) for token_id in token_ids] + [detokenizer.flush()]
    assert "\ufffd" not in "".join(chunks).replace("\ufffd" * text.count("\ufffd"), "")
    assert "".join(chunks) == tokenizer.decode(token_ids)


def test_a_character_of_four_byte_tokens_appears_with_its_last_byte(loaded):
    tokenizer, pieces = loaded["byte_level"]
    alphabet = {pieces.token_bytes(i): i for i in range(len(pieces.pieces))}
    token_ids = [alphabet[bytes([byte])] for byte in "🙂".encode()]
    detokenizer = make_detokenizer(pieces, skip_special_tokens=True)
    assert [detokenizer.push(token_id) for token_id in token_ids] == ["", "", "", "🙂"]


def test_incomplete_bytes_at_the_end_become_one_replacement_character(loaded):
    _, pieces = loaded["byte_level"]
    alphabet = {pieces.token_bytes(i): i for i in range(len(pieces.pieces))}
    detokenizer = make_detokenizer(pieces, skip_special_tokens=True)
    assert [detokenizer.push(alphabet[bytes([byte])]) for byte in "🙂".encode()[:3]] == [""] * 3
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_shown_only_when_asked_for(loaded):
    tokenizer, pieces = loaded["byte_level"]
    end = tokenizer.token_to_id("<|im_end|>")
    assert decode_all(pieces, [end], skip_special_tokens=True) == ""
    assert decode_all(pieces, [end], skip_special_tokens=False) == "<|im_end|>"
    assert pieces.token_bytes(end) == b"<|im_end|>"


@pytest.mark.parametrize(
    "decoder",
    ['{"type": "BPEDecoder", "suffix": "</w>"}', "null"],
)
def test_a_decoder_that_cannot_be_followed_is_refused_at_load(loaded, decoder):
    tokenizer, _ = loaded["byte_level"]
    with pytest.raises(ModelLoadError, match=r"decoder"):
        build_token_pieces(tokenizer, f'{{"decoder": {decoder}}}')


@pytest.fixture(scope="module")
def metaspace_with_bytes(tmp_path_factory):
    """A decoder that drops the first token's space, of a vocabulary with byte tokens."""
    folder = make_sentencepiece_like_folder(tmp_path_factory.mktemp("t"), is_metaspace_decoder=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer, build_token_pieces(tokenizer, tokenizer.to_str())


def test_a_byte_token_is_a_first_token_like_any_other(metaspace_with_bytes):
    tokenizer, pieces = metaspace_with_bytes
    byte, word = tokenizer.token_to_id("<0x41>"), tokenizer.token_to_id("\u2581hello")
    for token_ids, text in (([byte, word], "A hello"), ([word, word], "hello hello")):
        assert tokenizer.decode(token_ids) == text
        assert decode_all(pieces, token_ids, skip_special_tokens=True) == text


@given(token_ids=st.lists(st.integers(0, 300), max_size=20))
@settings(max_examples=120, deadline=None)
def test_bytes_and_a_dropped_first_space_together(metaspace_with_bytes, token_ids):
    tokenizer, pieces = metaspace_with_bytes
    assert decode_all(pieces, token_ids, skip_special_tokens=True) == tokenizer.decode(token_ids)
