"""Attacks on capture@1: weights that move, by every way of declaring and of guarding them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.capture_side_effects import Scaled, refused
from rlkernel_conformance.clauses.capture_state_machine import claimed, equal
from rlkernel_conformance.compare import require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import CaptureError


def _resize(m: Scaled) -> None:
    m.weight.data = m.weight.data.clone()
    m.weight.data.resize_(30, 30).fill_(5)


MOVES: Final[Mapping[str, Callable[[Scaled], object]]] = {
    "rebound": lambda m: setattr(m, "weight", nn.Parameter(torch.full_like(m.weight, 5), requires_grad=False)),
    "data": lambda m: setattr(m.weight, "data", torch.full_like(m.weight, 5)),
    "cast": lambda m: m.double().weight.fill_(5),
    "turned": lambda m: setattr(m.weight, "data", torch.full_like(m.weight, 5).t()),
    "resized": _resize,
}


@dataclass(frozen=True)
class Held:
    """A way to declare static what moves, alone or beside another of its kind that stays."""

    static: Callable[[Scaled, Scaled], tuple[Any, ...]]  # of the module whose weight moves, and of the other
    name: str = "weight"  # in the name of what moves, and in no other
    bare: bool = False  # the tensor itself: what its module holds afterwards is another matter


HELD: Final[Mapping[str, Held]] = {
    "alone": Held(lambda m, _: (m,)),
    "beside": Held(lambda m, other: (m, other)),
    "list": Held(lambda m, other: ([m, other],)),
    "dict": Held(lambda m, other: ({"mine": m, "other": other},)),
    "callable": Held(lambda m, other: (lambda: (m, other),)),
    "tensor": Held(lambda m, _: (m.weight,), "static.0", bare=True),
    "tensor beside": Held(lambda m, other: (other.weight, m.weight), "static.1", bare=True),
    "dict of tensors": Held(lambda m, other: ({"mine": m.weight, "other": other.weight},), "mine", bare=True),
    "callable of a tensor": Held(lambda m, _: (lambda: m.weight,), "static.0"),
}


@dataclass(frozen=True)
class Moved:
    """How a weight moves, and what is to follow."""

    move: str
    then: str
    guard: str
    held: str = "alone"


def moves(subject: Subject) -> st.SearchStrategy[Moved]:
    """Every move with every claimed answer."""
    guards = ("sync", "call") if "guard:call" in subject.claims else ("sync",)
    found = st.builds(
        Moved,
        move=st.sampled_from(tuple(MOVES)),
        then=st.sampled_from(claimed(subject, "on_guard_fail")),
        guard=st.sampled_from(guards),
        held=st.sampled_from(tuple(HELD)),
    )
    return found.filter(lambda case: case.move != "rebound" or not HELD[case.held].bare)


@attack(
    "GC-08",
    moves,
    examples=(
        *(Moved("data", "recapture", guard, held) for held in HELD for guard in ("sync", "call")),
        Moved("rebound", "eager", "call"),
        Moved("rebound", "recapture", "sync"),
    ),
)
def a_weight_that_moves_is_named(subject: Subject, case: Moved) -> None:
    """By check_static or by the call itself, with what was asked for to follow."""
    if case.then not in claimed(subject, "on_guard_fail") or f"guard:{case.guard}" not in subject.claims | {
        "guard:sync"
    }:
        return
    model, x = Scaled(subject.device), torch.ones(2, 3, device=subject.device)
    held = HELD[case.held]
    static = held.static(model, Scaled(subject.device))

    def fn(x: Tensor) -> Tensor:
        return model(x)  # type: ignore[no-any-return]

    g = subject(fn, (x,), static=static, guard=case.guard, on_guard_fail=case.then, warmup=0)
    require(g.check_static() == (), f"{g.check_static()} moved before anything did")
    model.weight.fill_(3)
    require(g.check_static() == (), f"{g.check_static()} moved by a write in place")
    MOVES[case.move](model)
    if case.guard == "sync":
        try:
            named = g.check_static()
        except CaptureError as error:
            require(case.then == "raise", f"check_static raises though on_guard_fail is {case.then}: {error}")
            named = (str(error),)
        alone = sum(held.name in name for name in named) == 1 and (not held.bare or len(named) == 1)
        require(alone, f"check_static names {named}, expected {held.name} and no other that stays")
        require(
            case.move != "rebound" or "tied" not in "".join(named), f"check_static names {named}; tied is as it was"
        )
    _follows(case, g, x)
    g.invalidate()
    require(equal(g(x), x * 5), "after invalidate the answer is another")
    require(g.check_static() == (), "what was accepted is said to have moved")


def _follows(case: Moved, g: Any, x: Tensor) -> None:
    if case.then == "raise":
        for _ in range(2):
            refused("a call after a weight moved", lambda: g(x))
        return
    require(
        equal(g(x), x * 5), f"after a move, then {case.then}, the answer is {g(x).tolist()}, not {(x * 5).tolist()}"
    )
    stats = g.stats
    eager = sum(stats.eager_calls.values())
    require((eager > 0) == (case.then == "eager"), f"{case.then} gives {eager} eager calls")
    for name, found, before in (("replays", stats.replays, 0), ("captures", stats.captures, 1)):
        require((found > before) == (case.then == "recapture"), f"{case.then} gives {found} {name}")
