"""Bad arguments of every operator: by an argument's annotation and a valid value of it, and what only its page says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.bad_head_arguments import BAD_ENDS, BAD_LISTS, BAD_LORA, BAD_SCORES, LISTS, leaf
from rlkernel_conformance.bad_layer_arguments import OF_LAYERS
from rlkernel_conformance.example_calls import B, D, N, T, V, draw, ids, logprobs, tokens
from rlkernel_core.quant import QuantTensor, quantize
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.policy_loss import Correction, Rejection
from rlkernel_core.spec.qmatmul import LoRA
from rlkernel_core.spec.sampling import Penalties
from rlkernel_core.spec.shape_rewards import RunningMoments

# What no argument of any operator is.
NEVER = {"object": object(), "complex": 1 + 2j, "bytes": b"seven", "set": {1, 2}, "array": np.ones(T, dtype="float32")}
NOT_A_NUMBER = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "-1": -1, "-1.5": -1.5, "10**400": 10**400}
NOT_A_PAIR = {
    "triple": (1.0, 2.0, 3.0),
    "single": (1.0,),
    "strings": ("a", "b"),
    "nan in a pair": (math.nan, 1.0),
    "None in a pair": (None, 1.0),
    "tensors": (torch.tensor(1.0), torch.tensor(2.0)),
    "two letters": "ab",
}


def of_type(annotation: str) -> dict[str, Any]:
    """Wrong types and numbers without a meaning for an argument of this annotation."""
    bad: dict[str, Any] = dict(NEVER)
    takes = {word.strip("[],.") for word in annotation.replace("[", " ").split()}
    if not takes & {"None", "Any"}:
        bad["None"] = None
    bad["a string"] = "no_such_choice"
    if "str" not in takes:
        bad["a number in words"] = "7"
    if not takes & {"Sequence", "tuple", "Any"}:
        bad["list"] = [1.0, 2.0]
    if takes & {"float", "int", "bool"} and not takes & {"Mapping", "tuple", "dict"}:
        bad |= NOT_A_NUMBER
    if "bool" not in takes:
        bad |= {"True": True, "False": False}
    else:
        bad |= {"0": 0, "numpy.bool": np.True_}
    if takes & {"int", "bool"} and "Tensor" not in takes:
        bad |= {"0.5": 0.5, "2.0": 2.0}
    if "tuple" in takes:
        bad |= NOT_A_PAIR
    if "Tensor" not in takes and "Any" not in takes:
        bad |= {"tensor": torch.ones(T), "scalar tensor": torch.tensor(1)}
    return bad


def of_tensor(x: Tensor) -> dict[str, Any]:
    """Tensors of a wrong dtype, device, layout, rank and size in place of the valid `x`."""
    bad: dict[str, Any] = {
        "complex tensor": x.to(torch.complex64),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "five dimensions": torch.ones(1, 1, 1, 1, 1, dtype=x.dtype, device=x.device),
        "one more dimension": x[None],
    }
    if x.dtype is not torch.bool:
        bad["bool tensor"] = x.bool()
    if not x.is_floating_point():
        bad["float tensor"] = x.float()
    if x.is_floating_point() or x.dtype is torch.bool:
        bad["integer tensor"] = x.long()
    if x.is_floating_point():
        bad["8-bit floats"] = x.to(torch.float8_e4m3fn)
    if x.dim():
        bad |= {"a dimension less": x[0], "a row less": x[:-1], "a row more": torch.cat([x, x[:1]])}
    return bad


SIZES = ("one more dimension", "a dimension less", "a row less", "a row more", "five dimensions")
ANY_REAL = ("bool tensor", "integer tensor", "8-bit floats")
NEGATIVE = ("-1", "-1.5")

# Argument -> bad values that are good ones there. With an operator: there alone.
FINE: dict[str, tuple[str, ...]] = {
    # any row length fits where no other tensor says it
    "head.weight": ("a row less", "a row more"),
    "whiten.x": (*SIZES, *ANY_REAL, "meta"),
    "shape_rewards.rewards": ("one more dimension", "a row less", "a row more", *ANY_REAL, "meta"),
    "fake_quantize.weight": ("a row less", "a row more", "meta"),
    "quantize.weight": ("a row less", "a row more", "meta"),
    "qmatmul.x": SIZES[:4],
    "linear.x": ("one more dimension", "a dimension less", "a row less", "a row more"),
    "linear.weight": ("a row less", "a row more"),
    "grouped_linear.x": ("a row less", "a row more"),
    "route.logits": ("a row less", "a row more", "meta"),
    "rms_norm.x": ("one more dimension", "a dimension less", "a row less", "a row more"),
    # one row, of which the ids are a list
    "logprob.logits": ("a dimension less",),
    "linear_logprob.hidden": ("a dimension less",),
    # tokens that no sequence holds do not count
    "cu_seqlens": ("a row less", "a row more"),
    "shape_rewards.cu_seqlens": (),
    "route.top_k": (),
    # rows of q beyond its last entry belong to no sequence
    "attention.cu_q": ("a row less", "a row more"),
    # any real dtype
    "rewards": (*ANY_REAL, "meta"),
    "baseline": ANY_REAL,
    "step_rewards": ANY_REAL,
    "reward_weights": ANY_REAL,
    "counts": (*ANY_REAL, "float tensor"),
    # any finite number
    "affine_suffix_scan.a": NEGATIVE,
    "group_filter.low": NEGATIVE,
    "kl_coef": NEGATIVE,
    "entropy_coef": NEGATIVE,
    "rms_norm.offset": NEGATIVE,
    "rope.table": ("a row less", "a row more"),
    "rope.offset": NEGATIVE,
    "glu.x": ("one more dimension", "a dimension less", "a row less", "a row more", "meta"),
    "step_weight": NEGATIVE,
    # out of their range they are off, or greedy
    "top_k": ("-1",),
    "top_p": NEGATIVE,
    "min_p": NEGATIVE,
    "invalid_token": ("-1",),
    # without a bound
    "log_ratio_limit": ("inf",),
    # numbers by name; a call of fn that does not fit fails as fn itself would
    "capture.example": ("tensor", "scalar tensor"),
}


def fine(operator: str, name: str, good: Mapping[str, Any]) -> tuple[str, ...]:
    """Bad values that this argument takes, in a call with these arguments."""
    if name == "weight" and operator in {"linear_logprob", "linear_policy_loss", "lm_head_sample"}:
        return FINE["head.weight"]
    if (operator, name) == ("affine_suffix_scan", "b") and not isinstance(good["a"], Tensor):
        return ("a row less", "a row more", "meta")  # there is no other tensor to differ from
    return FINE.get(f"{operator}.{name}", FINE.get(name, ()))


def bad_values(op: str, good: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Argument, words for a value, and the value: what no call of the operator takes there.

    Args:
        op: the operator.
        good: arguments of a good call; tensors among them are bent.
    """
    for name, parameter in OPERATORS[op].parameters.items():
        bad = of_type(str(parameter.annotation))
        if isinstance(good.get(name), Tensor):
            bad |= of_tensor(good[name])
        taken = fine(op, name, good)
        yield from ((name, what, value) for what, value in bad.items() if what not in taken)


