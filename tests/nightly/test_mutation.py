"""Small defects, put into the code one at a time: each area's own unit tests find nearly all."""

import pytest

from tests.nightly.mutation import AREA_FLOOR, AREAS, FLOOR, HEADER, measure, whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def outcomes():
    return []


@pytest.mark.parametrize("area", AREAS)
def test_the_tests_of_an_area_find_what_is_wrong_in_it(area, outcomes):
    outcome = measure(area)
    outcomes.append(outcome)
    missed = "\n\n".join(survivor.diff for survivor in outcome.survivors)
    assert outcome.share >= AREA_FLOOR, f"{missed}\n{HEADER}\n{outcome.line}"


def test_all_areas_together_keep_the_floor(outcomes):
    assert len(outcomes) == len(AREAS), "an area could not be measured"
    share, _ = whole(outcomes)
    assert share >= FLOOR, "\n".join([HEADER, *(one.line for one in outcomes)])
