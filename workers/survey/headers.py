"""What the headers of a folder's weights say."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from workers.loading.checkpoint import SafetensorsCheckpoint


@dataclass(frozen=True, slots=True)
class Headers:
    """num_bytes: of the files. dtypes: most elements first, as "bfloat16"."""

    num_bytes: int
    num_elements: int
    dtypes: tuple[str, ...]


def read_headers(folder: Path) -> Headers | None:
    """None where there are no weights yet. Raises ModelLoadError for files that are damaged."""
    if not any(folder.glob("*.safetensors")):
        return None
    checkpoint = SafetensorsCheckpoint(folder)
    elements: Counter[str] = Counter()
    with checkpoint.opened(checkpoint.names) as tensors:
        for tensor in tensors.values():
            elements[str(tensor.dtype).removeprefix("torch.")] += math.prod(tensor.shape)
    dtypes = tuple(name for name, _ in elements.most_common())
    return Headers(checkpoint.total_bytes, elements.total(), dtypes)
