"""What the rows of a draw ask for: parameters, noise and edits as factors, as arguments, and as rows of the definition.

Legend: N rows · V vocabulary · R owners of parameters: rows, state slots or requests · H history entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.sampling_batches import pack
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.sampling import LogitBias, Penalties, TokenLists

Array = np.ndarray[Any, Any]

# Values that the owners of a parameter have in turn, and those without meaning, which every seventh has where it is
# spoiled: rare, because such a row tells nothing else.
TURNS: Final[Mapping[str, Sequence[float]]] = {
    "temperature": (0.7, 0.0, 1.0, 1.5, 0.25, -0.0, 2.0),
    "top_k": (2, 0, 1, -1, 5, 2**33, 3, 127),
    "top_p": (0.5, np.nan, 0.9, 0.0, 1.0, -1.0, 0.25, 2.0),
    "min_p": (0.0625, np.nan, 1.0, 0.0, 0.5, -1.0, 2.0),
    "repetition": (1.25, 1.0, 0.75, 2.0),
    "frequency": (0.5, 0.0, -0.25),
    "presence": (0.25, -0.5, 0.0),
}
SPOILED: Final[Mapping[str, Sequence[float]]] = {
    "temperature": (-1.0, np.nan, np.inf),
    "repetition": (0.0, np.nan, -1.0, np.inf),
    "frequency": (np.nan, -np.inf),
    "presence": (np.inf, np.nan),
}
NUMBERS: Final = {"1": 1.0, "0.7": 0.7, "0": 0.0, "cold": 0.001}
GIVEN_PENALTIES: Final = {
    "repetition": ("repetition",),
    "frequency": ("frequency",),
    "presence": ("presence",),
    "all": ("repetition", "frequency", "presence"),
}


def factors(subject: Subject) -> dict[str, Sequence[Any]]:
    """Parameters, noise and edits of every sampling operator."""
    tensors = {"tensor": "per_row_parameters"}
    penalized = "penalties" in subject.claims
    return {
        "temperature": claimed(subject, dict.fromkeys(NUMBERS, "") | tensors | {"spoiled": "per_row_parameters"}),
        "top_k": _filter(subject, "top_k", (1, 3, "V", "V + 5", -1)),
        "top_p": _filter(subject, "top_p", (0.9, 0.5, 0.0, 1.0)),
        "min_p": _filter(subject, "min_p", (0.0625, 1.0, 0.0)),
        "entries": ("rows", "one", "number"),  # of the parameters that are tensors
        "filter_order": claimed(subject, {"topk_topp": "", **_named("filter_order", "joint", "topp_topk")}),
        "tie": claimed(subject, {"lowest_id": "", **_named("tie", "keep_all")}),
        "noise": ("rows", "seeds", "steps", "seeds of one step", "numbers"),
        "penalties": claimed(subject, {"": "", **dict.fromkeys(("none", *GIVEN_PENALTIES), "penalties")}),
        "coefficients": ("numbers", "tensors", "spoiled") if penalized else ("numbers",),
        "history": ("", "output", "counts", "prompt", "prompt and counts") if penalized else ("",),
        "allowed": claimed(subject, {"": "", **dict.fromkeys(("some", "all", "one", "nothing"), "allowed")}),
        "banned": claimed(subject, {"": "", **dict.fromkeys(("some", "all"), "banned")}),
        "padding": claimed(subject, {0: "", 9: "vocab_size"}),
        "raw_logprob": claimed(subject, {False: "", True: "raw_logprob"}),
    }


def bias_levels(subject: Subject, feature: str) -> tuple[Any, ...]:
    """Of the values that are added to some logits."""
    return claimed(subject, {"": "", **dict.fromkeys(("some", "repeated", "bans", "posinf", "spoiled"), feature)})


def _named(family: str, *levels: str) -> dict[str, str]:
    return {level: f"{family}:{level}" for level in levels}


def _filter(subject: Subject, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """A filter's levels, off first; a tensor of it needs two features."""
    levels = claimed(subject, {None: "", **dict.fromkeys(values, name)})
    return (*levels, "tensor") if {name, "per_row_parameters"} <= subject.claims else levels


RULES: Final = (
    # What has no meaning for all rows hides all else.
    Rule(("temperature", "entries"), lambda T, entries: T != "spoiled" or entries == "rows"),
    Rule(("coefficients", "entries"), lambda c, entries: c != "spoiled" or entries == "rows"),
    Rule(("penalties", "coefficients"), lambda p, c: c == "numbers" or p not in {"", "none"}),
    Rule(("penalties", "history"), lambda p, history: not history or bool(p)),
)
INTEGERS: Final = ("int64", "int32", "int16", "uint8")
REALS: Final = ("float32", "float64", "bfloat16", "float16")
ROWS: Final = ("contiguous", "spread", "offset", "expanded")  # of one dimension
LIST: Final = tuple(name for name in ROWS if name != "expanded")


