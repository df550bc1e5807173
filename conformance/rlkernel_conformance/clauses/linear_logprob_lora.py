"""Attacks on low-rank additions to the head of linear_logprob@1.

Legend: N rows · D hidden · V vocabulary · r rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    gradients,
    heads,
    operand_gradients,
    sizes,
    small,
    with_leaves,
)
from rlkernel_conformance.compare import close, plain
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.qmatmul import LoRA

RANKS: Final = (1, 3, 16, 70)
FROZEN: Final = (("weight",), ("weight", "bias"), (), ("hidden", "weight", "bias"), ("weight", "bias", "lora.B"),
                 ("weight", "bias", "lora.A"), ("hidden", "weight", "bias", "lora.A"))  # fmt: skip


def adapted(case: Head) -> Head:
    """A cheap head with LoRA."""
    return replace(small(case), rank=RANKS[case.seed % len(RANKS)])


def near(subject: Subject, given: dict[str, Any], dtype: str) -> None:
    """Log-probabilities are the definition's."""
    want = definition(given)
    size = np.maximum(1, np.abs(want.lse) / 10)
    close(subject, "logprob", subject(**given).logprob, want.logprob, dtype, scale=size)


@attack("LL-36", lambda s: heads(s).map(adapted))
def lora_adds_its_product(subject: Subject, case: Head) -> None:
    """Any rank and scale, adapters of the dtype of hidden and of 32 bits; B = 0."""
    given = case.given(subject)
    near(subject, given, case.dtype)
    for scale in (-2.0, 3.0):
        near(subject, {**given, "lora": case.lora(subject, "float32", scale)}, case.dtype)
    nothing = LoRA(given["lora"].A, torch.zeros_like(given["lora"].B), 0.5)
    near(subject, {**given, "lora": nothing}, case.dtype)


@attack("LL-37", lambda s: heads(s).map(adapted), scale=0.5)
def gradients_of_lora_match_float64(subject: Subject, case: Head) -> None:
    """Those of A, B and hidden with the head frozen, the usual way; trained; and of each alone."""
    if "grad" not in subject.claims:
        return
    given, g = case.given(subject), draw.normal((case.N,), case.seed + 20, subject.device)
    dz = definition(given, {"logprob": plain(g, "g")}).grad
    want, least = operand_gradients(given, dz), 0.05 * float(g.double().norm()) / given["temperature"]
    for frozen in (FROZEN[0], FROZEN[case.seed % len(FROZEN)]):
        call, leaves = with_leaves(given, frozen)
        found = gradients({"logprob": subject(**call).logprob}, {"logprob": g}, leaves)
        check_gradients(subject, found, want, case.dtype, sizes(given, dz, least))


@attack("LL-38", lambda s: heads(s).map(adapted), scale=0.5)
def lora_written_in_place_is_seen(subject: Subject, case: Head) -> None:
    """As an optimizer writes it."""
    given = case.given(subject)
    near(subject, given, case.dtype)
    given["lora"].B.copy_(given["lora"].B.flip(0) + 1)
    near(subject, given, case.dtype)
    given["lora"].A.mul_(-2)
    near(subject, given, case.dtype)
