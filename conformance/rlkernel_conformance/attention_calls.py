"""Calls of attention@1, and what the definition says of them: what its clauses and its space share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.compare import plain
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.attention import Reached, attention, attention_gradients

Lengths = tuple[tuple[int, int], ...]  # queries and keys of each sequence
PROMPTS: Final[Lengths] = ((5, 5), (1, 1), (70, 70))
# Prompts, one token behind a cache, a part of a prompt, nothing asked, more queries than keys.
LENGTHS: Final[tuple[Lengths, ...]] = (
    PROMPTS,
    ((1, 9), (1, 65), (1, 1), (1, 128)),
    ((3, 70), (0, 4), (17, 17), (64, 130)),
    ((4, 2), (3, 0), (2, 2)),
    ((33, 64),),
)
HEADS: Final = ((2, 1), (1, 1), (4, 2), (7, 1), (3, 3))
WIDTHS: Final = (16, 1, 20, 64, 128)
PAGES: Final = (1, 4, 16, 64)  # keys of one
SIZES: Final = {"normal": 1.0, "large": 6.0, "flat": 2.0**-6}  # of the values of q
GRADED: Final = ("q", "k", "v", "sinks")


@dataclass(frozen=True)
class Attend:
    """Sequences of queries and keys."""

    lengths: Lengths
    heads: tuple[int, int]
    D: int
    seed: int
    dtype: str = "float32"
    page: int = 0  # keys of a page; 0: rows
    spare: int = 0  # rows of q beyond the sequences
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    size: str = "normal"

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        place, dtype, (Hq, Hk) = subject.device, getattr(torch, self.dtype), self.heads
        queries, keys = (sum(n[i] for n in self.lengths) for i in (0, 1))

        def drawn(rows: int, heads: int, salt: int) -> Tensor:
            return draw.normal((rows, heads, self.D), self.seed + salt, place)

        given: dict[str, Any] = {
            "q": (drawn(queries + self.spare, Hq, 0) * SIZES[self.size]).to(dtype),
            "k": drawn(keys, Hk, 1).to(dtype),
            "v": drawn(keys, Hk, 2).to(dtype),
            "cu_q": offsets([m for m, _ in self.lengths], place),
            "cu_k": offsets([n for _, n in self.lengths], place),
        }
        if not self.causal and "bidirectional" in subject.claims:
            given["causal"] = False
        elif self.window is not None and "window" in subject.claims:
            given["window"] = self.window
        if self.softcap is not None and "softcap" in subject.claims:
            given["softcap"] = self.softcap
        if self.sinks and "sinks" in subject.claims:
            given["sinks"] = draw.normal((Hq,), self.seed + 3, place).to(dtype)
        if self.scale is not None:
            given["scale"] = self.scale
        return in_pages(given, self.page, self.seed) if self.page and "paged" in subject.claims else given


def offsets(lengths: list[int], place: Any) -> Tensor:
    """[B + 1] where each sequence begins, and the last ends."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=place)


