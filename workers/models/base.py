"""What the runner asks of any model: hidden states, logits and the geometry of its attention.

Knows no architecture and no checkpoint format.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from attention import AttentionConfig, ForwardBatch, LatentEntry, LayerAttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.slot_states import SlotStates, StateEntry
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.errors import ConfigError
from workers.layers.embedding import VocabShard
from workers.layers.formats.layer import FormattedLayer, LinearLayer
from workers.models.media_encoder import MediaEncoder
from workers.models.request_encoder import RequestEncoder
from workers.models.token_inputs import ModelOutput, TokenInputs


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Attention of one rank, as the model defines it. Field meanings as in AttentionConfig.

    Layers name heads of their own only where these differ from the model's.
    """

    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    layers: tuple[LayerAttentionConfig, ...]
    latent: LatentEntry | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_unequal_head_dims(self) -> bool:
        """Whether any layer has V heads of another size than K heads where heads are kept."""
        if self.latent is not None:
            return False
        own = [layer.heads for layer in self.layers if layer.heads is not None]
        sizes = [(heads.head_dim, heads.v_head_dim) for heads in own]
        return any(k != v for k, v in [*sizes, (self.head_dim, self.v_head_dim)])

    def attention_config(
        self,
        max_context_len: int,
        page_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionConfig:
        """The config of a backend for this model."""
        return AttentionConfig(
            num_layers=self.num_layers,
            tp_q_head_num=self.tp_q_head_num,
            tp_k_head_num=self.tp_k_head_num,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            max_context_len=max_context_len,
            page_size=page_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
            layers=self.layers,
            latent=self.latent,
        )


class CausalLM(nn.Module, ABC):
    """A decoder-only language model on one rank.

    vocab_shard: which logits local_logits gives, where it does not give all.
    state_entries: what its modules keep of a request as a whole, in an order of its own.
    continues_states: whether these take many tokens on top of a state as fast as without one.
    has_invariant_products: whether on a GPU a token's bits, attention apart, are the same whatever
    shares its step, if ShardContext.is_deterministic asks for that.
    encoder: of an encoder-decoder, whose other methods are its decoder's.
    media: of a model that takes images in place of placeholder tokens.
    """

    geometry: AttentionGeometry
    vocab_size: int
    vocab_shard: VocabShard | None = None
    state_entries: tuple[StateEntry, ...] = ()
    encoder: RequestEncoder | None = None
    media: MediaEncoder | None = None
    continues_states: bool = True
    has_invariant_products: bool = False

    @abstractmethod
    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        """Final states of all tokens.

        Rows are laid out as forward_batch says; keys and values go to the pool through its backend.
        """

    def forward_rows(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, rows: torch.Tensor
    ) -> ModelOutput:
        """As forward, but only the final states at rows, int64 (m,).

        A model may leave out what no other token needs of the last layer.
        """
        output: ModelOutput = self(tokens, forward_batch)
        return replace(output, hidden=output.hidden.index_select(0, rows))

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (m, hidden_size) -> logits (m, vocab_size), whole on every rank.

        In float32 or in the model's dtype, as the head computes them.
        """

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As compute_logits, but only this rank's columns where the model keeps them apart:
        (m, vocab_shard.num_rows), those beyond num_real_rows being of no token."""
        return self.compute_logits(hidden)

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        """What compute_logits gives, from what local_logits gave on every rank."""
        return local

    def tap_layers(self, layer_ids: Sequence[int]) -> None:
        """From here on every pass hands over the stream behind these layers, for a drafter; the
        last layer's is what hidden is made of. Called once, before the first step.

        Raises ConfigError where the model hands over none, ValueError where it has no such layer.
        """
        raise ConfigError(f"{type(self).__name__} hands over no states of its layers")

    def input_embedding(self) -> nn.Parameter:
        """This rank's rows of the embedding, (num_rows, hidden_size), for a drafter without one.

        Raises ConfigError where the model hands over none.
        """
        raise ConfigError(f"{type(self).__name__} hands over no embedding")

    def capture_obstacle(self, max_context_len: int) -> str:
        """What a decode step does that a CUDA graph would not repeat; "" where a graph repeats all.

        Asked before the first step, of a model on its device. May run it and wait for it.
        """
        return f"{type(self).__name__} decides on the host what a step does"

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        """Called once, when weights and pools are there and before the first step."""

    def keep_states(self, states: SlotStates) -> None:
        """Called once, before the first step: where to read and stage states of state_entries."""

    def prepare_while_idle(self) -> bool:
        """Do a piece of what makes later starts faster; whether there was any. May wait for the
        device; ranks need not have the same to do."""
        return False

    def product_seconds(self, num_tokens: Sequence[int]) -> tuple[float, ...]:
        """Seconds that a step's products take on this rank with each of these numbers of tokens;
        empty where nobody can say. May wait for the device."""
        return ()


class NativeCausalLM(CausalLM):
    """A model made of sharded layers under Hugging Face's module names.

    tied_weights: checkpoint names that have no layer of their own because they must equal another
    tensor -> that tensor's name.
    """

    tied_weights: dict[str, str]

    def layers_as_stored(self) -> frozenset[LinearLayer | FormattedLayer]:
        """Layers whose products are made with weights as a checkpoint stores them, where that is a
        form that products take."""
        return frozenset()

    def capture_obstacle(self, max_context_len: int) -> str:
        return ""

    @abstractmethod
    def is_redundant_weight(self, name: str) -> bool:
        """Whether a checkpoint tensor can be left unread: it follows from the config."""
