"""The calls of sample@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.compare import plain
from rlkernel_conformance.sampling_batches import KINDS, logits_row, to
from rlkernel_conformance.spaces import requests
from rlkernel_conformance.spaces.modes import GRADLESS
from rlkernel_conformance.spaces.request_rows import Requests, chosen
from rlkernel_conformance.spaces.requests import (
    Array,
    bias_levels,
    bias_tensors,
    generator,
)
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import Drawn
from rlkernel_core.spec.sampling import Status

ROWS: Final = (5, 1, 2, 0, 33)
VOCABULARIES: Final = (33, 1, 2, 31, 32, 100, 1000, 4099)
EVERY: Final = (*KINDS, "zeros", "dominant", "far")
VALUES: Final = ("normal", "mixed", *(kind for kind in EVERY if kind not in {"normal", "nothing", "all nan"}))
SLOTS: Final = 7
# Around powers of two and edges of tiles, and vocabularies of Llama 2 and 3, Qwen and Gemma.
MANY: Final = (4097, 65537)
REAL: Final = (1023, 1025, 8193, 16385, 32000, 65537, 128256, 131073, 151936, 262144)


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Sizes, values, what is asked for, and what is asked back."""
    return {
        "rows": ROWS,
        "V": VOCABULARIES,
        "values": VALUES,
        "dtype": subject.dtypes,
        **requests.factors(subject),
        "bias": bias_levels(subject, "bias"),
        **result_factors(subject),
    }


def result_factors(subject: Subject) -> dict[str, Sequence[Any]]:
    """What sample and lm_head_sample take besides: slots, and results on request."""
    ranked = claimed(subject, {"raw": "top_n:raw", "processed": "top_n:processed"})
    return {
        "slot": claimed(subject, {"": "", **dict.fromkeys(("all", "some"), "slot")}),
        "stream": claimed(subject, {0: "", 1: "stream", 2**32 - 1: "stream"}),
        "entropy": claimed(subject, {False: "", True: "entropy"}),
        "top_n": (0, 1, 3, "V") if ranked else (0,),
        "rank": (False, True) if ranked else (False,),
        "top_n_from": ranked or ("raw",),
        "kept": claimed(subject, {0: "", **dict.fromkeys((1, 3, "V + 5"), "kept_ids")}),
        "invalid_token": (0, -9, 2**40),
    }


RULES: Final = (
    *requests.RULES,
    Rule(
        ("noise", "rows", "temperature", "slot"),
        lambda noise, rows, T, slot: noise != "numbers" or rows <= 1 or T == "0" or bool(slot),
    ),
)


def logits_of(point: Point, N: int, V: int) -> Array:
    """[N, V] of one kind, or of all in turn."""
    g, kind = generator(point, 0), point["values"]
    kinds = EVERY if kind == "mixed" else (kind,)
    rows = [logits_row(g, V, kinds[(i + point.seed) % len(kinds)], g.choice([0.3, 3.0])) for i in range(N)]
    return np.stack(rows) if rows else np.zeros((0, V))


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    N, V, junk = point["rows"], point["V"], point["padding"]
    x = np.concatenate([logits_of(point, N, V), np.resize([np.inf, np.nan, 1e4], (N, junk))], 1)
    logits = torch.from_numpy(x).to(getattr(torch, point["dtype"]))
    given: Given = {
        "logits": logits.requires_grad_(point["mode"] in GRADLESS),  # a draw takes them where no gradient is recorded
        **asked(point, V, N),
        **requests.bias("bias", point, V, N),
    }
    placed: Given = to(subject.device, given)
    return placed


def asked(point: Point, V: int, N: int) -> Given:
    """All that sample and lm_head_sample share."""
    slot, R = point["slot"], SLOTS if point["slot"] else N
    given = {**requests.parameters(point, V, R), **requests.penalties(point, V, R), **requests.edits(point, V, N)}
    if slot:
        of = torch.from_numpy(generator(point, 6).integers(0, R, size=N))
        if slot == "some":  # beside padding, and a slot that is none
            of[1::6], of[4::6] = -1, R
        given["slot"] = of
    given |= {"vocab_size": V} if point["padding"] else {}
    given |= {n: True for n in ("raw_logprob", "entropy", "rank") if point[n]}
    given |= {"top_n": V if point["top_n"] == "V" else min(V, point["top_n"])} if point["top_n"] else {}
    given |= {"kept_capacity": V + 5 if point["kept"] == "V + 5" else point["kept"]} if point["kept"] else {}
    defaults = {"top_n_from": "raw", "invalid_token": 0, "stream": 0}
    return given | {n: point[n] for n, default in defaults.items() if point[n] != default}


