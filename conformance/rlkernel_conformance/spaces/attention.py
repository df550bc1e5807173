"""The calls of attention@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlkernel_conformance.attention_calls import Bounded, expected, expected_gradients, in_pages, offsets
from rlkernel_conformance.spaces.layouts import ANY, SAME_VALUES
from rlkernel_conformance.spaces.modes import GRADLESS
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject

OFFSETS = ("int32", "int64")


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    masks = claimed(subject, {"causal": "", "window 3": "window", "window 64": "window", "all": "bidirectional"})
    return {
        # queries and keys of each sequence
        "lengths": (((3, 3), (2, 5)), ((1, 70),), ((65, 65),), (), ((0, 2), (3, 1))),
        "heads": ((2, 1), (1, 1), (3, 3), (8, 2)),
        "D": (4, 1, 20, 64),
        "dtype": subject.dtypes,
        "values": (1.0, 6.0, 2.0**-6),
        "page": claimed(subject, {0: "", 1: "paged", 16: "paged"}),
        "mask": masks,
        "softcap": claimed(subject, {None: "", 5: "softcap", 50.0: "softcap"}),
        "sinks": claimed(subject, {False: "", True: "sinks"}),
        "scale": (None, 0.5),
        "spare": (0, 2),
        "bound": (None, 200),
        "own keys": (False, True),  # cu_k is left out where it is cu_q
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    g, dtype, (Hq, Hk), D = point.generator(), getattr(torch, point["dtype"]), point["heads"], point["D"]
    own, spare = point["own keys"], point["spare"]
    lengths = [(m, m if own else n) for m, n in point["lengths"]]
    queries = sum(m for m, _ in lengths) + spare
    keys = queries if own else sum(n for _, n in lengths)

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    given: Given = {
        "q": (drawn(queries, Hq, D) * point["values"]).to(dtype),
        "k": drawn(keys, Hk, D).to(dtype),
        "v": drawn(keys, Hk, D).to(dtype),
        "cu_q": offsets([m for m, _ in lengths], "cpu"),
        "cu_k": offsets([n for _, n in lengths], "cpu"),
    }
    if point["page"]:
        given = in_pages(given, point["page"], point.seed)
    elif own:
        del given["cu_k"]
    if point["sinks"]:
        given["sinks"] = drawn(Hq).to(dtype)
    mask, _, width = point["mask"].partition(" ")
    masks: dict[str, Given] = {"causal": {}, "all": {"causal": False}, "window": {"window": int(width or 1)}}
    given |= masks[mask]
    given |= {n: point[n] for n in ("softcap", "scale") if point[n] is not None}
    if point["bound"] is not None:
        given["max_k"] = point["bound"]
    return {n: x.to(subject.device) if isinstance(x, torch.Tensor) else x for n, x in given.items()}


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition, and its gradients."""
    wide = "float64" if point["dtype"] == "float64" else "float32"
    found = expected(subject, given)
    wants = {n: _want(found[n], kind) for n, kind in (("out", point["dtype"]), ("lse", wide))}
    if not upstream:
        return wants
    graded = expected_gradients(subject, given, upstream)
    dtypes = {n: str(given[n].dtype).removeprefix("torch.") for n in graded}
    return wants | {f"d_{n}": _want(x, dtypes[n]) for n, x in graded.items()}


def _want(found: Bounded, dtype: str) -> Want:
    return Want(*found, dtype)


def _without_gradient(page: int, upstream: str, wants: str) -> bool:
    """Keys in pages have none."""
    return not page or upstream == "none" or wants in {"q", "sinks"}


def _model(subject: Subject, lengths: Any, heads: tuple[int, int], D: int, page: int, **more: Any) -> dict[str, Any]:
    paged = {"page": page} if "paged" in subject.claims else {}
    return {"lengths": lengths, "heads": heads, "D": D, **paged, **more}


SPACE = Space(
    "attention",
    factors,
    arguments,
    answers,
    {
        "q": Argument(ANY),
        "k": Argument(ANY),
        "v": Argument(ANY),
        "cu_q": Argument(SAME_VALUES, OFFSETS),
        "cu_k": Argument(SAME_VALUES, OFFSETS, Rule(("page", "own keys"), lambda page, own: not page and not own)),
        "page_table": Argument(SAME_VALUES, OFFSETS, Rule(("page",), bool)),
        "seqused_k": Argument(SAME_VALUES, OFFSETS, Rule(("page",), bool)),
        "sinks": Argument(SAME_VALUES, ("", "float32"), Rule(("sinks",), bool)),
    },
    (
        Rule(("page", "upstream", "wants"), _without_gradient),
        Rule(("page", "mode"), lambda page, mode: not page or mode not in GRADLESS),
    ),
    lambda s: [
        _model(s, ((1, 4099), (1, 1), (2, 1024)), (8, 2), 128, 16),
        _model(s, ((260, 260), (3, 3)), (7, 1), 64, 0),
        _model(s, ((5, 300),), (2, 1), 256, 64),
        _model(s, ((1, 2),) * 300, (4, 1), 16, 1),
    ],
)
