"""The calls of divergence@1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance import draw
from rlkernel_conformance.clauses.divergence_rows import allowed, allowed_gradient, kinds, listed
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.logprob import PER_ROW, REAL, ROWS, TENSORS, mask_of
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import divergence as definition

BETA: Final = {"jsd": (None, 0.1, 0.9)}


def options(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """What linear_divergence takes too."""
    per_row = dict.fromkeys(PER_ROW, "per_row_temperature")
    return {
        "kind": kinds(subject),
        "beta": (None, 0.1, 0.9),
        "temperature": claimed(subject, {"1": "", "0.7": "", **per_row}),
        "teacher temperature": claimed(subject, {"": "", "1.7": "teacher_temperature", **per_row})
        if "teacher_temperature" in subject.claims
        else ("",),
        "mask": claimed(subject, {"": "", "some": "mask", "none": "mask", "all": "mask"}),
    }


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ROWS,
        "V": (33, 1, 2, 128, 1000, 4099),
        "values": tuple(draw.LOGITS),
        "dtype": subject.dtypes,
        **options(subject),
        "list": claimed(subject, {0: "", **dict.fromkeys((1, 5, 70), "teacher_ids")}),
        "padding": (0, 3),
    }


RULES: Final = (
    Rule(("kind", "beta"), lambda kind, beta: beta is None or kind == "jsd"),
    Rule(("list", "teacher temperature"), lambda K, T: not K or not T),
    Rule(("list", "padding"), lambda K, padding: bool(K) or not padding),
)
# Lists whose ids or masses differ from row to row make no sense as one row for all.
TEMPERATURE: Final = TENSORS["temperature"]
OPTIONS: Final = {
    "temperature": TEMPERATURE,
    "teacher_temperature": Argument(
        dtypes=TEMPERATURE.dtypes, given=Rule(("teacher temperature",), lambda T: T in PER_ROW)
    ),
    "mask": Argument(given=Rule(("mask",), bool)),
}


def temperatures_of(point: Point, rows: tuple[int, ...], device: str) -> Given:
    """Numbers, or tensors that broadcast to the rows."""
    found: Given = {}
    for salt, (factor, name) in enumerate(
        (("temperature", "temperature"), ("teacher temperature", "teacher_temperature"))
    ):
        how = point[factor]
        if how in PER_ROW:
            shape = {"rows": rows, "number": (), "last of one": (*rows[:-1], 1) if rows else ()}[how]
            T = 0.5 + torch.rand(shape, generator=point.generator(3 + salt), dtype=torch.float64)
            found[name] = T.float().to(device)
        elif how:
            found[name] = float(how)
    return found


def options_of(point: Point, rows: tuple[int, ...], device: str) -> Given:
    """Of the call."""
    given: Given = {"kind": point["kind"], **temperatures_of(point, rows, device)}
    given |= {"beta": point["beta"]} if point["beta"] is not None else {}
    return given | ({"mask": mask_of(point, rows, device)} if point["mask"] else {})


def list_of(point: Point, teacher: torch.Tensor, rows: tuple[int, ...], device: str) -> Given:
    """The teacher's list of a point, from its logits [N, V]."""
    found = listed(teacher, min(point["list"], teacher.shape[1]))
    fill = {"teacher": math.nan, "teacher_ids": -1}
    padded = {n: torch.nn.functional.pad(x, (0, point["padding"]), value=fill[n]) for n, x in found.items()}
    return {n: x.view(*rows, x.shape[-1]).to(device) for n, x in padded.items()}


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    rows, V = point["rows"], point["V"]
    x, teacher = (
        draw.logits(point["values"], math.prod(rows), V, 2 * point.seed + i, point["dtype"], "cpu") for i in range(2)
    )
    given: Given = {"logits": x.view(*rows, V).to(subject.device), "teacher": teacher.view(*rows, V).to(subject.device)}
    given |= options_of(point, rows, subject.device)
    return given | (list_of(point, teacher, rows, subject.device) if point["list"] else {})


def rows_of(given: Given, rows: tuple[int, ...], logits: Any, teacher: Any, g: Any) -> tuple[definition.Rows, Any]:
    """The definition of logits [N, V] under the options of a call of rows [...], and which rows count, [N]."""
    n = math.prod(rows)
    more: Given = {name: given[name] for name in ("kind", "beta") if name in given}
    for name in ("temperature", "teacher_temperature"):
        T = given.get(name)
        if T is not None:
            T = np.broadcast_to(plain(T, name) if torch.is_tensor(T) else T, rows).reshape(-1)
            more[name] = T
    if "teacher_ids" in given:
        ids = plain(given["teacher_ids"], "teacher_ids")
        more["ids"] = ids.reshape(n, ids.shape[-1])
    mask = plain(given["mask"], "mask").reshape(-1) if "mask" in given else np.ones(n, bool)
    g = None if g is None else np.where(mask, np.broadcast_to(g, rows).reshape(-1), 0.0)
    return definition.divergence(logits, teacher, g=g, **more), mask


def values_of(
    subject: Subject, dtype: str, found: definition.Rows, mask: Any, rows: tuple[int, ...], stored: str
) -> Want:
    """Divergences, 0 where rows do not count."""
    bound = np.where(mask, allowed(subject, dtype, found), 0.0)
    return Want(np.where(mask, found.values, 0.0).reshape(rows), bound.reshape(rows), stored)


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    dtype, x, teacher = point["dtype"], plain(given["logits"], "logits"), plain(given["teacher"], "teacher")
    rows, n = x.shape[:-1], math.prod(x.shape[:-1])
    found, mask = rows_of(
        given, rows, x.reshape(n, x.shape[-1]), teacher.reshape(n, teacher.shape[-1]), upstream.get("", None)
    )
    wanted = {"": values_of(subject, dtype, found, mask, rows, "float64" if dtype == "float64" else "float32")}
    if upstream:
        grad = np.where(mask[:, None], found.grad, 0.0)
        bound = np.where(mask[:, None], allowed_gradient(subject, dtype, found), 0.0)
        wanted["d_logits"] = Want(grad.reshape(x.shape), bound.reshape(x.shape), dtype)
    return wanted


SPACE = Space(
    "divergence",
    factors,
    arguments,
    answers,
    {
        "logits": Argument(),
        "teacher": Argument(SAME_VALUES),
        "teacher_ids": Argument(SAME_VALUES, ("int64", "int32", "int16"), Rule(("list",), bool)),
        **OPTIONS,
    },
    RULES,
    lambda _: [*({"V": V, "rows": (2,)} for V in REAL[::3]), {"V": 151936, "rows": (2,), "kind": "jsd"}],
)
