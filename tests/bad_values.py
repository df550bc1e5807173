"""Values that an argument must refuse, by its annotation and a valid value of it; and those it may take after all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.example_calls import T

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
        "five dimensions": torch.ones(1, 1, 1, 1, 1, dtype=x.dtype),
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
    "qmatmul.x": SIZES[:4],
    "quantize.weight": ("a row less", "a row more", "meta"),
    # tokens that no sequence holds do not count
    "cu_seqlens": ("a row less", "a row more"),
    "shape_rewards.cu_seqlens": (),
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


def fine(operator: str, name: str) -> tuple[str, ...]:
    """Bad values that this argument takes."""
    if name == "weight" and operator in {"linear_logprob", "linear_policy_loss", "lm_head_sample"}:
        return FINE["head.weight"]
    return FINE.get(f"{operator}.{name}", FINE.get(name, ()))
