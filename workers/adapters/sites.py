"""Where adapters act in a model: its joined projections and, where they may, its embedding and its
experts; and what of each a rank holds.

The matrices of an adapter are cut as the layer is that they add to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from workers.adapters.embedding_site import EmbeddingSite
from workers.adapters.expert_site import ExpertsSite
from workers.adapters.low_rank import LowRank
from workers.adapters.ref import AdapterInfo
from workers.errors import ConfigError
from workers.layers.formats.format import Cut
from workers.layers.formats.layer import LinearLayer
from workers.layers.gated_mlp import GatedMLP
from workers.layers.linear import RowParallelLinear
from workers.layers.moe.mixture import MixtureOfExperts
from workers.models.grouped_attention import GroupedQueryAttention
from workers.models.registry import NATIVE_ARCHITECTURES
from workers.models.stream_decoder import StreamCausalLM


@dataclass(frozen=True, slots=True)
class SitePart:
    """One checkpoint module of a site. rows: its own among the site's outputs on this rank."""

    module: str
    cut: Cut
    rows: slice


@dataclass(frozen=True, slots=True)
class Site:
    """One layer of a rank. sums_ranks: its output is the sum of what ranks make of their inputs."""

    layer: LinearLayer
    parts: tuple[SitePart, ...]

    @property
    def sums_ranks(self) -> bool:
        return isinstance(self.layer, RowParallelLinear)

    @property
    def num_inputs(self) -> int:
        """On this rank."""
        return self.parts[0].cut.num_columns

    @property
    def num_outputs(self) -> int:
        """On this rank."""
        return int(self.parts[-1].rows.stop)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """(in_features, out_features) of the whole ones."""
        return {part.module: (part.cut.whole[1], part.cut.whole[0]) for part in self.parts}

    def share_of(self, whole: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """What this rank has of an adapter, by module."""
        return {
            part.module: LowRank(pair.a[:, part.cut.columns], pair.b[part.cut.rows])
            for part in self.parts
            if (pair := whole.get(part.module)) is not None
        }


AnySite = Site | EmbeddingSite | ExpertsSite


@dataclass(frozen=True, slots=True)
class AdapterTargets:
    """What adapters may change beside projections, for which slots take more memory."""

    embeddings: bool = False
    experts: bool = False


PROJECTIONS = AdapterTargets()


def sites_of(
    model: nn.Module, architecture: str, targets: AdapterTargets = PROJECTIONS
) -> list[AnySite]:
    """The embedding's, then in the order of the model's layers. Raises ConfigError for a model that
    takes no adapters, or none of its targets."""
    family = NATIVE_ARCHITECTURES.get(architecture)
    is_adaptable = family is not None and family.takes_adapters
    if not (is_adaptable and isinstance(model, StreamCausalLM)):
        raise ConfigError(
            f"max_loras: {architecture} takes no adapters as it is run; the Llama family and Gemma "
            "do, natively"
        )
    paths = {module: path for path, module in model.named_modules()}
    sites: list[AnySite] = []
    if targets.embeddings:
        embedding = model.model.embed_tokens
        sites.append(EmbeddingSite(embedding, paths[embedding]))
    sites += [_site(layer, paths[layer]) for layer in _adapted_layers(model)]
    if targets.experts:
        sites += _expert_sites(model, architecture, paths)
    return sites


def adapter_info(sites: Sequence[AnySite], max_rank: int, num_slots: int) -> AdapterInfo:
    modules = {module: shape for site in sites for module, shape in site.modules.items()}
    experts = tuple(site.names for site in sites if isinstance(site, ExpertsSite))
    return AdapterInfo(max_rank, num_slots, modules, experts)


def _adapted_layers(model: StreamCausalLM) -> Iterator[LinearLayer]:
    for layer in model.model.decoder_layers:
        if isinstance(layer.self_attn, GroupedQueryAttention):
            yield layer.self_attn.qkv_proj
            yield layer.self_attn.o_proj
        if isinstance(layer.mlp, GatedMLP):
            yield layer.mlp.gate_up_proj
            yield layer.mlp.down_proj


def _expert_sites(
    model: StreamCausalLM, architecture: str, paths: Mapping[nn.Module, str]
) -> list[ExpertsSite]:
    mixtures = [x.mlp for x in model.model.decoder_layers if isinstance(x.mlp, MixtureOfExperts)]
    if not mixtures:
        raise ConfigError(f"lora_experts: {architecture} has no experts")
    if any(mixture.experts.spec.weighs_inputs for mixture in mixtures):
        raise ConfigError(f"lora_experts: {architecture} weighs what its experts are given")
    return [ExpertsSite.of(mixture.experts, paths[mixture.experts]) for mixture in mixtures]


def _site(layer: LinearLayer, path: str) -> Site:
    prefix, first, parts = layer.checkpoint_prefix(path), 0, []
    for module, cut in layer.weight_cuts().items():
        rows = slice(first, first + cut.num_rows)
        parts.append(SitePart((prefix + module).rstrip("."), cut, rows))
        first = rows.stop
    return Site(layer, tuple(parts))
