"""A model at the hub, by its name there."""

from dataclasses import dataclass

DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class HubModel:
    """id: as at the hub. revision: branch, tag or commit; None: the hub's default branch."""

    id: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.id if self.revision is None else f"{self.id} at {self.revision}"
