"""A model folder whose output can be constrained: a config of models/ and a tokenizer of its size.

    python3 -m benchmarks.h200.structured_model CONFIG_JSON RANKS FOLDER

RANKS: a vocabulary of tiktoken, a line of base64 and rank for each token, as packages ship it. The
tokens of lowest rank fill the config's vocabulary but for its last NUM_SPECIAL, of which one ends a
sequence: with o200k_base and Llama 3.1's 128,256 a tokenizer as large as that model's own.
"""

import argparse
import base64
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

NUM_SPECIAL = 256
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"


def read_ranks(path: Path, num_tokens: int) -> dict[bytes, int]:
    """The tokens of rank below num_tokens. Raises ValueError where there are fewer."""
    pairs = (line.split() for line in path.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    kept = {token: rank for token, rank in ranks.items() if rank < num_tokens}
    if len(kept) != num_tokens:
        raise ValueError(f"{path} has {len(kept)} tokens of rank below {num_tokens}")
    return kept


def halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens of lower rank that the last merge joins; None for a byte."""
    parts = [token[i : i + 1] for i in range(len(token))]
    own = ranks[token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, own) for a, b in zip(parts, parts[1:], strict=False)]
        at = min(range(len(joined)), key=joined.__getitem__)
        if joined[at] >= own:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def byte_letters() -> dict[int, str]:
    """How byte-level tokenizers write each byte: printable ones as they are."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def build_tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pair = halves(token, ranks) if len(token) > 1 else None
        if pair is not None:
            merges.append((text(pair[0]), text(pair[1])))
    vocab = {text(token): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(f"<|special_{index}|>", special=True) for index in range(NUM_SPECIAL)]
    )
    return tokenizer


def write_folder(config_path: Path, ranks_path: Path, folder: Path) -> None:
    config = json.loads(config_path.read_text())
    num_tokens = config["vocab_size"] - NUM_SPECIAL
    tokenizer = build_tokenizer(read_ranks(ranks_path, num_tokens))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|special_1|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    config |= {"bos_token_id": num_tokens, "eos_token_id": num_tokens + 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="a model folder with a tokenizer of its size")
    parser.add_argument("config", type=Path)
    parser.add_argument("ranks", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_folder(arguments.config, arguments.ranks, arguments.folder)


if __name__ == "__main__":
    main()
