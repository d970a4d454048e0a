"""Drives a loaded model row by row, as the runner would, over any attention."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from attention import ForwardBatch, ForwardMode
from attention.backends.base import AttentionBackend
from attention.forward_batch import AttentionDispatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.slot_states import SlotStates
from attention.registry import create_attention_backend
from workers.loading.loader import LoadedModel
from workers.models.token_inputs import TokenInputs
from workers.runner.kv_memory import create_kv_pool

MAX_ROWS = 8


class PlannedAttention(AttentionDispatch, Protocol):
    """What both the dense fake and every backend offer."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None: ...


def make_batch(
    new_tokens: Mapping[int, Sequence[int]],
    prefix_lens: Mapping[int, int],
    attention: AttentionDispatch,
) -> ForwardBatch:
    """Rows in the mapping's order. Row r's position p lies at cache index (r + 1) * 256 + p."""
    new = np.array([len(tokens) for tokens in new_tokens.values()], dtype=np.int32)
    old = np.array([prefix_lens[row] for row in new_tokens], dtype=np.int32)
    positions = np.concatenate([np.arange(p, p + n) for p, n in zip(old, new, strict=True)])
    slots = np.repeat(np.array(list(new_tokens), dtype=np.int64), new)
    ids = [token for tokens in new_tokens.values() for token in tokens]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if (new == 1).all() else ForwardMode.EXTEND,
        batch_size=len(new),
        num_tokens=len(ids),
        input_ids=torch.tensor(ids),
        positions=torch.from_numpy(positions.astype(np.int64)),
        req_pool_indices=torch.tensor(list(new_tokens)),
        seq_lens=torch.from_numpy(old + new),
        extend_seq_lens=torch.from_numpy(new),
        extend_prefix_lens=torch.from_numpy(old),
        out_cache_loc=torch.from_numpy((slots + 1) * 256 + positions),
        seq_lens_cpu=old + new,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=old,
        attn_backend=attention,
    )


def torch_native_backend(loaded: LoadedModel) -> AttentionBackend:
    """The real CPU backend over real pools of pages of 16, rows laid out as make_batch does."""
    config = loaded.attention_config(page_size=16, kv_dtype=torch.float32)
    table = ReqToTokenPool(MAX_ROWS, 256, config.device)
    for row in range(MAX_ROWS):
        indices = torch.arange((row + 1) * 256, (row + 2) * 256, dtype=torch.int32)
        table.write(torch.tensor([row]), 0, indices)
    pool = create_kv_pool(config, ((MAX_ROWS + 1) * 16,), ())
    loaded.model.prepare(table, pool)
    return create_attention_backend("torch_native", config, table, pool)


class ModelRows:
    """Rows of one model, each with its tokens so far."""

    def __init__(self, loaded: LoadedModel, attention: PlannedAttention) -> None:
        self.model = loaded.model
        self.attention = attention
        self.lengths: dict[int, int] = {}
        self._states = SlotStates(loaded.model.state_entries, MAX_ROWS, loaded.device)
        loaded.model.keep_states(self._states)

    @torch.inference_mode()
    def step(self, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Row -> logits (new tokens of the row, vocab_size)."""
        prefix_lens = {row: self.lengths.get(row, 0) for row in new_tokens}
        batch = make_batch(new_tokens, prefix_lens, self.attention)
        self.attention.init_forward_metadata(batch)
        tokens = TokenInputs(batch.input_ids, batch.positions)
        self._states.begin_step()
        logits = self.model.compute_logits(self.model(tokens, batch).hidden)
        self._states.commit()
        for row, tokens in new_tokens.items():
            self.lengths[row] = prefix_lens[row] + len(tokens)
        sizes = [len(tokens) for tokens in new_tokens.values()]
        return dict(zip(new_tokens, logits.split(sizes), strict=True))

    def greedy(self, row: int, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Prefill, then decode one token a step."""
        tokens = [int(self.step({row: prompt})[row][-1].argmax())]
        while len(tokens) < num_tokens:
            tokens.append(int(self.step({row: tokens[-1:]})[row][-1].argmax()))
        return tokens

    def greedy_logits(
        self, row: int, prompt: Sequence[int], num_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """As greedy, prompt first, and logits (len(tokens), vocab_size): of every token a step."""
        tokens, logits = list(prompt), [self.step({row: prompt})[row]]
        for _ in range(num_tokens):
            tokens.append(int(logits[-1][-1].argmax()))
            logits.append(self.step({row: tokens[-1:]})[row])
        return tokens, torch.cat(logits)
