"""Refusals of values, of rules and of what capture and rollout_buffer take, by the name of the argument that is wrong.

What an argument of a wrong type, size, dtype or device is told: test_bad_input.py. What depends on another argument, or
on a limit of one: the clauses on bad arguments, `rlkernel_conformance.bad_arguments`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel_conformance.example_calls import N, V, base
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.policy_kinds import KINDS


def bucket(dims: Any, sizes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {"buckets": (rlk.Bucket(dims, sizes, **options),)}


# Operator -> (the argument that is named, what is changed in the base call).
REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "logprob": [
        ("temperature", {"temperature": torch.arange(N), "validate": True}),
        ("temperature", {"temperature": torch.arange(float(N)), "validate": True}),
        ("ids", {"ids": torch.full((N,), V), "validate": True}),
        ("support.ids", {"support": rlk.Support(torch.full((N,), V), torch.arange(N + 1)), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(9), torch.arange(N + 1) + 1), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(9), torch.arange(N, -1, -1)), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(3), 3 * torch.arange(N + 1)), "validate": True}),
    ],
    "linear_logprob": [("max_workspace_bytes", {"max_workspace_bytes": 10})],
    "capture": [
        ("max_graphs", {"max_graphs": 0}),
        ("buckets", {"buckets": rlk.Bucket({"x": 0}, (4,))}),
        ("buckets[0].sizes", bucket({"x": 0}, (4, 2))),
        ("buckets[0].dims", bucket({}, (4,))),
        ("buckets[0].dims", bucket({"z": 0}, (4,))),
        ("buckets[0].over", bucket({"x": 0}, (4,), over="split")),
        ("x", bucket({"x": 2}, (4,))),
        ("pad", {"pad": {"z": 0}}),
        ("static.0", {"static": ("weights",)}),
        *(("example", {"example": example}) for example in ((), (torch.ones(1), 2, 3), {"z": torch.ones(1)})),
    ],
    "rollout_buffer": [
        ("max_tokens", {"max_tokens": 63}),
        *((name, {name: 0}) for name in ("max_tokens", "max_seqs", "page_tokens", "rewards", "group_size")),
        ("max_batch_tokens", {"max_batch_tokens": 0}),
        ("fields['x']", {"fields": {"x": "float32"}}),
        ("fields", {"fields": {"x": rlk.Field("float31")}}),
    ],
}  # fmt: skip
ROWS = [pytest.param(op, *row, id=f"{op}-{row[0]}-{i}") for op, rows in REFUSED.items() for i, row in enumerate(rows)]


@pytest.mark.parametrize(("op", "argument", "change"), ROWS)
def test_the_argument_that_is_wrong_is_named(op: str, argument: str, change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        getattr(rlk, op)(**{**base(op), **change})
    assert (caught.value.argument, caught.value.remedy != "") == (argument, True)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: rlk.Correction("tokens"), "correction.level"),
        (lambda: rlk.Correction(mode="drop"), "correction.mode"),
        (lambda: rlk.Correction(low=2.0, high=1.0), "correction.low"),
        (lambda: rlk.Correction(mode="mask", high=None), "correction.high"),
        (rlk.Rejection, "rejection.high"),
        (lambda: rlk.Rejection("k2", low=0.1, high=0.2), "rejection.low"),
        (lambda: rlk.Rejection("k4", high=1.0), "rejection.statistic"),
        (lambda: rlk.GammaGate(k_pos=0.0), "gamma.k_pos"),
    ],
)
def test_a_malformed_rule_is_refused_when_it_is_made(make: Callable[[], object], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert caught.value.argument == argument


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_that_a_kind_of_loss_lacks_is_refused(kind: str) -> None:
    required = {"dppo_tv": {"clip": (0.2, 0.2)}, "dppo_kl": {"clip": (0.2, 0.2)}, "dro": {"dro_beta": 0.1}}
    pairs = {"clip": (0.2, 0.2), "tau": (1.0, 1.0), "gamma": rlk.GammaGate()}
    for name in {n for row in KINDS.values() for n in row.options} - set(KINDS[kind].options):
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            given = {**base("policy_loss"), "kind": kind, **required.get(kind, {})}
            rlk.policy_loss(**given, **{name: pairs.get(name, 2.0)})


@pytest.mark.parametrize("op", OPERATORS)
def test_a_plain_call_needs_no_feature_but_its_kind(op: str) -> None:
    needs = OPERATORS[op].needs(OPERATORS[op].call(**base(op)))
    # A scan has its factors, and groups of one get 0 unless `singleton` says another.
    own = {"affine_suffix_scan": {"a_tensor"}, "advantage": {"singleton_zero"}}
    assert {name for name in needs if ":" not in name} == own.get(op, set())
