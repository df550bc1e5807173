"""Hidden states and output heads for the spaces of linear_logprob@1 and linear_policy_loss@1, and their gradients.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.linear_logprob_heads import matrices, operand_gradients, sizes
from rlkernel_conformance.clauses.linear_policy_loss_steps import FINENESS
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.logprob import REAL
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.qmatmul import LoRA

INNER: Final = (4096, 11008, 14336, 27648)  # hidden and intermediate sizes of Llama and Qwen
LORAS: Final = ((1, -2.0), (3, 0.5), (70, 0.25))  # rank and scale
SCALED: Final = {"bias": ("given", "forbids", "large")}


def head_factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Sizes, operands and what is done to logits."""
    others = dict.fromkeys(subject.dtypes, "mixed_dtypes")
    return {
        "D": (8, 1, 5, 33),
        "V": (33, 1, 2, 128, 1025),
        "hidden": ("normal", "exact", "confident"),
        "dtype": subject.dtypes,
        "weight dtype": claimed(subject, {"": "", **others}),
        "bias": claimed(subject, {"": "", **dict.fromkeys(SCALED["bias"], "bias")}),
        "lora": claimed(subject, {None: "", **dict.fromkeys(LORAS, "lora")}),
        "logit scale": claimed(subject, {1.0: "", 0.5: "logit_scale", 2.5: "logit_scale"}),
        "softcap": claimed(subject, {None: "", 1.5: "softcap", 50.0: "softcap"}),
        "workspace": claimed(subject, {None: "", 1 << 28: "max_workspace_bytes"}),
    }


def head_of(subject: Subject, point: Point, n: int) -> Given:
    """Operands: hidden [N, D] and weight [V, D], logits of a standard deviation of about 3; options of the logits."""
    D, V, how, g = point["D"], point["V"], point["hidden"], point.generator(11)
    hidden = torch.randn(n, D, generator=g, dtype=torch.float64)
    weight = 3 / D**0.5 * torch.randn(V, D, generator=g, dtype=torch.float64)
    if how == "exact":  # products and sums that nothing rounds, many of them equal
        hidden, weight = torch.round(hidden) / 2, torch.round(weight) / 2
    hidden = 4 * hidden if how == "confident" else hidden
    kind = getattr(torch, point["dtype"])
    given: Given = {
        "hidden": hidden.to(kind),
        "weight": weight.to(getattr(torch, point["weight dtype"] or point["dtype"])),
    }
    if point["bias"]:
        bias = torch.randn(V, generator=g, dtype=torch.float64)
        if point["bias"] == "forbids":
            bias[1:] = torch.where(torch.rand(V - 1, generator=g) < 0.4, -torch.inf, bias[1:])
        given["bias"] = (bias + (100.0 if point["bias"] == "large" else 0.0)).to(kind)
    if point["lora"]:
        r, scale = point["lora"]
        A, B = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((r, D), (V, r)))
        given["lora"] = LoRA((A / D**0.5).to(subject.device, kind), (B / r**0.5).to(subject.device, kind), scale)
    given |= {"softcap": point["softcap"]} if point["softcap"] else {}
    given |= {"logit_scale": point["logit scale"]} if point["logit scale"] != 1.0 else {}
    given |= {"max_workspace_bytes": point["workspace"]} if point["workspace"] else {}
    return given


def forbidden(given: Given, n: int) -> Any:
    """[N, V] bool: ids that the bias rules out."""
    V = given["weight"].shape[0]
    bias = given.get("bias")
    return (torch.zeros(V, dtype=torch.bool) if bias is None else bias == -torch.inf).expand(n, V)


def logits_of(given: Given, counted: Any) -> Any:
    """(hidden @ weight.T + bias) * logit_scale [N, V] of the operands as they are stored; 0 where rows do not count."""
    hidden = plain(given["hidden"], "hidden")
    hidden = np.where(counted[:, None], hidden.reshape(len(counted), hidden.shape[-1]), 0.0)
    x = hidden @ plain(given["weight"], "weight").T
    if given.get("lora") is not None:
        A, B = matrices(given)
        x = x + (hidden @ A.T) @ B.T
    if given.get("bias") is not None:
        x = x + plain(given["bias"], "bias")
    return x * given.get("logit_scale", 1.0)


