"""The calls whose orders are derived: which arguments they have, and which of their dimensions are rows, as data.

The floats of a row are named by their place in it, so that two rows whose numbers are made alike have one hash. Rows
but the one that is asked about have names of their own, so that a number of one row in the sum of another shows.

Legend: N rows · V vocabulary · D hidden · B sequences · T tokens · H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError, UnknownNameError

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Probe:
    """How an operator is asked."""

    form: str  # of a size: "NxV"
    sizes: tuple[str, ...]  # where none is given
    arguments: Callable[[tuple[int, ...], torch.dtype, torch.Generator], Arguments]
    rows: Mapping[str, int]  # float arguments that have rows -> how many leading dimensions are rows
    outputs: tuple[str, ...]  # fields of the result; a name for a result that is one tensor
    upstream: tuple[str, ...] = ()  # results that gradients arrive at, where gradients are asked about
    gradients: tuple[str, ...] = ()  # arguments whose gradients are then outputs


def _drawn(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def _logprob(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    N, V = size
    return {"logits": _drawn(g, N, V, dtype=dtype), "ids": torch.full((N,), V // 3), "entropy": True}


def _linear_logprob(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    N, D, V = size
    weight = _drawn(g, V, D, dtype=dtype)
    return {"hidden": _drawn(g, N, D, dtype=dtype), "weight": weight, "ids": torch.full((N,), V // 3), "entropy": True}


def _whiten(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    B, T = size
    return {"x": _drawn(g, B, T, dtype=dtype), "mask": torch.ones(B, T, dtype=torch.bool)}


def _policy_loss(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    B, T = size
    return {
        "logprob": -_drawn(g, B, T, dtype=dtype).abs(), "old_logprob": -_drawn(g, B, T).abs(),
        "advantages": _drawn(g, B), "mask": torch.ones(B, T, dtype=torch.bool), "kind": "grpo",
    }  # fmt: skip


def _linear(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    M, K, N = size
    return {
        "x": _drawn(g, M, K, dtype=dtype), "weight": _drawn(g, N, K, dtype=dtype), "bias": _drawn(g, N, dtype=dtype),
        "residual": _drawn(g, M, N, dtype=dtype),
    }  # fmt: skip


def _grouped_linear(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    """All rows are those of the first of two experts: rows of one expert are alike."""
    T, K, N = size
    return {
        "x": _drawn(g, T, K, dtype=dtype), "weight": _drawn(g, 2, N, K, dtype=dtype),
        "ends": torch.tensor([T, T], dtype=torch.int32), "bias": _drawn(g, 2, N, dtype=dtype),
    }  # fmt: skip


def _rms_norm(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    N, D = size
    return {"x": _drawn(g, N, D, dtype=dtype), "weight": _drawn(g, D, dtype=dtype), "eps": 1e-6}


def _rope(size: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> Arguments:
    N, H, D = size
    return {
        "q": _drawn(g, N, H, D, dtype=dtype), "k": _drawn(g, N, 1, D, dtype=dtype), "table": _drawn(g, 4, D),
        "positions": torch.full((N,), 2), "q_weight": _drawn(g, D, dtype=dtype), "k_weight": _drawn(g, D, dtype=dtype),
        "eps": 1e-6,
    }  # fmt: skip


PROBES: Final[Mapping[str, Probe]] = {
    "logprob": Probe(
        "NxV", ("1x2000", "8x2000", "40x2000"), _logprob, {"logits": 1}, ("logprob", "lse", "entropy"),
        ("logprob",), ("logits",),
    ),
    "linear_logprob": Probe(
        "NxDxV", ("1x128x600", "8x128x600", "130x128x600"), _linear_logprob, {"hidden": 1},
        ("logprob", "lse", "entropy"), ("logprob",), ("hidden", "weight"),
    ),
    "linear": Probe(
        "MxKxN", ("1x512x300", "8x512x300", "64x512x300", "8192x512x300"), _linear, {"x": 1, "residual": 1}, ("y",),
        ("y",), ("x", "weight"),
    ),
    "grouped_linear": Probe(
        "TxKxN", ("1x512x300", "8x512x300", "300x512x300"), _grouped_linear, {"x": 1}, ("y",), ("y",), ("x", "weight"),
    ),
    "rms_norm": Probe(
        "NxD", ("1x2000", "8x2000"), _rms_norm, {"x": 1}, ("y",), ("y",), ("x", "weight"),
    ),
    "rope": Probe(
        "NxHxD", ("1x2x128", "8x2x128"), _rope, {"q": 1, "k": 1}, ("q", "k"), ("q", "k"),
        ("q", "k", "q_weight", "k_weight"),
    ),
    "whiten": Probe("BxT", ("4x300",), _whiten, {}, ("y", "mean", "rstd")),
    "policy_loss": Probe("BxT", ("4x300",), _policy_loss, {}, ("loss",)),
}  # fmt: skip


def probe(op: str) -> Probe:
    """How an operator is asked.

    Raises:
        UnknownNameError: nobody said how.
    """
    if op not in PROBES:
        raise UnknownNameError("operator with certificates", op, PROBES)
    return PROBES[op]


def numbers(op: str, size: str) -> tuple[int, ...]:
    """A size such as "8x50257".

    Raises:
        ArgumentError: it has not the operator's form.
    """
    form, parts = probe(op).form, size.split("x")
    if len(parts) != form.count("x") + 1 or not all(p.isdecimal() and int(p) for p in parts):
        raise ArgumentError("size", size, f"a size of {op} is {form}", f"For example {probe(op).sizes[-1]}.")
    return tuple(map(int, parts))