INT = torch.int64
MASK, REF = tokens(), {"ref_logprob": logprobs(B, T, seed=6)}
KL, BONUS = {**REF, "kl_coef": 0.2}, {"entropy": draw(B, T).abs(), "entropy_coef": 0.1}
DENSE = torch.zeros(B, T)
STEPS = {"rewards": DENSE, "group": None}
PAIRED = {"kind": "gae", "values": torch.zeros(6), "cu_seqlens": torch.tensor([0, 2, 5])}
VTRACE = {**STEPS, "kind": "vtrace", "values": DENSE, "ratio": DENSE}
BAG = {name: draw(9) for name in ("logprob", "old_logprob", "advantages")}  # tokens of no sequence
OTHER = torch.zeros(B, T + 1)
LENGTHS = torch.full((B,), T)


def stored(rows: int, device: str = "cpu") -> QuantTensor:
    """A quantized weight [rows, D]."""
    return quantize(draw(rows, D), "int4_g32").to(device)


# Operator -> (how the name of the refused argument begins, what is changed in the example call of six rows): refusals
# that depend on another argument or on a limit of one. A name that is not known gets a suggestion instead.
REFUSED: Final[Mapping[str, Callable[[], list[tuple[str, dict[str, Any]]]]]] = {
    "logprob": lambda: [
        ("logits", {"logits": torch.zeros(N, 0)}),
        ("softcap", {"softcap": 0.0}),
        ("top_logprobs", {"top_logprobs": V + 1}),
        ("top_logprobs", {"top_logprobs": 1, "group": SimpleNamespace(rank=int, size=int)}),
        *BAD_SCORES,
        *BAD_LISTS,
    ],
    "linear_logprob": lambda: [
        ("bias", {"bias": torch.zeros(V + 1)}),
        ("hidden", {"hidden": torch.zeros(N, 0)}),
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("logit_scale", {"logit_scale": 0.0}),
        ("max_workspace_bytes", {"max_workspace_bytes": 0}),
        ("weight", {"weight": stored(V), "ids": ids(N, 3)}),
        ("weight", {"weight": stored(V, "meta")}),
        ("weight", {"weight": quantize(draw(V, D), "int8_w8a8")}),
        ("weight", {"weight": stored(V), "ids": LISTS}),
        ("partial_grad", {"partial_grad": True}),
        *BAD_LORA,
        *BAD_SCORES,
        *BAD_LISTS,
    ],
    "sample": lambda: [
        ("top_k", {"top_k": 2.0}),
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
        ("penalties.repetition", {"penalties": Penalties(repetition=0.0)}),
        ("penalties.prompt_bits", {"penalties": Penalties(prompt_bits=torch.zeros(1, 2, dtype=torch.int32))}),
        ("penalties.output_counts", {"penalties": Penalties(output_counts=torch.zeros(N, 1, dtype=INT))}),
    ],
    "lm_head_sample": lambda: [
        ("bias", {"bias": torch.zeros(V + 1)}),
        ("softcap", {"softcap": 0.0}),
        ("hidden", {"hidden": leaf(N, D)}),
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("weight", {"weight": leaf(V, D)}),
        ("logit_scale", {"logit_scale": 0.0}),
        ("seed", {"seed": 0}),
        ("vocab_size", {"vocab_size": V + 1}),
        ("lora", {"lora": LoRA(leaf(2, D), draw(V, 2))}),
        ("weight", {"weight": quantize(draw(V, D + 1), "int8_channel")}),
        ("weight", {"weight": quantize(draw(V, D), "int8_w8a8")}),
        *BAD_LORA,
    ],
    "verify": lambda: [
        ("target_logits", {"target_logits": leaf(N, V)}),
        ("target_logits", {"cu_draft": torch.zeros(0, dtype=INT)}),
        ("draft_probs", {"draft_probs": torch.zeros(4, V - 1)}),
        ("draft_probs and draft_logits", {"draft_probs": torch.zeros(4, V), "draft_logits": torch.zeros(4, V)}),
        ("seed", {"seed": 0}),
        ("allowed", {"allowed": torch.zeros(2, 2, dtype=torch.int32)}),
        ("penalties.output_ids", {"penalties": Penalties(output_ids=torch.zeros(5, 1, dtype=INT))}),
    ],
    "quantize": lambda: [
        ("unknown format 'int4_g32?'; did you mean 'int4_g32'", {"format": "int4_g32?"}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("dtype", {"dtype": torch.int8}),
        ("weight", {"weight": draw(V + 1, D), "out": stored(V)}),
        ("out", {"out": quantize(draw(V, D), "nf4")}),
        ("weight", {"weight": torch.zeros(V, 0)}),
        ("out", {"weight": torch.zeros(V, D, device="meta"), "out": stored(V)}),
        ("dtype", {"dtype": torch.bfloat16, "out": stored(V)}),
    ],
    "fake_quantize": lambda: [
        ("unknown format 'int4_g32?'; did you mean 'int4_g32'", {"format": "int4_g32?"}),
        ("weight", {"weight": torch.zeros(0, D)}),
        ("weight", {"weight": torch.zeros(V, 0)}),
        ("dtype", {"dtype": torch.int8}),
        ("dtype", {"dtype": torch.float64}),
        ("clipped", {"clipped": 1}),
    ],
    "linear_policy_loss": lambda: [
        ("ids", {"hidden": draw(B, D)}),  # a token has one id
        ("weight", {"weight": torch.zeros(V, D + 1)}),
        ("ids", {"ids": torch.zeros(B, 0, dtype=INT)}),
        ("temperature", {"temperature": 0.0}),
        ("advantages", {"advantages": torch.zeros(B + 1)}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("old_logprob", {"old_logprob": leaf(B, T)}),
        ("weight", {"weight": stored(V)}),
        *BAD_LORA,
    ],
    "dequantize": lambda: [("dtype", {"dtype": dtype}) for dtype in (torch.float64, torch.int8)],
    "qmatmul": lambda: [
        ("bias", {"bias": torch.zeros(V + 1)}),
        ("residual", {"residual": torch.zeros(N, V + 1)}),
        ("x", {"x": draw(N, D + 1)}),
        ("x", {"x": torch.tensor(1.0)}),
        ("w", {"w": stored(V, "meta")}),
        *BAD_LORA,
        ("activation", {"w": stored(V - 1), "activation": "swiglu"}),
        *BAD_ENDS,
    ],
    "advantage": lambda: [
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
    "policy_loss": lambda: [
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
        ("horizon", {"kind": "dr_grpo", "process_group": SimpleNamespace(rank=int, size=int)}),
        ("process_group", {"process_group": "dp"}),
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
        ("correction", {"correction": Correction()}),
        ("rejection", {"rejection": Rejection(high=2.0)}),
        ("mask", {"mask": MASK[:, :3]}),
        ("advantages", {"advantages": torch.zeros(B + 2)}),
        ("cu_seqlens", {"cu_seqlens": torch.tensor([0, 8])}),
        ("cu_seqlens", {**BAG, "kind": "grpo"}),
        ("cu_seqlens", {**BAG, "level": "sequence"}),
    ],
    "affine_suffix_scan": lambda: [
        ("init", {"init": torch.zeros(B + 1)}),
        ("mask", {"mask": tokens().float()}),
        ("mask", {"mask": OTHER.bool()}),
        ("lengths", {"lengths": torch.full((B + 1,), T)}),
        ("b", {"b": torch.zeros(4), "a": 0.9}),
        ("cu_seqlens", {"b": torch.zeros(4), "a": 0.9, "cu_seqlens": torch.zeros(0, dtype=INT)}),
    ],
    "whiten": lambda: [
        ("mask", {"mask": tokens().float()}),
        ("mask", {"mask": OTHER.bool()}),
        ("lengths", {"lengths": torch.full((B + 1,), T)}),
        ("counts", {"counts": OTHER}),
        ("mask and lengths", {"mask": MASK, "lengths": LENGTHS}),
    ],
    "group_filter": lambda: [
        ("group", {"group": 0}),
        ("group", {"group": torch.arange(B + 1)}),
        ("group", {"group": torch.arange(float(B))}),
        ("min_members", {"min_members": 0}),
        ("valid", {"valid": torch.ones(B + 1, dtype=torch.bool)}),
        ("rewards", {"rewards": draw(B)[None, None]}),
        ("group", {"group": 4}),
        ("low", {"rule": "mean", "low": 1.0, "high": 1.0}),
    ],
    "shape_rewards": lambda: [
        ("mask", {"mask": tokens().float()}),
        ("overlong_buffer", {"max_length": 10, "overlong_buffer": 0, "lengths": LENGTHS}),
        ("kl_clamp", {**REF, "logprob": REF["ref_logprob"], "kl": "k1", "kl_coef": 0.1, "kl_clamp": -1.0}),
        ("logprob", {"kl": "k1", "kl_coef": 0.1}),
        ("kl_coef", {"kl_coef": 0.1}),
        ("overlong_buffer", {"max_length": 10, "lengths": LENGTHS}),
        ("lengths", {"max_length": 10, "overlong_buffer": 2}),
        ("clip", {"clip": (1.0, 0.0)}),
        ("clip", {"rewards": DENSE, "clip": (0.0, 1.0)}),
        ("output", {"output": "token"}),
        ("running", {"running": RunningMoments(*torch.zeros(3))}),
    ],
    **OF_LAYERS,
}
