"""The calls of linear_divergence@1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.linear_divergence_heads import FORMS
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces import divergence, heads
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.logprob import REAL, ROWS
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ROWS,
        "D": (8, 1, 33),
        "V": (33, 1, 2, 128, 1025),
        "hidden": ("normal", "exact", "confident"),
        "dtype": subject.dtypes,
        **divergence.options(subject),
        "form": claimed(subject, FORMS),
        "list": (5, 1, 70),
        "padding": (0, 3),
        "backward": claimed(subject, {"recompute": "", "save": "backward:save"}),
    }


RULES: Final = (
    *divergence.RULES[:1],
    Rule(("form", "teacher temperature"), lambda form, T: form != "list" or not T),
    Rule(("form", "list"), lambda form, K: form == "list" or K == 5),
    Rule(("form", "padding"), lambda form, padding: form == "list" or not padding),
)


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    rows, V, D, g = point["rows"], point["V"], point["D"], point.generator(11)
    n, kind = math.prod(rows), getattr(torch, point["dtype"])

    def side(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.randn(n, size, generator=g, dtype=torch.float64)
        weight = 2 / size**0.5 * torch.randn(V, size, generator=g, dtype=torch.float64)
        if point["hidden"] == "exact":  # products and sums that nothing rounds, many of them equal
            hidden, weight = torch.round(hidden) / 2, torch.round(weight) / 2
        return (4 * hidden if point["hidden"] == "confident" else hidden).to(kind), weight.to(kind)

    (hidden, weight), (teacher, head) = side(D), side(D + 2)
    given: Given = {"hidden": hidden.view(*rows, D), "weight": weight, **divergence.options_of(point, rows, "cpu")}
    if point["form"] == "head":
        given |= {"teacher": teacher.view(*rows, D + 2), "teacher_weight": head}
    else:
        logits = (teacher.double() @ head.double().T).to(kind)
        given["teacher"] = logits.view(*rows, V)
        given |= divergence.list_of(point, logits, rows, "cpu") if point["form"] == "list" else {}
    given |= {"backward": "save"} if point["backward"] == "save" else {}
    return {n: x.to(subject.device) if torch.is_tensor(x) else x for n, x in given.items()}


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    rows, dtype = point["rows"], point["dtype"]
    n, V = math.prod(rows), point["V"]
    every = np.ones(n, bool)
    logits, teacher = heads.logits_of(given, every), plain(given["teacher"], "teacher")
    teacher = teacher.reshape(n, teacher.shape[-1])
    if "teacher_weight" in given:
        teacher = teacher @ plain(given["teacher_weight"], "teacher_weight").T
    found, mask = divergence.rows_of(given, rows, logits.reshape(n, V), teacher, upstream.get("", None))
    stored = "float64" if dtype == "float64" else "float32"
    wanted = {"": divergence.values_of(subject, dtype, found, mask, rows, stored)}
    if upstream:
        dz = np.where(mask[:, None], found.grad, 0.0)
        up = np.where(mask, np.broadcast_to(upstream[""], rows).reshape(-1), 0.0)
        T = torch.as_tensor(given.get("temperature", 1.0)).double()
        weight = plain(given["weight"], "weight")
        least = 0.05 * float(np.linalg.norm(up)) * float(np.linalg.norm(weight)) / V**0.5
        least = least / float(T.min()) if n else least
        jump = float(np.linalg.norm(np.where(mask[:, None], found.slack, 0.0)))
        for name, want in heads.head_gradients(subject, given, mask, dz, least).items():
            other = plain(given["weight" if name == "d_hidden" else "hidden"], name)
            more = jump * float(np.linalg.norm(other))
            wanted[name] = Want(want.values, want.allowed + more, want.dtype, norm=True)
    return wanted


SPACE = Space(
    "linear_divergence",
    factors,
    arguments,
    answers,
    {
        "hidden": Argument(),
        "weight": Argument(),
        "teacher": Argument(SAME_VALUES),
        "teacher_weight": Argument(SAME_VALUES, given=Rule(("form",), lambda form: form == "head")),
        "teacher_ids": Argument(SAME_VALUES, ("int64", "int32", "int16"), Rule(("form",), lambda form: form == "list")),
        **divergence.OPTIONS,
    },
    RULES,
    lambda _: [*({"V": V, "rows": (2,)} for V in REAL[::3]), {"D": 4096, "rows": (2,)}, {"V": 33_000, "rows": (72,)}],
    masking={"rows": ((0,),), "mask": ("none",), "V": (1,)},
)
