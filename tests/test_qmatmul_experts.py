"""The grouped product of the reference: rows of several experts in one call."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.quant import quantize, stack
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_torch.direct import qmatmul
from tests.test_qmatmul import normal


def ends(*sizes: int) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def test_experts_of_one_stack_are_products_of_their_own() -> None:
    weights = [quantize(normal(6, 64, seed=e), "mxfp4") for e in range(3)]
    x, bias = normal(5, 64, seed=9), normal(18, seed=8)
    found = qmatmul(x, stack(weights), bias=bias, activation="swiglu", ends=ends(2, 0, 3))
    for rows, e in ((slice(0, 2), 0), (slice(2, 5), 2)):
        want = qmatmul(x[rows], weights[e], bias=bias.view(3, 6)[e], activation="swiglu")
        torch.testing.assert_close(found[rows], want)


def test_ends_are_those_of_torch() -> None:
    w, x = quantize(normal(12, 64), "int8_channel"), normal(5, 64, seed=1).bfloat16()
    dense = rlk.dequantize(w, dtype=torch.bfloat16).view(3, 4, 64)
    found = qmatmul(x, w, ends=ends(2, 0, 3), weight_rounding="dtype")
    want = torch.nn.functional.grouped_mm(x, dense.transpose(1, 2), offs=ends(2, 0, 3))
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ends": ends(2, 3).long()}, ArgumentTypeError, "int32"),
        ({"ends": ends(1, 1, 1, 1, 1)}, ArgumentError, "12 rows of w"),
        ({"ends": torch.zeros(0, dtype=torch.int32)}, ArgumentError, "12 rows of w"),
        ({"x": normal(5, 1, 64)}, ArgumentError, r"\[M, K\]"),
        ({"lora": LoRA(normal(2, 64), normal(12, 2))}, ArgumentError, "ends"),
        ({"activation": "swiglu", "ends": ends(1, 1, 1, 1)}, ArgumentError, "halves the rows of w, which are 3"),
        ({"residual": normal(5, 12)}, ArgumentError, "residual"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, error, message) -> None:
    given = {"x": normal(5, 64), "w": quantize(normal(12, 64), "int4_g32"), "ends": ends(2, 3)}
    with pytest.raises(error, match=message):
        qmatmul(**(given | change))
