"""Weights of one fp8 flavour as those of the other: every code, exactly or refused."""

import pytest
import torch

from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_rocm.fp8 import to_fnuz, to_ocp

SCALE = torch.tensor([[0.37]])
PAIRS = [(torch.float8_e4m3fn, torch.float8_e4m3fnuz), (torch.float8_e5m2, torch.float8_e5m2fnuz)]


def every(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize(("ocp", "fnuz"), PAIRS)
def test_every_finite_ocp_code_keeps_its_value(ocp, fnuz) -> None:
    codes = every(ocp)[every(ocp).float().isfinite()]
    made, scale = to_fnuz(codes, SCALE)
    assert made.dtype == fnuz
    assert torch.equal(made.double() * scale.double(), codes.double() * SCALE.double())


@pytest.mark.parametrize(("ocp", "fnuz"), PAIRS)
def test_every_fnuz_code_with_a_counterpart_keeps_its_value(ocp, fnuz) -> None:
    value = every(fnuz).double()
    codes = every(fnuz)[(value * 0 == 0) & (value.abs() / 2 <= torch.finfo(ocp).max / 4)]
    made, scale = to_ocp(codes, SCALE)
    assert made.dtype == ocp
    assert torch.equal(made.double() * scale.double(), codes.double() * SCALE.double())


def test_a_negative_zero_becomes_zero_and_not_nan() -> None:
    made, _ = to_fnuz(torch.tensor([0x80], dtype=torch.uint8).view(torch.float8_e4m3fn), SCALE)
    assert made.view(torch.uint8).tolist() == [0]


@pytest.mark.parametrize(
    ("change", "dtype", "code"),
    [
        (to_fnuz, torch.float8_e4m3fn, 0x7F),
        (to_fnuz, torch.float8_e5m2, 0xFC),
        (to_ocp, torch.float8_e4m3fnuz, 0x80),
        (to_ocp, torch.float8_e4m3fnuz, 0x7F),
        (to_ocp, torch.float8_e5m2fnuz, 0x7C),
    ],
)
def test_a_code_without_counterpart_is_refused(change, dtype, code) -> None:
    with pytest.raises(ArgumentError, match="counterpart"):
        change(torch.tensor([0, code], dtype=torch.uint8).view(dtype), SCALE)


def test_a_scale_that_cannot_be_doubled_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cannot hold 2\.0 times"):
        to_fnuz(torch.zeros(1).to(torch.float8_e4m3fn), torch.tensor([60000.0], dtype=torch.float16))


def test_other_dtypes_are_refused() -> None:
    for change in (to_fnuz, to_ocp):
        with pytest.raises(ArgumentTypeError, match="codes"):
            change(torch.zeros(2), SCALE)
