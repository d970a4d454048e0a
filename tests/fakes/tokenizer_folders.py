"""Model folders with tiny real tokenizers made on the spot: byte-level, sentencepiece-like."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

CHATML_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "def main(argv):\n    return [naïve for naïve in 'café' if naïve]\n",
    "The quick brown fox jumps over the lazy dog. Größe, Straße, Übermut, 東京, 日本語, 🙂🙃.\n",
    "hello world, hello there, what is the world? tokens and tokens and more tokens\n",
    "a  b   c\t\td\n\n\n  e   \n",
)


def make_byte_level_folder(folder: Path, chat_template: str | None = CHATML_TEMPLATE) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = {"eos_token": "<|im_end|>", "bos_token": None}
    return _save(tokenizer, folder, config, chat_template)


def make_sentencepiece_like_folder(folder: Path, *, is_metaspace_decoder: bool = False) -> Path:
    """Llama 2's shape: a prefix space, "\u2581" for spaces, <0xXX> for bytes, <s> in front."""
    alphabet = sorted({char for text in CORPUS[:3] for char in text if char not in "🙂🙃東京"})
    words = ["\u2581the", "\u2581hello", "\u2581world", "hel", "lo", "\u2581\u2581", "wor", "ld"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [char for char in ["\u2581", *alphabet] if char not in tokens]
    tokens += words
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("\u2581", "\u2581"), ("w", "o"), ("wo", "r")]
    tokens += [a + b for a, b in merges if a + b not in tokens]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    if is_metaspace_decoder:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}"
        "{{ eos_token }}{% endfor %}"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    return _save(tokenizer, folder, config, template)


def make_word_piece_folder(folder: Path) -> Path:
    """BERT's shape: words in lower case and their pieces, [CLS] and [SEP] around a text or a pair,
    whose second text's tokens are of type 1."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list(".,?!'")
    words = ["hello", "world", "the", "quick", "brown", "fox", "over", "##ing", "##lo"]
    tokens = [*marks, *letters, *(f"##{letter}" for letter in letters[:26]), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return _save(tokenizer, folder, {"cls_token": "[CLS]", "sep_token": "[SEP]"}, None)


def _save(
    tokenizer: Tokenizer, folder: Path, config: dict[str, object], chat_template: str | None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder
