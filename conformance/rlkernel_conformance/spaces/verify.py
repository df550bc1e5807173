"""The calls of verify@1.

Legend: B requests · K drafts · M = K + B rows · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.compare import plain
from rlkernel_conformance.sampling_batches import to
from rlkernel_conformance.spaces import requests
from rlkernel_conformance.spaces.modes import GRADLESS
from rlkernel_conformance.spaces.request_rows import Requests, chosen
from rlkernel_conformance.spaces.requests import Array, bias_levels, bias_tensors, generator
from rlkernel_conformance.spaces.sample import VALUES, Judged, Stated, logits_of
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import gumbel, uniform, words
from rlkernel_core.spec.sampling import STREAMS

COUNTS: Final = ((2, 0, 1), (0,), (1,), (3, 0, 1, 4, 2, 2), (), (1,) * 12, (7,))
VOCABULARIES: Final = (12, 1, 2, 32, 33, 1000, 4099)
REAL: Final = (8193, 32000, 65537, 128256, 151936)
MASS: Final = 8e-6  # of a probability, relatively: what rounding of both laws may decide, as in the definition


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Drafts and their laws, sizes and values."""
    laws = {"draft_probs": "draft_probs", "draft_logits": "draft_logits"}
    return {
        "drafts": COUNTS,
        "V": VOCABULARIES,
        "values": VALUES,
        "dtype": subject.dtypes,
        "law": claimed(subject, {"": "", **laws}),
        "q": ("near", "equal", "disjoint", "holes", "ones", "spoiled"),
        "ids": ("likely", "foreign", "edges"),
        "draft padding": (0, 5),
        **requests.factors(subject),
        "bias": bias_levels(subject, "bias"),
        "invalid_token": (-1, 0, 2**40),
    }


RULES: Final = (
    *requests.RULES,
    Rule(("law", "q"), lambda law, q: bool(law) or q == "near"),
    Rule(("law", "draft padding"), lambda law, padding: bool(law) or not padding),
    Rule(("noise", "drafts", "temperature"), lambda n, drafts, T: n != "numbers" or len(drafts) <= 1 or T == "0"),
)


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    counts, V, junk = point["drafts"], point["V"], point["padding"]
    B, K = len(counts), sum(counts)
    M = K + B
    x = logits_of(point, M, V)
    target = np.concatenate([x, np.resize([np.inf, np.nan, 1e4], (M, junk))], 1)
    place = np.repeat(np.arange(B), counts) + np.arange(K)  # of the drafts among the rows
    q = _laws(point, x[place])
    given: Given = {
        "target_logits": torch.from_numpy(target).to(getattr(torch, point["dtype"])),
        "draft_ids": torch.from_numpy(_ids(point, x[place], q, V)),
        "cu_draft": torch.from_numpy(np.cumsum([0, *counts])),
        **requests.parameters(point, V, B),
        **requests.penalties(point, V, B),
        **requests.edits(point, V, M),
        **requests.bias("bias", point, V, M),
    }
    given["target_logits"].requires_grad_(point["mode"] in GRADLESS)
    if point["law"]:
        with np.errstate(divide="ignore"):
            values = q if point["law"] == "draft_probs" else np.log(q) + 3.0
        wide = np.concatenate([values, np.resize([np.nan, 7.0], (K, point["draft padding"] + junk))], 1)
        given[point["law"]] = torch.from_numpy(wide).float()
    given |= {"vocab_size": V} if junk else {}
    given |= {"raw_logprob": True} if point["raw_logprob"] else {}
    given |= {"invalid_token": point["invalid_token"]} if point["invalid_token"] != -1 else {}
    placed: Given = to(subject.device, given)
    return placed