def size_of_values(given: Given, lse: Any) -> Any:
    """What tolerances of log-probabilities scale with, [N].

    They are those of logits up to ten and of sums of 4096 products; the rounding of longer sums grows as their root.
    """
    return np.maximum(1, np.abs(lse) / 10) * max(1.0, given["weight"].shape[1] / 4096) ** 0.5


def name_of(x: torch.Tensor) -> str:
    """The dtype of a tensor."""
    return str(x.dtype).removeprefix("torch.")


def coarsest(*tensors: Any) -> str:
    """The dtype among those of tensors whose tolerances count."""
    return min((name_of(x) for x in tensors if x is not None), key=FINENESS.index)


def result_dtype(given: Given) -> str:
    """Of log-probabilities and losses."""
    wide = any(given[n].dtype == torch.float64 for n in ("hidden", "weight", "bias") if given.get(n) is not None)
    return "float64" if wide else "float32"


def head_gradients(subject: Subject, given: Given, counted: Any, dz: Any, least: float) -> dict[str, Want]:
    """Gradients of the operands from that of the scaled logits [N, V], each by the norm of its error.

    `least` is the norm below which a gradient is rounding.
    """
    hidden = plain(given["hidden"], "hidden")
    hidden = np.where(counted[:, None], hidden.reshape(len(counted), hidden.shape[-1]), 0.0)
    flat = {**given, "hidden": torch.from_numpy(hidden), "logit_scale": given.get("logit_scale", 1.0)}
    found, norms = {}, sizes(flat, dz, least)
    lora = given.get("lora")
    like = {**given, **({} if lora is None else {"lora.A": lora.A, "lora.B": lora.B})}
    for name, values in operand_gradients(flat, dz).items():
        dtype = coarsest(given["hidden"], given["weight"], like[name])
        row = "grad" if subject.op == "linear_logprob" else "grad_hidden" if name == "hidden" else "grad_weight"
        atol, rtol = subject.tolerance(row, dtype)
        # Where few elements hold the norm, they may err more: see check_gradients. Those of dz are rounded, too.
        few = 1 + 3 * max(_concentration(values), _concentration(dz))
        bound = atol + rtol * few * max(float(np.linalg.norm(values)), norms[name])
        found[f"d_{name}"] = Want(values.reshape(like[name].shape), bound, name_of(like[name]), norm=True)
    return found


def _concentration(x: Any) -> float:
    """One over the root of how many elements hold the norm of x: 1 where one does, or none."""
    squares = np.square(x)
    return float(np.linalg.norm(squares) / squares.sum()) if squares.any() else 1.0


OPERANDS: Final = {
    "hidden": Argument(),
    "weight": Argument(),
    "bias": Argument(dtypes=("", "float32", "bfloat16", "float16"), given=Rule(("bias",), bool)),
    "lora.A": Argument(dtypes=("", "float32", "bfloat16", "float16"), given=Rule(("lora",), bool)),
    "lora.B": Argument(dtypes=("", "float32", "bfloat16", "float16"), given=Rule(("lora",), bool)),
}


def real_heads(subject: Subject) -> Sequence[dict[str, Any]]:
    """Vocabularies and hidden sizes of models, each with little else."""
    graded = {"upstream": "normal"} if "grad" in subject.claims else {}
    return [*({"V": V, **graded} for V in REAL), *({"D": D, **graded} for D in INNER)]


def rows_of(rows: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """[N, D] as [..., D]."""
    return x.view(*rows, x.shape[-1])


def poisoned(hidden: torch.Tensor, counted: torch.Tensor, seed: int) -> torch.Tensor:
    """Hidden states [N, D] with anything where rows do not count."""
    poison = (math.nan, math.inf, -math.inf, 30000.0)[seed % 4]
    return torch.where(counted[:, None], hidden, torch.tensor(poison, dtype=hidden.dtype))
