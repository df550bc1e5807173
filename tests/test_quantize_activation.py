"""quantize_activation: codes and scales of an input of a matmul, against a definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rlkernel as rlk
from rlkernel_core.definitions import quantize as definition
from rlkernel_core.quant import activations
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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.float().nan_to_num(nan=-9.0), b.float().nan_to_num(nan=-9.0))


@pytest.mark.parametrize("columns", [256, 301])
@pytest.mark.parametrize("kind", SPECS)
def test_codes_and_scales_have_the_bits_of_the_rules(kind: str, columns: int) -> None:
    x = tokens(6, columns, dtype=torch.bfloat16)
    x[1], x[2, 5], x[3, 250], x[4] = 0, torch.nan, torch.inf, 1e-38
    want, found = activations.quantize_activation(x, SPECS[kind]), rlk.quantize_activation(x, SPECS[kind])
    assert same(want.codes, found.codes)
    assert same(want.scale, found.scale)
    assert same(want.value(), found.value())


@pytest.mark.parametrize(
    "kind, needed",
    [
        ("token_int8", {"format:int8_channel"}),
        ("token_fp8", {"format:fp8_channel"}),
        ("block128_fp8", {"format:fp8_channel"}),
        ("mxfp8", {"format:mxfp8"}),
        ("e4m3fnuz", {"format:fp8_channel", "element:e4m3fnuz"}),
        ("beside mxfp4", {"format:mxfp8", "scale_rule:even"}),
    ],
)
def test_the_call_is_one_of_quantize(kind: str, needed: set[str]) -> None:
    rlk.quantize_activation(tokens(2, 70), SPECS[kind])
    decision = rlk.last_decision("quantize")
    assert decision is not None
    assert needed == decision.call.features


@pytest.mark.parametrize("kind, dtype", [("nvfp4", torch.float32), ("token_fp8", torch.float64)])
def test_what_no_format_of_weights_expresses_is_plain_torch(kind: str, dtype: torch.dtype) -> None:
    x = tokens(2, 70, dtype=dtype)
    rlk.quantize(tokens(2, 70), "int4_channel")
    made, decision = rlk.quantize_activation(x, kind), rlk.last_decision("quantize")
    assert decision is not None
    assert {"format:int4_channel"} == decision.call.features
    assert torch.equal(activations.quantize_activation(x, kind).value(), made.value())


def test_a_compiled_graph_has_the_same_values() -> None:
    x = tokens(3, 70)
    run = torch.compile(lambda x: rlk.quantize_activation(x, "mxfp8").value(), fullgraph=True, backend="eager")
    assert torch.equal(rlk.quantize_activation(x, "mxfp8").value(), run(x))


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
