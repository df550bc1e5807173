"""The calls of quantize@1.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rlkernel
from rlkernel_conformance.compare import require
from rlkernel_conformance.quantized_weights import SCALE_RULES, packed
from rlkernel_conformance.spaces import weights
from rlkernel_conformance.spaces.space import Argument, Given, Point, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core import quant
from rlkernel_core.definitions import quant as stored
from rlkernel_core.definitions import quantize as definition
from rlkernel_core.quant import CANONICAL, QuantSpec, QuantTensor, nibbles

ROWS = (4, 1, 3, 130)
COLUMNS = (64, 1, 7, 33, 128, 129, 256, 300)
DTYPES = ("float32", "bfloat16", "float16")
TALL = (4097, 65537)
WIDE = 2**20 + 24  # columns


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Formats with all their options, sizes, values, and what is written into."""
    return {
        "family": weights.families(subject, SCALE_RULES),
        "member": range(weights.MEMBERS),
        "N": ROWS,
        "K": COLUMNS,
        "values": tuple(weights.VALUES),
        "dtype": subject.dtypes,
        "of": (None, *DTYPES),  # the argument dtype
        "out": claimed(subject, {"": "", **dict.fromkeys(("canonical", "packed", "cut"), "out")}),
    }


def _spec(subject: Subject, point: Point) -> QuantSpec:
    return weights.spec(subject, SCALE_RULES, point)


def arguments(subject: Subject, point: Point) -> Given:
    """The call; what is written into holds another weight."""
    N, K, spec = point["N"], point["K"], _spec(subject, point)
    weight = weights.weight(point["values"], N, K, point.generator(1), point["dtype"]).to(subject.device)
    # A format without options may be told by its name.
    given: Given = {"weight": weight, "format": spec if spec.changed or point.seed % 2 else spec.format}
    of = None if point["of"] is None else getattr(torch, point["of"])
    if point["out"]:
        other = weights.weight("graded", N, K, point.generator(2)).to(subject.device)
        out = quant.quantize(other, spec, dtype=of or torch.float32)
        if point["out"] == "packed":
            out = next(packed(subject, out), out)
        given["out"] = weights.placed(out, "padded") if point["out"] == "cut" else out
        return given
    return given | ({"dtype": of} if of else {})


def read(subject: Subject, point: Point, given: Given, w: Any) -> dict[str, Tensor]:
    """Parts in the canonical layout; which codes are the nearest; and the bits beside them, which are 0."""
    weight, out = given["weight"], given.get("out")
    require(isinstance(w, QuantTensor), f"the result is a {type(w).__name__}, not a QuantTensor")
    require(out is None or w is out, "out is not what is returned")
    own = torch.float32 if weight.dtype == torch.float64 else weight.dtype
    dtype = out.dtype if out is not None else given.get("dtype") or own
    require(
        (w.spec, w.shape, w.dtype) == (_spec(subject, point), tuple(weight.shape), dtype),
        f"the result is {w!r} of {w.dtype}",
    )
    if out is None:
        require(w.layout == CANONICAL, f"a fresh weight has layout {w.layout!r}")
    elif w.layout != CANONICAL:
        w = rlkernel.prepack(w, layout=CANONICAL)
    w.validate()
    w = replace(w.to("cpu"), parts={name: part.cpu().contiguous() for name, part in w.parts.items()})
    return {**w.parts, "nearest": torch.from_numpy(definition.codes_are_right(weight, w)), "unused": _unused(w)}


def _unused(w: QuantTensor) -> Tensor:
    """The nibbles, and bits of `high`, that no column has."""
    codes, K = w.parts["codes"], w.shape[1]
    if codes.dim() == 1:
        return codes[-1:] & 15 if w.shape[0] * K % 2 else codes[:0]
    rest = [codes[:, -1] >> 4] if codes.dtype == torch.uint8 and K % 2 else []
    if "high" in w.parts:
        bits = 1 if w.spec.element == "int5" else 2
        rest.append(nibbles.unpack_bits(w.parts["high"], bits, -(-K * bits // 8) * 8 // bits)[:, K:].flatten())
    return torch.cat(rest) if rest else codes.new_zeros(0, dtype=torch.uint8)


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Scales and all that comes with them bit by bit, the nearest codes, tables as they were published."""
    del upstream
    spec, weight = _spec(subject, point), given["weight"].cpu()
    parts = definition.scales(weight, spec)
    if spec.element in stored.TABLES:
        parts["table"] = stored.TABLES[spec.element]
    found = {name: _bits(part) for name, part in parts.items()}
    if spec.double_quant:
        found["nested_table"] = Want(definition.dynamic_map(), 2.0**-22, "float32")
    every = np.ones(tuple(weight.shape), bool)
    return {**found, "nearest": Want(every, 0.0, "bool"), "unused": Want(_none(spec, weight), 0.0)}


def _none(spec: QuantSpec, weight: Tensor) -> Any:
    empty = quant.quantize(torch.zeros_like(weight), spec)
    return np.zeros(tuple(_unused(empty).shape))


def _bits(part: Tensor) -> Want:
    wide = part.float().double() if part.is_floating_point() else part
    return Want(wide.numpy(), 0.0, str(part.dtype).removeprefix("torch."), signed=True)


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Every format at the lengths of real models, and in the middle of two codes; the least of many rows first."""
    every = weights.every(subject, SCALE_RULES)
    long = [{**kind, "K": K, "N": 2} for kind, K in weights.lengths(every)]
    tall = [{**kind, "K": 40, "N": N} for kind, N in zip(every[::29], TALL * 3, strict=False)]
    middles = [{**kind, "K": 64, "values": values} for kind in every for values in ("codes", "wide")]
    return [*tall[:1], *long, *middles, *tall[1:], *({**kind, "K": WIDE, "N": 1} for kind in every[::65])]


TENSORS = {"weight": Argument()}
SPACE = Space("quantize", factors, arguments, expected, TENSORS, (), real, read=read, written=("out",))
