"""Attacks on group_filter@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import plain, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as oracle

NEAR = 1e-5  # a std or mean closer to its threshold than this may fall on either side
CONSTANTS = ((8, 0.7), (7, 0.9), (12, 12.3), (5, 0.1), (9, 1e5 + 0.1), (3, -1e-20), (16, 30.1))


@dataclass(frozen=True)
class Groups:
    """Rewards [B], or [B, K], in groups."""

    groups: int
    size: int  # members of a group; of ids, on average
    seed: int
    rule: str
    K: int = 0  # several rewards per sequence where positive
    ids: bool = True
    dtype: str = "float32"
    valid: bool = False
    least: int = 1
    combine: str = "any"
    threshold: float = 0.0
    inside: tuple[float, float] = (0.0, 1.0)
    ddof: int = 1
    levels: int = 5  # how many different rewards there are, 0 to 1

    @property
    def B(self) -> int:  # noqa: N802  the legend's name
        """Sequences."""
        return self.groups * self.size

    def names(self, subject: Subject) -> Tensor:
        """Ids of the sequences: arbitrary, unsorted numbers; or adjacent members where ids are not claimed."""
        if not (self.ids and "group_ids" in subject.claims):
            return torch.arange(self.B, device=subject.device) // self.size
        return 7919 * draw.integers((self.B,), self.groups, self.seed + 5, subject.device) - 12345

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call, without what the subject does not claim."""
        shape = (self.B, self.K) if self.K else (self.B,)
        levels = draw.integers(shape, self.levels, self.seed, subject.device)
        x = (levels / max(1, self.levels - 1)).to(getattr(torch, self.dtype))
        given: dict[str, Any] = {"rewards": x, "rule": self.rule, "min_members": self.least, "combine": self.combine}
        given["group"] = self.names(subject) if self.ids and "group_ids" in subject.claims else self.size
        if self.rule == "std":
            given |= {"threshold": self.threshold, "ddof": self.ddof}
        elif self.rule == "mean":
            given |= {"low": self.inside[0], "high": self.inside[1]}
        if self.valid and "valid" in subject.claims:
            given["valid"] = draw.integers((self.B,), 10, self.seed + 3, subject.device) < 7
        return given


def judged(subject: Subject, case: Groups, given: dict[str, Any], out: Any) -> None:
    """`out` is what a loop over groups in float64 gives, where no threshold is near."""
    numbers = {n: given[n] for n in ("threshold", "low", "high", "ddof") if n in given}
    valid = plain(given["valid"], "valid") if "valid" in given else None
    names = plain(case.names(subject), "group")
    more = {"valid": valid, "least": case.least, "combine": case.combine}
    keep, group_keep, near = oracle.group_filter(
        plain(given["rewards"], "rewards"), names, case.rule, **more, **numbers
    )
    exact = case.rule == "std" and case.threshold == 0.0  # a constant group has a std of exactly 0
    clear = (near > NEAR) | exact | (case.rule == "distinct")
    for name, want in (("keep", keep), ("group_keep", group_keep)):
        have = plain(getattr(out, name), name)
        require(have.shape == want.shape and have.dtype == bool, f"{name} is {have.dtype}{list(have.shape)}")
        require(bool((have == want)[clear].all()), f"{name} is {have.tolist()}, expected {want.tolist()}")