def parameter_tensors(history: str = "history") -> dict[str, Argument]:
    """How parameters and edits of every sampling operator may be given."""

    def coefficient(name: str) -> Argument:
        having = tuple(p for p, names in GIVEN_PENALTIES.items() if name in names)
        return Argument(ROWS, REALS, Rule(("penalties", "coefficients"), lambda p, c: p in having and c != "numbers"))

    def of_history(*having: str) -> Rule:
        return Rule((history,), lambda h: h in having)

    is_tensor = ("tensor", "spoiled")
    seeds, steps = ("rows", "seeds", "seeds of one step"), ("rows", "steps", "seeds of one step")
    return {
        "temperature": Argument(ROWS, REALS, Rule(("temperature",), lambda t: t in is_tensor)),
        "top_k": Argument(ROWS, (*INTEGERS, "int8"), Rule(("top_k",), lambda k: k == "tensor")),
        "top_p": Argument(ROWS, REALS, Rule(("top_p",), lambda p: p == "tensor")),
        "min_p": Argument(ROWS, REALS, Rule(("min_p",), lambda p: p == "tensor")),
        "seed": Argument(ROWS, (*INTEGERS, "uint64"), Rule(("noise",), lambda noise: noise in seeds)),
        "step": Argument(ROWS, (*INTEGERS, "uint64"), Rule(("noise",), lambda noise: noise in steps)),
        "penalties.repetition": coefficient("repetition"),
        "penalties.frequency": coefficient("frequency"),
        "penalties.presence": coefficient("presence"),
        "penalties.prompt_bits": Argument(given=of_history("prompt", "prompt and counts")),
        "penalties.output_ids": Argument(dtypes=INTEGERS, given=of_history("output", "counts", "prompt and counts")),
        "penalties.output_counts": Argument(dtypes=INTEGERS, given=of_history("counts", "prompt and counts")),
        "allowed": Argument(given=Rule(("allowed",), bool)),
        "banned.ids": Argument(LIST, INTEGERS, Rule(("banned",), bool)),
        "banned.offsets": Argument(LIST, INTEGERS, Rule(("banned",), bool)),
    }


def bias_tensors(name: str) -> dict[str, Argument]:
    """How the values added to some logits may be given."""
    given = Rule((name,), bool)
    return {
        f"{name}.ids": Argument(LIST, INTEGERS, given),
        f"{name}.values": Argument(LIST, REALS, given),
        f"{name}.offsets": Argument(LIST, INTEGERS, given),
    }


def generator(point: Point, salt: int) -> np.random.Generator:
    """Of values that stand in no tensor yet."""
    return np.random.default_rng((point.seed, salt))


def parameters(point: Point, V: int, R: int) -> Given:
    """Law and noise."""
    given: Given = {}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = point[name]
        if value in {"tensor", "spoiled"}:
            given[name] = _turns(name, value, point, R)
        elif value is not None:
            given[name] = {"V": V, "V + 5": V + 5, **NUMBERS}.get(value, value)
    given |= noise(point, R)
    return given | {name: point[name] for name in ("filter_order", "tie") if point[name] != "topk_topp"}


def _turns(name: str, level: str, point: Point, R: int) -> torch.Tensor:
    """[R] the values of a table, from another one on at each point; or one for all."""
    table, bad = TURNS[name], SPOILED.get(name, ())
    turns = [table[(i + point.seed) % len(table)] for i in range(max(R, 1))]
    if level == "spoiled":
        first = (point.seed + len(name)) % 7
        turns[first::7] = [bad[(i + point.seed) % len(bad)] for i in range(len(turns[first::7]))]
    values = torch.tensor(turns, dtype=torch.int64 if name == "top_k" else torch.float32)
    return {"rows": values[:R], "one": values[:1], "number": values[0]}[point["entries"]]


EDGES: Final = (2**32 - 1, 2**32, -1, -(2**63), 2**63 - 1, 0)


