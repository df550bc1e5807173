"""Weights one under the other: several projections in one product, and the experts of a layer."""

from __future__ import annotations

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant import FORMATS, QuantSpec, dequantize, pack, quantize, stack

SHARED = {"fp8_tensor", "nvfp4"}  # one scale for all rows


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [name for name in FORMATS if name not in SHARED])
def test_a_stack_has_the_bits_of_its_weights(kind) -> None:
    weights = [quantize(normal(rows, 256, seed=rows), kind) for rows in (128, 256, 4)]
    found = stack(weights)
    found.validate()
    assert torch.equal(dequantize(found), torch.cat([dequantize(w) for w in weights]))


def test_projections_that_share_an_input_are_one_product() -> None:
    x = normal(3, 64)
    weights = [quantize(normal(rows, 64, seed=rows), "int4_g32") for rows in (32, 8, 8)]
    parts = rlk.qmatmul(x, stack(weights)).split((32, 8, 8), -1)
    assert [p.shape for p in parts] == [(3, 32), (3, 8), (3, 8)]
    for part, w in zip(parts, weights, strict=True):
        torch.testing.assert_close(part, rlk.qmatmul(x, w), rtol=1e-5, atol=1e-5)


def test_a_stack_shares_no_memory_with_its_weights() -> None:
    w = quantize(normal(4, 64), "nf4")
    first, found = dequantize(w), stack((w,))
    for part in found.parts.values():
        part.zero_()
    assert torch.equal(dequantize(w), first)


@pytest.mark.parametrize("kind", sorted(SHARED))
def test_scales_of_all_rows_have_to_be_the_same(kind) -> None:
    w, other = quantize(normal(4, 64), kind), quantize(2 * normal(4, 64), kind)
    assert torch.equal(dequantize(stack((w, w))), torch.cat((dequantize(w), dequantize(w))))
    with pytest.raises(ArgumentError, match="scale of all rows"):
        stack((w, other))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((), "are none"),
        (("int4_g32", "int4_g64"), "agree in format"),
        (("nf4", "nf4"), "ends inside a block"),
        (("fp8_block128", "fp8_block128"), "ends inside a block"),
    ],
)
def test_weights_that_do_not_join_are_refused(weights, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        stack([quantize(normal(3, 96), kind) for kind in weights])


def test_a_packed_weight_is_refused() -> None:
    with pytest.raises(LayoutError, match="reference_tiled"):
        stack((pack(quantize(normal(4, 64), QuantSpec.named("int4_g32"))),))