def _laws(point: Point, x: Array) -> Array:
    """[K, V] of the drafts: near the target's, equal, elsewhere, on some ids, nothing left, or no probabilities."""
    g, how = generator(point, 7), point["q"]
    y = np.nan_to_num(x, nan=-20.0, posinf=20.0, neginf=-20.0)
    y = np.clip(y - y.max(1, keepdims=True, initial=-np.inf), -20, 0) if y.size else y
    y = {"near": y + g.normal(size=y.shape), "disjoint": -y}.get(how, y)
    q = np.exp(y)
    q = np.where(g.random(q.shape) < 0.5, 0.0, q) if how == "holes" else q
    with np.errstate(invalid="ignore"):
        q = np.nan_to_num(q / q.sum(1, keepdims=True))
    if how == "ones" and point["law"] == "draft_probs":
        q = np.ones_like(q)  # p - q has no mass anywhere
    if how == "spoiled" and point["law"] == "draft_probs":
        q = np.where(g.random(q.shape) < 0.3, g.choice([np.nan, -0.5], size=q.shape), q)
    return q


def _ids(point: Point, x: Array, q: Array, V: int) -> Array:
    """[K] drafts: the target's best or one of the drafter's, some of them foreign, or the first and last ids."""
    g, how = generator(point, 8), point["ids"]
    best = np.where(np.isnan(x), -np.inf, x).argmax(1) if len(x) else np.zeros(0, np.int64)
    drawn = np.array([g.choice(V, p=row / row.sum()) if row.sum() > 0 else 0 for row in np.maximum(q, 0.0)], np.int64)
    ids = np.where(g.random(len(best)) < 0.6, best, drawn)
    foreign, edges = np.resize([V, -1, 2**40, -100], ids.shape), np.resize([V - 1, 0], ids.shape)
    return np.where(g.random(len(ids)) < 0.4, foreign, ids) if how == "foreign" else edges if how == "edges" else ids


def expected(subject: Subject, point: Point, given: Given, found: Mapping[str, Any]) -> dict[str, Want]:
    """All results, request by request along the drafts that were accepted, where each step is possible."""
    logits = plain(given["target_logits"], "target_logits")[:, : given.get("vocab_size")]
    M, V = logits.shape
    cu, ids = (plain(given[name], name).astype(np.int64) for name in ("cu_draft", "draft_ids"))
    B = len(cu) - 1
    owner = np.repeat(np.arange(B), np.diff(cu) + 1)
    late = np.arange(M) - (cu[:-1] + np.arange(B))[owner]
    drafts = [ids[cu[b] : cu[b] + j] for b, j in zip(owner, late, strict=True)]
    rounded = logits.astype("float64" if point["dtype"] == "float64" else "float32")
    counted = None
    if "penalties" in given:
        inside = (d[(d >= 0) & (d < V)] for d in drafts)
        counted = np.stack([np.bincount(d, minlength=V) for d in inside]) if M else np.zeros((0, V), np.int64)
    asking = Requests(given, rounded, owner, history=counted, late=late)
    laws = [asking.law_keeping(subject, i, int(count)) for i, count in enumerate(found["kept_count"])]
    token, behind, accepted = np.zeros(M, np.int64), np.ones(M, bool), np.zeros(B, np.int64)
    q = _stored_laws(given, V)
    for b in range(B):
        first, k = int(cu[b]) + b, int(cu[b + 1] - cu[b])
        for j in range(k + 1):
            i = first + j
            behind[i] = False
            draft = int(ids[cu[b] + j]) if j < k else None
            if laws[i].log_p is None:
                break
            goes_on = found["accepted"][b] > j
            step = Step(subject, asking, laws[i], i)
            law = q[cu[b] + j] if q is not None and j < k else None
            token[i], accept = step.outcome(draft, law, int(found["token"][i]), goes_on=bool(goes_on))
            if not accept:
                break
            accepted[b] += 1
    rows = [Judged(law, rounded[i], asking.rows[i].temperature == 0, int(token[i])) for i, law in enumerate(laws)]
    stated = Stated(subject, point["dtype"], rows, behind, {"invalid_token": -1, **given})
    return {"accepted": Want(accepted, 0.0, "int32"), **stated.of_every_draw(found)}


def _stored_laws(given: Given, V: int) -> Array | None:
    """[K, V] what was given as the laws of the drafts; what is no probability counts as 0."""
    if "draft_probs" in given:
        return np.maximum(np.nan_to_num(plain(given["draft_probs"], "draft_probs")[:, :V]), 0.0)
    if "draft_logits" not in given:
        return None
    z = plain(given["draft_logits"], "draft_logits")[:, :V]
    with np.errstate(invalid="ignore"):
        q = np.exp(z - z.max(1, keepdims=True))
        return np.nan_to_num(q / q.sum(1, keepdims=True))


