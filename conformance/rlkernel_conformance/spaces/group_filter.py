"""The calls of group_filter@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as definition

# Groups of two: both right, both wrong, one of each; in quarters, so that means and thresholds are met exactly.
TABLES: Mapping[str, tuple[float, ...]] = {
    "right or wrong": (1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),
    "quarters": (0.25, 0.75, 0.5, 0.5, 0.25, 0.25, 1.0, 0.75, 0.0, 0.25, 0.75, 0.75),
    "negative zero": (0.0, -0.0, -0.0, -0.0, 0.0, 0.0, -0.0, 0.0, 1.0, -0.0, 0.0, 0.0),
    "constant": (30.125,) * 12,
    "far": (4096.0, 4096.0, 4096.0, 4128.0, 4096.0, 4096.0, 4160.0, 4096.0, 4096.0, 4096.0, 4096.0, 4128.0),
    "not finite": (1.0, np.nan, 1.0, 0.0, np.inf, 1.0, -np.inf, np.nan, 0.0, 1.0, 0.5, 0.5),
}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, groups and values."""
    return {
        "B": (12, 2, 6, 1, 0, 480),
        "K": (0, 1, 3),
        "values": tuple(TABLES),
        "dtype": (*subject.dtypes, *(("int32", "int64", "bool") if subject.takes_any_dtype else ())),
        "group": claimed(subject, {2: "", 1: "", "all": "", 6: "", **dict.fromkeys(IDS, "group_ids")}),
        "rule": claimed(subject, {"std": "rule:std", "mean": "rule:mean", "distinct": "rule:distinct"}),
        # A std of exactly that, of rewards 0 and 1 and of 0.25 and 0.75 with ddof = 0; means of exactly low and high.
        "threshold": (0.0, 0.5, 0.25),
        "bounds": ((0.0, 1.0), (0.25, 0.75), (-1.0, 0.5), (0.5, 2.0), (4096.0, 4112.0)),
        "ddof": (1, 0, 2),
        "valid": claimed(subject, {"": "", "some": "valid", "none": "valid", "one": "valid"}),
        "min_members": (1, 2, 3),
        "combine": ("any", "all"),
    }


IDS = ("in order", "mixed", "negative", "large", "of many sizes")
RULES = (
    Rule(("B", "group"), lambda B, group: not isinstance(group, int) or B % group == 0),
    Rule(("rule", "threshold"), lambda rule, threshold: rule == "std" or threshold == 0),
    Rule(("rule", "ddof"), lambda rule, ddof: rule == "std" or ddof == 1),
    Rule(("rule", "bounds"), lambda rule, bounds: rule == "mean" or bounds == (0.0, 1.0)),
)


def ids_of(point: Point) -> Tensor:
    """Group ids [B] int64, two of each or fewer and more."""
    B = point["B"]
    ids = torch.arange(B) // 2
    if point["group"] == "mixed":
        return ids[torch.randperm(B, generator=point.generator(2))]
    if point["group"] == "negative":
        return -1 - ids
    if point["group"] == "large":
        return ids * 7 + 30_000
    return (torch.arange(B).float() + 1).log2().long() if point["group"] == "of many sizes" else ids


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    B, K, dtype = point["B"], point["K"], getattr(torch, point["dtype"])
    shape = (B, K) if K else (B,)
    table = torch.tensor(TABLES[point["values"]], dtype=torch.float64)
    place = torch.arange(B * max(1, K)).view(shape)
    x = table[(place + point.seed) % len(table)]
    x = x.to(dtype) if dtype.is_floating_point else (4 * x.nan_to_num(0, 1, -1)).to(dtype)
    group = point["group"]
    given: Given = {
        "rewards": x,
        "group": ids_of(point) if group in IDS else max(1, B) if group == "all" else group,
        "rule": point["rule"],
        "min_members": point["min_members"],
        "combine": point["combine"],
    }
    if point["rule"] == "std":
        given |= {"threshold": point["threshold"], "ddof": point["ddof"]}
    if point["rule"] == "mean":
        given |= dict(zip(("low", "high"), point["bounds"], strict=True))
    if point["valid"]:
        valid = torch.rand(B, generator=point.generator(3)) < {"some": 0.7, "none": 0.0, "one": 0.0}[point["valid"]]
        valid[:1] |= point["valid"] == "one"
        given["valid"] = valid
    return {n: v.to(subject.device) if isinstance(v, Tensor) else v for n, v in given.items()}


def expected(_: Subject, point: Point, given: Given, __: Mapping[str, Any]) -> dict[str, Want]:
    """What is kept, and how much."""
    rewards, group = plain(given["rewards"], "rewards").astype(np.float64), given["group"]
    ids = np.arange(len(rewards)) // group if isinstance(group, int) else plain(group, "group")
    valid = plain(given["valid"], "valid") if "valid" in given else None
    numbers = {n: given[n] for n in ("threshold", "low", "high", "ddof") if n in given}
    options = {"valid": valid, "least": given["min_members"], "combine": given["combine"]}
    keep, group_keep, _near = definition.group_filter(rewards, ids, given["rule"], **options, **numbers)
    return {
        "keep": Want(keep, 0.0, "bool"),
        "group_keep": Want(group_keep, 0.0, "bool"),
        "kept_groups": Want(len(np.unique(ids[group_keep])), 0.0, "int64"),
        "kept_sequences": Want(keep.sum(), 0.0, "int64"),
        "groups": Want(len(np.unique(ids)), 0.0, "int64"),
    }


SPACE = Space(
    "group_filter",
    factors,
    arguments,
    expected,
    {
        "rewards": Argument(),
        "group": Argument(SAME_VALUES, ("int64", "int32", "int16"), Rule(("group",), lambda g: g in IDS)),
        "valid": Argument(given=Rule(("valid",), bool)),
    },
    RULES,
    lambda subject: [
        {"B": 130, "group": 65},
        {"B": 5000, "group": 1000},
        {"B": 8194, "group": 2},
        {"B": 1 << 17, "group": 1 << 13},
        *({"B": B, "group": "mixed"} for B in (4098,) if "group_ids" in subject.claims),
    ],
    constants=True,
)
