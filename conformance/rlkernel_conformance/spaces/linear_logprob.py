"""The calls of linear_logprob@1.

Legend: N rows · D hidden · V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces import heads, logprob
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject

PER_ROW: Final = logprob.PER_ROW
BACKWARD: Final = {"auto": "", "recompute": "backward:recompute", "save": "backward:save"}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": logprob.ROWS,
        **heads.head_factors(subject),
        "ids": ("inside", "edges", "outside"),
        "K": claimed(subject, logprob.COUNTS),
        "temperature": claimed(subject, {"1": "", "0.7": "", **dict.fromkeys(PER_ROW, "per_row_temperature")}),
        "mask": claimed(subject, {"": "", "some": "mask", "none": "mask", "all": "mask"}),
        "entropy": claimed(subject, {False: "", True: "entropy"}),
        "support": claimed(subject, {"": "", "ragged": "support", "twice": "support", "all": "support"}),
        "backward": claimed(subject, BACKWARD),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    rows, copies = point["rows"], point.levels.get("copies", 1)
    n = math.prod(rows)
    given = heads.head_of(subject, point, n // copies)
    ids = logprob.ids_of(point, (n // copies,), point["V"], heads.forbidden(given, n // copies))
    if point.levels.get("K") != logprob.RAGGED:
        ids = ids.tile(copies).view(rows) if copies > 1 else ids.view((*rows, *ids.shape[1:]))
    given["ids"] = logprob.on(subject.device, ids)
    hidden = given["hidden"].tile(copies, 1)
    if point["mask"]:
        given["mask"] = logprob.mask_of(point, rows, "cpu")
        if point["layout of mask"] != "expanded" != point["layout of hidden"]:
            hidden = heads.poisoned(hidden, given["mask"].reshape(-1), point.seed)
    given["hidden"] = heads.rows_of(rows, hidden)
    given = {n: x.to(subject.device) if torch.is_tensor(x) else x for n, x in given.items()}
    given["temperature"] = logprob.temperature_of(point, rows, subject.device)
    if point["support"]:
        given["support"] = logprob.support_of(point, n, point["V"], subject.device)
    given |= {"entropy": True} if point["entropy"] else {}
    given |= {"backward": point["backward"]} if point["backward"] != "auto" else {}
    return given


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Results of the definition, and the gradients of the operands."""
    copies, shape = point.levels.get("copies", 1), tuple(given["hidden"].shape[:-1])
    n = math.prod(shape)
    counted = plain(given["mask"], "mask").reshape(-1) if "mask" in given else np.ones(n, bool)
    x = heads.logits_of(given, counted)
    one = {**given, "ids": given["ids"][: n // copies]} if copies > 1 else given
    of_one = (n // copies,) if copies > 1 else shape
    law = logprob.Law.of(x[: n // copies], one, of_one, upstream if copies == 1 else {})
    found = _results(subject, given, law, copies)
    if not upstream:
        return found
    dz = law.grad
    if copies > 1:  # a gradient is linear in those that come in
        dz = np.zeros(x.shape)
        for name, u in upstream.items():
            of_name = logprob.Law.of(x[: n // copies], one, of_one, {name: np.ones(n // copies)})
            dz += u[:, None] * np.tile(of_name.grad, (copies, 1))
    weight = plain(given["weight"], "weight")
    most = float(np.sqrt(sum(np.square(u).sum() for u in upstream.values())))
    coldest = float(torch.as_tensor(given["temperature"]).double().min()) if n else 1.0
    least = 0.05 * most * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / coldest
    return found | heads.head_gradients(subject, given, counted, dz, least)


def _results(subject: Subject, given: Given, law: logprob.Law, copies: int) -> dict[str, Want]:
    dtype = heads.coarsest(given["hidden"], given["weight"])
    size = heads.size_of_values(given, law.row.lse)
    values: dict[str, tuple[str, Any, Any]] = {
        "logprob": ("logprob", law.logprob, logprob.of_ids(size, law.valid)),
        "lse": ("lse", law.row.lse, size),
    }
    if given.get("entropy"):
        values["entropy"] = ("entropy", law.row.entropy, size)
    if law.row.log_kept_mass is not None:
        values["log_kept_mass"] = ("logprob", np.where(law.valid, law.row.log_kept_mass, np.nan), 2 * size)
    stored, shape = heads.result_dtype(given), tuple(given["hidden"].shape[:-1])

    def shaped(x: Any) -> Any:
        return np.concatenate([x] * copies).reshape((*shape, *x.shape[1:]))

    def placed(name: str, x: Any) -> Any:
        return law.listed(x) if name in {"logprob", "invalid"} and law.of_list is not None else shaped(x)

    found = {"invalid": Want(placed("invalid", law.invalid), 0.0, "bool")}
    for name, (row, x, scale) in values.items():
        want = Want.near(subject, row, dtype, np.where(logprob.of_ids(law.mask, x), x, 0.0), scale=scale, stored=stored)
        every, allowed = (placed(name, a) for a in (want.values, want.allowed))
        found[name] = Want(every, allowed, stored)
    return found


def real(subject: Subject) -> Sequence[Mapping[str, Any]]:
    """Vocabularies and hidden sizes of models; more than 4096 rows, and than 65536."""
    graded = {"upstream": "normal"} if "grad" in subject.claims else {}
    many = [{"rows": (7 * k,), "copies": k, "V": 5, **graded} for k in (601, 9371)]
    return [*({"rows": (2,), **sizes} for sizes in heads.real_heads(subject)), *many]


SPACE = Space(
    "linear_logprob",
    factors,
    arguments,
    expected,
    {
        **heads.OPERANDS,
        **logprob.IDS,
        "temperature": logprob.TENSORS["temperature"],
        "mask": Argument(given=Rule(("mask",), bool)),
        "support.ids": Argument(SAME_VALUES, logprob.INTEGERS, Rule(("support",), bool)),
        "support.offsets": Argument(SAME_VALUES, logprob.INTEGERS, Rule(("support",), bool)),
    },
    (logprob.ONE_ID,),
    real,
    masking={"rows": ((0,),), "mask": ("none",), "V": (1,)},
)
