"""What the attacks on verify@1 draw: rounds of drafts, and the definition's answer to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.compare import plain, require
from rlkernel_conformance.goodness_of_fit import follows, share
from rlkernel_conformance.sampling_batches import Batch, random_batch, to
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.sampling import Row, sample_row
from rlkernel_core.definitions.verify import Outcome, verify_request
from rlkernel_core.spec.verify import VerifyResult

SCALE: Final = 0.25  # a case is a batch of requests with parameters of their own
ORDERS: Final = ("topp_topk", "joint")  # besides topk_topp
TIES: Final = ("keep_all",)  # besides lowest_id
COUNTS: Final = ((3, 0, 1, 4, 2, 2), (2, 2, 2), (5,), (1, 0))
# The first of each is off.
MILD: Final = {
    "temperature": (1.0, 0.7, 1.5, 1.0, 0.0),
    "top_k": (0, 5, 8, 0),
    "top_p": (1.0, 0.9, 1.0, 0.7),
    "min_p": (0.0, 0.0, 0.05),
}


@dataclass
class Round:
    """What a call of verify is made of, and its rows apart."""

    target: Tensor  # [M, V]
    drafts: list[int]
    cu: list[int]
    rows: list[Row]  # one per request
    q: np.ndarray[Any, Any] | None = None  # [K, V]
    form: str = "strict"  # strict | probs | logits

    def slices(self, i: int) -> tuple[slice, slice]:
        """The rows of a request, and its drafts."""
        return slice(self.cu[i] + i, self.cu[i + 1] + i + 1), slice(self.cu[i], self.cu[i + 1])

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """As verify takes them."""
        given = Batch(self.target[: len(self.rows)], self.rows).arguments(subject.claims, "cpu")
        given = {n: v for n, v in given.items() if n != "stream"}
        given |= {"draft_ids": torch.tensor(self.drafts, dtype=torch.int64), "cu_draft": torch.tensor(self.cu)}
        if self.q is not None:
            q = torch.from_numpy(self.q)
            given |= {"draft_probs": q.float()} if self.form == "probs" else {"draft_logits": q.log().float()}
        return {"target_logits": self.target.to(subject.device)} | to(subject.device, given)

    def outcome(self, i: int) -> Outcome:
        """The definition's answer for a request."""
        mine, drafts = self.slices(i)
        work = torch.float64 if self.target.dtype == torch.float64 else torch.float32
        x = self.target[mine].to(work).numpy()
        law = None
        if self.q is not None:
            law = np.float32(self.q[drafts]).astype(float)
            if self.form == "logits":
                law = np.exp(np.log(self.q[drafts]).astype(np.float32).astype(float))
                law /= law.sum(1, keepdims=True)
        with np.errstate(all="ignore"):
            numbers = np.float64 if work == torch.float64 else np.float32
            return verify_request(x, self.drafts[drafts], law, self.rows[i], numbers)