def cases(subject: Subject) -> st.SearchStrategy[Groups]:
    """Every claimed dtype and rule."""
    rules = sorted(f.removeprefix("rule:") for f in subject.claims if f.startswith("rule:"))
    return st.builds(
        Groups,
        groups=st.integers(1, 5),
        size=st.integers(1, 6),
        seed=st.integers(0, 2**20),
        rule=st.sampled_from(rules),
        K=st.sampled_from((0, 0, 2, 3)),
        ids=st.booleans(),
        dtype=st.sampled_from(subject.dtypes),
        valid=st.booleans(),
        least=st.integers(1, 3),
        combine=st.sampled_from(("any", "all")),
        threshold=st.sampled_from((0.0, 0.2, 0.3, 0.4, 0.6)),
        inside=st.sampled_from(((0.0, 1.0), (0.3, 0.7), (-1.0, 0.45))),
        ddof=st.sampled_from((1, 0) if "ddof" in subject.claims else (1,)),
        levels=st.sampled_from((5, 2, 3)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Groups]:
    """A few members per group, any spread passing: for laws that compare two calls."""
    return cases(subject).map(
        lambda c: replace(c, dtype=subject.dtypes[0], threshold=0.0, inside=(0.0, 1.0), size=c.size + 1, least=1)
    )


@attack("GF-01", cases, examples=(Groups(4, 2, 1, "std", threshold=0.6, levels=2, ids=False),))
def the_loop_over_groups(subject: Subject, case: Groups) -> None:
    """Every rule, ragged and uniform groups, invalid members, several rewards."""
    if f"rule:{case.rule}" not in subject.claims or case.dtype not in subject.dtypes:
        return
    given = case.arguments(subject)
    judged(subject, case, given, subject(**given))


@attack("GF-02", lambda s: cases(s).map(lambda c: replace(c, ids=False, K=0, least=1, threshold=0.0)), scale=0.5)
def constant_groups_go(subject: Subject, case: Groups) -> None:
    """Values whose naive mean is another number."""
    if case.rule == "mean":
        case = replace(case, rule=next((r for r in ("std", "distinct") if f"rule:{r}" in subject.claims), "mean"))
    given = replace(case, valid=False).arguments(subject)
    for size, value in CONSTANTS if case.rule != "mean" else ():
        x = torch.full((3 * size,), value, dtype=torch.float64).to(given["rewards"].dtype).to(subject.device)
        out = subject(**{**given, "rewards": x, "group": size})
        require(not bool(out.group_keep.any()), f"a group of {size} times {value} is kept")


@attack("GF-03", plain_cases, scale=0.5)
def rewards_are_judged_one_by_one(subject: Subject, case: Groups) -> None:
    """Two rewards that always sum to 1 (SkyRL#2104); all of several is each of them."""
    if case.rule == "mean":
        case = replace(case, rule=next((r for r in ("std", "distinct") if f"rule:{r}" in subject.claims), "mean"))
    given = replace(case, K=0, combine="any", valid=False).arguments(subject)
    x = given.pop("rewards")
    both = torch.stack([x, 1 - x], 1)
    one = plain(subject(x, **given).group_keep, "group_keep")
    for combine in ("any", "all"):
        out = plain(subject(both, **{**given, "combine": combine}).group_keep, "group_keep")
        require(bool((out == one).all()), f"{combine} of x and 1 - x is {out.tolist()}, of x {one.tolist()}")


@attack("GF-04", plain_cases)
def ids_are_names(subject: Subject, case: Groups) -> None:
    """Sequences permuted, ids renamed in another order."""
    case = replace(case, ids=True)
    given = case.arguments(subject)
    order = torch.randperm(case.B, generator=torch.Generator().manual_seed(case.seed)).to(subject.device)
    moved = {k: v[order] if isinstance(v, Tensor) else v for k, v in given.items()}
    moved["group"] = -5 * moved["group"] + 3
    want, have = subject(**given), subject(**moved)
    for name in ("keep", "group_keep"):
        same_bits(name, getattr(have, name), getattr(want, name)[order], "after a permutation")


@attack("GF-05", plain_cases)
def what_is_invalid_harms_no_other(subject: Subject, case: Groups) -> None:
    """NaN, infinities, and anything at all in members that are not valid."""
    given = case.arguments(subject)
    bad = draw.integers(tuple(given["rewards"].shape), 10, case.seed + 7, subject.device) < 2
    for poison in (torch.nan, torch.inf, -torch.inf):
        x = torch.where(bad, poison, given["rewards"])
        if "valid" in given:
            out_of_it = ~given["valid"] if case.K == 0 else ~given["valid"][:, None]
            x = torch.where(out_of_it, -7.0, x)
        changed = {**given, "rewards": x}
        judged(subject, case, changed, subject(**changed))


@attack("GF-06", cases)
def the_counts_are_exact(subject: Subject, case: Groups) -> None:
    """How many groups there are and are kept, and how many sequences."""
    given = case.arguments(subject)
    out = subject(**given)
    names, kept = plain(case.names(subject), "group"), plain(out.group_keep, "group_keep")
    want = {
        "groups": len(np.unique(names)),
        "kept_groups": len(np.unique(names[kept])),
        "kept_sequences": int(plain(out.keep, "keep").sum()),
    }
    for name, number in want.items():
        have = plain(getattr(out, name), name)
        require(have.shape == () and int(have) == number, f"{name} is {have.tolist()}, expected {number}")


@attack("GF-07", cases, scale=0.3)
def no_sequences_make_no_groups(subject: Subject, case: Groups) -> None:
    """B = 0."""
    given = case.arguments(subject)
    out = subject(**{k: v[:0] if isinstance(v, Tensor) else v for k, v in given.items()})
    require(out.keep.shape == (0,) and out.group_keep.shape == (0,), "no sequences are kept")
    counts = [int(x) for x in (out.groups, out.kept_groups, out.kept_sequences)]
    require(counts == [0, 0, 0], f"no sequences give the counts {counts}")


@attack("GF-11", plain_cases)
def a_group_is_the_same_in_any_batch(subject: Subject, case: Groups) -> None:
    """Beside forty copies of itself, at the end."""
    case = replace(case, ids=False)
    given = case.arguments(subject)
    many = {k: v.repeat(40, *[1] * (v.dim() - 1)) if isinstance(v, Tensor) else v for k, v in given.items()}
    want, have = subject(**given), subject(**many)
    for name in ("keep", "group_keep"):
        same_bits(name, getattr(have, name)[-case.B :], getattr(want, name), "at the end of a large batch")


def with_nan(subject: Subject, case: Groups) -> dict[str, Any]:
    """The call with a reward that is NaN."""
    given = case.arguments(subject)
    given["rewards"].view(-1)[0] = torch.nan
    return given


derive("group_filter", with_nan, inputs_untouched=plain_cases)
derive("group_filter", lambda s, c: c.arguments(s), determinism=cases, capture=plain_cases)
