"""The fast oracle of the GPU tests gives what the slow, obvious one gives."""

import pytest

from attention import LayerAttentionConfig
from tests.gpu.attention.vectorised_oracle import VectorisedOracleBackend
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

ROWS = rows_of((40, 1), (0, 70), (17, 9), (3, 1), (5, 0))
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "chunks": LayerAttentionConfig(chunk_size=24),
    "everything": LayerAttentionConfig(sliding_window_size=8, logit_cap=0.8, has_sinks=True),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_vectorised_oracle_equals_the_slow_one(layer, kv_heads):
    case = build_case(CaseSpec(ROWS, kv_heads=kv_heads, layer=layer))
    assert relative_error(case.run(VectorisedOracleBackend), case.run_oracle()) < 1e-12