class Step:
    """A row whose draft is tested, or that draws."""

    def __init__(self, subject: Subject, asking: Requests, law: Any, i: int) -> None:
        self.subject, self.scores, self.p = subject, law.log_p, np.exp(law.log_p)
        self.noise = asking.noise[i] if subject.exact_noise else None

    def outcome(self, draft: int | None, q: Array | None, token: int, *, goes_on: bool) -> tuple[int, bool]:
        """The token and whether the draft was accepted: what was found where it may be, else the definition's."""
        if draft is None or q is None:
            drawn = self._drawn(self.scores, "target", token)
            return drawn, draft is not None and drawn == draft
        may_accept, may_reject = self._test(draft, q)
        if may_accept and (goes_on or not may_reject):
            return draft, True
        with np.errstate(divide="ignore"):
            residual = np.maximum(self.p - q, 0.0)
            slack = MASS * (self.p + q)
            sure = np.where(residual > slack, residual, 0.0)
            if not (residual > 0).any():
                return self._drawn(self.scores, "residual", token), False
            if self._may_be(residual, slack, token) or not sure.any():
                return token, False
            return self._drawn(np.log(residual), "residual", token), False

    def _test(self, draft: int, q: Array) -> tuple[bool, bool]:
        """Whether the draft may be accepted, and whether it may be rejected."""
        if not 0 <= draft < self.p.size:
            return False, True
        p, theirs = float(self.p[draft]), float(q[draft])
        if self.noise is None:
            return p > 0, theirs > p * (1 - MASS) or p == 0
        u = float(uniform(words(*self.noise, self.p.size, STREAMS["accept"]))[draft])
        near = abs(u * theirs - p) <= MASS * p and p > 0
        return u * theirs < p or near, not u * theirs < p or near

    def _may_be(self, residual: Array, slack: Array, token: int) -> bool:
        """Whether a token is the residual's, with what rounding may leave of it or take from it."""
        if not (0 <= token < self.p.size and residual[token] + slack[token] > 0 and self.p[token] > 0):
            return False
        if self.noise is None:
            return bool(residual[token] > 0)
        noise = self._noise("residual")
        score = self.subject.tolerance("score", "float32")[0]
        at_least = np.log(np.maximum(residual - slack, 0.0)) + noise - score
        at_most = np.log(residual[token] + slack[token]) + noise[token] + score
        return bool(at_most >= at_least.max())

    def _noise(self, stream: str) -> Array:
        seed, step = self.noise or (0, 0)
        noise: Array = gumbel(words(seed, step, self.p.size, STREAMS[stream]))
        return noise

    def _drawn(self, scores: Array, stream: str, token: int) -> int:
        noise = None if self.noise is None else self._noise(stream)[None]
        return int(chosen(self.subject, scores[None], noise, np.array([token]))[0])


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Vocabularies, and many requests: of few tokens, so that many drafts are tested."""
    wide: list[dict[str, Any]] = [{"V": V, "drafts": (1,)} for V in REAL]
    laws = [law for law in ("draft_probs", "draft_logits") if law in subject.claims]
    many = [{"drafts": (1, 2) * 150, "law": law, "q": q} for law in laws for q in ("near", "ones")]
    return [*wide, *many, {"drafts": (1, 2) * 1000, "V": 2, "values": "equal"}]


TENSORS: Final = {
    "target_logits": Argument(),
    "draft_ids": Argument(requests.ROWS, requests.INTEGERS),
    "cu_draft": Argument(requests.LIST, requests.INTEGERS),
    "draft_probs": Argument(dtypes=requests.REALS, given=Rule(("law",), lambda law: law == "draft_probs")),
    "draft_logits": Argument(dtypes=requests.REALS, given=Rule(("law",), lambda law: law == "draft_logits")),
    **requests.parameter_tensors(),
    **bias_tensors("bias"),
}
SPACE = Space("verify", factors, arguments, expected, TENSORS, RULES, real, draws=True)
