"""The experts of a layer as one layer: a rank's share of all of them in two 3-D tensors.

Experts that all tokens share are cut into pieces of a routed expert's width and lie behind the
others. Knows no routing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from workers.layers.formats.format import Cut
from workers.layers.formats.modules import ModulesLayer, store_modules
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import Fp8Blocks
from workers.layers.kept.stacks import Fp4Stack
from workers.layers.kept.weight import KeptWeight
from workers.layers.moe.copies import PlacesByTurns
from workers.layers.moe.kept import DOWN, GATE_UP, KEPT_DTYPES, kept_stacks, stack_of
from workers.layers.moe.products import experts_in_torch, products_for, weighing_inputs
from workers.layers.moe.router import block_prefix
from workers.layers.moe.routing import Choice
from workers.layers.moe.spec import MixtureSpec
from workers.layers.moe.tensors import (
    ExpertTensors,
    GatedTargets,
    SeparateExperts,
    StackedExperts,
    store_stacks,
)
from workers.layers.routed_experts import RoutedProducts, RoutedWeights
from workers.layers.sharding import ShardContext, TensorSource, WeightSlot
from workers.parallel.expert_copies import ExpertHolders
from workers.parallel.expert_group import ExpertShare


class Experts(ModulesLayer):
    """(n, hidden_size) and Choice -> this rank's part of the sum (n, hidden_size).

    gate_up: (kept, 2 * columns, hidden_size), gate over up; down: (kept, hidden_size, columns);
    biases: (kept, 2 * columns), (kept, hidden_size) or None; kept, columns: of share. stacks: the
    first two as a checkpoint stores them, which then are no parameters.
    """

    def __init__(self, spec: MixtureSpec, hidden_size: int, shard: ShardContext) -> None:
        super().__init__()
        self.spec, self.hidden_size = spec, hidden_size
        self.share = share = ExpertShare.of_rank(
            shard.experts,
            spec.num_experts,
            spec.num_pieces,
            spec.width,
            shard.num_redundant_experts,
        )
        self._part, self.num_parts = shard.experts.ep_rank, shard.experts.ep_size
        self.holders = ExpertHolders.of_owners(spec.num_experts, self.num_parts)
        kept, columns = share.num_kept, share.num_columns
        self.gate_up = shard.empty_weight(kept, 2 * columns, hidden_size)
        self.down = shard.empty_weight(kept, hidden_size, columns)
        self.stacks: nn.ModuleDict | None = None
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if spec.has_bias:
            self.gate_up_bias = shard.empty_parameter(kept, 2 * columns)
            self.down_bias = shard.empty_parameter(kept, hidden_size)
        products = products_for(shard.dtype, shard.device, self.num_parts)
        self._asks_host = products is experts_in_torch
        self._products = weighing_inputs(products) if spec.weighs_inputs else products
        self.places = nn.Buffer(_places(spec, share).to(shard.device), persistent=False)
        self._by_turns: PlacesByTurns | None = None

    @property
    def num_elsewhere(self) -> int:
        """1 where an id stands for the experts of other ranks: see local."""
        return int(self.num_parts > 1)

    @property
    def fixed_places(self) -> torch.Tensor | None:
        """int64 (experts and pieces,), where each lies here, num_kept for elsewhere; None where
        copies of experts take turns."""
        return self.places if self._by_turns is None else None

    def keep_copies(self, loads: Sequence[int]) -> None:
        """Fill the room for copies, as all ranks do by the same loads: tokens of each expert.
        Called before weights are loaded."""
        num_copies = self.share.num_copies * self.num_parts
        self.holders = ExpertHolders.of_loads(loads, self.num_parts, num_copies)
        self.share = replace(self.share, copies=self.holders.copies_of(self._part))
        places = _places(self.spec, self.share).to(self.places.device)
        self._by_turns = PlacesByTurns.of(self.holders, self._part, places, self.share.num_kept)

    @property
    def is_kept(self) -> bool:
        return self.stacks is not None

    def wrap_products(self, wrap: Callable[[RoutedProducts], RoutedProducts]) -> None:
        """From now on the experts are multiplied by what wrap makes of what did it."""
        self._products = wrap(self._products)

    @property
    def asks_host(self) -> bool:
        """Whether forward waits for the device."""
        return self._asks_host

    @property
    def weights(self) -> RoutedWeights:
        """The parameters as they are now."""
        return RoutedWeights(
            self.gate_up, self.down, self.spec.gating, self.gate_up_bias, self.down_bias
        )

    @property
    def kept(self) -> KeptExperts | None:
        """What stands in the place of weights where is_kept."""
        if self.stacks is None:
            return None
        gate_up, down = stack_of(self.stacks[GATE_UP]), stack_of(self.stacks[DOWN])
        return KeptExperts(gate_up, down, self.spec.gating, self.gate_up_bias, self.down_bias)

    def checkpoint_prefix(self, module_path: str) -> str:
        return block_prefix(self.spec, module_path)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = dict(self._routed().shapes())
        shared = self._shared_modules().items()
        return shapes | {f"{name}.weight": whole for name, whole in shared}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        if name_part.startswith("experts."):
            self._routed().load(name_part, tensor)
        else:
            self._load_shared(name_part.split(".")[1].removesuffix("_proj"), tensor)

    def store(
        self,
        prefix: str,
        recipe: WeightRecipe,
        slots: dict[str, WeightSlot],
        shard: ShardContext,
        keeps: bool,
    ) -> set[str]:
        is_taken = keeps and shard.dtype in KEPT_DTYPES
        stacks = kept_stacks(self, prefix, recipe, shard.device) if is_taken else None
        if stacks is None:
            self.gate_up = shard.empty_parameter(*self.gate_up.shape)
            self.down = shard.empty_parameter(*self.down.shape)
        else:
            self.register_parameter("gate_up", None)
            self.register_parameter("down", None)
            self.stacks = nn.ModuleDict(stacks)
        routed = self._routed()
        if isinstance(routed, StackedExperts):
            packed = {f"experts.{name}": one for name, one in (stacks or {}).items()}
            fp4 = {name: one for name, one in packed.items() if isinstance(one, Fp4Stack)}
            store_stacks(self, routed, prefix, recipe, slots, shard.device, fp4)
            return set()
        return store_modules(self, prefix, recipe, slots, shard.device)

    def module_cuts(self) -> Mapping[str, Cut]:
        modules = self._separate().modules().items()
        cuts = {name: cut for name, cut in modules if cut is not None}
        for module, whole in self._shared_modules().items():
            # Of pieces that do not lie together: all of it, and the rank's part when it is there.
            cuts[module] = Cut(whole, slice(0, whole[0]), slice(0, whole[1]))
        return cuts

    def modules_elsewhere(self) -> Mapping[str, tuple[int, int]]:
        width, hidden = self.spec.width, self.hidden_size
        is_down = f".{self.spec.names.down}"
        return {
            name: (hidden, width) if name.endswith(is_down) else (width, hidden)
            for name, cut in self._separate().modules().items()
            if cut is None
        }

    def take(self, module: str, weight: torch.Tensor) -> None:
        if module in self._shared_modules():
            self._load_shared(module.split(".")[1].removesuffix("_proj"), weight)
        else:
            self._separate().take(module, weight)

    def keep(self, module: str, weight: KeptWeight | None) -> None:
        kept = self.kept
        if kept is None or not isinstance(weight, Fp8Blocks):
            raise ValueError(f"{module} is not kept in blocks of FP8")
        self._separate().keep(module, weight, kept)

    def _separate(self) -> SeparateExperts:
        return SeparateExperts(self.spec, self.share, self.weights, self.hidden_size)

    def _shared_modules(self) -> dict[str, tuple[int, int]]:
        """-> (out_features, in_features)."""
        if self.spec.shared is None:
            return {}
        columns, hidden = self.spec.num_pieces * self.spec.width, self.hidden_size
        name = self.spec.shared.name
        return {
            f"{name}.gate_proj": (columns, hidden),
            f"{name}.up_proj": (columns, hidden),
            f"{name}.down_proj": (hidden, columns),
        }

    def _routed(self) -> ExpertTensors:
        if not self.spec.names.is_stacked:
            return self._separate()
        return StackedExperts(self.spec, self.share, self.weights, self.hidden_size)

    def _load_shared(self, part: str, tensor: TensorSource) -> None:
        share = self.share
        for place, piece in enumerate(share.pieces, start=share.first_piece):
            first = piece * self.spec.width + share.first_column
            columns = slice(first, first + share.num_columns)
            GatedTargets(self.weights, self.hidden_size, columns).load(place, part, tensor)

    def local(self, chosen: Choice) -> Choice:
        """The same with the places of experts here; what lies elsewhere is at num_kept. Of an
        expert with copies, tokens take turns: a rank computes those that are its part's."""
        if self.num_elsewhere == 0:
            return chosen
        if self._by_turns is not None:
            return chosen._replace(ids=self._by_turns.of_ids(chosen.ids))
        return chosen._replace(ids=self.places[chosen.ids])

    def forward(self, x: torch.Tensor, chosen: Choice) -> torch.Tensor:
        here = self.local(chosen)
        return self._products(x, here.ids, here.weights, self.weights)


def _places(spec: MixtureSpec, share: ExpertShare) -> torch.Tensor:
    """int64 (num_experts + num_pieces,): where each lies on this rank, num_kept for elsewhere."""
    places = [share.place_of(expert) for expert in range(spec.num_experts + spec.num_pieces)]
    return torch.tensor([share.num_kept if place is None else place for place in places])