def expected(subject: Subject, point: Point, given: Given, found: Mapping[str, Any]) -> dict[str, Want]:
    """All results, by the tokens that were drawn where these are possible."""
    x = plain(given["logits"], "logits")[:, : given.get("vocab_size")]
    return results(subject, point["dtype"], x, given, found)


def results(
    subject: Subject, dtype: str, logits: Array, given: Given, found: Mapping[str, Any], bias: str = "bias"
) -> dict[str, Want]:
    """Of logits [N, V]."""
    N, V = logits.shape
    slot = plain(given["slot"], "slot").astype(np.int64) if "slot" in given else np.arange(N)
    asking = Requests(given, logits.astype("float64" if dtype == "float64" else "float32"), slot, bias=bias)
    laws = [asking.law_keeping(subject, i, int(count)) for i, count in enumerate(found["kept_count"])]
    noise = asking.gumbel(given.get("stream", 0)) if subject.exact_noise else None
    nothing = np.full(V, -np.inf)
    scores = np.stack([nothing if law.log_p is None else law.log_p for law in laws]) if N else np.zeros((0, V))
    token = chosen(subject, scores, noise, found["token"])
    rows = [Judged(law, asking.logits[i], asking.rows[i].temperature == 0, token[i]) for i, law in enumerate(laws)]
    return Stated(subject, dtype, rows, slot < 0, given).wants(found)


@dataclass(frozen=True)
class Judged:
    """A row: its law, and the token that it drew."""

    law: Drawn
    logits: Array  # [V] before the edits
    greedy: bool
    token: int

    @property
    def x(self) -> Array:
        """[V] edited logits; none where there is no law."""
        return np.zeros(0) if self.law.x is None else self.law.x

    def threshold(self, tau: float, cut: int) -> tuple[float, int]:
        """Threshold and threshold_id as they are where they describe the kept tokens; else some that do."""
        x, kept = self.x, self.law.kept
        described = np.flatnonzero((x > tau) | ((x == tau) & (np.arange(x.size) <= cut)))
        if len(kept) == (x > -np.inf).sum() and x.max(initial=np.inf) < np.inf:
            return -np.inf, -1
        if described.tolist() == sorted(kept):
            return tau, cut
        return (float(x[kept[-1]]), int(kept[-1])) if len(kept) else (np.inf, -1)

    @property
    def raw(self) -> Array:
        """[V] logits without NaN."""
        return np.where(np.isnan(self.logits), -np.inf, self.logits)

    def best(self, source: str) -> tuple[Array, Array]:
        """The possible ids of a law, best first, and their log-probabilities."""
        if source == "processed":
            return self.law.kept, np.zeros(0) if self.law.log_p is None else self.law.log_p[self.law.kept]
        order = np.lexsort((np.arange(self.logits.size), -self.raw))
        log_raw: Array = np.asarray(self.law.log_raw)[order]
        return order[log_raw > -np.inf], log_raw[log_raw > -np.inf]

    def rank(self, source: str) -> int:
        """How many tokens stand before the drawn one."""
        x = self.raw if source == "raw" else self.x
        return int((x > x[self.token]).sum() + (x[: self.token] == x[self.token]).sum())


