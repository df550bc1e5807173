"""The calls of fake_quantize@1.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlkernel_conformance.clauses.fake_quantize import own_dtype
from rlkernel_conformance.compare import plain
from rlkernel_conformance.quantized_weights import SCALE_RULES
from rlkernel_conformance.spaces import weights
from rlkernel_conformance.spaces.layouts import ANY
from rlkernel_conformance.spaces.quantize import COLUMNS, DTYPES, ROWS, TALL, WIDE
from rlkernel_conformance.spaces.space import Argument, Given, Point, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import fake_quantize as definition
from rlkernel_core.quant.spec import spec_of


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Formats with all their options, sizes, values, and how the gradient goes through."""
    return {
        "family": weights.families(subject, SCALE_RULES),
        "member": range(weights.MEMBERS),
        "N": ROWS,
        "K": COLUMNS,
        "values": tuple(weights.VALUES),
        "dtype": subject.dtypes,
        "of": (None, *DTYPES),  # the argument dtype
        "clipped": claimed(subject, {False: "", True: "clipped"}),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    spec = weights.spec(subject, SCALE_RULES, point)
    weight = weights.weight(point["values"], point["N"], point["K"], point.generator(1), point["dtype"])
    given: Given = {"weight": weight.to(subject.device), "format": spec, "clipped": point["clipped"]}
    if not spec.changed and point.seed % 2:  # a format without options may be told by its name
        given["format"] = spec.format
    return given | ({"dtype": getattr(torch, point["of"])} if point["of"] else {})


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Values of right codes; the upstream gradient, or zero."""
    del subject, point
    weight, spec = given["weight"].detach().cpu(), spec_of(given["format"])
    dtype = given.get("dtype") or own_dtype(weight)
    # Rounding keeps the order: between two right values of fp32 lies what they may be rounded to.
    low, high = (plain(torch.from_numpy(x).float().to(dtype), "y") for x in definition.fake_quantize(weight, spec))
    found = {"": _between(low, high, dtype)}
    if upstream:
        passed = plain(torch.from_numpy(np.array(upstream[""])).to(weight.dtype), "gradient")
        surely, perhaps = definition.beyond(weight, spec) if given["clipped"] else (False, False)
        cut = np.where(surely, 0.0, passed)
        other = np.where(perhaps, 0.0, cut)
        found["d_weight"] = _between(np.minimum(cut, other), np.maximum(cut, other), weight.dtype)
    return found


def _between(low: Any, high: Any, dtype: torch.dtype) -> Want:
    apart = np.isfinite(low) & np.isfinite(high)
    half = np.where(apart, np.where(apart, high, 0.0) / 2 - np.where(apart, low, 0.0) / 2, 0.0)
    return Want(np.where(apart, np.where(apart, low, 0.0) + half, high), half, str(dtype).removeprefix("torch."))


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Every format at a length of a real model, and at values in the middle of two codes; many rows; a long row."""
    every = weights.every(subject, SCALE_RULES)
    long = [{**kind, "K": K, "N": 2} for kind, K in weights.lengths(every)]
    long[0]["N"] = 6  # more elements than 16 bits count
    tall = [{**kind, "K": 40, "N": N} for kind, N in zip(every[::29], TALL * 3, strict=False)]
    middles = [{**kind, "K": 64, "values": values} for kind in every for values in ("codes", "wide")]
    return [*long, *middles, *tall, *({**kind, "K": WIDE, "N": 1} for kind in every[::65])]


SPACE = Space("fake_quantize", factors, arguments, expected, {"weight": Argument(ANY)}, (), real)
