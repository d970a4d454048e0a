"""Text before and behind a hole, by the marks that a tokenizer has."""

import json

import pytest

from service.tokenizer.encoder import EncodeRefusedError, TextEncoder
from service.tokenizer.infill import _FAMILIES
from service.tokenizer.jobs import EncodeText
from tests.fakes.tokenizer_folders import make_byte_level_folder


def encoder_with(folder, tokens):
    """A tokenizer that has these special tokens too."""
    made = make_byte_level_folder(folder)
    path = made / "tokenizer.json"
    document = json.loads(path.read_text())
    first = max(entry["id"] for entry in document["added_tokens"])
    first = max(first, *document["model"]["vocab"].values()) + 1
    for token_id, token in enumerate(tokens, start=first):
        document["added_tokens"].append(
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    path.write_text(json.dumps(document))
    return TextEncoder(made, max_rendered_bytes=1 << 20), dict(
        zip(tokens, range(first, first + 9), strict=False)
    )


@pytest.mark.parametrize("marks", _FAMILIES, ids=lambda marks: marks.prefix)
def test_prefix_suffix_and_middle_stand_behind_their_marks(tmp_path, marks):
    encoder, ids = encoder_with(tmp_path, [marks.prefix, marks.suffix, marks.middle])

    def plain(text):
        return encoder.encode_text(EncodeText(text, add_special_tokens=False))

    before, behind = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))"
    found = encoder.encode_text(EncodeText(before, suffix=behind))
    assert found == [
        ids[marks.prefix],
        *plain(before),
        ids[marks.suffix],
        *plain(behind),
        ids[marks.middle],
    ]
    assert encoder.encode_text(EncodeText(before)) == plain(before)


def test_without_all_marks_a_suffix_is_refused(tmp_path):
    encoder, _ = encoder_with(tmp_path, ["<|fim_prefix|>", "<|fim_suffix|>"])
    with pytest.raises(EncodeRefusedError) as refusal:
        encoder.encode_text(EncodeText("a", suffix="b"))
    assert refusal.value.param == "suffix"
