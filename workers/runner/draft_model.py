"""The draft model of a rank: loaded, checked against its target, and given a pool of its own.

The pool has the target's pages of account 0: the same numbers, other keys and values.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from attention.backends.base import AttentionBackend
from attention.config import AttentionConfig
from attention.kernels.providers import probe_triton
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.tuning.candidates import AUTO_TUNED
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import LoadedModel, load_model
from workers.loading.model_folder import TOKENIZER_FILE, ModelFacts, resolve_model_folder
from workers.loading.rounded_drafter import draft_recipe
from workers.loading.weights import OnProgress
from workers.models.base import CausalLM
from workers.parallel.group import TPGroup
from workers.runner.kv_memory import create_kv_pool, resolve_kv_dtype
from workers.runner.sizing import AttentionPlan, choose_attention
from workers.runner.speculative_runner import check_branches
from workers.runner.tree_kernels import tree_kernels
from workers.speculation.device_draft import Argmax, DeviceDraftModel
from workers.speculation.device_draft_tree import DeviceDraftTree
from workers.speculation.device_drafter import DeviceDrafter, DeviceTreeDrafter
from workers.speculation.draft import DraftModelProposer
from workers.speculation.draft_tree import DraftTreeProposer
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import Proposer
from workers.speculation.taps import StepTaps

_ANY_PAGE_SIZE = 1


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model whose backend reads and writes a pool of its own at the target's cache indices.
    table: int32 (num_slots, max_context_len), req_to_token. tree: as in SpeculativeConfig. tp:
    whose ranks have a part of the model each."""

    model: CausalLM
    backend: AttentionBackend
    pool: TokenToKVPool
    table: torch.Tensor
    tree: tuple[int, ...]
    tp: TPGroup

    def proposer(self, history: TokenHistory, taps: StepTaps) -> Proposer:
        """As PlacedDrafter.proposer: it reads tokens only."""
        own = history, self.model, self.backend, self.table
        return DraftTreeProposer(*own, self.tree) if self.tree else DraftModelProposer(*own)

    def device_drafter(self) -> DeviceDrafter:
        """As PlacedDrafter.device_drafter: chains."""
        return DeviceDraftModel(self.model, self.backend, self.tp, self._argmax())

    def tree_drafter(self) -> DeviceTreeDrafter:
        """As PlacedDrafter.tree_drafter."""
        kernels = tree_kernels(self.table.device)
        return DeviceDraftTree(self.model, self.backend, self.tp, self._argmax(), kernels)

    def _argmax(self) -> Argmax:
        if self.table.device.type != "cuda" or probe_triton().missing:
            return partial(torch.argmax, dim=-1)
        # Triton comes with torch for CUDA only.
        from workers.layers.cuda.likeliest import likeliest_columns

        return likeliest_columns

    def prepare_while_idle(self) -> bool:
        """As PlacedDrafter.prepare_while_idle."""
        return self.model.prepare_while_idle()

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        """As PlacedDrafter.clear_tokens."""
        self.pool.clear_tokens(cache_indices)


