"""A rank's share of a model of transformers, by the tensor-parallel plan of its class and config.

transformers' loader reads of a checkpoint what a DTensor parameter holds on its rank. Only for that
are parameters DTensors: loaded, they are plain tensors, and sums over ranks go through the TPGroup.
Decision 0059.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from workers.errors import ConfigError, ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_class import obstacles_named, part_for_class
from workers.models.transformers_cuts import JOINING_STYLES, STYLES, Cut, Style
from workers.parallel.group import TPGroup

_HEAD_COUNTS = re.compile(r"(\w+_)?num_(\w+_)?(attention|key_value|kv)_heads(_per_layer)?")


@dataclass(frozen=True, slots=True)
class ModelShares:
    """What the plan says of one model, by names as they stand in it.

    cuts: of parameters that are cut; of several names of one parameter, each has an entry.
    """

    cuts: dict[str, Cut]
    styles: dict[str, Style]


def check_tensor_parallel(
    model_class: Any, config: PreTrainedConfig, tp_size: int, device_type: str
) -> None:
    """Raise ConfigError, naming what is in the way, where the model cannot be cut over tp_size
    ranks on such devices. Reads no weights."""
    with torch.device("meta"), obstacles_named(model_class):
        model = model_class(copy.deepcopy(part_for_class(config, model_class)))
        shares = shares_of(model, tp_size)
    if device_type != "cpu":
        _check_head(model, shares.styles)


def shares_of(model: PreTrainedModel, tp_size: int) -> ModelShares:
    """Raises ConfigError, as check_tensor_parallel. model: whole, on any device."""
    try:
        return _shares_of(model, tp_size)
    except _CannotBeCutError as error:
        raise ConfigError(
            f"{type(model).__name__} runs through transformers, on one rank only: {error}; set "
            f"tp_size=1 in place of {tp_size}"
        ) from error


class _CannotBeCutError(Exception):
    """Its message says why, without the model's name."""


def _shares_of(model: PreTrainedModel, tp_size: int) -> ModelShares:
    plan = _known_plan(model)
    shares = ModelShares({}, {})
    for path, module in _text_modules(model):
        if (style := plan.get(_by_wildcard(path))) is not None:
            shares.styles[path] = style
        for name, parameter in module.named_parameters(recurse=False):
            own_path = f"{path}.{name}"
            own_style = plan.get(_by_wildcard(own_path), style)
            cut = None if own_style is None else own_style.cut(name, parameter)
            if cut is not None:
                _check_divides(own_path, parameter.shape[cut.dim], cut, tp_size)
                shares.cuts[own_path] = cut
    if not any("*" in _by_wildcard(path) for path in shares.cuts):
        raise _CannotBeCutError("its tensor-parallel plan cuts no layer")
    if any(getattr(text_config_of(model.config), "activation_sparsity_pattern", None) or ()):
        # Gemma 3n. transformers' plan cuts these features all the same.
        raise _CannotBeCutError("its sparse activations compare all features of a token")
    _check_heads(text_config_of(model.config), tp_size)
    _check_shared(model, shares.cuts)
    return shares


def _known_plan(model: PreTrainedModel) -> dict[str, Style]:
    plan: dict[str, str] = model._tp_plan or {}
    if not plan:
        raise _CannotBeCutError("transformers has no tensor-parallel plan for it")
    unknown = sorted(set(plan.values()) - set(STYLES))
    if unknown:
        raise _CannotBeCutError(f"its tensor-parallel plan asks for {', '.join(unknown)}")
    return {name: STYLES[style] for name, style in plan.items()}


def _text_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """All but those of models within it for images and sound: they never run."""
    text = type(text_config_of(model.config))
    others: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{other}.") for other in others):
            continue
        if isinstance(module, PreTrainedModel) and type(text_config_of(module.config)) is not text:
            others.append(path)
            continue
        yield path, module


def _by_wildcard(name: str) -> str:
    """As plans write it: layers.3.mlp is layers.*.mlp."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check_head(model: PreTrainedModel, styles: Mapping[str, Style]) -> None:
    """On GPUs, kernels that ranks choose by measurement may round differently. Logits that ranks
    join are the same bits on all, and so are the tokens that they sample."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    heads = [path for path, module in model.named_modules() if module is head]
    for path, style in styles.items():
        is_part = any(path == own or path.startswith(f"{own}.") for own in heads)
        if is_part and isinstance(style, JOINING_STYLES):
            return
    raise ConfigError(
        f"{type(model).__name__} runs through transformers, over several ranks on CPU only: its "
        "plan leaves the head whole, and ranks on GPUs could sample unlike tokens; set tp_size=1"
    )


