"""Refusals that depend on another argument, or on a limit of one: by the name of the argument that is wrong.

What an argument of a wrong type, size, dtype or device is told: test_bad_input.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.policy_kinds import KINDS
from tests.base_calls import B, D, N, T, V, base, draw, logprobs, tokens

INT = torch.int64
MASK, ROLLED, REF = tokens(), {"rollout_logprob": logprobs(B, T, seed=7)}, {"ref_logprob": logprobs(B, T, seed=6)}
KL, BONUS = {**REF, "kl_coef": 0.2}, {"entropy": draw(B, T).abs(), "entropy_coef": 0.1}
DENSE = torch.zeros(B, T)
STEPS = {"rewards": DENSE, "group": None}
PAIRED = {"kind": "gae", "values": torch.zeros(6), "cu_seqlens": torch.tensor([0, 2, 5])}
VTRACE = {**STEPS, "kind": "vtrace", "values": DENSE, "ratio": DENSE}
BAG = {name: draw(9) for name in ("logprob", "old_logprob", "advantages")}  # tokens of no sequence
OTHER = torch.zeros(B, T + 1)
LENGTHS = torch.full((B,), T)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def bucket(dims: Any, sizes: tuple[int, ...], **options: Any) -> dict[str, Any]:
    return {"buckets": (rlk.Bucket(dims, sizes, **options),)}


def w(rows: int, device: str = "cpu") -> rlk.QuantTensor:
    return rlk.quantize(draw(rows, D), "int4_g32").to(device)


# Operator -> (the argument that is named, what is changed in the base call).
REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "logprob": [
        ("logits", {"logits": torch.zeros(N, 0)}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": leaf(N)}),
        ("softcap", {"softcap": 0.0}),
        ("top_logprobs", {"top_logprobs": V + 1}),
        ("temperature", {"temperature": torch.arange(N), "validate": True}),
        ("temperature", {"temperature": torch.arange(float(N)), "validate": True}),
        ("ids", {"ids": torch.full((N,), V), "validate": True}),
        ("support.ids", {"support": rlk.Support(torch.full((N,), V), torch.arange(N + 1)), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(9), torch.arange(N + 1) + 1), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(9), torch.arange(N, -1, -1)), "validate": True}),
        ("support.offsets", {"support": rlk.Support(torch.arange(3), 3 * torch.arange(N + 1)), "validate": True}),
    ],
    "linear_logprob": [
        ("hidden", {"hidden": torch.zeros(N, 0)}),
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("temperature", {"temperature": 0.0}),
        ("temperature", {"temperature": leaf(N)}),
        ("logit_scale", {"logit_scale": 0.0}),
        ("max_workspace_bytes", {"max_workspace_bytes": 0}),
        ("max_workspace_bytes", {"max_workspace_bytes": 10}),
    ],
    "sample": [
        ("logits", {"logits": torch.zeros(N, 0)}),
        ("logits", {"logits": leaf(N, V)}),
        ("temperature", {"temperature": torch.ones(N, 1)}),
        ("seed", {"seed": 0}),  # rows would share their noise
        ("step", {"step": 2**64}),
        ("stream", {"stream": 2**32}),
        ("vocab_size", {"vocab_size": V + 1}),
        ("vocab_size", {"vocab_size": 0}),
        ("top_n", {"top_n": V + 1}),
        ("allowed", {"allowed": torch.zeros(N, 1, dtype=torch.int32)}),
        ("penalties.repetition", {"penalties": rlk.Penalties(repetition=0.0)}),
        ("penalties.prompt_bits", {"penalties": rlk.Penalties(prompt_bits=torch.zeros(1, 2, dtype=torch.int32))}),
        ("penalties.output_counts", {"penalties": rlk.Penalties(output_counts=torch.zeros(N, 1, dtype=INT))}),
    ],
    "lm_head_sample": [
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("weight", {"weight": leaf(V, D)}),
        ("logit_scale", {"logit_scale": 0.0}),
        ("seed", {"seed": 0}),
        ("vocab_size", {"vocab_size": V + 1}),
    ],
    "verify": [
        ("target_logits", {"target_logits": leaf(N, V)}),
        ("target_logits", {"cu_draft": torch.zeros(0, dtype=INT)}),
        ("draft_probs", {"draft_probs": torch.zeros(4, V - 1)}),
        ("draft_probs and draft_logits", {"draft_probs": torch.zeros(4, V), "draft_logits": torch.zeros(4, V)}),
        ("seed", {"seed": 0}),
        ("allowed", {"allowed": torch.zeros(2, 2, dtype=torch.int32)}),
        ("penalties.output_ids", {"penalties": rlk.Penalties(output_ids=torch.zeros(5, 1, dtype=INT))}),
    ],
    "quantize": [
        ("weight", {"weight": torch.zeros(V, 0)}),
        ("out", {"weight": torch.zeros(V, D, device="meta"), "out": w(V)}),
        ("dtype", {"dtype": torch.bfloat16, "out": w(V)}),
    ],
    "qmatmul": [
        ("x", {"x": draw(N, D + 1)}),
        ("x", {"x": torch.tensor(1.0)}),
        ("w", {"w": w(V, "meta")}),
        ("lora.A", {"lora": rlk.LoRA(draw(D, 2), draw(V, 2))}),
        ("lora.B", {"lora": rlk.LoRA(draw(2, D), draw(2, V))}),
        ("activation", {"w": w(V - 1), "activation": "swiglu"}),
        ("ends", {"ends": torch.tensor([2, 3])}),
        ("ends", {"ends": torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)}),
        ("ends", {"ends": torch.zeros(0, dtype=torch.int32)}),
        ("x", {"x": draw(N, 1, D), "ends": torch.tensor([2, 3], dtype=torch.int32)}),
        ("lora", {"lora": rlk.LoRA(draw(2, D), draw(V, 2)), "ends": torch.tensor([2, 3], dtype=torch.int32)}),
        ("activation", {"activation": "swiglu", "ends": torch.arange(1, V + 1, dtype=torch.int32)}),
    ],
    "advantage": [
        ("group", {"group": None}),
        ("group", {"group": 4}),
        ("values", {"values": DENSE}),
        ("gamma", {"gamma": 0.9}),
        ("values", {**STEPS, "kind": "gae"}),
        ("gamma", {**STEPS, "kind": "gae", "values": DENSE, "gamma": 1.1}),
        ("lam", {**STEPS, "kind": "gae", "values": DENSE, "lam": 0.5, "length_adaptive": 0.1}),
        ("values", {**STEPS, "kind": "gae", "values": OTHER, "mask": MASK}),
        ("lengths and mask", {**STEPS, "kind": "returns", "mask": MASK, "lengths": LENGTHS}),
        ("lengths and cu_seqlens", {**STEPS, "kind": "returns", "cu_seqlens": LENGTHS, "lengths": LENGTHS}),
        ("rewards", {**STEPS, **PAIRED, "rewards": torch.zeros(2), "values": torch.zeros(2)}),
        ("rewards", {"rewards": torch.zeros(5), "group": 1, "reward_level": "token"}),
        ("output", {"output": "token"}),
        ("output", {**STEPS, "kind": "returns", "output": "sequence"}),
        ("output", {"kind": "returns", "group": None}),
        ("whiten_level", {**STEPS, "kind": "returns", "whiten_level": "sequence"}),
        ("lengths", {"kind": "opo"}),
        ("valid_range", {"valid_range": (1.0, 0.0)}),
        ("masked_time", {**STEPS, "kind": "returns", "turns": DENSE.long(), "masked_time": "step"}),
        ("turns", {**STEPS, "kind": "returns", "turns": DENSE}),
        ("reward_weights", {"rewards": torch.zeros(B, 2), "kind": "gdpo", "reward_weights": torch.zeros(3)}),
        ("anchor", {"kind": "gigpo", "step_rewards": torch.zeros(B)}),
        # of tensors that should have one shape, the odd one out, and not the one after it
        ("values", {**VTRACE, "values": OTHER}),
        ("values", {**VTRACE, "rewards": torch.zeros(B), "values": OTHER, "mask": MASK}),
        ("ratio", {**VTRACE, "ratio": OTHER}),
        ("rewards", {**VTRACE, "rewards": OTHER}),
        ("mask", {**STEPS, "kind": "returns", "mask": OTHER.bool()}),
        ("values", {"rewards": torch.zeros(5), "group": None, **PAIRED}),
    ],
    "policy_loss": [
        ("level", {"kind": "gspo", "level": "token"}),
        ("clip", {"kind": "dppo_tv"}),
        ("dro_beta", {"kind": "dro"}),
        ("clip[0]", {"clip": (-0.1, 0.2)}),
        ("clip[1]", {"clip": (0.1, torch.nan)}),
        ("tau[1]", {"kind": "sapo", "tau": (1.0, 0.0)}),
        ("dual_clip", {"dual_clip": 1.0}),
        ("log_ratio_limit", {"log_ratio_limit": 0.0}),
        ("denominator", {"aggregate": "token_sum", "denominator": 3.0}),
        ("denominator", {"denominator": 0.0}),
        ("horizon", {"horizon": 3.0}),
        ("horizon", {**BAG, "kind": "dr_grpo", "cu_seqlens": torch.tensor([0, 9])}),
        ("count_empty", {"count_empty": True}),
        ("count_empty", {"kind": "grpo", "count_empty": True, "denominator": 4.0}),
        ("kl", {"kl": "k2"}),
        ("kl", {**KL, "kl": "k2+"}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("kl_coef", {**REF, "kl_coef": torch.ones(2)}),
        ("kl_clamp", {**KL, "kl_clamp": (20.0, 10.0)}),
        ("kl_importance", {"kl_importance": True}),
        ("entropy_coef", {"entropy_coef": 0.1}),
        ("entropy_aggregate", {"entropy_aggregate": "token_mean"}),
        ("entropy_denominator", {**BONUS, "entropy_aggregate": "token_sum", "entropy_denominator": 3.0}),
        ("correction", {"correction": rlk.Correction()}),
        ("correction", {**ROLLED, "kind": "gmpo", "correction": rlk.Correction()}),
        ("correction", {**ROLLED, "kind": "vespo", "correction": rlk.Correction("sequence")}),
        ("rejection", {"rejection": rlk.Rejection(high=2.0)}),
        ("mask", {"mask": MASK[:, :3]}),
        ("advantages", {"advantages": torch.zeros(B + 2)}),
        ("old_logprob", {"old_logprob": leaf(B, T)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 8])}),
        ("cu_seqlens", {**BAG, "kind": "grpo"}),
        ("cu_seqlens", {**BAG, "level": "sequence"}),
    ],
    "affine_suffix_scan": [
        ("b", {"b": torch.zeros(4), "a": 0.9}),
        ("cu_seqlens", {"b": torch.zeros(4), "a": 0.9, "cu_seqlens": torch.zeros(0, dtype=INT)}),
    ],
    "whiten": [("mask and lengths", {"mask": MASK, "lengths": LENGTHS})],
    "group_filter": [
        ("group", {"group": 4}),
        ("low", {"rule": "mean", "low": 1.0, "high": 1.0}),
    ],
    "shape_rewards": [
        ("logprob", {"kl": "k1", "kl_coef": 0.1}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("overlong_buffer", {"max_length": 10, "lengths": LENGTHS}),
        ("lengths", {"max_length": 10, "overlong_buffer": 2}),
        ("clip", {"clip": (1.0, 0.0)}),
        ("clip", {"rewards": DENSE, "clip": (0.0, 1.0)}),
        ("output", {"output": "token"}),
        ("running", {"running": rlk.RunningMoments(*torch.zeros(3))}),
    ],
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
    assert {name for name in needs if ":" not in name} == ({"a_tensor"} if op == "affine_suffix_scan" else set())
