"""Attacks on the kinds of advantage@1 that are a recursion over time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.advantage_batches import (
    OVER_TIME,
    Answer,
    Batch,
    agree,
    alike,
    columns,
    exact,
    expected,
    where_claimed,
)
from rlkernel_conformance.compare import close, plain
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import advantage as oracle


@attack("AD-03", lambda s: exact(s, OVER_TIME, B=1, ends=True), scale=0.5, examples=(Batch("gae", B=1, T=33),))
@where_claimed
def masked_tokens_take_no_time(subject: Subject, case: Batch) -> None:
    """A row with holes against the row of its valid tokens."""
    given = case.arguments(subject)
    m = given["mask"][0]
    dense = {k: x for k, x in columns(given, m).items() if k != "mask"}
    alike(subject, subject(**given).advantages[:, m], subject(**dense).advantages, case.dtype)


@attack("AD-05", lambda s: exact(s, ("gae",)), scale=0.4)
@where_claimed
def lambda_and_gamma_have_limits(subject: Subject, case: Batch) -> None:
    """TD errors at lambda 0, reward to go at lambda = gamma = 1, r - v at gamma 0."""
    given = replace(case, ends=False).arguments(subject)
    given.pop("mask", None)
    r, v = plain(given["rewards"], "rewards"), plain(given["values"], "values")
    end = np.zeros((case.B, 1))
    if "bootstrap" in subject.claims:
        given["bootstrap"] = case.noise((case.B,), 7, subject)
        end = plain(given["bootstrap"], "bootstrap")[:, None]
    following = np.concatenate([v[:, 1:], end], 1)
    to_go = r[:, ::-1].cumsum(1)[:, ::-1] + end
    for gamma, lam, want in ((0.9, 0.0, r + 0.9 * following - v), (1.0, 1.0, to_go - v), (0.0, 0.7, r - v)):
        found = subject(**{**given, "gamma": gamma, "lam": lam}).advantages
        scale = max(1.0, np.abs(to_go).max()) * np.sqrt(case.T)
        close(subject, "advantages", found, want, case.dtype, scale=scale)


@attack("AD-06", lambda s: exact(s, ("returns", "gae", "reinforce_pp"), whiten=False), scale=0.5)
@where_claimed
def a_scan_may_be_split(subject: Subject, case: Batch) -> None:
    """The right part first; what it carries is the bootstrap of the left part."""
    case = replace(case, lam=1.0, ends=True)
    given = case.arguments(subject)
    cut = case.seed % (case.T + 1)
    left, right = columns(given, slice(0, cut)), columns(given, slice(cut, None))
    carried = given["bootstrap"]
    if cut < case.T:
        # The return at the first valid token; nothing valid there carries the bootstrap on.
        back = subject(**right)
        m = right.get("mask", torch.ones_like(right["rewards"], dtype=torch.bool))
        first = back.returns.gather(1, m.int().argmax(1, keepdim=True))[:, 0]
        carried = torch.where(m.any(1), first, carried.to(first.dtype))
    whole = subject(**given)
    if cut:
        front = subject(**{**left, "bootstrap": carried})
        alike(subject, front.returns, whole.returns[:, :cut], case.dtype)
        alike(subject, front.advantages, whole.advantages[:, :cut], case.dtype)
    if cut < case.T:
        alike(subject, back.advantages, whole.advantages[:, cut:], case.dtype)


@attack("AD-07", lambda s: exact(s, OVER_TIME, whiten=False), scale=0.5, examples=(Batch("gae", T=9, whiten=False),))
@where_claimed
def an_episode_ends(subject: Subject, case: Batch) -> None:
    """Everything behind a done moves; nothing up to it does."""
    given = replace(case, ends=False).arguments(subject)
    at = case.seed % case.T
    given["dones"] = torch.zeros((case.B, case.T), dtype=torch.bool, device=subject.device)
    given["dones"][:, at] = True
    given.pop("mask", None)
    moved = {**given}
    for name in ("rewards", "values", "q_values", "ratio"):
        if name in given:
            x = given[name].clone()
            x[:, at + 1 :] = 100.0 + x[:, at + 1 :].abs()
            moved[name] = x
    if "bootstrap" in subject.claims:
        moved["bootstrap"] = 1e3 + case.noise((case.B,), 7, subject).abs()
    want, found = subject(**given), subject(**moved)
    alike(subject, found.advantages[:, : at + 1], want.advantages[:, : at + 1], case.dtype)
    alike(subject, found.returns[:, : at + 1], want.returns[:, : at + 1], case.dtype)


def _gae(given: dict[str, Any], lam: Any) -> Answer:
    """GAE of every row with its own lambda, a number or one per token."""
    one = expected({**given, "lam": 1.0})
    n = {k: plain(x, k) for k, x in given.items() if isinstance(x, torch.Tensor)}
    m = n.get("mask", np.ones(n["rewards"].shape, bool))
    rows = [
        oracle.gae_row(
            n["rewards"][i],
            n["values"][i],
            m[i],
            given["gamma"],
            lam[i],
            n["bootstrap"][i] if "bootstrap" in n else 0.0,
            n["dones"][i] if "dones" in n else None,
        )
        for i in range(len(m))
    ]
    return Answer(
        np.stack([a for a, _ in rows]),
        np.stack([np.where(k, g, 0) for k, (_, g) in zip(m, rows, strict=True)]),
        one.scale,
    )


def _only_gae(subject: Subject) -> Any:
    return exact(subject, ("gae",), B=5)  # T is never 5 x 1: a lambda [B] is not taken for one per token


@attack("AD-08", _only_gae, scale=0.4, examples=(Batch("gae", B=5, T=9),))
@where_claimed
def lambda_may_differ(subject: Subject, case: Batch) -> None:
    """Per sequence, per token with the index of the next state, and equal ones against a number."""
    given = case.arguments(subject)
    by_token = (draw.integers((case.B, case.T), 9, case.seed + 1, subject.device) / 8).to(given["rewards"].dtype)
    for lam in (by_token, by_token[:, 0].contiguous()):
        agree(subject, subject(**{**given, "lam": lam}), _gae(given, plain(lam, "lam")), case.dtype)
    equal = subject(**{**given, "lam": torch.full_like(by_token, 0.875)})
    alike(subject, equal.advantages, subject(**{**given, "lam": 0.875}).advantages, case.dtype)


@attack("AD-09", _only_gae, scale=0.4)
@where_claimed
def each_output_has_its_lambda(subject: Subject, case: Batch) -> None:
    """Advantages by lam, returns by lam_value."""
    given = case.arguments(subject)
    out = subject(**{**given, "lam": case.lam / 2, "lam_value": 0.95})
    policy, value = (_gae(given, [x] * case.B) for x in (case.lam / 2, 0.95))
    agree(subject, out, replace(policy, returns=value.returns), case.dtype)


@attack("AD-10", _only_gae, scale=0.5)
@where_claimed
def a_turn_is_one_step(subject: Subject, case: Batch) -> None:
    """Against GAE over turns; masked tokens between two tokens of a turn do not end it."""
    given = replace(case, ends=False).arguments(subject)
    if "bootstrap" in subject.claims:
        given["bootstrap"] = case.noise((case.B,), 7, subject)
    ids = draw.integers((case.B, case.T), 4, case.seed + 2, subject.device).sort(1).values * 3 - 4
    out = subject(**given, turns=ids)
    n = {k: plain(x, k) for k, x in {**given, "turns": ids}.items() if isinstance(x, torch.Tensor)}
    m = n.get("mask", np.ones(n["rewards"].shape, bool))
    rows = [
        oracle.turn_gae_row(
            n["rewards"][i],
            n["values"][i],
            m[i],
            n["turns"][i],
            case.gamma,
            case.lam,
            n["bootstrap"][i] if "bootstrap" in n else 0.0,
        )
        for i in range(case.B)
    ]
    a, g = (np.stack([row[k] for row in rows]) for k in (0, 1))
    scale = np.maximum(1.0, np.abs(np.stack([a, g])).max((0, 2)))[:, None] * np.sqrt(case.T)
    agree(subject, out, Answer(a, g, scale), case.dtype)


@dataclass(frozen=True)
class Large:
    """So many tokens and a little more, in rows of `T`."""

    tokens: int
    T: int = 1024


@attack("AD-27", lambda s: st.just(Large(1 << 31)), scale=0.0, memory=96 << 30)
def the_last_row_of_a_large_batch_is_right(subject: Subject, case: Large) -> None:
    """Returns of the first and the last row, where offsets in 32 bits have wrapped."""
    if "kind:returns" not in subject.claims:
        return
    dtype = "bfloat16" if "bfloat16" in subject.dtypes else subject.dtypes[0]
    rows = case.tokens // case.T + 2
    rewards = torch.zeros(rows, case.T, dtype=getattr(torch, dtype), device=subject.device)
    for at in (0, -1):
        rewards[at] = draw.integers((case.T,), 3, at, subject.device).to(rewards.dtype)
    found = subject(rewards, kind="returns", gamma=0.5).returns
    for at in (0, -1):
        back = np.zeros(case.T + 1)
        for t in range(case.T - 1, -1, -1):
            back[t] = float(rewards[at, t]) + 0.5 * back[t + 1]
        close(subject, "advantages", found[at], back[:-1], "float32", scale=4.0)