def _check_divides(path: str, size: int, cut: Cut, tp_size: int) -> None:
    if cut.may_be_uneven:
        fits = (tp_size - 1) * -(-size // tp_size) < size
    else:
        fits = size % (cut.num_parts * tp_size) == 0
    if not fits:
        raise _CannotBeCutError(f"{path} has {size} features")


def _check_heads(config: Any, tp_size: int) -> None:
    """A head that is cut in two would be taken for a head of its own."""
    for key, value in config.to_dict().items():
        if not _HEAD_COUNTS.fullmatch(key):
            continue
        counts = value if isinstance(value, list) else [value]
        if any(isinstance(count, int) and count % tp_size for count in counts):
            raise _CannotBeCutError(f"{key}={value}")


def _check_shared(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Of a parameter with several names, such as embedding and head."""
    first: dict[nn.Parameter, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, path)
        if cuts.get(other) != cuts.get(path):
            raise _CannotBeCutError(f"its plan cuts {other} and {path}, which are one, differently")


class WholeModel:
    """The one rank there is has all of a model."""

    def __init__(self, model_class: Any) -> None:
        self.model_class = model_class

    def join(self, model: PreTrainedModel) -> None:
        """Nobody to join."""


class RankShare:
    """What one rank of several has of a model.

    model_class: builds models that have this rank's share of their parameters from the start, as
    DTensors where they are on the meta device, to be loaded, else cut from what they are.
    """

    def __init__(self, model_class: Any, tp: TPGroup) -> None:
        self._tp = tp
        self._shares = ModelShares({}, {})

        def build(model: Any, config: PreTrainedConfig, *given: Any, **options: Any) -> None:
            model_class.__init__(model, config, *given, **options)
            self._shares = shares_of(model, tp.size)
            _cut_parameters(model, self._shares.cuts, tp)

        members = {"__init__": build, "__module__": model_class.__module__}
        self.model_class: Any = type(model_class.__name__, (model_class,), members)

    def join(self, model: PreTrainedModel) -> None:
        """Make the model, which model_class built last and which is loaded, compute what a whole
        one does. Raises ModelLoadError where loading has put its share together wrongly."""
        _check_conversions(model, self._shares.cuts)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    local = nn.Parameter(parameter.to_local(), requires_grad=False)
                    setattr(module, name, local)
        for path, style in self._shares.styles.items():
            style.install(model.get_submodule(path), self._tp)


def part_of_rank(model_class: Any, tp: TPGroup) -> WholeModel | RankShare:
    """What this rank has of the class's models."""
    return WholeModel(model_class) if tp.size == 1 else RankShare(model_class, tp)


class _RankMesh(DeviceMesh):
    """Who this rank is, without a process group: what is only cut needs no collective.

    It has the rank's name: meshes of the same ranks and names are one and the same to DTensor.
    """

    def __init__(self, tp: TPGroup) -> None:
        ranks, names = list(range(tp.size)), (f"rank{tp.rank}",)
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=tp.rank)
        self._own_rank = tp.rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return self._own_rank


def _cut_parameters(model: nn.Module, cuts: Mapping[str, Cut], tp: TPGroup) -> None:
    mesh = _RankMesh(tp)
    of_rank: dict[nn.Parameter, nn.Parameter] = {}
    for path, cut in cuts.items():
        module_path, _, name = path.rpartition(".")
        module = model.get_submodule(module_path)
        parameter = module.get_parameter(name)
        if parameter not in of_rank:
            whole, placements = parameter.detach(), [_placement(cut)]
            share = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            own = share if parameter.is_meta else share.to_local().clone()
            of_rank[parameter] = nn.Parameter(own, requires_grad=False)
        setattr(module, name, of_rank[parameter])


def _placement(cut: Cut) -> Placement:
    if cut.num_parts == 1:
        return Shard(cut.dim)
    return _StridedShard(cut.dim, split_factor=cut.num_parts)


def _check_conversions(model: PreTrainedModel, cuts: Mapping[str, Cut]) -> None:
    """The loader cuts what it reads and converts that; the share of what the whole would have been
    converted to comes of it in some cases only."""
    for conversion in getattr(model, "_weight_conversions", ()):
        if not isinstance(conversion, WeightConverter):
            continue
        for path, cut in cuts.items():
            is_target = any(target in path for target in conversion.target_patterns)
            if is_target and not gives_shares(conversion, cut):
                raise ModelLoadError(
                    f"{path} is put together from tensors that cannot be cut over ranks as they "
                    "are read; set tp_size=1, or save the model anew with transformers"
                )


def gives_shares(conversion: WeightConverter, cut: Cut) -> bool:
    """Whether experts are stacked, and joined along another dimension or as parts of the cut."""
    for operation in conversion.operations:
        if isinstance(operation, MergeModulelist):
            if operation.dim == cut.dim:
                return False
        elif isinstance(operation, Concatenate):
            num_joined = len(conversion.source_patterns)
            if operation.dim == cut.dim and num_joined != cut.num_parts:
                return False
        else:
            return False
    return True
