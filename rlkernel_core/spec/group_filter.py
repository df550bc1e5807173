"""group_filter@1: which groups carry a signal (dynamic sampling, arXiv:2503.14476), decided on the device.

    rule "std"       std of the valid members > threshold
    rule "mean"      low < mean < high        (0 < share of correct answers < 1)
    rule "distinct"  at least two different valid rewards

Several rewards [B, K] are judged one by one and joined by `combine`: filtering on their sum would drop groups whose
signals cancel (SkyRL#2104). A member that is not finite or not in `valid` counts for nothing.

Legend: B sequences · K rewards. Imports no torch.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.form import BATCH_INVARIANT, CAPTURABLE, DETERMINISTIC, Clause, Feature, OpCall, OpSpec

if TYPE_CHECKING:
    from torch import Tensor

RULES = ("std", "mean", "distinct")


@dataclass(frozen=True)
class GroupFilterResult:
    """What group_filter returns."""

    keep: Tensor  # [B] bool: the sequence is a valid member of a group that is kept
    group_keep: Tensor  # [B] bool: its group is kept, whatever the sequence itself is
    kept_groups: Tensor  # [] int64
    kept_sequences: Tensor  # [] int64: how many are in `keep`
    groups: Tensor  # [] int64: how many groups there are


@dataclass(slots=True, eq=False)
class GroupFilterCall(OpCall[GroupFilterResult]):
    """Which groups of sequences to train on.

    Args:
        rewards: [B] or [B, K]; any real dtype.
        group: groups of the sequences: a size, or ids [B] in any order.
        rule: see above; `threshold` and `ddof` belong to "std", `low` and `high` to "mean".
        threshold: std must be above it. A constant group has a std of exactly 0.
        low: mean must be above it.
        high: mean must be below it.
        ddof: of the std.
        valid: [B] bool, members that count.
        min_members: a group with fewer valid members is not kept (complete groups: the group size).
        combine: "any" or "all" of the K rewards must pass.

    Raises:
        ArgumentError: wrong sizes, dtypes, numbers or choices.
    """

    rewards: Tensor
    _: KW_ONLY
    group: int | Tensor
    rule: str = "std"
    threshold: float = 0.0
    low: float = 0.0
    high: float = 1.0
    ddof: int = 1
    valid: Tensor | None = None
    min_members: int = 1
    combine: str = "any"


def check(call: GroupFilterCall) -> None:
    """Metadata checks shared by all implementations."""
    rewards, valid = call.rewards, call.valid
    checks.tensor("rewards", rewards, ndim=(1, 2), kind="real")
    check_group(call.group, rewards.shape[0])
    checks.choice("rule", call.rule, RULES)
    checks.choice("combine", call.combine, ("any", "all"))
    checks.number("threshold", call.threshold, at_least=0.0)
    if checks.number("low", call.low) >= checks.number("high", call.high):
        raise ArgumentError("low", call.low, f"must be below high = {call.high}", "Pass low < high.")
    checks.integer("ddof", call.ddof, at_least=0)
    checks.integer("min_members", call.min_members, at_least=1)
    of = "the sequences [B]"
    checks.aligned("valid", valid, rewards.shape[:1], of, kind="bool", beside=rewards, where="rewards")
    if not isinstance(call.group, int):
        checks.same_device("group", call.group, rewards, "rewards")


def check_group(group: Any, sequences: int) -> None:
    """Groups are a size that divides the number of sequences, or one id per sequence."""
    if checks.is_tensor(group):
        checks.shape("group", checks.tensor("group", group, ndim=1, kind="integer"), (sequences,), "the sequences [B]")
        return
    size = checks.integer("group", group, at_least=1)
    if sequences % size:
        raise ArgumentError(
            "group",
            size,
            f"must divide the number of sequences, {sequences}",
            "Pass group ids [B] for groups of different sizes.",
        )


SPEC = OpSpec(
    name="group_filter",
    record=GroupFilterCall,
    summary="which groups of rollouts carry a signal",
    primary="rewards",
    one_of=("rule",),
    check=check,
    needed=lambda call: {"group_ids": checks.is_tensor(call.group)},
    features=(
        DETERMINISTIC,
        BATCH_INVARIANT,
        CAPTURABLE,
        Feature("rule:std", "std above a threshold"),
        Feature("rule:mean", "mean inside an interval"),
        Feature("rule:distinct", "at least two different rewards"),
        Feature("ddof", "another ddof of the std than 1"),
        Feature("group_ids", "groups by arbitrary ids, not by size"),
        Feature("valid", "members that do not count"),
    ),
    clauses=(
        Clause("GF-01", "matches the definition", "keep is what a loop over groups in float64 gives", "law"),
        Clause("GF-02", "constant groups go", "a group of one value, of any size, never has std > 0", "accuracy"),
        Clause("GF-03", "rewards one by one", "signals that cancel in the sum still keep a group", "law"),
        Clause("GF-04", "ids are names", "permuting sequences permutes keep", "invariance", "group_ids"),
        Clause("GF-05", "invalid is not contagious", "NaN and invalid members count for nothing", "law"),
        Clause("GF-06", "counts", "kept_groups, kept_sequences and groups are exact", "accuracy"),
        Clause("GF-07", "nothing to do", "B = 0 gives no group", "accuracy"),
        Clause("GF-08", "bad arguments", "wrong sizes, dtypes, choices raise ArgumentError", "refusal"),
        Clause("GF-09", "inputs untouched", "no argument is written to", "side_effect"),
        Clause("GF-10", "determinism", DETERMINISTIC.text, "determinism", "deterministic"),
        Clause("GF-11", "batch invariance", BATCH_INVARIANT.text, "invariance", "batch_invariant"),
        Clause("GF-12", "capture", CAPTURABLE.text, "capture", "capturable"),
    ),
)
