"""cutlass_mla and trtllm_mla on data-centre Blackwell, against float64 over the heads."""

from dataclasses import replace

import numpy as np
import pytest

from attention.features import Feature
from attention.registry import LATENT_BACKENDS
from tests.gpu.attention.device_cases import DECODE
from tests.gpu.attention.latent_device_cases import (
    STEPS,
    eager_and_replayed,
    latent_device_case,
    run,
)
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.proofs.cells import proves
from tests.unit.attention.cases import relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK
from tests.unit.attention.visibility_cases import KINDS, fields_of

pytestmark = NEEDS_GPU

TOLERANCE = 1.5e-2
DRAFTS = rows_of((40, 8), (0, 5), (300, 1), (1000, 16), (64, 3))


def params(*features):
    """Each backend with each page size that its kernel has."""
    for name in ("cutlass_mla", "trtllm_mla"):
        backend = LATENT_BACKENDS.get(name)
        marks = [needs_backend(name), proves(name, Feature.MLA, *features)]
        for page_size in backend.capability.page_sizes:
            yield pytest.param(backend, page_size, marks=marks, id=f"{name}-{page_size}")


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize(("backend", "page_size"), params(Feature.UNEQUAL_HEAD_DIMS))
def test_every_step(backend, page_size, rows):
    case = latent_device_case(rows, page_size=page_size)
    assert relative_error(run(case, backend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize("num_heads", [8, 32, 128])
@pytest.mark.parametrize(("backend", "page_size"), params(Feature.DECODE))
def test_any_number_of_heads(backend, page_size, num_heads):
    dims = replace(DEEPSEEK, num_heads=num_heads)
    case = latent_device_case(DECODE, dims, page_size=page_size)
    assert relative_error(run(case, backend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize(("backend", "page_size"), params())
def test_every_kind_of_visibility(backend, page_size, make):
    case = latent_device_case(DRAFTS, page_size=page_size)
    fields = fields_of(case.spec, *make(case.spec, np.random.default_rng(1)))
    case = replace(case, batch=replace(case.batch, **fields))
    assert relative_error(run(case, backend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize(("backend", "page_size"), params(Feature.DECODE, Feature.GRAPHS))
def test_a_graph_gives_what_an_eager_step_gives(backend, page_size):
    case = latent_device_case(DECODE, page_size=page_size)
    eager, replayed = eager_and_replayed(case, backend)
    assert relative_error(replayed, eager) < TOLERANCE
