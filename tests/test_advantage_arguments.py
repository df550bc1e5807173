"""What advantage refuses, what a call needs, and that reference and spec have one signature."""

from __future__ import annotations

import pytest
import torch

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.advantage_kinds import KINDS
from rlkernel_torch.direct import advantage

X, T2 = torch.zeros(4), torch.zeros(4, 3)
I4 = torch.zeros(4, dtype=torch.int64)
REFUSED = [
    ("kind", X, {"kind": "grop"}),
    ("group", X, {"kind": "grpo"}),
    ("group", X, {"kind": "grpo", "group": 3}),
    ("group", X, {"kind": "grpo", "group": torch.zeros(3, dtype=torch.int64)}),
    ("group", X, {"kind": "grpo", "group": torch.zeros(4)}),
    ("values", X, {"kind": "grpo", "group": 2, "values": T2}),
    ("gamma", X, {"kind": "grpo", "group": 2, "gamma": 0.9}),
    ("values", T2, {"kind": "gae"}),
    ("gamma", T2, {"kind": "gae", "values": T2, "gamma": 1.1}),
    ("lam", T2, {"kind": "gae", "values": T2, "lam": -0.1}),
    ("lam", T2, {"kind": "gae", "values": T2, "lam": torch.zeros(5)}),
    ("lam", T2, {"kind": "gae", "values": T2, "lam": 0.5, "length_adaptive": 0.1}),
    ("values", T2, {"kind": "gae", "values": torch.zeros(4, 4), "mask": T2.bool()}),
    ("lengths and mask", T2, {"kind": "returns", "mask": T2.bool(), "lengths": I4}),
    ("lengths and cu_seqlens", T2, {"kind": "returns", "cu_seqlens": I4, "lengths": I4}),
    ("mask", T2, {"kind": "returns", "mask": T2}),
    ("rewards", torch.zeros(3), {"kind": "gae", "values": torch.zeros(3), "cu_seqlens": I4}),
    ("rewards", torch.zeros(5), {"kind": "grpo", "group": 1, "reward_level": "token"}),
    ("bootstrap", T2, {"kind": "returns", "bootstrap": torch.zeros(3)}),
    ("output", X, {"kind": "grpo", "group": 2, "output": "token"}),
    ("output", T2, {"kind": "returns", "output": "sequence"}),
    ("output", X, {"kind": "returns"}),
    ("whiten_level", T2, {"kind": "returns", "whiten_level": "sequence"}),
    ("lengths", X, {"kind": "opo", "group": 2}),
    ("eps", X, {"kind": "grpo", "group": 2, "eps": -1.0}),
    ("ddof", X, {"kind": "grpo", "group": 2, "ddof": -1}),
    ("valid_range", X, {"kind": "grpo", "group": 2, "valid_range": (1.0, 0.0)}),
    ("masked_time", T2, {"kind": "returns", "turns": T2.long(), "masked_time": "step"}),
    ("turns", T2, {"kind": "returns", "turns": T2}),
    ("rewards", X.to(torch.complex64), {"kind": "grpo", "group": 2}),
    ("reward_weights", torch.zeros(4, 2), {"kind": "gdpo", "group": 2, "reward_weights": torch.zeros(3)}),
    ("anchor", X, {"kind": "gigpo", "group": 2, "step_rewards": X}),
    # of tensors that should have one shape, the odd one out, and not the one after it
    ("values", T2, {"kind": "gae", "values": torch.zeros(4, 4)}),
    ("values", T2, {"kind": "vtrace", "values": torch.zeros(4, 4), "ratio": T2}),
    ("values", X, {"kind": "vtrace", "values": torch.zeros(4, 4), "ratio": T2, "mask": T2.bool()}),
    ("ratio", T2, {"kind": "vtrace", "values": T2, "ratio": torch.zeros(4, 4)}),
    ("mask", T2, {"kind": "returns", "mask": torch.zeros(4, 4).bool()}),
    ("rewards", torch.zeros(4, 4), {"kind": "vtrace", "values": T2, "ratio": T2}),
    ("values", torch.zeros(5), {"kind": "gae", "values": torch.zeros(6), "cu_seqlens": torch.tensor([0, 2, 5])}),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "rewards", "kw"), REFUSED)
def test_a_bad_argument_is_named(argument, rewards, kw):
    with pytest.raises(ArgumentError) as error:
        advantage(rewards, **kw)
    assert argument == error.value.argument


CHANGES = [
    {},
    *({n: X} for n in ("mask", "lengths", "cu_seqlens", "group", "lam", "turns", "dones", "bootstrap", "in_loss")),
    {"lam_value": 0.5},
    {"length_adaptive": 0.1},
    {"weights": X},
    {"output": "token"},
    {"leave_one_out": True},
    {"scale": "batch"},
    {"constant": "peer"},
    {"singleton": "error"},
    {"whiten": "defer"},
]


def test_every_feature_a_call_can_need_exists():
    spec = OPERATORS["advantage"]
    for kind in KINDS:
        for change in CHANGES:
            assert spec.needs(spec.call(X, kind=kind, **change)) <= spec.feature_names
    assert {"kind:grpo"} == spec.needs(spec.call(X, kind="grpo", group=4))
    assert {"kind:gdpo", "whiten"} == spec.needs(spec.call(X, kind="gdpo", group=4))
