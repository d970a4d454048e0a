"""The answer of /generate, for the description of the API."""

from typing import Any

from msgspec import Struct


class GenerateAnswer(Struct, frozen=True):
    """meta_info: id, finish_reason, numbers of tokens, log probabilities that were asked for."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
