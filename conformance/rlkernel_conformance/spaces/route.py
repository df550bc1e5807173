"""The calls of route@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.route import allowed_gradient, expected_gates, expected_gradient
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import ANY, SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import route as definition

VALUES: Final = {"normal": 1.0, "large": 30.0, "small": 2.0**-6}  # sizes of the logits


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "T": (3, 1, 0, 130),
        "E": (5, 1, 64, 130, 1025),
        "k": (2, 1, 8),
        "dtype": subject.dtypes,
        "values": tuple(VALUES),
        "replay": claimed(subject, {"": "", "drawn": "replay"}),
        "renormalize": claimed(subject, {False: "", True: "renormalize"}),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call; among replayed ids are some that are no expert."""
    g, T, E = point.generator(), point["T"], point["E"]
    k = min(point["k"], E)
    logits = torch.randn(T, E, generator=g, dtype=torch.float64) * VALUES[point["values"]]
    given: Given = {"logits": logits.to(getattr(torch, point["dtype"])).to(subject.device), "top_k": k}
    if point["replay"]:
        given["replay"] = (torch.randint(E + 2, (T, k), generator=g) - 1).to(subject.device)
    return given | ({"renormalize": True} if point["renormalize"] else {})


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    dtype, E = point["dtype"], point["E"]
    wide = "float64" if dtype == "float64" else "float32"
    logits = plain(given["logits"], "logits")
    ids = plain(given["replay"], "replay") if "replay" in given else definition.best(logits, given["top_k"])
    ids = ids.reshape(point["T"], given["top_k"])
    order, ends = definition.order(ids, E)
    found = {
        "ids": Want(ids, dtype="int64"),
        "gates": Want.near(subject, "gates", dtype, expected_gates(given, ids), stored=wide),
        "order": Want(order, dtype="int64"),
        "ends": Want(ends, dtype="int32"),
    }
    if upstream:
        want, size = expected_gradient(given, ids, np.broadcast_to(upstream["gates"], ids.shape))
        found["d_logits"] = Want(want, allowed_gradient(subject, dtype, want, size), dtype)
    return found


SPACE = Space(
    "route",
    factors,
    arguments,
    answers,
    {
        "logits": Argument(ANY),
        "replay": Argument(SAME_VALUES, ("int64", "int32", "int16"), Rule(("replay",), bool)),
    },
    (),
    lambda _: [
        {"T": 1030, "E": 128, "k": 8},  # Qwen3-30B-A3B
        {"T": 17, "E": 384, "k": 8},  # Kimi K2
        {"T": 4099, "E": 8, "k": 2},  # Mixtral 8x7B
    ],
)
