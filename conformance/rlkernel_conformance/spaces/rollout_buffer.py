"""The calls of rollout_buffer@1: a buffer is made, filled and emptied; the batch that comes out is what went in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.clauses.rollout_state_machine import FIRST_TOKEN
from rlkernel_conformance.spaces.layouts import SAME_VALUES, laid_out
from rlkernel_conformance.spaces.modes import WITHOUT_SYNCHRONIZATION
from rlkernel_conformance.spaces.space import Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.rollouts import DEFAULT_FIELDS, Field

# Two numbers a token, one that no append gives, and a dtype of two bytes.
OWN: Final = {
    **DEFAULT_FIELDS,
    "pair": Field("float64", (2,)),
    "tag": Field("int16", default=-3),
    "p": Field("bfloat16"),
}
Row = tuple[int, ...]  # tokens of a sequence


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Sequences of a group, pages, fields, and how tokens are appended."""
    return {
        "lengths": ((3, 5, 2), (1,), (4, 4), (0, 2), (8, 1, 9)),
        "groups": (1, 2),
        "page_tokens": (4, 1, 8),
        "fields": claimed(subject, {"default": "", "own": "fields"}),
        "rewards": (1, 3),
        "on_full": claimed(subject, {"raise": "on_full:raise", "drop_oldest": "on_full:drop_oldest"}),
        "append": ("packed", "a tail behind", "token by token"),
        "layout of values": SAME_VALUES,
        "dtype of cu_seqlens": ("int64", "int32"),
        "batch": ("fits", "has room"),
    }


RULES = (
    Rule(("append", "dtype of cu_seqlens"), lambda append, dtype: append != "token by token" or dtype == "int64"),
    Rule(("mode",), lambda mode: mode != WITHOUT_SYNCHRONIZATION),  # `finish` and `pop` read lengths, as the page says
)


def rows_of(point: Point) -> list[Row]:
    """Tokens of each sequence, group by group."""
    rows, count = [], FIRST_TOKEN
    for n in point["lengths"] * point["groups"]:
        rows.append(tuple(range(count, count + n)))
        count += n
    return rows


def arguments(subject: Subject, point: Point) -> Given:
    """The buffer: room for all, in whole pages."""
    page, longest = point["page_tokens"], max(*point["lengths"], 1)
    number = len(point["lengths"]) * point["groups"]
    given: Given = {"max_tokens": -(-longest // page) * page * number, "max_seqs": number, "page_tokens": page}
    given |= {"rewards": point["rewards"], "on_full": point["on_full"], "device": subject.device}
    given |= {"fields": OWN} if point["fields"] == "own" else {}
    return given | ({"max_batch_tokens": given["max_tokens"]} if point["batch"] == "has room" else {})


def fields_of(tokens: Sequence[int]) -> dict[str, Any]:
    """Arrays of every field of some tokens but those with a default; each dtype holds them."""
    token = np.asarray(tokens, np.float64)
    return {"token": token, "logprob": -token / 8, "pair": np.stack([token, -token], -1), "p": token % 64}


def use(subject: Subject, point: Point, given: Given, buffer: Any) -> dict[str, Tensor]:
    """Fill a buffer and pop all of it; copies of the batch."""
    names = OWN if point["fields"] == "own" else DEFAULT_FIELDS
    rows, members = rows_of(point), len(point["lengths"])

    def values(tokens: Sequence[int]) -> dict[str, Tensor]:
        stored = {n: x for n, x in fields_of(tokens).items() if n in names}
        made = {
            n: torch.tensor(x, dtype=getattr(torch, names[n].dtype), device=subject.device) for n, x in stored.items()
        }
        return {n: laid_out(x, point["layout of values"]) for n, x in made.items()}

    for group in range(point["groups"]):
        mine = rows[group * members : (group + 1) * members]
        slots = buffer.reserve(max(*map(len, mine), 1), [group] * members)
        if point["append"] == "token by token":
            for t in range(max(map(len, mine))):
                alive = torch.tensor([t < len(row) for row in mine], device=subject.device)
                buffer.append(slots, values([row[t] if t < len(row) else 999 for row in mine]), alive=alive)
        else:
            tail = [999, 998] if point["append"] == "a tail behind" else []
            dtype = getattr(torch, point["dtype of cu_seqlens"])
            ends = torch.tensor([0, *accumulate(map(len, mine))], dtype=dtype, device=subject.device)
            buffer.append(slots, values([t for row in mine for t in row] + tail), cu_seqlens=ends)
        buffer.finish(slots, torch.tensor(rewards_of(point)[group], dtype=torch.float32, device=subject.device))
    with buffer.pop(groups=point["groups"]) as batch:
        found = {name: batch[name] for name in names}
        found |= {name: getattr(batch, name) for name in ("cu_seqlens", "group", "group_ids", "reward", "valid")}
        return {name: x.clone() for name, x in found.items()}


def rewards_of(point: Point) -> Any:
    """[groups, members] or [groups, members, K] in quarters."""
    K, shape = point["rewards"], (point["groups"], len(point["lengths"]))
    values = np.arange(np.prod(shape) * K) % 7 / 4
    return values.reshape(*shape, K) if K > 1 else values.reshape(shape)


def expected(subject: Subject, point: Point, given: Given, _: Mapping[str, Any]) -> dict[str, Want]:
    """What went in."""
    rows, K = rows_of(point), point["rewards"]
    tokens = [t for row in rows for t in row]
    members = np.repeat(np.arange(point["groups"]), len(point["lengths"]))
    names = OWN if point["fields"] == "own" else DEFAULT_FIELDS
    stored = fields_of(tokens)
    found = {n: Want(stored[n], 0.0, f.dtype) for n, f in names.items() if f.default is None}
    found |= {n: Want(np.full(len(tokens), f.default), 0.0, f.dtype) for n, f in names.items() if f.default is not None}
    reward = rewards_of(point).reshape((len(rows), K) if K > 1 else len(rows))
    return found | {
        "cu_seqlens": Want(np.array([0, *accumulate(map(len, rows))]), 0.0, "int64"),
        "group": Want(members, 0.0, "int64"),
        "group_ids": Want(members, 0.0, "int64"),
        "reward": Want(reward, 0.0, "float32"),
        "valid": Want(np.ones(len(rows), bool), 0.0, "bool"),
    }


SPACE = Space(
    "rollout_buffer",
    factors,
    arguments,
    expected,
    {},
    RULES,
    lambda _: [
        {"lengths": (70_001, 3)},
        {"lengths": (2,) * 4099, "page_tokens": 1},
        {"lengths": (8193, 1), "groups": 3},
    ],
    use,
)
