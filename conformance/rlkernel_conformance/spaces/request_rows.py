"""The rows of a draw as the definition takes them, read from the arguments of a call as these are stored.

Legend: N rows · V vocabulary · R owners of parameters: rows, state slots or requests.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.requests import Array
from rlkernel_conformance.spaces.space import Given
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import NAN, PARAM, Drawn, Row, edited, gumbel, philox4x32, sample_row
from rlkernel_core.spec.sampling import Penalties


@dataclass
class Requests:
    """The rows of a call, as its arguments are stored."""

    given: Given
    logits: Array  # [N, V] in the type of the edits, before them
    owner: Array  # [N] which entry of a parameter with several a row has
    history: Array | None = None  # [N, V] further occurrences in the output
    late: Array | int = 0  # [N] what is added to the step of a row
    bias: str = "bias"
    known: dict[Any, Drawn] = field(default_factory=dict)

    @property
    def dtype(self) -> Any:
        """Of the edits."""
        return self.logits.dtype.type

    def each(self, name: str, default: Any) -> Array:
        """[N] a parameter's entries; floats in the type of the edits."""
        value = self.given.get(name, default)
        if torch.is_tensor(value):
            flat = plain(value, name).reshape(-1)
            return self._rounded(np.resize(flat, len(self.owner)) if flat.size == 1 else flat[self._safe(flat.size)])
        return self._rounded(np.full(len(self.owner), value, None if isinstance(value, float) else object))

    def _rounded(self, x: Array) -> Array:
        return x.astype(self.dtype).astype(np.float64) if x.dtype.kind == "f" else x

    def _safe(self, size: int) -> Array:
        return np.clip(self.owner, 0, size - 1)

    @cached_property
    def coefficients(self) -> dict[str, Array]:
        """[N] each of the penalties that is given."""
        asked = self.given.get("penalties") or Penalties()
        found = {n: getattr(asked, n) for n in ("repetition", "frequency", "presence")}
        rows = replace(self, given=found)
        return {n: rows.each(n, None) for n, x in found.items() if x is not None}

    @cached_property
    def bad(self) -> Array:
        """[N] rows with a parameter that has no meaning, or whose slot is none of a parameter's."""
        T = self.each("temperature", 1.0)
        bad = ~((T >= 0) & np.isfinite(T))
        for name, x in self.coefficients.items():
            bad |= ~np.isfinite(x) | ((x <= 0) if name == "repetition" else False)
        asked = self.given.get("penalties") or Penalties()
        params = [self.given.get(n) for n in ("temperature", "top_k", "top_p", "min_p", "seed", "step")]
        sizes = [x.shape[0] for x in (*params, *vars(asked).values()) if torch.is_tensor(x) and x.dim()]
        for size in sizes:
            bad |= (self.owner >= size) & (size != 1)
        return bad

    @cached_property
    def rows(self) -> list[Row]:
        """What each row asks for, without its noise."""
        (N, V), given = self.logits.shape, self.given
        params = {n: self.each(n, off) for n, off in OFF.items()}
        params["top_k"] = np.maximum(params["top_k"], 0)
        seen, count = self._history(V)
        mask, bias = self._mask(V), self._bias()
        shared = {n: given[n] for n in ("filter_order", "tie", "stream") if n in given}
        return [
            Row(
                **{n: x[i] for n, x in params.items()},
                **{n: x[i] for n, x in self.coefficients.items()},
                allowed=None if mask is None else mask[i],
                bias=bias[i],
                in_prompt=None if seen is None else seen[i],
                out_count=None if count is None else count[i],
                **shared,
            )
            for i in range(N)
        ]

    def _history(self, V: int) -> tuple[Array | None, Array | None]:
        """[N, V] in the prompt, and occurrences in the output."""
        asked = self.given.get("penalties") or Penalties()
        seen = None
        if asked.prompt_bits is not None:
            seen = _unpacked(asked.prompt_bits, V)
            seen = seen[self._safe(len(seen)) if len(seen) != 1 else np.zeros_like(self.owner)]
        count = self.history
        if asked.output_ids is not None:
            ids = plain(asked.output_ids, "an entry").astype(np.int64)
            times = np.ones_like(ids) if asked.output_counts is None else plain(asked.output_counts, "an entry")
            total = np.zeros((len(ids), V), np.int64)
            row, column = np.nonzero((ids >= 0) & (ids < V))
            np.add.at(total, (row, ids[row, column]), times[row, column].astype(np.int64))
            total = total[self._safe(len(ids)) if len(ids) != 1 else np.zeros_like(self.owner)]
            count = total if count is None else total + count
        return seen, count

    def _mask(self, V: int) -> Array | None:
        """[N, V] ids that are allowed and not banned."""
        allowed, banned = self.given.get("allowed"), self.given.get("banned")
        if allowed is None and banned is None:
            return None
        mask = np.ones((len(self.owner), V), bool) if allowed is None else _unpacked(allowed, V)
        for i, ids in enumerate(_lists(banned.ids, banned.offsets) if banned is not None else ()):
            mask[i, ids[(ids >= 0) & (ids < V)]] = False
        return mask

    def _bias(self) -> list[dict[int, float]]:
        """Sums of the values by id, of each row; -inf where one of them is."""
        made: list[dict[int, float]] = [{} for _ in self.owner]
        given, V = self.given.get(self.bias), self.logits.shape[1]
        if given is None:
            return made
        values = list(_lists(given.values, given.offsets))
        for i, ids in enumerate(_lists(given.ids, given.offsets)):
            for token, value in zip(ids.tolist(), values[i].tolist(), strict=True):
                if 0 <= token < V:
                    before = made[i].get(token, 0.0)
                    made[i][token] = -np.inf if -np.inf in {before, value} else before + value
        return made

    @cached_property
    def noise(self) -> list[tuple[int, int]]:
        """Seed and step of each row."""
        seeds, steps = (self.each(name, 0) for name in ("seed", "step"))
        late = np.broadcast_to(self.late, seeds.shape)
        return [(int(s) % 2**64, (int(t) + int(j)) % 2**64) for s, t, j in zip(seeds, steps, late, strict=True)]

    def gumbel(self, stream: int) -> Array:
        """[N, V] noise of the contract; rows of one seed at once."""
        made: Array = np.empty(self.logits.shape)
        by_seed, V = defaultdict[int, list[int]](list), self.logits.shape[1]
        for i, (seed, _) in enumerate(self.noise):
            by_seed[seed].append(i)
        block = np.arange((V + 3) // 4)
        for seed, rows in by_seed.items():
            steps = np.array([self.noise[i][1] for i in rows], np.uint64)[:, None]
            drawn = philox4x32((block, steps, steps >> np.uint64(32), stream), seed)
            made[rows] = gumbel(np.moveaxis(drawn, 0, -1).reshape(len(rows), -1)[:, :V])
        return made

    @cached_property
    def keys(self) -> list[Any]:
        """By row, equal where all is equal that a law depends on."""
        numbers_of = np.array([[getattr(r, n) for n in LAW] for r in self.rows], np.float64)
        arrays = [(x, r.allowed, r.in_prompt, r.out_count) for x, r in zip(self.logits, self.rows, strict=True)]
        bytes_of = (tuple(None if x is None else x.tobytes() for x in row) for row in arrays)
        biases = (tuple(r.bias.items()) for r in self.rows)
        return list(zip(bytes_of, biases, map(bytes, numbers_of), self.bad.tolist(), strict=True))

    def law(self, i: int) -> Drawn:
        """The law of a row; the noise in it is another's."""
        key = self.keys[i]
        if key not in self.known:
            self.known[key] = self._law(i, self.rows[i])
        return self.known[key]

    def _law(self, i: int, row: Row) -> Drawn:
        with np.errstate(all="ignore"):
            x, status = edited(self.logits[i], row, self.dtype)
            if self.bad[i] or np.isnan(x).any():
                status = NAN if np.isnan(self.logits[i]).any() else 0
                return Drawn(status | PARAM, log_raw=self._raw(i))
            law = sample_row(self.logits[i], row, self.dtype)
            return law if law.log_raw is not None else replace(law, log_raw=self._raw(i))

    def _raw(self, i: int) -> Array:
        raw: Array = sample_row(self.logits[i], Row(), self.dtype).log_raw
        return np.full(self.logits.shape[1], -np.inf) if raw is None else raw

    def law_keeping(self, subject: Subject, i: int, count: int) -> Drawn:
        """The law of a row; of those that rounding cannot tell apart the one that keeps so many tokens, if there is."""
        law, row = self.law(i), self.rows[i]
        if law.log_p is None or len(law.kept) == count:
            return law
        mass, (nats, relative) = subject.tolerance("top_p", "float32")[0], subject.tolerance("min_p", "float32")
        nats += 30 * relative
        if law.sure(mass, nats):
            return law
        with np.errstate(all="ignore"):
            for p in (0.0, -mass, mass):
                for m in (1.0, 1.0 - nats, 1.0 + nats):
                    other = replace(row, top_p=row.top_p + p, min_p=row.min_p * m)
                    near = sample_row(self.logits[i], other, self.dtype)
                    if len(near.kept) == count:
                        return near
        return law


OFF: Final[Mapping[str, Any]] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LAW: Final = (*OFF, "repetition", "frequency", "presence")


def _unpacked(bits: torch.Tensor, V: int) -> Array:
    """[R, V] bool."""
    ids = np.arange(V)
    return (plain(bits, "an entry")[:, ids >> 5] >> (ids & 31)) & 1 != 0


def _lists(flat: torch.Tensor, offsets: torch.Tensor) -> Iterator[Array]:
    """The entries of each row."""
    values, ends = plain(flat, "an entry"), plain(offsets, "an entry").astype(np.int64)
    for a, b in itertools.pairwise(ends):
        yield values[a:b]


def chosen(subject: Subject, scores: Array, noise: Array | None, token: Array) -> Array:
    """[N] the tokens [N] where they may be the argmax of scores [N, V] with noise [N, V], else one that may.

    Those within rounding of the best may; all with a score without noise, which is not the contract's then.
    """
    N, V = scores.shape
    may = scores > -np.inf
    if noise is not None:
        noised = scores + noise
        may &= noised >= noised.max(1, keepdims=True) - subject.tolerance("score", "float32")[0]
    right = (token >= 0) & (token < V) & may[np.arange(N), np.clip(token, 0, V - 1)]
    best = may.argmax(1) if noise is None else np.where(may, scores + noise, -np.inf).argmax(1)
    return np.where(right, token, best)
