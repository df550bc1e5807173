"""The calls of dequantize@1: weights of any stored bytes, not only of those that a quantizer writes.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlkernel_conformance.quantized_weights import SCALES, STORED, packed, with_any_codes
from rlkernel_conformance.spaces import weights
from rlkernel_conformance.spaces.space import Given, Point, Space, Want
from rlkernel_conformance.subject import Subject
from rlkernel_core import quant
from rlkernel_core.definitions import quant as definition
from rlkernel_core.quant import QuantTensor

ROWS = (6, 1, 3, 130)
COLUMNS = (128, 1, 7, 33, 64, 256, 300)
DTYPES = ("float32", "bfloat16", "float16")
TALL = (4097, 65537)
WIDE = 2**20 + 24  # columns


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Formats, sizes, scales, and both dtypes."""
    return {
        "family": weights.families(subject, STORED),
        "member": range(weights.MEMBERS),
        "N": ROWS,
        "K": COLUMNS,
        "scales": tuple(SCALES),
        "w": ("quantized", "offset", "padded", "packed"),
        "dtype": (None, *DTYPES),  # the argument
        "dtype of w": DTYPES,
    }


def weight(subject: Subject, point: Point) -> QuantTensor:
    """A canonical weight of any codes and scales, on the CPU."""
    spec = weights.spec(subject, STORED, point)
    full = weights.weight("graded", point["N"], point["K"], point.generator(1))
    w = quant.quantize(full, spec, dtype=getattr(torch, point["dtype of w"]))
    return with_any_codes(w, SCALES[point["scales"]], point.generator(2))


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    w = weight(subject, point).to(subject.device)
    if point["w"] == "packed":
        w = next(packed(subject, w), w)
    elif point["w"] != "quantized":
        w = weights.placed(w, point["w"])
    return {"w": w} | ({"dtype": getattr(torch, point["dtype"])} if point["dtype"] else {})


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """What the reader of the format says, rounded once."""
    del upstream
    dtype = given.get("dtype") or given["w"].dtype
    values = definition.decode(weight(subject, point)).to(dtype)
    return {"": Want(values.double().numpy(), 0.0, str(dtype).removeprefix("torch."), signed=True)}


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Every format at the lengths of real models; many rows, the fewest of these first; a row of more than 2^20."""
    every = weights.every(subject, STORED)
    long = [{**kind, "K": K, "N": 2} for kind, K in weights.lengths(every)]
    tall = [{**kind, "K": 40, "N": N} for kind, N in zip(every[::29], TALL * 2, strict=False)]
    return [*tall[:1], *long, *tall[1:], *({**kind, "K": WIDE, "N": 1} for kind in every[::65])]


SPACE = Space("dequantize", factors, arguments, expected, {}, (), real)
