"""Attacks on linear_policy_loss@1 whose ranks leave the gradient of hidden as their parts.

Legend: V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.linear_logprob_heads import of_shard
from rlkernel_conformance.clauses.linear_policy_loss_steps import Step, check_operands, run, steps
from rlkernel_conformance.compare import same_bits
from rlkernel_conformance.ranks import on_ranks
from rlkernel_conformance.subject import Subject


@attack("LPL-22", lambda s: steps(s, T=3), scale=0.2)
def parts_of_a_gradient_are_left_to_be_added(subject: Subject, case: Step) -> None:
    """Two ranks with shards of different sizes."""
    case = replace(case, head=replace(case.head, V=max(case.head.V, 7)))
    given, cuts = case.given(subject), [0, case.head.V // 3, case.head.V]

    def on_rank(rank: int, group: Any) -> Any:
        mine = {**of_shard(given, slice(cuts[rank], cuts[rank + 1])), "group": group}
        return run(subject, mine), run(subject, {**mine, "partial_grad": True})

    ranks = on_ranks(subject, 2, on_rank)
    for (out, whole), (parted, part) in ranks:
        same_results(parted, out, "where a gradient is left a part")
        for name in set(whole) - {"hidden", "lora.A"}:
            same_bits(f"d{name}", part[name], whole[name], "where that of hidden is left a part")
    if ranks[0][1][1]:
        check_operands(subject, case, {"hidden": sum(part["hidden"] for _, (_, part) in ranks)})
