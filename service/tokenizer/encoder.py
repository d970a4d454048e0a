"""Text and conversations to token ids, synchronously. Runs inside a tokenizer process.

Text of a chat message can never become a special token; see service.tokenizer.special_tokens.
Knows no sockets and no event loop. Not safe for threads: one instance a process.
"""

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding, Tokenizer

from service.tokenizer.chat_template import ChatTemplate, ChatTemplateError
from service.tokenizer.detokenizer import decode_all
from service.tokenizer.folder import TokenizerFiles, read_tokenizer_files
from service.tokenizer.infill import infill_marks_of
from service.tokenizer.jobs import EncodeChat, EncodeText, EncodeTexts, strings_in
from service.tokenizer.pieces import TokenPieces, build_token_pieces, sample_token_ids
from service.tokenizer.special_tokens import Shield, SpecialTokenGuard, UnguardableTextError
from workers.errors import ModelLoadError

if TYPE_CHECKING:
    from service.tokenizer.token_floor import TokenFloor

# Shorter texts are encoded in less time than it takes to make their floor.
_MIN_MEASURED_CHARS = 64 << 10
_RESERVED_KWARGS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class EncodeRefusedError(Exception):
    """The input cannot be encoded. The message may go to a client; param names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class PromptTooLongError(Exception):
    """The text was not encoded: it has at least min_tokens tokens."""

    def __init__(self, min_tokens: int) -> None:
        super().__init__(f"at least {min_tokens} tokens")
        self.min_tokens = min_tokens


def load_tokenizer(files: TokenizerFiles) -> tuple[Tokenizer, TokenPieces]:
    """Raises ModelLoadError if it cannot be read or our decoding differs from its own."""
    try:
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from error
    # A serialised tokenizer may truncate or pad what it encodes; a server must do neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pieces = build_token_pieces(tokenizer, files.tokenizer_json)
    for token_ids in sample_token_ids(pieces, num_sequences=16, length=64):
        for skip in (True, False):
            ours = decode_all(pieces, token_ids, skip_special_tokens=skip)
            if ours != tokenizer.decode(token_ids, skip_special_tokens=skip):
                raise ModelLoadError(
                    "the tokenizer's decoder behaves in a way Tessera cannot follow"
                )
    return tokenizer, pieces


class TextEncoder:
    """One model folder's tokenizer and chat template. Raises ModelLoadError if it has none."""

    def __init__(self, folder: Path, max_rendered_bytes: int) -> None:
        self._folder = folder
        files = read_tokenizer_files(folder)
        self._tokenizer, self._pieces = load_tokenizer(files)
        self._template: ChatTemplate | None = None
        if files.chat_template is not None:
            try:
                self._template = ChatTemplate(
                    files.chat_template, files.named_tokens, max_rendered_bytes
                )
            except ChatTemplateError as error:
                raise ModelLoadError(str(error)) from error
        self._reserved_kwargs = _RESERVED_KWARGS | files.named_tokens.keys()
        literals = self._template.literals if self._template else frozenset[str]()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_text = {i: token.content for i, token in added.items() if token.special}
        self._guard = SpecialTokenGuard(self._special_text.values(), literals)

    def encode_text(self, job: EncodeText) -> list[int]:
        """Token ids of a text, in the tokenizer's own way unless special tokens are to be text.

        Raises PromptTooLongError, and EncodeRefusedError for a suffix that the model has no marks
        for."""
        text = self._with_suffix(job) if job.suffix else job.text
        self._check_floor(text, job.max_tokens)
        if job.parse_special_tokens:
            return self._encode(text, job.add_special_tokens).ids
        return self._encode_plain(text, job.add_special_tokens)

    def encode_texts(self, job: EncodeTexts) -> tuple[list[int], int]:
        """Token ids of a text or a pair, and where the second's begin, as EncodedTexts has it.

        Raises PromptTooLongError, and EncodeRefusedError where nothing of the texts would be kept.
        """
        for text in job.texts:
            self._check_floor(text, job.max_tokens)
        self._tokenizer.encode_special_tokens = not job.parse_special_tokens
        try:
            if job.kept_tokens is not None:
                self._truncate(job, job.kept_tokens)
            first, *others = job.texts
            second = others[0] if others else None
            encoding = self._tokenizer.encode(
                first, second, add_special_tokens=job.add_special_tokens
            )
        finally:
            self._tokenizer.no_truncation()
            self._tokenizer.encode_special_tokens = False
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else 0

    def _truncate(self, job: EncodeTexts, num_kept: int) -> None:
        num_added = self._tokenizer.num_special_tokens_to_add(len(job.texts) == 2)
        least = num_added + len(job.texts)
        if job.add_special_tokens and num_kept < least:
            raise EncodeRefusedError(
                f"truncate_prompt_tokens must be at least {least}: the model's own marks take "
                f"{num_added} tokens",
                "truncate_prompt_tokens",
            )
        direction = "right" if job.keeps_beginning else "left"
        self._tokenizer.enable_truncation(num_kept, direction=direction)

    def _with_suffix(self, job: EncodeText) -> str:
        marks = infill_marks_of(self._tokenizer)
        if marks is None:
            raise EncodeRefusedError(
                "suffix: this model's tokenizer has no fill-in-the-middle tokens that are known",
                "suffix",
            )
        return marks.joined(job.text, job.suffix)

    def encode_chat(self, job: EncodeChat) -> list[int]:
        """Token ids of a conversation. Raises EncodeRefusedError or PromptTooLongError."""
        if self._template is None:
            raise EncodeRefusedError("this model has no chat template; use /v1/completions")
        reserved = sorted(self._reserved_kwargs & job.template_kwargs.keys())
        if reserved:
            raise EncodeRefusedError(f"{reserved[0]} cannot be set", "chat_template_kwargs")
        shield = self._shield(job)
        try:
            rendered = self._render(self._template, job, shield)
        except ChatTemplateError as error:
            raise EncodeRefusedError(shield.restore(str(error)), "messages") from error
        self._check_floor(rendered, job.max_tokens)
        return self._encode_guarded(rendered, shield, job.add_special_tokens)

    def is_special(self, token_id: int) -> bool:
        """Whether text of a client never becomes that token in a chat."""
        return token_id in self._special_text

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return decode_all(self._pieces, token_ids, skip_special_tokens=skip_special_tokens)

    def _check_floor(self, text: str, max_tokens: int | None) -> None:
        """Raise PromptTooLongError if the text has certainly more tokens, before it is encoded."""
        if max_tokens is None or len(text) <= max(max_tokens, _MIN_MEASURED_CHARS):
            return
        floor = self._floor
        num_tokens = 0 if floor is None else floor.count(text)
        if num_tokens > max_tokens:
            raise PromptTooLongError(num_tokens)

    @cached_property
    def _floor(self) -> "TokenFloor | None":
        """Made for the first long text; most processes never see one."""
        from service.tokenizer.token_floor import build_token_floor

        document = json.loads(read_tokenizer_files(self._folder).tokenizer_json)
        return build_token_floor(document, self._pieces.is_byte_level)

    def _shield(self, job: EncodeChat) -> Shield:
        try:
            return self._guard.shield(strings_in([job.messages, job.tools, job.template_kwargs]))
        except UnguardableTextError as error:
            raise EncodeRefusedError("the text uses every private character", "messages") from error

    def _render(self, template: ChatTemplate, job: EncodeChat, shield: Shield) -> str:
        messages = [
            {key: value if key == "role" else shield.protect(value) for key, value in item.items()}
            for item in job.messages
        ]
        if template.takes_arguments_as_text:
            messages = [_with_text_arguments(message) for message in messages]
        kwargs = {key: shield.protect(value) for key, value in job.template_kwargs.items()}
        tools = shield.protect(job.tools)
        if not job.continue_final_message:
            return template.render(
                messages,
                tools=tools,
                add_generation_prompt=job.add_generation_prompt,
                kwargs=kwargs,
            )
        # The space behind the marker shows whether the template trims its contents.
        tag = shield.marker + " "
        messages[-1] = {**messages[-1], "content": messages[-1]["content"] + tag}
        rendered = template.render(
            messages, tools=tools, add_generation_prompt=False, kwargs=kwargs
        )
        head, found, tail = rendered.rpartition(shield.marker)
        if not found:
            raise ChatTemplateError("the last message does not appear in the conversation")
        return head if tail.startswith(" ") else head.rstrip()

    def _encode_guarded(self, rendered: str, shield: Shield, add_special_tokens: bool) -> list[int]:
        """Encode rendered text; special tokens that are not the template's become plain text."""
        trusted = self._guard.find(rendered)
        text = shield.restore(rendered)
        encoding = self._encode(text, add_special_tokens)
        token_ids: list[int] = encoding.ids
        found = [i for i, token_id in enumerate(token_ids) if token_id in self._special_text]
        offsets: list[tuple[int, int]] | None = None
        if not add_special_tokens and [self._special_text[token_ids[i]] for i in found] == [
            token for _, token in trusted
        ]:
            return token_ids
        offsets = encoding.offsets
        starts = {start for start, _ in trusted}
        replaced: dict[int, list[int]] = {}
        for i in found:
            start, end = offsets[i]
            content = text[start:end]
            first = start + len(content) - len(content.lstrip())
            if content and first not in starts:
                replaced[i] = self._as_plain_text(content)
        if not replaced:
            return token_ids
        return [t for i, own in enumerate(token_ids) for t in replaced.get(i, (own,))]

    def _as_plain_text(self, text: str) -> list[int]:
        token_ids = self._encode_plain(text, add_special_tokens=False)
        if not self._special_text.keys().isdisjoint(token_ids):
            raise EncodeRefusedError(f"{text!r} cannot be written as plain text", "messages")
        return token_ids

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        self._tokenizer.encode_special_tokens = True
        try:
            token_ids: list[int] = self._encode(text, add_special_tokens).ids
        finally:
            self._tokenizer.encode_special_tokens = False
        return token_ids


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**function, "arguments": _json(function["arguments"])}}
        for call in message.get("tool_calls", ())
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
