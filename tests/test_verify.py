"""verify: what it refuses; clauses of every operator name features that it has, once."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.sampling import Penalties
from rlkernel_torch.direct import verify

V = 12


@pytest.mark.parametrize(
    "wrong, argument",
    [
        ({"target_logits": torch.zeros(4, V)}, "target_logits"),
        ({"target_logits": torch.zeros(5, V, requires_grad=True)}, "target_logits"),
        ({"draft_ids": torch.zeros(3)}, "draft_ids"),
        ({"cu_draft": torch.zeros(0, dtype=torch.int64)}, "target_logits"),
        ({"draft_probs": torch.zeros(3, V - 1)}, "draft_probs"),
        ({"draft_logits": torch.zeros(4, V)}, "draft_logits"),
        ({"draft_probs": torch.zeros(3, V), "draft_logits": torch.zeros(3, V)}, "draft_probs and draft_logits"),
        ({"seed": 0}, "seed"),
        ({"temperature": torch.ones(5)}, "temperature"),
        ({"allowed": torch.zeros(2, 1, dtype=torch.int32)}, "allowed"),
        ({"penalties": Penalties(output_ids=torch.zeros(5, 1, dtype=torch.int64))}, "penalties.output_ids"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(wrong, argument) -> None:
    arguments = {
        "target_logits": torch.zeros(5, V),
        "draft_ids": torch.zeros(3, dtype=torch.int64),
        "cu_draft": torch.tensor([0, 2, 3]),
        "seed": torch.arange(2),
        "step": 0,
    } | wrong
    with pytest.raises(ArgumentError) as caught:
        verify(arguments.pop("target_logits"), arguments.pop("draft_ids"), **arguments)
    assert caught.value.argument == argument


@pytest.mark.parametrize("op", OPERATORS)
def test_clauses_name_known_features_once(op) -> None:
    spec = OPERATORS[op]
    assert {c.feature for c in spec.clauses} - {None} <= spec.feature_names
    assert len({c.id for c in spec.clauses}) == len(spec.clauses)
