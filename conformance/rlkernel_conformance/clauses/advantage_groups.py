"""Attacks on the kinds of advantage@1 that compare a sequence with its group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import refused
from rlkernel_conformance.clauses.advantage_batches import (
    BY_SEQUENCE,
    GROUPED,
    OVER_TIME,
    Batch,
    K,
    alike,
    batches,
    exact,
    sliced,
    where_claimed,
)
from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import advantage as oracle
from rlkernel_core.spec.advantage_kinds import EPS_MODES

# Values whose naive mean is another number, or whose one-pass variance is negative (verl, NeMo-RL#1518, slime).
CONSTANTS = (12.3, 0.9, 0.7, 0.3, 30.1, 0.1, 1e5 + 0.1, -1e-20)
CENTRED = ("grpo", "dr_grpo", "rloo")


@attack("AD-11", lambda s: batches(s, BY_SEQUENCE, whiten=False), scale=0.35, examples=(Batch("grpo", whiten=False),))
@where_claimed
def a_constant_group_gets_exactly_zero(subject: Subject, case: Batch) -> None:
    """Many values in groups of 2 to 17 members, beside a group that is not constant."""
    sizes = [17, *range(2, 18)] if "group_ids" in subject.claims else [2 + case.seed % 16] * 9
    values = [CONSTANTS[(i + case.seed) % len(CONSTANTS)] for i in range(len(sizes))]
    x = torch.cat([torch.full((n,), v, dtype=torch.float64) for n, v in zip(sizes, values, strict=True)])
    x[: sizes[0]] = torch.arange(sizes[0])
    case = replace(case, B=len(x), levels=False)
    given = case.arguments(subject)
    x = x.clamp(max=6e4).to(given["rewards"].dtype).to(subject.device)  # what fp16 holds
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(subject.device)
    given["group"] = ids if "group_ids" in subject.claims else sizes[0]
    given["rewards"] = x[:, None].repeat(1, K) if case.kind == "gdpo" else x
    if case.kind == "gigpo":
        given["step_rewards"] = x
    a = subject(**given).advantages[sizes[0] :]
    wrong = (a != 0).nonzero().flatten()[:1]
    require(not len(wrong), f"a constant group gets {a[wrong].tolist()} for {x[sizes[0] :][wrong].tolist()}")


@attack("AD-12", lambda s: exact(s, BY_SEQUENCE, levels=False), scale=0.35, examples=(Batch("grpo"),))
@where_claimed
def a_group_of_one_gets_zero(subject: Subject, case: Batch) -> None:
    """Every sequence alone; one alone beside a group; and refused where the caller says so."""
    given = replace(case, whiten=False).arguments(subject)
    a = subject(**{**given, "group": 1}).advantages
    require(not bool(a.any() | a.isnan().any()), f"groups of one get {a.tolist()}")
    if "group_ids" in subject.claims:
        ids = torch.full((case.B,), 4, device=subject.device)
        ids[0] = 9
        a = subject(**{**given, "group": ids}).advantages
        require(float(a[0]) == 0.0, f"a group of one beside another gets {a[0].item()!r}")
        require(bool(a.isfinite().all()), "a group of one reaches another group")
    if "singleton_error" in subject.claims:
        whole = {**given, "group": case.B, "singleton": "error"}
        alike(subject, subject(**whole).advantages, subject(**{**whole, "singleton": "zero"}).advantages, case.dtype)
        refused(subject, "group", {**whole, "group": 1})


@attack("AD-13", lambda s: exact(s, whiten=False), scale=0.5, examples=(Batch("grpo"), Batch("gae"), Batch("dr_grpo")))
@where_claimed
def what_is_invalid_harms_no_other(subject: Subject, case: Batch) -> None:
    """NaN, infinities and rewards out of range in one sequence: it gets 0 and a flag, the rest what it would get."""
    if "singleton_zero" not in subject.claims:
        case = replace(case, B=3)  # one group of which two members stay
    given = replace(case, whiten=False).arguments(subject)
    x = given["rewards"]
    poisons: list[tuple[float, dict[str, Any]]] = [(torch.nan, {}), (torch.inf, {}), (-torch.inf, {})]
    if case.takes("valid_range") and "sequence_masks" in subject.claims:
        poisons.append((1e4, {"valid_range": (-100.0, 100.0)}))
    want = None
    if not isinstance(given.get("group"), int):
        want = subject(**sliced(given, slice(1, None))).advantages
    for poison, more in poisons:
        bad = {**given, "rewards": x.clone(), **more}
        bad["rewards"][0] = poison
        if "mask" in given and case.kind not in BY_SEQUENCE and not bool(given["mask"][0].any()):
            return
        out = subject(**bad)
        if "stats" in subject.claims:
            flags = out.stats.invalid.tolist()
            require(flags == [True] + [False] * (case.B - 1), f"{poison} in the first sequence is flagged as {flags}")
        if isinstance(given.get("group"), int) and "stats" in subject.claims and out.stats.group_count is not None:
            counted = int(out.stats.group_count.reshape(case.B, -1)[0, 0])
            require(counted == given["group"] - 1, f"{counted} members are counted beside one that is invalid")
        require(bool((out.advantages[0] == 0).all()), f"a reward of {poison} gets {out.advantages[0].tolist()}")
        require(bool(out.advantages.isfinite().all()), f"a reward of {poison} reaches {out.advantages.tolist()}")
        if want is not None:
            alike(subject, out.advantages[1:], want, case.dtype)


@attack("AD-14", lambda s: exact(s, ("dr_grpo", "grpo", "rloo")), scale=0.5, examples=(Batch("rloo", B=7),))
@where_claimed
def two_masks_are_two(subject: Subject, case: Batch) -> None:
    """Counted and not trained, trained and not counted."""
    given = case.arguments(subject)
    counted, trained = (draw.integers((case.B,), 2, case.seed + i, subject.device) == 1 for i in (20, 21))
    if "singleton_zero" not in subject.claims:
        counted[:] = True
    found = subject(**given, in_stats=counted, in_loss=trained).advantages
    x, member = plain(given["rewards"], "rewards"), plain(counted, "in_stats")
    group = given["group"]
    ids = plain(group, "group") if isinstance(group, Tensor) else np.arange(case.B) // group
    want = np.zeros(case.B)
    for i in np.flatnonzero(plain(trained, "in_loss")):
        mine = x[(ids == ids[i]) & member]
        if len(mine) < 2:
            continue
        mean, var = oracle.mean_var(mine, case.ddof)
        var = var if np.ptp(mine) else 0.0
        if case.kind == "rloo" and member[i]:
            want[i] = x[i] - (mine.sum() - x[i]) / (len(mine) - 1)
        elif case.kind in {"dr_grpo", "rloo"}:  # who is not counted is compared with all who are
            want[i] = x[i] - mean
        elif var > 0:
            want[i] = (x[i] - mean) * oracle.factor(var, case.eps, case.eps_mode)
    close(subject, "advantages", found, want, case.dtype, scale=np.maximum(1.0, np.abs(want)))


@attack("AD-15", lambda s: exact(s, GROUPED, levels=False), scale=0.5)
@where_claimed
def ids_are_names(subject: Subject, case: Batch) -> None:
    """Sequences permuted, ids renamed in another order."""
    given = case.arguments(subject)
    order = torch.randperm(case.B, generator=torch.Generator().manual_seed(case.seed)).to(subject.device)
    moved = sliced(given, order)
    moved["group"] = -5 * moved["group"] + 3
    alike(subject, subject(**moved).advantages, subject(**given).advantages[order], case.dtype)


@attack("AD-16", lambda s: exact(s, CENTRED), scale=0.4, examples=(Batch("grpo", B=6, eps=1e-6),))
@where_claimed
def offsets_cost_nothing(subject: Subject, case: Batch) -> None:
    """Multiples of 1/32 plus 2^17, which float32 holds: the same advantages."""
    wide = next((d for d in ("float32", "float64") if d in subject.dtypes), None)
    if wide is None:
        return
    given = replace(case, dtype=wide).arguments(subject)
    x = (given["rewards"] * 32).round() / 32
    want = subject(**{**given, "rewards": x}).advantages
    for offset in (2.0**17, -(2.0**17)):
        alike(subject, subject(**{**given, "rewards": x + offset}).advantages, want, wide)


_WHITENED = ("reinforce_pp", "returns", "dr_grpo", "grpo", "rloo")


@attack(
    "AD-17", lambda s: exact(s, _WHITENED, whiten=True), scale=0.4, examples=(Batch("returns"), Batch("reinforce_pp"))
)
@where_claimed
def whitened_advantages_have_mean_0_and_variance_1(subject: Subject, case: Batch) -> None:
    """Over the valid tokens or sequences; deferred, the moments give the same; a constant batch is exactly 0."""
    given = {**case.arguments(subject), "whiten": "global", "whiten_eps": 0.0}
    deferred = "stats" in subject.claims
    out, later = subject(**given), subject(**{**given, "whiten": "defer" if deferred else "none"})
    a = plain(out.advantages, "advantages")
    valid = plain(given["mask"], "mask") if "mask" in given else np.ones(a.shape, bool)
    values = a[valid]
    if len(values) > 1 and np.ptp(plain(later.advantages, "advantages")[valid]) > 1e-3:
        require(abs(values.mean()) < 1e-4, f"the mean is {values.mean()!r}")
        require(abs(values.var(ddof=1) - 1) < 1e-3, f"the variance is {values.var(ddof=1)!r}")
        if deferred:
            applied = (later.advantages - later.stats.mean) * later.stats.rstd
            applied = applied if "mask" not in given else torch.where(given["mask"], applied, 0.0)
            alike(subject, out.advantages, applied, case.dtype)
        raw = plain(later.advantages, "advantages")
        for mode in subject.choices("whiten_eps_mode", EPS_MODES, "var_add"):
            for ddof in (1, 0) if "whiten_ddof" in subject.claims else (1,):
                how = {"whiten_eps": 0.05, "whiten_eps_mode": mode, "whiten_ddof": ddof}
                mean, var = oracle.mean_var(raw[valid], ddof)
                want = np.where(valid, (raw - mean) * oracle.factor(var, 0.05, mode), 0.0)
                found = subject(**{**given, **how}).advantages
                close(subject, "advantages", found, want, case.dtype, scale=4 * np.maximum(1.0, np.abs(want).max()))
    require(not bool(a[~valid].any()), "a masked advantage is not 0")
    if case.kind in OVER_TIME:
        for value in (30.1, 0.1, 12.3, -7e4):
            x = torch.full_like(given["rewards"], value)
            ends = {k: v for k, v in given.items() if k not in {"bootstrap", "dones", "whiten_eps"}}
            a = subject(**{**ends, "rewards": x, "gamma": 0.0}).advantages
            require(not bool(a.any()), f"a batch of {value} whitens to {a.abs().max().item()!r}")