@dataclass(frozen=True)
class Stated:
    """Results of all rows, with what the page says where no token can be drawn."""

    subject: Subject
    dtype: str
    rows: Sequence[Judged]
    padding: Array  # [N] bool
    given: Given

    @property
    def stored(self) -> str:
        """Dtype of the results."""
        return "float64" if self.dtype == "float64" else "float32"

    def each(self, value: Any, without: Any, on_padding: Any = 0) -> Array:
        """[N] of a function of a row with a law."""
        pairs = zip(self.rows, self.padding, strict=True)
        return np.array([on_padding if p else without if r.law.log_p is None else value(r) for r, p in pairs])

    def near(self, output: str, values: Any, scale: Any = 1.0) -> Want:
        """Within the tolerance, of numbers as results hold them: what overflows fp32 is infinite."""
        with np.errstate(over="ignore"):
            held = np.asarray(values, np.float64).astype(self.stored).astype(np.float64)
        values = np.where(np.isinf(held), held, values)
        return Want.near(self.subject, output, self.dtype, values, scale=scale, stored=self.stored)

    def wants(self, found: Mapping[str, Any]) -> dict[str, Want]:
        """All that was asked for; `found` chooses where there is a choice."""
        given, source = self.given, self.given.get("top_n_from", "raw")
        wants = self.of_every_draw(found) | self.thresholds(found)
        if given.get("entropy"):
            wants["entropy"] = self.near("entropy", self.each(lambda r: r.law.entropy, np.nan))
        if given.get("rank"):
            wants["rank"] = Want(self.each(lambda r: r.rank(source), -1, -1), 0.0, "int32")
        if n := given.get("kept_capacity"):
            wants["kept_ids"] = Want(self.table([r.law.kept for r in self.rows], n, -1), 0.0, "int64")
        if n := given.get("top_n"):
            best = [r.best(source) for r in self.rows]
            wants["top_ids"] = Want(self.table([ids for ids, _ in best], n, -1), 0.0, "int64")
            wants["top_logprobs"] = self.near("raw_logprob", self.table([p for _, p in best], n, -np.inf), 2.0)
        return wants

    def of_every_draw(self, found: Mapping[str, Any]) -> dict[str, Want]:
        """What every sampling operator returns of its rows."""
        given, invalid = self.given, self.given.get("invalid_token", 0)
        certain = self.each(lambda r: r.greedy or len(r.law.kept) == 1, True)
        whole = self.each(lambda r: r.greedy or len(r.law.kept) == (r.x > -np.inf).sum(), True)
        wants = {
            "status": self.status(found["status"], given.get("kept_capacity", 0)),
            "kept_count": Want(self.each(lambda r: len(r.law.kept), 0), 0.0, "int32"),
            "token": Want(self.each(lambda r: r.token, invalid, invalid), 0.0, "int64"),
            "logprob": self.near("logprob", self.each(lambda r: r.law.log_p[r.token], -np.inf), certain == 0),
            "log_kept_mass": self.near("log_kept_mass", self.each(lambda r: r.law.log_kept_mass, -np.inf), whole == 0),
        }
        if given.get("raw_logprob"):
            wants["raw_logprob"] = self.near("raw_logprob", self.each(lambda r: r.law.log_raw[r.token], np.nan))
        return wants

    def thresholds(self, found: Mapping[str, Any]) -> dict[str, Want]:
        """Both numbers of each row, whatever they are where they describe the kept tokens."""
        places = zip(self.rows, found["threshold"].tolist(), found["threshold_id"].tolist(), strict=True)
        cuts = np.array([r.threshold(tau, cut) for r, tau, cut in places]).reshape(-1, 2)
        tau, cut = (np.where(self.padding, on_padding, x) for on_padding, x in zip((0, -1), cuts.T, strict=True))
        return {"threshold": Want(tau, 0.0, self.stored), "threshold_id": Want(cut, 0.0, "int64")}

    def status(self, found: Array, capacity: int) -> Want:
        """Bits; FALLBACK says nothing of a result."""
        over = [Status.KEPT_OVERFLOW.value * (0 < capacity < len(r.law.kept)) for r in self.rows]
        bits = [r.law.status | flag for r, flag in zip(self.rows, over, strict=True)]
        slow = found.astype(np.int64) & Status.FALLBACK.value
        return Want(np.where(self.padding, 0, np.array(bits, np.int64) | slow), 0.0, "int32")

    def table(self, rows: Sequence[Array], n: int, behind: float) -> Array:
        """[N, n] the first n of each row."""
        made = np.full((len(rows), n), behind)
        for out, row, pad in zip(made, rows, self.padding, strict=True):
            if not pad:
                out[: len(row[:n])] = row[:n]
        return made


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Vocabularies, and many rows."""
    raw = "raw_logprob" in subject.claims
    wide: list[dict[str, Any]] = [{"V": V, "rows": 2 if V < 70000 else 1, "raw_logprob": raw} for V in REAL]
    filters = [n for n in ("top_p", "top_k", "min_p") if n in subject.claims]
    wide[-1] |= {n: {"top_p": 0.9, "top_k": "V", "min_p": 0.0625}[n] for n in filters[:1]}
    many = {"V": 5, "values": "equal", "noise": "steps"}
    # Without a filter every id that is lost shows in the number of kept tokens.
    small = {"V": 1000, "rows": 33, "banned": "some", "dtype of banned.ids": "uint8"}
    return [*wide, *([small] if "banned" in subject.claims else []), *({"rows": N, **many} for N in MANY)]


TENSORS: Final = {
    "logits": Argument(),
    "slot": Argument(requests.ROWS, requests.INTEGERS, Rule(("slot",), bool)),
    **requests.parameter_tensors(),
    **bias_tensors("bias"),
}
SPACE = Space(
    "sample",
    factors,
    arguments,
    expected,
    TENSORS,
    RULES,
    real,
    draws=True,
)