@dataclass(frozen=True)
class Rounds:
    """Requests with drafts of every length, from a seed."""

    seed: int
    counts: tuple[int, ...] = COUNTS[0]
    V: int = 12
    dtype: str = "float32"
    filters: bool = True

    def round(self, subject: Subject, form: str = "strict", *, edits: bool = False) -> Round:
        """Drafts of laws near the target's, or for strict drafts about half of them right."""
        rng, B = np.random.default_rng(self.seed), len(self.counts)
        cu = [0, *np.cumsum(self.counts).tolist()]
        made = random_batch(self.seed, self.V, cu[-1] + B, getattr(torch, self.dtype), ("normal", "ties"), edits)
        rows = made.fit(subject.claims).rows[:B]
        for row in rows:
            row.allowed, row.bias, row.step = None, {}, row.step % 2**31
        # Mild parameters: laws of one token test little.
        for name, values in MILD.items():
            shared = float(np.float32(rng.choice(values)))
            for row in rows:
                own = float(np.float32(rng.choice(values))) if "per_row_parameters" in subject.claims else shared
                off = name != "temperature" and name not in subject.claims
                value = float(values[0]) if off or not self.filters else own
                setattr(row, name, int(value) if name == "top_k" else value)
        if self.filters:
            orders = [o for o in ORDERS if f"filter_order:{o}" in subject.claims]
            ties = [t for t in TIES if f"tie:{t}" in subject.claims]
            for row in rows:  # one for all, as a call has one
                row.filter_order = ["topk_topp", *orders][self.seed % (1 + len(orders))]
                row.tie = ["lowest_id", *ties][self.seed // 3 % (1 + len(ties))]
        out = Round((made.logits.double() / 4).to(made.logits.dtype), [], cu, rows, form=form)
        if form == "strict":
            for i, row in enumerate(rows):
                x = out.target[out.slices(i)[0]].float().numpy()
                for j in range(self.counts[i]):
                    with np.errstate(all="ignore"):
                        token = sample_row(x[j], replace(row, step=row.step + j)).token
                    out.drafts.append(token if rng.random() < 0.6 else int(rng.integers(self.V)))
            return out
        near = np.delete(out.target.double().numpy(), [c + i for i, c in enumerate(cu[1:])], 0)
        q = np.exp(near + rng.normal(size=near.shape))
        out.q = q / q.sum(1, keepdims=True)
        out.drafts = [int(rng.choice(self.V, p=p)) for p in out.q]
        return out


def rounds(subject: Subject, **fixed: Any) -> st.SearchStrategy[Rounds]:
    """Every claimed dtype."""
    drawn: dict[str, Any] = {
        "seed": st.integers(0, 255),
        "counts": st.sampled_from(COUNTS),
        "V": st.sampled_from((12, 33, 2)),
        "dtype": st.sampled_from(subject.dtypes),
    }
    return st.builds(Rounds, **drawn | {n: st.just(v) for n, v in fixed.items()})


def form_of(subject: Subject) -> str:
    """A form of draft laws that the subject takes."""
    claimed = [form for form in ("probs", "logits") if f"draft_{form}" in subject.claims]
    return claimed[0] if claimed else "strict"


def call(subject: Subject, made: Round, **more: Any) -> VerifyResult:
    """The subject's answer."""
    out: VerifyResult = subject(**made.arguments(subject) | more)
    return out


def as_defined(subject: Subject, made: Round, **more: Any) -> VerifyResult:
    """Accepted drafts and emitted tokens of every request are those of the definition; `more` changes the call.

    With other noise than the contract's they are possible ones, and the clauses of laws judge how often they come.
    """
    out = call(subject, made, **more)
    accepted, token = plain(out.accepted, "accepted"), plain(out.token, "token")
    for i in range(len(made.rows)):
        want, (mine, _) = made.outcome(i), made.slices(i)
        if want.sure and subject.exact_noise:
            found = token[mine].tolist()
            expected = want.tokens + [-1] * (len(found) - len(want.tokens))
            text = f"request {i}: drafts {made.drafts[made.slices(i)[1]]}"
            require(found == expected, f"{text} give tokens {found}, expected {expected}")
            require(int(accepted[i]) == want.accepted, f"{text}: {accepted[i]} accepted, expected {want.accepted}")
        elif want.sure:
            found = token[mine][: int(accepted[i]) + 1].tolist()
            for drawn, law in zip(found, want.laws, strict=False):
                impossible = law.log_p is not None and drawn not in law.kept
                require(not impossible, f"request {i} emits {drawn}, which the target never draws")
    return out


# 2048 requests of two drafts over 8 tokens: limit(8) = 43, so a law off by KL = 0.03 shows at the first token. A
# replacement drawn from p, not from the residual, is off by 0.1 and more for laws this far apart; second tokens are
# reached by about half of the requests, third ones by a quarter.
REQUESTS: Final = 2048


@dataclass(frozen=True)
class Chains:
    """Many requests of two drafts with the same laws."""

    seed: int
    filters: bool


def chains(subject: Subject) -> st.SearchStrategy[Chains]:
    """With and without top-k."""
    return st.builds(Chains, seed=st.integers(0, 63), filters=st.sampled_from((False, True)))


def chain_law(subject: Subject, case: Chains, form: str) -> None:
    """First, second and third tokens, each given that it was reached; the share of accepted drafts."""
    V, n, rng = 8, REQUESTS, np.random.default_rng(case.seed)
    p = rng.normal(size=(3, V)).astype(np.float32)
    given: dict[str, Any] = {"top_k": 4} if case.filters and "top_k" in subject.claims else {}
    law = np.stack([np.exp(sample_row(x, Row(**given)).log_p) for x in p])
    draft = rng.normal(size=V).astype(np.float32)
    q = np.exp(draft.astype(float)) / np.exp(draft.astype(float)).sum()
    if form == "strict":
        q = np.full(V, 0.1 / V) + 0.9 * (np.arange(V) == law[0].argmax())
    ids = rng.choice(V, size=(n, 2), p=q / q.sum())
    if form != "strict":
        value = torch.from_numpy(draft if form == "logits" else q.astype(np.float32))
        given[f"draft_{form}"] = value.to(subject.device).expand(2 * n, V)
    at = subject.device
    out = subject(
        torch.from_numpy(p).to(at).repeat(n, 1),
        torch.from_numpy(ids.reshape(-1)).to(at),
        cu_draft=torch.arange(n + 1, device=at) * 2,
        seed=torch.arange(n, device=at) + 1000 * case.seed,
        step=7,
        **given,
    )
    token, accepted = plain(out.token, "token").reshape(n, 3), plain(out.accepted, "accepted")
    for j in range(3):
        if (accepted >= j).any():
            follows(f"tokens {j} of {form} drafts", token[accepted >= j, j], law[j])
    overlap = float((law[0] * q).sum() if form == "strict" else np.minimum(law[0], q).sum())
    share(f"accepted {form} drafts", int((accepted >= 1).sum()), n, overlap)
