"""Batches of rows that ask for different things, for the sampling operators; shaped by what a backend claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from rlkernel_core.definitions.sampling import Row
from rlkernel_core.spec.sampling import LogitBias, Penalties

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("normal", "ties", "equal", "holes", "one left", "nothing", "nan", "all nan", "posinf", "huge", "denormal")


@dataclass
class Batch:
    """Logits [N, V] as the operator sees them, and one `Row` per row."""

    logits: torch.Tensor
    rows: list[Row]

    def arguments(self, claims: frozenset[str] | None = None, device: str = "cpu") -> dict[str, Any]:
        """The rows as arguments of sample: tensors with one entry per row, or what `fit` left of that."""
        work = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        first, V = self.rows[0], self.logits.shape[1]

        def each(name: str, dtype: torch.dtype = work) -> torch.Tensor:
            return torch.tensor([getattr(row, name) for row in self.rows], dtype=dtype)

        law = {"temperature": work, "top_k": torch.int64, "top_p": work, "min_p": work}
        arguments: dict[str, Any] = {
            name: each(name, dtype) if claims is None or "per_row_parameters" in claims else getattr(first, name)
            for name, dtype in law.items()
            if claims is None or name == "temperature" or name in claims
        }
        arguments |= {name: each(name, torch.int64) for name in ("seed", "step")}
        if any(row.allowed is not None for row in self.rows):
            arguments["allowed"] = pack([np.ones(V, bool) if r.allowed is None else r.allowed for r in self.rows])
        if any(row.bias for row in self.rows):
            arguments["bias"] = ragged_bias([row.bias for row in self.rows])
        if any(row.out_count is not None for row in self.rows):
            arguments["penalties"] = penalties(self.rows, V, work)
        arguments |= {"filter_order": first.filter_order, "tie": first.tie, "stream": first.stream}
        return to(device, arguments)

    def fit(self, claims: frozenset[str]) -> Batch:
        """The same batch with everything off that is not claimed."""
        off: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        off = {name: value for name, value in off.items() if name not in claims}
        if "per_row_parameters" not in claims:
            shared = {name: getattr(self.rows[0], name) for name in ("temperature", "top_k", "top_p", "min_p")}
            off = {n: 1.0 if math.isnan(v) else v for n, v in shared.items()} | off  # a number has no NaN
        if "allowed" not in claims:
            off["allowed"] = None
        if "bias" not in claims:
            off["bias"] = {}
        if "penalties" not in claims:
            off |= {"repetition": 1.0, "frequency": 0.0, "presence": 0.0, "in_prompt": None, "out_count": None}
        return Batch(self.logits, [replace(row, **off) for row in self.rows])


def to(device: str, value: Any) -> Any:
    """The value with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {n: to(device, v) for n, v in value.items()}
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    return kind(**{f.name: to(device, getattr(value, f.name)) for f in fields(value)})


def pack(masks: Any) -> torch.Tensor:
    """[N, ceil(V / 32)] int32 words of [N][V] bools."""
    masks = np.asarray(masks)
    padded = np.zeros((masks.shape[0], -(-masks.shape[1] // 32) * 32), bool)
    padded[:, : masks.shape[1]] = masks
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def ragged_bias(lists: Sequence[Mapping[int, float]]) -> LogitBias:
    """Values by id, per row."""
    ids = [token for row in lists for token in row]
    values = [value for row in lists for value in row.values()]
    offsets = np.cumsum([0, *map(len, lists)])
    return LogitBias(
        torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32), torch.from_numpy(offsets)
    )


def penalties(rows: Sequence[Row], V: int, dtype: torch.dtype = torch.float32) -> Penalties:
    """The histories of rows and what is done about them."""
    counts = [np.zeros(V, int) if r.out_count is None else r.out_count for r in rows]
    width = max(1, *(int((c > 0).sum()) for c in counts))
    ids, times = np.full((len(rows), width), -1), np.zeros((len(rows), width), int)
    for i, c in enumerate(counts):
        some = np.flatnonzero(c)
        ids[i, : some.size], times[i, : some.size] = some, c[some]
    return Penalties(
        **{
            n: torch.tensor([getattr(r, n) for r in rows], dtype=dtype) for n in ("repetition", "frequency", "presence")
        },
        prompt_bits=pack([np.zeros(V, bool) if r.in_prompt is None else r.in_prompt for r in rows]),
        output_ids=torch.from_numpy(ids),
        output_counts=torch.from_numpy(times),
    )


def logits_row(g: np.random.Generator, V: int, kind: str, scale: float) -> np.ndarray[Any, Any]:
    """[V] of a kind."""
    x = g.normal(size=V) * scale
    if kind == "ties":
        x = np.round(x)
    elif kind == "equal":
        x[:] = 1.25
    elif kind == "holes":
        x[g.random(V) < 0.5] = -np.inf
    elif kind == "one left":
        x[np.arange(V) != g.integers(V)] = -np.inf
    elif kind == "nothing":
        x[:] = -np.inf
    elif kind == "nan":
        x[g.integers(V)] = np.nan
    elif kind == "all nan":
        x[:] = np.nan
    elif kind == "posinf":
        x[g.random(V) < 0.2] = np.inf
        x[g.integers(V)] = np.inf
    elif kind == "huge":
        x[g.integers(V)], x[g.integers(V)] = 3e38, -3e38
    elif kind == "denormal":
        x *= 1e-40
    elif kind == "zeros":
        x = np.where(x > 0, 0.0, -0.0)
    elif kind == "dominant":
        x[g.integers(V)] += 1e4
    elif kind == "far":
        x += g.choice([-1e4, 1e4])
    return x


def random_batch(
    seed: int,
    V: int,
    N: int,
    dtype: torch.dtype = torch.float32,
    kinds: Sequence[str] = KINDS,
    edits: bool = True,
    filter_order: str = "topk_topp",
    tie: str = "lowest_id",
) -> Batch:
    """N rows of random kinds, scales and parameters, off values among them."""
    g = np.random.default_rng(seed)
    logits = np.stack([logits_row(g, V, g.choice(kinds), g.choice([0.1, 1, 5, 30])) for _ in range(N)])
    stored = torch.from_numpy(logits).to(dtype)
    fp32 = np.float64 if dtype == torch.float64 else np.float32
    rows = []
    for _ in range(N):
        row = Row(
            temperature=float(fp32(g.choice([0, 0.3, 0.7, 1, 1, 2]))),
            top_k=int(g.choice([0, -1, 1, 2, 5, 50, V, V + 5])),
            top_p=float(fp32(g.choice([1, 0.95, 0.9, 0.5, 0, 2, np.nan]))),
            min_p=float(fp32(g.choice([0, 0, -1, 0.05, 0.5, 1, 2]))),
            seed=int(g.integers(-(2**63), 2**63)),
            step=int(g.integers(2**40)),
            filter_order=filter_order,
            tie=tie,
        )
        if edits:
            row.allowed = g.random(V) < g.choice([0, 0.5, 0.95, 1.1])
            row.bias = {
                int(t): float(np.float32(g.choice([-3, 0, 2.5]))) for t in g.choice(V, min(V, 3), replace=False)
            }
            row.repetition, row.frequency, row.presence = (
                float(fp32(g.choice(c))) for c in ([1, 1.3, 0.8], [0, 0.4], [0, -0.7])
            )
            row.in_prompt, row.out_count = g.random(V) < 0.3, g.integers(0, 4, V) * (g.random(V) < 0.3)
        rows.append(row)
    return Batch(stored, rows)
