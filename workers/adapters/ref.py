"""What a request says of its adapter, and what an engine says of the adapters that it takes."""

import msgspec

from workers.adapters.expert_modules import ExpertModules


class AdapterRef(msgspec.Struct, frozen=True):
    """An adapter as it was when it was loaded.

    name: what clients call it. folder: where every rank finds its files. key: of what these files
    hold; whoever reads them later finds the same, or refuses.
    """

    name: str
    folder: str
    key: str


class AdapterInfo(msgspec.Struct, frozen=True):
    """max_rank: of an adapter. num_slots: adapters that one step may have. modules: the checkpoint
    modules that adapters may change, by name, as (in_features, out_features) of the whole one.
    experts: of each layer whose experts they may change."""

    max_rank: int
    num_slots: int
    modules: dict[str, tuple[int, int]]
    experts: tuple[ExpertModules, ...] = ()

    def shape_of(self, module: str) -> tuple[int, int] | None:
        """None for what adapters may not change."""
        shapes = (one.shape_of(module) for one in self.experts)
        return self.modules.get(module) or next(filter(None, shapes), None)

    def experts_at(self, stack_path: str) -> ExpertModules | None:
        return next((one for one in self.experts if one.stack_path == stack_path), None)


def prefix_salt(cache_salt: str, adapter: AdapterRef | None) -> str:
    """What requests must have in common to share cached prefixes: keys and values behind an adapter
    are not those behind another one. No salt of a client is taken for an adapter's."""
    if adapter is not None:
        return f"\0{adapter.key}\0{cache_salt}"
    return f"\0\0{cache_salt}" if cache_salt.startswith("\0") else cache_salt
