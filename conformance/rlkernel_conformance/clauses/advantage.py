"""Attacks on advantage@1 that hold for every kind; those of one family stand in the modules imported here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.clauses import advantage_groups, advantage_steps
from rlkernel_conformance.clauses.advantage_batches import (
    BY_SEQUENCE,
    OVER_TIME,
    TOKENS,
    Batch,
    agree,
    alike,
    batches,
    exact,
    expected,
    sliced,
    where_claimed,
)
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import require, same_bits
from rlkernel_conformance.ranks import on_shares
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.advantage_kinds import KINDS

__all__ = ["advantage_groups", "advantage_steps"]
EACH = tuple(Batch(kind, seed=3) for kind in KINDS)  # every kind at least once
# Advantages that depend on more than a sequence and its group.
OF_THE_BATCH = frozenset(k for k in KINDS if KINDS[k].whiten == "global") | {"gpg"}
ASKING = (
    *(Batch(kind, seed=6, option="weights") for kind in ("gae", "grpo")),
    Batch("grpo", B=7, seed=6, option="others"),
    Batch("dr_grpo", B=7, seed=6, option="others' mean"),
    Batch("gae", seed=6, option="length_adaptive"),
    Batch("grpo", seed=6, option="by token"),
    Batch("returns", seed=6, ends=False, option="masked steps"),
    Batch("gae", seed=6, option="carry"),
    *(Batch(kind, B=7, seed=6, option="alone") for kind in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl")),
    *(Batch(kind, seed=6, option="unclipped") for kind in ("vtrace", "retrace")),
    Batch("grpo", B=7, seed=6, option="out of range"),
)


@attack(
    "AD-01",
    batches,
    scale=0.35,
    examples=(*EACH, *ASKING, Batch("grpo", seed=4, eps=0.05), Batch("gae", seed=5, T=200)),
)
@where_claimed
def every_kind_is_its_definition(subject: Subject, case: Batch) -> None:
    """Advantages and returns against loops over rows and groups in float64."""
    given = case.arguments(subject)
    out = subject(**given)
    agree(subject, out, expected(given), case.dtype)
    wide = torch.float64 if case.dtype == "float64" else torch.float32
    require(out.advantages.dtype == wide, f"advantages of {case.dtype} are {out.advantages.dtype}")


def _layouts(subject: Subject, case: Batch) -> tuple[dict[str, dict[str, Any]], Tensor]:
    """One ragged batch in every claimed layout, and its valid tokens."""
    given = case.arguments(subject)
    lengths = draw.integers((case.B,), case.T + 1, case.seed + 30, subject.device)
    keep = torch.arange(case.T, device=lengths.device) < lengths[:, None]
    given = {k: x for k, x in given.items() if k not in {"mask", "lengths"}}
    if case.kind in BY_SEQUENCE and case.kind != "gdpo":  # rewards per token, summed over valid ones
        given["rewards"] = case.noise((case.B, case.T), 31, subject)
    calls: dict[str, dict[str, Any]] = {}
    if "mask" in subject.claims:
        calls["mask"] = {**given, "mask": keep}
    if "lengths" in subject.claims:
        calls["lengths"] = {**given, "lengths": lengths}
    if "packed" in subject.claims and case.kind != "otb":
        flat = {
            k: x[keep] if k in TOKENS and isinstance(x, Tensor) and tuple(x.shape) == (case.B, case.T) else x
            for k, x in given.items()
        }
        flat["cu_seqlens"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        calls["packed"] = {**flat, **({} if case.kind == "gdpo" else {"reward_level": "token"})}
    return calls, keep


@attack("AD-02", exact, scale=0.4, examples=(Batch("gae", seed=1), Batch("grpo", seed=1)))
@where_claimed
def layouts_agree(subject: Subject, case: Batch) -> None:
    """Ragged sequences by mask, by lengths and packed; some of them empty. Rewards by token are summed per sequence."""
    calls, keep = _layouts(subject, case)
    if case.kind in BY_SEQUENCE and case.kind != "gdpo" and "mask" in calls:
        by_token = calls["mask"]["rewards"]
        calls["summed"] = {**calls["mask"], "rewards": torch.where(keep, by_token, 0).sum(1)}
    found = {}
    for layout, given in calls.items():
        a = subject(**given).advantages
        found[layout] = a if a.dim() == 1 else a[keep]
        require(a.dim() == 1 or bool((a[~keep] == 0).all()), f"padding has an advantage by {layout}")
    first, *others = found.values() or [None]
    for a in others:
        alike(subject, a, first, case.dtype)


@attack("AD-04", exact, scale=0.35, examples=(Batch("returns", seed=1),))
@where_claimed
def masked_positions_may_hold_anything(subject: Subject, case: Batch) -> None:
    """NaN, infinities and huge numbers in every token-level argument, any turn, any done."""
    given = case.arguments(subject)
    mask = draw.integers((case.B, case.T), 10, case.seed, subject.device) < 7
    given = {**{k: x for k, x in given.items() if k != "lengths"}, "mask": mask}
    if case.kind in BY_SEQUENCE and case.kind != "gdpo":
        given["rewards"] = case.noise((case.B, case.T), 31, subject)
    if case.kind == "gae" and "turns" in subject.claims:
        given["turns"] = draw.integers((case.B, case.T), 4, case.seed + 2, subject.device).sort(1).values
    tokens = [k for k in TOKENS if k != "mask" and k in given and tuple(given[k].shape) == (case.B, case.T)]
    want = subject(**given)
    for poison in (torch.nan, torch.inf, -torch.inf, 6e4):
        held = {"dones": True, "turns": 2**60}
        bad = {k: torch.where(mask, given[k], held.get(k, poison)) for k in tokens}
        out = subject(**{**given, **bad})
        alike(subject, out.advantages, want.advantages, case.dtype)
        if "stats" in subject.claims:
            require(not bool(out.stats.invalid.any()), f"a masked {poison} makes a sequence invalid")
        require(out.advantages.dim() == 1 or bool((out.advantages[~mask] == 0).all()), "a masked advantage is not 0")


@attack("AD-18", lambda s: exact(s, ("reinforce_pp", "gpg", "grpo", "gdpo"), ends=False), scale=0.25)
@where_claimed
def ranks_agree_with_one(subject: Subject, case: Batch) -> None:
    """Whole groups on two and three ranks, one of them empty, against all of them on one rank."""
    case = replace(case, B=9)
    given = case.arguments(subject)
    if case.kind == "grpo":
        if "scale:batch" not in subject.claims:
            return
        given["scale"] = "batch"
    if "group" in given:
        given["group"] = 3
    want = subject(**given).advantages
    weights = given.pop("reward_weights", None)  # of rewards, not of sequences
    whole = {} if weights is None else {"reward_weights": weights}
    for bounds in ((0, 3, 9), (0, 9, 9), (0, 0, 3, 9)):
        found = torch.cat([out.advantages for out in on_shares(subject, given, bounds, **whole)])
        alike(subject, found, want, case.dtype)


@attack("AD-19", lambda s: batches(s, dtype="float32"), scale=0.3, examples=(Batch("returns"), Batch("dr_grpo")))
@where_claimed
def narrow_dtypes_give_the_result_of_their_values(subject: Subject, case: Batch) -> None:
    """bf16, fp16, integers and bools against float32 of the same values."""
    given = case.arguments(subject)
    names = [k for k, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()]
    for dtype in ("bfloat16", "float16"):
        if dtype in subject.dtypes:
            low = {k: given[k].to(getattr(torch, dtype)) for k in names}
            out = subject(**{**given, **low})
            require(out.advantages.dtype == torch.float32, f"advantages of {dtype} are {out.advantages.dtype}")
            wide = subject(**{**given, **{k: x.float() for k, x in low.items()}})
            alike(subject, out.advantages, wide.advantages, "float32")
    if any(not i.requires.dtypes for i in subject.impls):
        whole = draw.integers(tuple(given["rewards"].shape), 2, case.seed, subject.device)
        want = subject(**{**given, "rewards": whole.float()}).advantages
        for rewards in (whole, whole.bool()):
            alike(subject, subject(**{**given, "rewards": rewards}).advantages, want, "float32")


@attack("AD-20", exact, scale=0.35)
@where_claimed
def results_are_constants(subject: Subject, case: Batch) -> None:
    """No result requires grad, though every floating argument does."""
    given = case.arguments(subject)
    wanted = {
        k: x.clone().requires_grad_() for k, x in given.items() if isinstance(x, Tensor) and x.is_floating_point()
    }
    for name, x in leaves(subject(**{**given, **wanted})).items():
        require(not x.requires_grad, f"{name} requires grad")


@attack("AD-22", exact, scale=0.35, examples=(Batch("gae"), Batch("grpo")))
@where_claimed
def nothing_to_do_is_done(subject: Subject, case: Batch) -> None:
    """No sequences, no time, no valid token, no finite reward."""
    given = case.arguments(subject)
    a = subject(**given).advantages
    none = subject(**sliced(given, slice(0, 0))).advantages
    require(none.shape == a[:0].shape, f"no sequences give {list(none.shape)}")
    empty = subject(**{**given, "rewards": torch.full_like(given["rewards"], torch.nan)})
    calls = [empty.advantages]
    if a.dim() == 2:
        cut = {k: x[:, :0] if isinstance(x, Tensor) and x.dim() == 2 else x for k, x in given.items()}
        require(subject(**cut).advantages.shape == (case.B, 0), "no time gives an advantage")
        if "mask" in given:
            calls.append(subject(**{**given, "mask": torch.zeros_like(given["mask"])}).advantages)
            require(calls[-1].shape == a.shape, f"masked rows give {list(calls[-1].shape)}")
    for found in calls:
        where = given.get("mask") if found.dim() == 2 and found is empty.advantages else None
        kept = found if where is None else torch.where(where.any(1, keepdim=True), found, 0.0)
        require(not bool(kept.any() | kept.isnan().any()), f"nothing valid gives {found.tolist()}")


def _same_rows(subject: Subject, given: dict[str, Any], want: Tensor, at: Any, when: str) -> None:
    same_bits("advantages", subject(**sliced(given, at)).advantages, want[at], when)


@attack("AD-24", lambda s: exact(s, tuple(k for k in KINDS if k not in OF_THE_BATCH)), scale=0.4)
@where_claimed
def a_group_is_the_same_in_any_batch(subject: Subject, case: Batch) -> None:
    """Bit by bit: alone, at the end of a large batch, padded further, packed."""
    case = replace(case, B=6)
    given = case.arguments(subject)
    if "group" in given:
        given["group"] = 3
    want = subject(**given).advantages
    _same_rows(subject, given, want, slice(3, 6), "without the other group")
    if case.kind in OVER_TIME:
        _same_rows(subject, given, want, slice(1, 2), "alone")
    repeated = {k: x.repeat(40, *[1] * (x.dim() - 1)) if isinstance(x, Tensor) else x for k, x in given.items()}
    same_bits("advantages", subject(**repeated).advantages[-6:], want, "at the end of a large batch")
    if "group" in given and "group_ids" in subject.claims:
        ids = torch.arange(6, device=subject.device) // 3
        same_bits("advantages", subject(**{**given, "group": 5 - ids}).advantages, want, "with groups by ids")
    if case.kind in OVER_TIME:
        calls, keep = _layouts(subject, case)
        rows = [subject(**c).advantages for c in calls.values()]
        rows = [a if a.dim() == 1 else a[keep] for a in rows]
        for a in rows[1:]:
            same_bits("advantages", a, rows[0], "in another layout")


derive(
    "advantage",
    lambda s, c: c.arguments(s),
    inputs_untouched=exact,
    determinism=batches,
    capture=exact,
    scale=0.4,
)
