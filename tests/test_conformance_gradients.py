"""Gradients are judged by the rounding of what they add up: where terms cancel, of the terms."""

import numpy as np
import pytest
import torch

from rlkernel_conformance.clauses.linear_logprob_heads import (
    Head,
    check_gradients,
    definition,
    operand_gradients,
    sizes,
)
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.subject import Subject

# One row of one number: 127 terms of up to 48 leave a gradient of 5, of which their rounding to bf16 is two percent.
CANCELLING = Head(
    N=1, D=1, V=127, seed=412, dtype="bfloat16", temperature=0.5, bias=False, softcap=0.0, logit_scale=1.0
)


@pytest.fixture(scope="module")
def subject():
    return Subject("torch", "linear_logprob")


def exact(subject, case=CANCELLING):
    given = case.given(subject)
    return given, definition(given, {"logprob": np.ones(case.N), "entropy": np.full(case.N, -3.0)}).grad


def rounded(x) -> dict[str, torch.Tensor]:
    return {n: torch.as_tensor(v).bfloat16() for n, v in x.items()}


def test_rounding_the_gradient_of_the_logits_is_no_violation_where_terms_cancel(subject) -> None:
    for seed in range(200):
        given, dz = exact(subject, Head(**{**vars(CANCELLING), "seed": seed}))
        found = operand_gradients(given, torch.as_tensor(dz).bfloat16().double().numpy())
        check_gradients(subject, rounded(found), operand_gradients(given, dz), "bfloat16", sizes(given, dz, 0.0))


def test_a_gradient_that_leaves_out_a_term_is_refuted(subject) -> None:
    given, dz = exact(subject)
    wrong = dz.copy()
    wrong[0, np.argmax(np.abs(dz[0]))] = 0
    with pytest.raises(Violation, match="d_hidden is off"):
        check_gradients(
            subject,
            rounded(operand_gradients(given, wrong)),
            operand_gradients(given, dz),
            "bfloat16",
            sizes(given, dz, 0.0),
        )
