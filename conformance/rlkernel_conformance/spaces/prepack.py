"""The calls of prepack@1.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel_conformance import quantized_weights
from rlkernel_conformance.compare import require
from rlkernel_conformance.quantized_weights import STORED
from rlkernel_conformance.spaces import weights
from rlkernel_conformance.spaces.space import Given, Point, Space, Want
from rlkernel_conformance.subject import Subject
from rlkernel_core import quant
from rlkernel_core.quant import CANONICAL, QuantTensor

ROWS = (16, 1, 3, 128, 129)
COLUMNS = (128, 1, 7, 33, 64, 256, 300)
VALUES = ("graded", "zeros", "subnormal", "not finite")
TALL = (4097, 28672)


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Formats, sizes, what a weight is packed from and into."""
    return {
        "family": weights.families(subject, STORED),
        "member": range(weights.MEMBERS),
        "N": ROWS,
        "K": COLUMNS,
        "values": VALUES,
        "w": ("quantized", "offset", "padded", "packed"),
        "layout": (None, "own", CANONICAL),
        "dtype of w": ("float32", "bfloat16", "float16"),
    }


def weight(subject: Subject, point: Point) -> QuantTensor:
    """The canonical weight."""
    full = weights.weight(point["values"], point["N"], point["K"], point.generator(1)).to(subject.device)
    dtype = getattr(torch, point["dtype of w"])
    return quant.quantize(full, weights.spec(subject, STORED, point), dtype=dtype)


def arguments(subject: Subject, point: Point) -> Given:
    """The call; a weight that no layout can hold stays canonical."""
    w = weight(subject, point)
    packed = next(quantized_weights.packed(subject, w), w)
    layout = packed.layout if point["layout"] == "own" or packed is w else point["layout"]
    if point["w"] != "quantized":
        w = packed if point["w"] == "packed" else weights.placed(w, point["w"])
    return {"w": w} | ({"layout": layout} if layout else {})


def read(subject: Subject, point: Point, given: Given, out: Any) -> dict[str, Tensor]:
    """Bytes of the parts, back in the canonical layout."""
    w = given["w"]
    require(isinstance(out, QuantTensor), f"the result is a {type(out).__name__}, not a QuantTensor")
    require(
        (out.spec, out.shape, out.dtype, out.device) == (w.spec, w.shape, w.dtype, w.device), f"{w!r} becomes {out!r}"
    )
    require(given.get("layout") in {None, out.layout}, f"layout={given.get('layout')!r} gives {out.layout!r}")
    if out.layout != w.layout:
        codes = w.parts["codes"].untyped_storage().data_ptr()
        shared = [name for name, x in out.parts.items() if x.untyped_storage().data_ptr() == codes]
        require(not shared, f"{shared} in layout {out.layout!r} are the codes of the weight it was made from")
    back = rlkernel.prepack(out, layout=CANONICAL)
    require(back.layout == CANONICAL, f"layout='canonical' gives {back.layout!r}")
    back.validate()
    return _bytes(back)


def _bytes(w: QuantTensor) -> dict[str, Tensor]:
    copies = {name: part.cpu().contiguous() for name, part in w.parts.items()}
    return {name: part.view(torch.uint8) for name, part in copies.items()}


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Every byte of the canonical weight."""
    del given, upstream
    return {name: Want(part.numpy(), 0.0) for name, part in _bytes(weight(subject, point)).items()}


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Every format at the lengths of real models, and many rows."""
    every = weights.every(subject, STORED)
    long = [{**kind, "K": K} for kind, K in weights.lengths(every)]
    tall = [{**kind, "K": 128, "N": N} for kind, N in zip(every[::29], TALL * 2, strict=False)]
    return [*tall[:1], *long, *tall[1:]]


SPACE = Space("prepack", factors, arguments, expected, {}, (), real, read=read)
