"""Adapters of a model's embedding: a token adds B's product with its own column of A."""

from collections.abc import Mapping
from dataclasses import dataclass

from workers.adapters.low_rank import LowRank
from workers.errors import AdapterError
from workers.layers.embedding import ScaledVocabParallelEmbedding, VocabParallelEmbedding


@dataclass(frozen=True, slots=True)
class EmbeddingSite:
    """Every rank has all of an adapter: cut, what it adds would have to be summed up. A head that
    is tied to the embedding is left as it is, as PEFT leaves it."""

    layer: VocabParallelEmbedding
    path: str

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        return {self.path: (self.layer.vocab_size, self.layer.weight.shape[1])}

    def share_of(self, whole: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """What the layer multiplies its rows by is in b. Raises AdapterError where b's values
        become too large by it."""
        pair = whole.get(self.path)
        if pair is None:
            return {}
        if not isinstance(self.layer, ScaledVocabParallelEmbedding):
            return {self.path: pair}
        scaled = (pair.b.float() * self.layer.factor).to(pair.b.dtype)
        if not scaled.isfinite().all():
            raise AdapterError(
                f"{self.path} gets values that are no finite numbers in {scaled.dtype} by the "
                f"model's own scale of {self.layer.factor:g}"
            )
        return {self.path: LowRank(pair.a, scaled)}
