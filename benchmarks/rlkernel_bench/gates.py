"""Right or wrong: results against their definition, by the tolerances of the specs.

No number is given for a wrong result. A peer that rounds logits to 16 bits misses the spec by orders of magnitude and
is still what people run, so peers have a second, coarse gate; a result that only passes that one is marked `coarse`.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_bench.work import Judgment
from rlkernel_core.spec import OPERATORS

# Absolute error that rounded logits may cause: 2^-8 |z| for bf16 logits of up to 40 nats, twice for the entropy.
COARSE_ABSOLUTE: Final = 0.16
COARSE_RELATIVE: Final = 0.05  # of gradients, Frobenius: 4.6e-2 was measured for bf16 logits with an entropy gradient


def tolerance(op: str, output: str, dtype: str) -> tuple[float, float]:
    """(atol, rtol) of an output for inputs of a dtype; the row of float32, or of any dtype, where there is none."""
    rows = {t.dtype: t for t in OPERATORS[op].tolerances if t.output == output}
    row = rows.get(dtype) or rows.get("float32") or rows["any"]
    return row.atol, row.rtol


def elementwise(op: str, output: str, dtype: str, found: Tensor, expected: Tensor, scale: Any = 1.0) -> Judgment:
    """Every element within atol * scale + rtol * |expected|; NaN must meet NaN, infinities themselves."""
    atol, rtol = tolerance(op, output, dtype)
    want = expected.double()
    have = found.detach().to(want.device).double()
    if have.shape != want.shape:
        return Judgment(math.inf, math.inf, math.inf)
    same = (have == want) | (have.isnan() & want.isnan())
    error = torch.where(same, 0.0, (have - want).abs().nan_to_num(nan=math.inf))
    allowed = atol * scale + rtol * want.abs().nan_to_num(posinf=0.0, neginf=0.0)
    if not error.numel():
        return Judgment(0.0, 0.0)
    over = torch.where(error == 0, 0.0, error / allowed)
    coarse = (error / (COARSE_ABSOLUTE + COARSE_RELATIVE * want.abs())).max()
    return Judgment(float(error.max()), float(over.max()), float(coarse))


def frobenius(found: Tensor, expected: Tensor, rtol: float) -> Judgment:
    """Norm of the error over the norm of what is expected; how matrices of gradients are judged."""
    want = expected.double()
    have = found.detach().to(want.device).double()
    if have.shape != want.shape:
        return Judgment(math.inf, math.inf, math.inf)
    norm = float(want.norm())
    error = float((have - want).norm()) / norm if norm else float(have.norm())
    error = math.inf if math.isnan(error) else error
    return Judgment(error, error / rtol, error / COARSE_RELATIVE)


def exact(found: Tensor, expected: Tensor) -> Judgment:
    """Equal values."""
    agree = found.shape == expected.shape and torch.equal(found.detach().cpu(), expected.cpu())
    bad = 0.0 if agree else math.inf
    return Judgment(bad, bad, bad)


def verdict(judged: dict[str, Judgment], *, peer: bool) -> str:
    """right, coarse (peers only) or wrong."""
    if all(j.over <= 1 for j in judged.values()) and judged:
        return "right"
    return "coarse" if peer and judged and all(j.coarse <= 1 for j in judged.values()) else "wrong"
