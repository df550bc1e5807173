"""Rows and columns of a quantized weight: the values of the whole, or a refusal."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import ArgumentError, LayoutError
from rlkernel_core.quant import FORMATS, QuantSpec, dequantize, pack, quantize
from rlkernel_core.quant.slicing import columns, rows

FLAT = {name for name, row in FORMATS.items() if row.spec.element in {"nf4", "fp4"}}


def weight(kind: str | QuantSpec, *shape: int):
    return quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_have_the_values_of_the_whole(kind) -> None:
    w = weight(kind, 384, 256)
    for start, stop in ((0, 128), (128, 384), (0, 384)):
        found = rows(w, start, stop)
        found.validate()
        assert torch.equal(dequantize(found), dequantize(w)[start:stop])


@pytest.mark.parametrize("kind", sorted(set(FORMATS) - FLAT))
def test_columns_have_the_values_of_the_whole(kind) -> None:
    w = weight(kind, 130, 768)
    for start, stop in ((0, 256), (256, 768), (512, 768)):
        found = columns(w, start, stop)
        found.validate()
        assert torch.equal(dequantize(found), dequantize(w)[:, start:stop])


@pytest.mark.parametrize(
    ("kind", "cut", "message"),
    [
        ("nf4", lambda w: columns(w, 0, 64), "no runs of columns.*int4_g128"),
        (QuantSpec.named("int4_g32", act_order=True), lambda w: columns(w, 0, 64), "no runs of columns"),
        ("int4_g32", lambda w: columns(w, 0, 40), "no multiple of 32"),
        ("int4_channel", lambda w: columns(w, 0, 41), "no multiple of 2"),
        ("fp8_block128", lambda w: rows(w, 0, 64), "cuts through a block"),
        (QuantSpec.named("nf4", double_quant=True), lambda w: rows(w, 1, 130), "cuts through a block"),
        ("int4_g32", lambda w: rows(w, 4, 4), r"must be some of 0\.\.130"),
        ("int4_g32", lambda w: rows(w, 0, 131), "must be some of"),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, cut, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        cut(weight(kind, 130, 128))


def test_a_packed_weight_is_cut_before_it_is_packed() -> None:
    with pytest.raises(LayoutError):
        rows(pack(weight("int4_g128", 64, 256), "reference_tiled"), 0, 32)
