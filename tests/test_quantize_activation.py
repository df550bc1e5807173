"""quantize_activation: codes and scales of an input of a matmul, against a definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_core.definitions import quantize as definition
from rlkernel_core.quant.activations import KINDS

SPECS = {
    **KINDS,
    "e4m3fnuz": rlk.QuantSpec.named("fp8_channel", element="e4m3fnuz", act="token_fp8"),
    "rceil": rlk.QuantSpec.named("mxfp8", element="e5m2", scale_rule="rceil", act="mxfp8"),
    "beside mxfp4": rlk.QuantSpec.named("mxfp4", scale_rule="even", rounding="away", act="mxfp8"),
    "away": rlk.QuantSpec.named("nvfp4", rounding="away", act="nvfp4"),
}


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (x * torch.exp2(torch.arange(shape[-1]).remainder(11) - 5.0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", SPECS)
def test_values_are_those_of_the_definition(kind: str, dtype: torch.dtype) -> None:
    x = tokens(7, 301, dtype=dtype)
    x[1], x[2, :40] = 0, 0
    x[3, 5], x[4, 290] = torch.nan, torch.inf
    wide = x.double() if dtype == torch.float64 else x.float()
    want, slack, _ = definition.activation(wide.numpy(), SPECS[kind])
    found = rlk.quantize_activation(x, SPECS[kind]).value().double().numpy()
    assert np.array_equal(np.isnan(want), np.isnan(found))
    kept = ~np.isnan(want)
    off = np.abs(want - found)[kept] - np.nan_to_num(slack[kept]) - 2.0**-22 * np.abs(want[kept])
    assert off.max() <= 0


@pytest.mark.parametrize(
    "kind, codes, scale",
    [
        ("token_int8", (2, 3, 37), (2, 3, 1)),
        ("token_fp8", (2, 3, 37), (2, 3, 1)),
        ("block128_fp8", (2, 3, 37), (2, 3, 1)),
        ("mxfp8", (2, 3, 37), (2, 3, 2)),
        ("nvfp4", (2, 3, 19), (2, 3, 3)),
    ],
)
def test_leading_dimensions_stay(kind: str, codes: tuple[int, ...], scale: tuple[int, ...]) -> None:
    x = tokens(2, 3, 37)
    made = rlk.quantize_activation(x.transpose(0, 1), kind)
    flat = rlk.quantize_activation(x.transpose(0, 1).reshape(6, 37), kind)
    assert (made.codes.transpose(0, 1).shape, made.scale.transpose(0, 1).shape) == (codes, scale)
    assert torch.equal(made.value().view(6, 37), flat.value())
    assert rlk.quantize_activation(x[:0], kind).value().shape == (0, 3, 37)
    assert torch.equal(rlk.quantize_activation(x[0, 0], kind).value(), flat.value()[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_does_not_depend_on_others(kind: str) -> None:
    x = tokens(3, 70)
    want = rlk.quantize_activation(x[:1], kind).value()
    x[1], x[2] = 1e4, torch.nan
    assert torch.equal(want, rlk.quantize_activation(x, kind).value()[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_qmatmul_multiplies_these_values(kind: str) -> None:
    x, spec = tokens(3, 70), KINDS[kind]
    w = rlk.quantize(tokens(5, 70), spec)
    want = rlk.quantize_activation(x, kind).value().double() @ rlk.dequantize(w).double().t()
    torch.testing.assert_close(rlk.qmatmul(x, w).double(), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name, x, kind",
    [
        ("x", [1.0], "mxfp8"),
        ("x", torch.ones(2, 3, dtype=torch.int64), "mxfp8"),
        ("x", torch.tensor(1.0), "mxfp8"),
        ("x", torch.ones(2, 0), "mxfp8"),
        ("x", torch.ones(2, 3, requires_grad=True), "mxfp8"),
        ("kind", torch.ones(2, 3), "mxfp9"),
        ("kind", torch.ones(2, 3), rlk.QuantSpec.named("mxfp8")),
        ("kind", torch.ones(2, 3), None),
    ],
)
def test_bad_arguments_are_named(name: str, x: object, kind: object) -> None:
    with pytest.raises(rlk.RLKernelError, match=name):
        rlk.quantize_activation(x, kind)  # type: ignore[arg-type]
