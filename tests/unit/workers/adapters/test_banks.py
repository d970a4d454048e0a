"""Device slots: nothing of the adapter before is left, as kernels read whole blocks of ranks."""

import pytest
import torch

from tests.fakes.tiny_models import TINY_MODELS, save_tiny_model
from workers.adapters.banks import Banks
from workers.adapters.host import HostAdapter
from workers.adapters.low_rank import LowRank
from workers.adapters.ref import AdapterRef
from workers.adapters.sites import AdapterTargets, sites_of
from workers.config import EngineConfig
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
MAX_RANK = 4


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    folder = save_tiny_model(TINY_MODELS["qwen3_moe"], tmp_path_factory.mktemp("model"))
    loaded = load_model(EngineConfig(model=str(folder)), SingleRank(), CPU, torch.float32)
    return sites_of(loaded.model, loaded.facts.architecture, AdapterTargets(True, True))


def adapter(sites, rank, changes):
    """Of ones, in all modules whose names changes says."""
    shapes = {module: shape for site in sites for module, shape in site.modules.items()}
    for names in (site.names for site in sites if hasattr(site, "names")):
        for part in (names.gate, names.up, names.down):
            module = f"{names.path}.1.{part}"
            shapes[module] = names.shape_of(module)
    whole = {
        module: LowRank(torch.ones(rank, inputs), torch.ones(outputs, rank))
        for module, (inputs, outputs) in shapes.items()
        if changes(module)
    }
    pairs = {key: one for site in sites for key, one in site.share_of(whole).items()}
    return HostAdapter(AdapterRef("", "", ""), pairs)


def matrices(bank):
    return {name: one for name, one in vars(bank).items() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("changes", [bool, lambda module: "down" in module or "q_proj" in module])
def test_a_slot_is_as_if_it_had_never_had_another_adapter(sites, changes) -> None:
    used, new = (Banks.of(sites, 2, MAX_RANK, torch.float32, CPU).all() for _ in range(2))
    later = adapter(sites, 2, changes)
    for bank, fresh in zip(used, new, strict=True):
        bank.fill(2, adapter(sites, MAX_RANK, bool))
        bank.fill(2, later)
        fresh.fill(2, later)
        assert bank.ranks.of(2) == fresh.ranks.of(2)
        assert torch.equal(bank.ranks.on_device, fresh.ranks.on_device)
        assert bank.ranks.on_device[2].tolist() == bank.ranks.of(2)
        assert matrices(bank).keys() == matrices(fresh).keys() != set()
        for name, one in matrices(bank).items():
            assert torch.equal(one, matrices(fresh)[name]), (bank, name)
            assert not one[:2].any(), "another slot's"
    assert any(one[2].any() for bank in new for one in matrices(bank).values())
