"""When an ingress of several models asks for traffic, and when it stops."""

from dataclasses import dataclass

from service.deployments.model_front import Readiness


@dataclass
class Front:
    is_ready: bool = False


def test_an_ingress_waits_for_every_model_before_it_is_ready():
    first, second = Front(), Front()
    readiness = Readiness([first, second])
    assert not readiness()
    first.is_ready = True
    assert not readiness()
    second.is_ready = True
    assert readiness()


def test_a_model_lost_later_does_not_take_the_others_with_it():
    first, second = Front(is_ready=True), Front(is_ready=True)
    readiness = Readiness([first, second])
    assert readiness()
    first.is_ready = False
    assert readiness()
    second.is_ready = False
    assert not readiness()
    second.is_ready = True
    assert readiness()


def test_with_one_model_it_is_that_models_own():
    only = Front()
    readiness = Readiness([only])
    for is_ready in (False, True, False, True):
        only.is_ready = is_ready
        assert readiness() is is_ready
