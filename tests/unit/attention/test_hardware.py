"""Limits of devices: found by exact name, absent for whatever was not measured."""

import pytest

from attention.hardware import H200, measured_limits
from attention.preferences import DeviceFacts


def test_an_h200_has_the_limits_measured_on_one():
    assert measured_limits(DeviceFacts("cuda", "NVIDIA H200", (9, 0))) == H200
    assert H200.bytes_per_s == 4.38e12
    assert H200.flops_per_s == 690e12


@pytest.mark.parametrize(
    "name", ["NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA A100"]
)
def test_a_device_of_another_name_has_none(name):
    assert measured_limits(DeviceFacts("cuda", name, (9, 0))) is None


def test_a_cpu_has_none():
    assert measured_limits(DeviceFacts("cpu", "CPU", None)) is None