class DraftModel:
    """Raises ConfigError where the two do not fit together, beside what load_model raises.

    config: the target's. model: the draft's name or folder. target: as it is loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: str,
        target: LoadedModel,
        tp: TPGroup,
        on_progress: OnProgress,
    ) -> None:
        # Refused by the name of its own setting where it is quantised.
        draft_recipe(config, resolve_model_folder(model))
        self._config = replace(
            config,
            model=model,
            speculative=None,
            draft_quantization=None,
            quantization=config.draft_quantization or config.quantization,
            served_model_name=None,
            max_context_len=target.facts.max_context_len,
        )
        try:
            self._loaded = load_model(self._config, tp, target.device, target.dtype, on_progress)
        except ConfigError as error:
            raise ConfigError(f"the draft model {model}: {error}") from error
        self._tp = tp
        _check_geometry(self._loaded, "be a draft model")
        _check_geometry(target, "have a draft model")
        if config.speculation is not None and config.speculation.tree:
            check_branches(config.speculation, self._loaded.model, self._loaded.facts.architecture)
        _check_tokens(self._loaded.facts, target.facts)

    @property
    def taps_final_states(self) -> bool:
        """As PagedDrafter.taps_final_states: it reads tokens only."""
        return False

    @property
    def num_taps(self) -> int:
        """As PagedDrafter.num_taps."""
        return 0

    def num_bytes_a_token(self) -> int:
        """As PagedDrafter.num_bytes_a_token: of keys and values."""
        return kv_bytes_a_token(self._config, self._loaded)

    def place(
        self, target: AttentionConfig, num_pages: int, req_to_token_pool: ReqToTokenPool
    ) -> PlacedModel:
        """target: whose pages these are. num_pages: of it, the reserved one counted."""
        config = replace(self._config, page_size=target.page_size)
        if self._loaded.device.type == "cuda":
            config = untuned(config)
        chosen = choose_attention(config, self._loaded, self._tp)
        kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, self._loaded.dtype)
        own = self._loaded.attention_config(chosen.page_size, kv_dtype)
        pool = create_kv_pool(own, (num_pages,), self._loaded.kv_scales)
        backend = AttentionPlan(chosen.routes, own, (num_pages,), 0).build(req_to_token_pool, pool)
        self._loaded.model.prepare(req_to_token_pool, pool)
        table = req_to_token_pool.req_to_token
        return PlacedModel(self._loaded.model, backend, pool, table, config.draft_tree, self._tp)


def untuned(config: EngineConfig) -> EngineConfig:
    """By preference where attention is to be chosen by measurement: by then the pools have the
    memory that measuring takes, and a drafter's graphs hold one backend."""
    asked = (
        config.attention_backend,
        config.prefill_attention_backend,
        config.decode_attention_backend,
    )
    chosen = [None if name == AUTO_TUNED else name for name in asked]
    return replace(
        config,
        attention_backend=chosen[0],
        prefill_attention_backend=chosen[1],
        decode_attention_backend=chosen[2],
    )


def kv_bytes_a_token(config: EngineConfig, loaded: LoadedModel) -> int:
    """Of account 0, on this rank."""
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, loaded.dtype)
    return loaded.attention_config(_ANY_PAGE_SIZE, kv_dtype).kv_bytes_of_account(0)


def check_pages(loaded: LoadedModel, role: str) -> None:
    """Raises ConfigError but for one account of text, whose pages two models can share."""
    model = loaded.model
    has_more = model.encoder is not None or model.media is not None or model.state_entries
    lets_go = any(
        layer.sliding_window_size > 0 or layer.chunk_size > 0 for layer in model.geometry.layers
    )
    if has_more or lets_go:
        raise ConfigError(
            f"{loaded.facts.architecture} cannot {role}: only models of text whose layers keep "
            "every token can"
        )


def _check_geometry(loaded: LoadedModel, role: str) -> None:
    """The same, of nothing but keys and values."""
    check_pages(loaded, role)
    if loaded.model.geometry.latent is not None:
        raise ConfigError(
            f"{loaded.facts.architecture} cannot {role}: only models that keep keys and values can"
        )


def _check_tokens(draft: ModelFacts, target: ModelFacts) -> None:
    sizes = f"{draft.vocab_size} and {target.vocab_size} tokens"
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model {draft.name} and {target.name} have different vocabularies: {sizes}"
        )
    if _vocabulary(draft.folder) != _vocabulary(target.folder):
        raise ConfigError(
            f"the draft model {draft.name} and {target.name} have different vocabularies: both of "
            f"{draft.vocab_size} tokens, of which not all are alike"
        )


def _vocabulary(folder: Path) -> object:
    """Which text each token id is, and how text becomes tokens. Raises ModelLoadError."""
    file = folder / TOKENIZER_FILE
    try:
        content = msgspec.json.decode(file.read_bytes())
        return content["model"], content["added_tokens"], content["pre_tokenizer"]
    except (OSError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{file}, which drafts are checked by, cannot be read") from error