def noise(point: Point, R: int) -> Given:
    """Seeds and steps, most of them beyond 32 bits."""
    how, g = point["noise"], generator(point, 1)
    if how == "numbers":
        return {"seed": 2**64 - 1 - point.seed, "step": 2**63 + point.seed}

    def some() -> torch.Tensor:
        values = g.integers(-(2**63), 2**63 - 1, size=R)
        at = g.permutation(R)[: len(EDGES) // 2]
        values[at] = g.permutation(np.array(EDGES))[: len(at)]
        return torch.from_numpy(values)

    seed: Any = 2**63 + 5 if how == "steps" else some()
    step: Any = 2**40 + 7 if how == "seeds" else some()
    return {"seed": seed, "step": step[:1] if how == "seeds of one step" and R else step}


def penalties(point: Point, V: int, R: int) -> Given:
    """Coefficients and histories: repeated ids, some of them foreign, counts of 0, and of more than fp32 holds."""
    if not point["penalties"]:
        return {}
    coefficients, history, g = point["coefficients"], point["history"], generator(point, 2)
    made: Given = {}
    for name in GIVEN_PENALTIES.get(point["penalties"], ()):
        first = TURNS[name][0]
        made[name] = first if coefficients == "numbers" else _turns(name, coefficients, point, R)
    if history in {"output", "counts", "prompt and counts"}:
        ids = g.integers(0, V, size=(R, 6))
        ids[:, 1], ids[:, 2] = ids[:, 0], (V, -1, 2**40, V - 1, 0)[point.seed % 5]
        made["output_ids"] = torch.from_numpy(ids)
    if history in {"counts", "prompt and counts"}:
        made["output_counts"] = torch.from_numpy(g.choice([0, 1, 2, 3, 100, 2**24 + 1], size=(R, 6)))
    if history in {"prompt", "prompt and counts"}:
        made["prompt_bits"] = _bits(g.random((R, V)) < 0.3, g)
    return {"penalties": Penalties(**made)}


def _bits(mask: Array, g: np.random.Generator) -> torch.Tensor:
    """[R, words + 1] of a mask [R, V], other bits at random: nothing may read them."""
    R, V = mask.shape
    wide = np.concatenate([mask, g.random((R, -V % 32 + 32)) < 0.5], 1)
    return pack(wide) if R else torch.zeros(0, wide.shape[1] // 32, dtype=torch.int32)


def edits(point: Point, V: int, N: int) -> Given:
    """Masks and bans, by row."""
    given: Given = {}
    if point["allowed"]:
        g = generator(point, 3)
        mask = g.random((N, V)) < {"some": 0.7, "all": 2.0, "one": 0.0, "nothing": 0.7}[point["allowed"]]
        if point["allowed"] == "one":
            mask[np.arange(N), np.resize([V - 1, 0, V // 2], N)] = True
        if point["allowed"] == "nothing":
            mask[1::3] = False
        given["allowed"] = _bits(mask, g)
    if point["banned"]:
        g, foreign = generator(point, 4), [V, -1, V - 1, 2**40]
        every = list(range(V))
        lists = [every if point["banned"] == "all" and i == 1 and V <= 33 else _few(g, V, foreign) for i in range(N)]
        given["banned"] = TokenLists(*_ragged(lists))
    return given


def _few(g: np.random.Generator, V: int, foreign: Sequence[int]) -> list[int]:
    """Up to four ids, not in order, one of them twice or foreign; few enough for offsets of 8 bits."""
    ids = [int(i) for i in g.integers(0, V, size=g.integers(0, min(V, 3)))]
    return [*ids, *ids[:1], int(g.choice(foreign))] if g.random() < 0.7 else ids


def _ragged(lists: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets; an id behind the last offset is no row's."""
    flat = [i for one in lists for i in one]
    return torch.tensor([*flat, 0], dtype=torch.int64), torch.from_numpy(np.cumsum([0, *map(len, lists)]))


def bias(name: str, point: Point, V: int, N: int) -> Given:
    """Values on a grid that every dtype holds, so that repeated ones add up without rounding."""
    how, g = point[name], generator(point, 5)
    if not how:
        return {}
    lists = [_few(g, V, (V, -1, 2**40)) for _ in range(N)]
    lists = [[*ids, *ids[:2]] for ids in lists] if how == "repeated" else lists
    ids, offsets = _ragged(lists)
    values = g.choice([-3.0, 0.0, 2.5, 0.25], size=len(ids))
    values[-1] = 77.0
    special = {"bans": -np.inf, "posinf": np.inf, "spoiled": np.nan}.get(how)
    if special is not None:
        values[: len(ids) - 1][g.random(len(ids) - 1) < 0.15] = special
    return {name: LogitBias(ids, torch.from_numpy(values).float(), offsets)}
