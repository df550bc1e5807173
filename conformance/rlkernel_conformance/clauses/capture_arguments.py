"""Attacks on capture@1: bad arguments of a capture and of calls, and values that are keys of graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.capture_side_effects import Case, cases_of, each
from rlkernel_conformance.clauses.capture_state_machine import SIZES, equal
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.graphed import Bucket

Call = Callable[[Subject, Tensor], Any]
# what is wrong -> (the start of the argument's name, the call)
WRONG: Final[Mapping[str, tuple[str, Call]]] = {
    "fn": ("fn", lambda s, x: s(3, (x,))),
    "example": ("example", lambda s, x: s(torch.neg, 3)),
    "outputs": ("outputs", lambda s, x: s(torch.neg, (x,), outputs="copy")),
    "rng": ("rng", lambda s, x: s(torch.neg, (x,), rng="no")),
    "warmup": ("warmup", lambda s, x: s(torch.neg, (x,), warmup=-1)),
    "max_graphs": ("max_graphs", lambda s, x: s(torch.neg, (x,), max_graphs=0)),
    "group": ("group", lambda s, x: s(torch.neg, (x,), group="shared")),
    "a bare bucket": ("buckets", lambda s, x: s(_same, (x,), buckets=Bucket({"x": 0}, SIZES))),
    "descending sizes": ("buckets[0].sizes", lambda s, x: s(_same, (x,), buckets=(Bucket({"x": 0}, (8, 4)),))),
    "no size": ("buckets[0].dims", lambda s, x: s(_same, (x,), buckets=(Bucket({}, SIZES),))),
    "another input": ("buckets[0].dims", lambda s, x: s(_same, (x,), buckets=(Bucket({"z": 0}, SIZES),))),
    "another dimension": ("x", lambda s, x: s(_same, (x,), buckets=(Bucket({"x": 2}, SIZES),))),
    "pad": ("pad", lambda s, x: s(_same, (x,), pad={"z": 0})),
    "static": ("static", lambda s, x: s(_same, (x,), static=("weights",))),
    "too many rows": ("buckets", lambda s, x: s(_same, (x,), buckets=(Bucket({"x": 0}, SIZES),))(x.new_zeros(9, 3))),
    "no key": ("y", lambda s, x: s(_same, (x,))(x, {1, 2})),
    "mode": ("mode", lambda s, x: s(_same, (x,)).pause("forever")),
}
NEEDS: Final = {"a bare bucket": "buckets", "descending sizes": "buckets", "no size": "buckets"} | dict.fromkeys(
    ("another input", "another dimension", "too many rows"), "buckets"
)


def _same(x: Tensor, y: Any = None) -> Tensor:
    return x


@attack("GC-25", cases_of(*WRONG), examples=each(*WRONG), scale=0.1)
def bad_arguments_are_named(subject: Subject, case: Case) -> None:
    """Of the capture and of its calls, after a good one of the same kind."""
    needs = NEEDS.get(
        case.word, case.word if case.word in {"static", "group"} else "pause" if case.word == "mode" else ""
    )
    if needs and needs not in subject.claims:
        return
    argument, call = WRONG[case.word]
    x = torch.ones(2, 3, device=subject.device)
    subject(_same, (x,), warmup=0)
    if "buckets" in subject.claims:
        subject(_same, (x,), buckets=(Bucket({"x": 0}, SIZES),), warmup=0)
    try:
        call(subject, x)
    except ArgumentError as error:
        require(error.argument.startswith(argument), f"{case.word}: {argument} is blamed on {error.argument}")
        return
    raise Violation(f"{case.word}: accepted")


VALUES: Final = ("1", "1.0", "True", "0.0", "-0.0", "nan", "'a'", "'b'", "None", "(1, 2)", "(1, 3)", "inf", "2**70")


def _value(text: str) -> Any:
    return float(text) if text in {"nan", "inf"} else eval(text, {"__builtins__": {}})  # noqa: S307  our own words


@dataclass(frozen=True)
class Arguments:
    """Calls with these values, in words, one after the other."""

    words: tuple[str, ...]


@attack(
    "GC-12",
    lambda s: st.builds(Arguments, st.lists(st.sampled_from(VALUES), min_size=2, max_size=6).map(tuple)),
    examples=(Arguments(("1", "1.0", "True")), Arguments(("0.0", "-0.0", "nan", "nan"))),
)
def a_value_is_a_key(subject: Subject, case: Arguments) -> None:
    """Numbers that are equal but not the same, text, None, tuples; as an argument and inside one."""

    def fn(x: Tensor, t: Any, options: dict[str, Any]) -> tuple[Any, ...]:
        number = 2.0**70 if t == 2**70 else float(t) if isinstance(t, int | float) else float(len(repr(t)))
        return x * number, type(t).__name__, repr(options["t"])

    x = torch.ones(2, device=subject.device)
    g = subject(fn, (x, 5, {"t": 5}), warmup=0)
    for word in case.words:
        t = _value(word)
        have, want = g(x, t, {"t": t}), fn(x, t, {"t": t})
        require(equal(have, want), f"with {word}, {have} is not {want}")
