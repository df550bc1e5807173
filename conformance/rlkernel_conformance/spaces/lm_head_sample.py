"""The calls of lm_head_sample@1: operands on a grid, whose products and sums no order of summation rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.linear_logprob_heads import matrices
from rlkernel_conformance.compare import plain
from rlkernel_conformance.sampling_batches import to
from rlkernel_conformance.spaces import requests, sample
from rlkernel_conformance.spaces.modes import GRADLESS
from rlkernel_conformance.spaces.requests import bias_levels, bias_tensors, generator
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.qmatmul import LoRA

VOCABULARIES: Final = (33, 1, 2, 100, 1023, 1025, 2100)
REAL: Final = (8193, 32000, 65537, 128256)


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """The head, and what sample is asked for."""
    return {
        "rows": sample.ROWS,
        "V": VOCABULARIES,
        "D": (8, 1, 64),
        "values": ("grid", "ties", "nan", "posinf"),
        "dtype": subject.dtypes,
        "weight dtype": claimed(subject, {"": "", **dict.fromkeys(("float32", "bfloat16", "float16"), "mixed_dtypes")}),
        **requests.factors(subject),
        "bias": claimed(subject, {"": "", "some": "bias", "bans": "bias"}),
        "lora": claimed(subject, {None: "", (1, -2.0): "lora", (3, 0.5): "lora"}),
        "logit_scale": claimed(subject, {1.0: "", 0.5: "logit_scale", 4.0: "logit_scale"}),
        "logit_bias": bias_levels(subject, "logit_bias"),
        **sample.result_factors(subject),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    N, V, D, g = point["rows"], point["V"], point["D"], generator(point, 0)
    hidden = g.integers(-4, 5, size=(N, D)) / 4
    weight = g.integers(-1 if point["values"] == "ties" else -8, 2 if point["values"] == "ties" else 9, (V, D)) / 4
    if point["values"] in {"nan", "posinf"}:
        hidden[1::3] = {"nan": np.nan, "posinf": np.inf}[point["values"]]
    head = np.concatenate([weight, np.resize([np.inf, np.nan, 100.0], (point["padding"], D))])
    kind = getattr(torch, point["dtype"])
    given: Given = {
        "hidden": torch.from_numpy(hidden).to(kind).requires_grad_(point["mode"] in GRADLESS),
        "weight": torch.from_numpy(head).to(getattr(torch, point["weight dtype"] or point["dtype"])),
        **sample.asked(point, V, N),
        **requests.bias("logit_bias", point, V, N),
    }
    if point["bias"]:
        bias = g.integers(-4, 5, size=len(head)) / 4
        bias[g.random(len(head)) < (0.3 if point["bias"] == "bans" else 0.0)] = -np.inf
        given["bias"] = torch.from_numpy(bias).to(kind)
    if point["lora"]:
        r, scale = point["lora"]
        A, B = (torch.from_numpy(g.integers(-2, 3, size=shape) / 2).to(kind) for shape in ((r, D), (len(head), r)))
        given["lora"] = LoRA(A, B, scale)
    given |= {"logit_scale": point["logit_scale"]} if point["logit_scale"] != 1 else {}
    placed: Given = to(subject.device, given)
    return placed


def expected(subject: Subject, point: Point, given: Given, found: Mapping[str, Any]) -> dict[str, Want]:
    """What sample's definition says of the logits, which are exact."""
    V = given.get("vocab_size")
    with np.errstate(invalid="ignore"):
        x = plain(given["hidden"], "hidden") @ plain(given["weight"], "weight")[:V].T
        if "lora" in given:
            A, B = matrices(given)
            x = x + (plain(given["hidden"], "hidden") @ A.T) @ B[:V].T
        x = x + plain(given["bias"], "bias")[:V] if "bias" in given else x
        x = x * given.get("logit_scale", 1.0)
    return sample.results(subject, point["dtype"], x, given, found, "logit_bias")


RULES: Final = sample.RULES
TENSORS: Final = {
    "hidden": Argument(),
    "weight": Argument(),
    "bias": Argument(requests.ROWS, given=Rule(("bias",), bool)),
    "lora.A": Argument(given=Rule(("lora",), bool)),
    "lora.B": Argument(given=Rule(("lora",), bool)),
    "slot": sample.TENSORS["slot"],
    **requests.parameter_tensors(),
    **bias_tensors("logit_bias"),
}
SPACE = Space(
    "lm_head_sample",
    factors,
    arguments,
    expected,
    TENSORS,
    RULES,
    lambda subject: [{"V": V, "rows": 1, "D": 8} for V in REAL],
    draws=True,
)