def in_pages(given: Mapping[str, Any], page: int, seed: int, fill: float = 0.0) -> dict[str, Any]:
    """The same call with its keys in pages of so many, in a drawn order among others; `fill` is what no key is in."""
    starts = given["cu_k"].tolist()
    counts = [b - a for a, b in pairwise(starts)]
    each = [-(-n // page) for n in counts]
    order = torch.randperm(sum(each) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(counts), max(each, default=0) + 1), 2**30, dtype=torch.int32)  # beyond the keys: not read
    pools = {n: given[n].new_full((len(order), page, *given[n].shape[1:]), fill) for n in "kv"}
    for b, (start, count) in enumerate(zip(starts, counts, strict=False)):
        for j in range(0, count, page):
            table[b, j // page] = at = order.pop()
            rows = slice(start + j, start + min(j + page, count))
            for name, pool in pools.items():
                pool[at, : rows.stop - rows.start] = given[name][rows]
    place = given["q"].device
    return {
        **{n: x for n, x in given.items() if n != "cu_k"},
        **pools,
        "page_table": table.to(place),
        "seqused_k": torch.tensor(counts, dtype=torch.int32, device=place),
    }


def taken_pages(
    subject: Subject, given: Mapping[str, Any], usual: tuple[int, ...], large: tuple[int, ...]
) -> tuple[int, ...]:
    """Which of the usual sizes of pages the subject takes; of large ones where it takes none of those."""
    for sizes in (usual, large):
        if taken := tuple(size for size in sizes if subject.admits(**in_pages(given, size, 0))):
            return taken
    return usual


def cases(subject: Subject) -> st.SearchStrategy[Attend]:
    """Every claimed dtype, length, width and option."""
    return st.builds(
        Attend,
        lengths=st.sampled_from(LENGTHS),
        heads=st.sampled_from(HEADS),
        D=st.sampled_from(WIDTHS),
        seed=st.integers(0, 2**20),
        dtype=st.sampled_from(subject.dtypes),
        page=st.sampled_from((0, 0, *PAGES)),
        spare=st.sampled_from((0, 3)),
        causal=st.sampled_from((True, True, False)),
        window=st.sampled_from((None, 1, 7, 64, 70)),
        softcap=st.sampled_from((None, 2.0, 50.0)),
        sinks=st.booleans(),
        scale=st.sampled_from((None, 0.3)),
        size=st.sampled_from(tuple(SIZES)),
    )


def in_rows(subject: Subject) -> st.SearchStrategy[Attend]:
    """Keys in rows, in the first claimed dtype, narrow: for laws that compare two calls."""
    return cases(subject).map(lambda c: replace(c, dtype=subject.dtypes[0], page=0, D=min(c.D, 64)))


def small(subject: Subject) -> st.SearchStrategy[Attend]:
    """Short ones."""
    return in_rows(subject).map(lambda c: replace(c, lengths=((3, 5), (1, 4), (2, 2)), D=min(c.D, 20)))


@dataclass(frozen=True)
class Sequence:
    """The float64 values of one, and where it stands."""

    rows: slice  # of q
    keys: slice  # of k and v, where these are rows
    q: Any
    k: Any
    v: Any


def sequences(given: Mapping[str, Any]) -> Iterator[Sequence]:
    """Those of a call, and the rows of none as one without keys."""
    q, k, v = (plain(given[n], n) for n in ("q", "k", "v"))
    cu_q = [*given["cu_q"].tolist(), len(q)]
    table = given.get("page_table")
    counts = [] if table is None else given["seqused_k"].tolist()
    own = given.get("cu_k")
    cu_k = (given["cu_q"] if own is None else own).tolist()
    for b, (start, end) in enumerate(pairwise(cu_q)):
        none = b == len(cu_q) - 2
        first, last = (0, 0) if none or table is not None else cu_k[b : b + 2]
        mine = slice(first, last)
        if table is None or none:
            some = (k.reshape(-1, *k.shape[-2:])[mine], v.reshape(-1, *v.shape[-2:])[mine])
        else:
            pages = table[b, : -(-counts[b] // k.shape[1])].tolist()
            some = tuple(x[pages].reshape(-1, *x.shape[2:])[: counts[b]] for x in (k, v))
        yield Sequence(slice(start, end), mine, q[start:end], *some)


def options(given: Mapping[str, Any]) -> tuple[float, bool, int | None, float | None, Any]:
    """What the definition takes beside the tensors of a sequence."""
    scale = given.get("scale")
    sinks = None if given.get("sinks") is None else plain(given["sinks"], "sinks")
    width = given["q"].shape[-1] ** -0.5
    masks = given.get("causal", True), given.get("window"), given.get("softcap")
    return width if scale is None else scale, *masks, sinks


Bounded = tuple[Any, Any]  # values, and how far a result may be


def bounded(subject: Subject, output: str, dtype: str, found: Reached) -> Bounded:
    """Values of a definition, and how far rounded operands may move them."""
    atol, rtol = subject.tolerance(output, dtype)
    summed, _ = subject.tolerance(output, "float64" if dtype == "float64" else "float32")
    finite = np.where(np.isfinite(found.value), np.abs(found.value), 0.0)
    # fp16's least step is 2^-24: the result is rounded to it, and each factor of a sum.
    least = 2.0**-24 + 2.0**-25 * found.weighed if dtype == "float16" else 0.0
    return found.value, rtol * finite + atol * found.size + summed * found.bent + least


def expected(subject: Subject, given: Mapping[str, Any]) -> dict[str, Bounded]:
    """The definition's out and lse."""
    dtype = str(given["q"].dtype).removeprefix("torch.")
    wide = "float64" if dtype == "float64" else "float32"
    parts = [attention(s.q, s.k, s.v, *options(given)) for s in sequences(given)]
    return {
        name: bounded(subject, "out", kind, Reached(*(np.concatenate(x) for x in zip(*found, strict=True))))
        for name, kind, found in zip(("out", "lse"), (dtype, wide), zip(*parts, strict=True), strict=True)
    }


def expected_gradients(subject: Subject, given: Mapping[str, Any], up: Mapping[str, Any]) -> dict[str, Bounded]:
    """Those of q, k, v (keys in rows) and sinks, for upstream gradients of out and lse."""
    zeros = {"out": np.zeros(given["q"].shape), "lse": np.zeros(given["q"].shape[:2])}
    g, g_lse = (np.broadcast_to(up.get(n, zero), zero.shape) for n, zero in zeros.items())
    totals = {
        n: Reached(*(np.zeros(given[n].shape) for _ in Reached._fields)) for n in GRADED if given.get(n) is not None
    }
    for s in sequences(given):
        found = attention_gradients(s.q, s.k, s.v, *options(given), g[s.rows], g_lse[s.rows])
        for name, place, one in zip(GRADED, (s.rows, s.keys, s.keys, slice(None)), found, strict=True):
            if one is not None and not (name in "kv" and given.get("page_table") is not None):
                for total, part in zip(totals[name], one, strict=True):
                    total[place] += part
    bounds = {}
    for name, reached in totals.items():  # those of fp32 sinks come from a rounded out, and are rounded themselves
        kinds = {str(given[n].dtype).removeprefix("torch.") for n in ("q", name)}
        allowed = [bounded(subject, "grad", kind, reached)[1] for kind in kinds]
        bounds[name] = reached.value, np.maximum.reduce(allowed)
    return bounds
