"""Every ceiling on what one request may ask for, in one frozen table.

Checked by the ingress before a request costs anything. Knows no model: the context length of the
model is a further limit and comes with ModelInfo.
"""

from pydantic import BaseModel, ConfigDict, Field

from service.response_store.records import StoreLimits
from workers.sampling.params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
)

# What the request schemas themselves accept of messages and content parts, before any ceiling.
MAX_ITEMS = 4096
# Of tools, likewise.
MAX_TOOLS = 1024
# Values of a JSON body's lists that a parser makes objects of in one go: all but those of long
# lists of whole numbers, which are read apart. Their sum over the body.
MAX_OTHER_ITEMS = 1 << 16
# What may be set for max_stored_response_bytes: it goes to the store in one piece.
MAX_STORED_BYTES = 16 << 20
# What may be set for max_grammar_bytes.
MAX_GRAMMAR_BYTES = 1 << 20
# What may be set for max_image_pixels: Pillow warns of larger ones itself.
MAX_IMAGE_PIXELS = 89_000_000
# What may be set for max_shown_pixels: three bytes each fit into a frame of the token way.
MAX_SHOWN_PIXELS = 16 << 20


class Limits(BaseModel):
    """Ceilings per request unless the name says otherwise. Bytes are UTF-8.

    max_prompts: of a generation. max_inputs: of a request for embeddings; max_inputs_at_once of
    them are with engines at a time. max_embedding_values: numbers of all of its vectors.
    max_paired_chars: of all pairs that one request has read together, a text counted in each pair.
    max_prompt_bytes counts one text prompt, or all message contents and tools of one chat.
    max_request_cost_tokens bounds the sum over prompts of prompt tokens + n * max_tokens.
    max_body_items: values that a JSON body has in lists, all together. max_body_nodes: its lists,
    objects and named fields. max_body_escapes: its backslashes, which a parser takes one by one;
    whoever sends more than that of other scripts sends them as UTF-8. All are judged for bodies of
    more than 64 KiB, and so is what lists hold besides numbers (MAX_OTHER_ITEMS).
    max_grammar_bytes: of a schema, a regular expression, a grammar or all choices together.
    max_grammar_cost_bytes bounds that times the sequences that one request generates.
    max_beam_tokens: the longest output of a beam search. max_beam_step_tokens: of all its beams,
    each with its prompt, which go to engines anew for every token.
    max_bad_words: each of which may be two to an engine, with and without a space before it.
    max_grammar_cpu_s: of a processor, for making one grammar of them.
    max_images, max_image_bytes: of a prompt, and of each file. max_image_pixels: of a file, as its
    header says; max_total_image_pixels: of all files of a prompt. max_shown_pixels: of an image as
    the model sees it, larger ones are made smaller; max_total_shown_pixels: of all of a prompt.
    max_held_image_bytes: what an ingress keeps, for each model, for requests under way.
    max_stored_responses, max_store_bytes: of all callers of the application, in the memory of Ray's
    head node. max_stored_response_bytes: of one; a larger one is answered and not kept.
    stored_response_ttl_s: how long each is kept at most.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_body_items: int = Field(default=1 << 20, ge=1024)
    max_body_nodes: int = Field(default=1 << 15, ge=1024)
    max_body_escapes: int = Field(default=1 << 19, ge=1024)
    max_grpc_message_bytes: int = Field(default=8 << 20, ge=1024)

    max_prompts: int = Field(default=64, ge=1)
    max_inputs: int = Field(default=2048, ge=1)
    max_inputs_at_once: int = Field(default=256, ge=1)
    max_embedding_values: int = Field(default=1 << 22, ge=1)
    max_paired_chars: int = Field(default=16 << 20, ge=1)
    max_prompt_bytes: int = Field(default=4 << 20, ge=1)
    max_prompt_tokens: int = Field(default=1 << 20, ge=1)
    max_messages: int = Field(default=1024, ge=1, le=MAX_ITEMS)
    max_content_parts: int = Field(default=256, ge=1, le=MAX_ITEMS)
    max_tools: int = Field(default=128, ge=0, le=MAX_TOOLS)
    max_template_kwargs: int = Field(default=16, ge=0)
    max_template_kwargs_bytes: int = Field(default=16 << 10, ge=0)
    max_rendered_bytes: int = Field(default=8 << 20, ge=1)

    max_n: int = Field(default=8, ge=1)
    max_logprobs: int = Field(default=20, ge=0, le=MAX_LOGPROBS)
    max_logprob_entries: int = Field(default=1 << 20, ge=1)
    max_stop_strings: int = Field(default=16, ge=0)
    max_stop_string_bytes: int = Field(default=256, ge=1)
    max_stop_token_ids: int = Field(default=MAX_STOP_TOKEN_IDS, ge=0, le=MAX_STOP_TOKEN_IDS)
    max_beam_tokens: int = Field(default=1024, ge=1)
    max_beam_step_tokens: int = Field(default=1 << 18, ge=1)
    max_bad_words: int = Field(default=MAX_BAD_WORDS // 2, ge=0, le=MAX_BAD_WORDS // 2)
    max_logit_bias_entries: int = Field(
        default=MAX_LOGIT_BIAS_ENTRIES, ge=0, le=MAX_LOGIT_BIAS_ENTRIES
    )
    max_request_cost_tokens: int = Field(default=1 << 22, ge=1)

    max_grammar_bytes: int = Field(default=64 << 10, ge=1, le=MAX_GRAMMAR_BYTES)
    max_grammar_choices: int = Field(default=1024, ge=1)
    max_grammar_cost_bytes: int = Field(default=8 << 20, ge=1)
    max_grammar_cpu_s: float = Field(default=0.5, gt=0)

    max_stored_responses: int = Field(default=4096, ge=1)
    max_store_bytes: int = Field(default=256 << 20, ge=1 << 20)
    max_stored_response_bytes: int = Field(default=4 << 20, ge=1, le=MAX_STORED_BYTES)
    stored_response_ttl_s: float = Field(default=86400.0, gt=0)

    max_request_id_bytes: int = Field(default=128, ge=1)
    max_cache_salt_bytes: int = Field(default=256, ge=0)
    max_session_id_bytes: int = Field(default=256, ge=1)

    max_images: int = Field(default=16, ge=0)
    max_image_bytes: int = Field(default=8 << 20, ge=1)
    max_image_pixels: int = Field(default=1 << 24, ge=1, le=MAX_IMAGE_PIXELS)
    max_total_image_pixels: int = Field(default=1 << 26, ge=1)
    max_shown_pixels: int = Field(default=1 << 22, ge=1, le=MAX_SHOWN_PIXELS)
    max_total_shown_pixels: int = Field(default=1 << 22, ge=1, le=MAX_SHOWN_PIXELS)
    max_held_image_bytes: int = Field(default=1 << 30, ge=1)

    max_pending_tokenizer_jobs: int = Field(default=1024, ge=1)
    tokenizer_timeout_s: float = Field(default=10.0, gt=0)

    @property
    def of_store(self) -> StoreLimits:
        return StoreLimits(
            self.max_stored_responses,
            self.max_store_bytes,
            self.max_stored_response_bytes,
            self.stored_response_ttl_s,
        )
