"""Attacks on capture@1: what captures and calls leave behind, what they refuse, and how they say so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.capture_state_machine import (
    claimed,
    equal,
    generator_state,
    optional,
)
from rlkernel_conformance.compare import Violation, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import CaptureError, FallbackWarning


@dataclass(frozen=True)
class Case:
    """A call of n rows; `word` is what the attack varies."""

    n: int
    word: str
    warmup: int = 1
    policy: str = "raise"

    def x(self, subject: Subject) -> Tensor:
        """[n, 3], from 1 up."""
        return torch.arange(1.0, 3.0 * self.n + 1, device=subject.device).view(self.n, 3)


def cases_of(*words: str) -> Callable[[Subject], st.SearchStrategy[Case]]:
    """Cases with one of these words."""
    return lambda s: st.builds(
        Case,
        n=st.integers(1, 5),
        word=st.sampled_from(words),
        warmup=st.integers(0, 3),
        policy=st.sampled_from(claimed(s, "on_capture_error")),
    )


def each(*words: str) -> tuple[Case, ...]:
    """A case of every word, for an attack to try before it draws."""
    return tuple(Case(2, word) for word in words)


def refused(what: str, call: Callable[[], Any]) -> CaptureError:
    """The CaptureError of a call; a Violation if it has none."""
    try:
        call()
    except CaptureError as error:
        return error
    raise Violation(f"{what} is not refused")


@attack("GC-04", cases_of("add", "fill", "exp"), examples=each("add", "fill", "exp"), scale=0.5)
def arguments_are_not_written_to(subject: Subject, case: Case) -> None:
    """A function that writes to its input, and one that does not."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        if case.word == "exp":
            return x.exp() + y
        x.add_(1) if case.word == "add" else x.fill_(7)
        return x * 2 + y

    x, y = case.x(subject), case.x(subject)
    g = subject(fn, (x, y), warmup=case.warmup)
    same_bits("the example", x, case.x(subject), "after the capture")
    for _ in range(2):
        want = fn(case.x(subject), y)
        require(equal(g(x, y), want), "the results differ")
        same_bits("x", x, case.x(subject), "after a call")
        same_bits("y", y, case.x(subject), "after a call")


@attack("GC-06", cases_of("default", "own"), examples=each("default", "own"), scale=0.5)
def drawing_is_refused(subject: Subject, case: Case) -> None:
    """From the default generator and from a declared one, whatever on_capture_error says; what draws nothing passes."""
    own = torch.Generator(subject.device)
    given = optional(subject, generators=(own,)) if case.word == "own" else {}
    by: dict[str, Any] = {"generator": own} if given else {}
    options = {"rng": "forbid", "on_capture_error": case.policy, "warmup": case.warmup, **given}
    x = case.x(subject)
    refused(
        "a function that draws",
        lambda: subject(lambda x: x + torch.rand(x.shape, device=x.device, **by), (x,), **options),
    )
    require(equal(subject(lambda x: x * 2, (x,), **options)(x), x * 2), "a function that draws nothing is another")


class _Scaled(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), 2.0, device=device), requires_grad=False)
        self.tied = self.weight  # a second name, as heads and embeddings have

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight[0, 0].to(x.dtype)


def _resize(m: _Scaled) -> None:
    m.weight.data = m.weight.data.clone()
    m.weight.data.resize_(30, 30).fill_(5)


MOVES: Final[Mapping[str, Callable[[_Scaled], object]]] = {
    "rebound": lambda m: setattr(m, "weight", nn.Parameter(torch.full_like(m.weight, 5), requires_grad=False)),
    "data": lambda m: setattr(m.weight, "data", torch.full_like(m.weight, 5)),
    "cast": lambda m: m.double().weight.fill_(5),
    "turned": lambda m: setattr(m.weight, "data", torch.full_like(m.weight, 5).t()),
    "resized": _resize,
}


# How a module is declared static, alone and beside another with the same names.
HELD: Final[Mapping[str, Callable[[nn.Module, nn.Module], Any]]] = {
    "alone": lambda m, _: (m,),
    "beside": lambda m, other: (m, other),
    "list": lambda m, other: ([m, other],),
    "dict": lambda m, other: ({"mine": m, "other": other},),
    "callable": lambda m, other: (lambda: (m, other),),
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
    return st.builds(
        Moved,
        move=st.sampled_from(tuple(MOVES)),
        then=st.sampled_from(claimed(subject, "on_guard_fail")),
        guard=st.sampled_from(guards),
        held=st.sampled_from(tuple(HELD)),
    )


@attack(
    "GC-08",
    moves,
    examples=(
        *(Moved("data", "recapture", "call", held) for held in HELD),
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
    model, x = _Scaled(subject.device), torch.ones(2, 3, device=subject.device)
    static = HELD[case.held](model, _Scaled(subject.device))

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
        require(sum("weight" in name for name in named) == 1, f"check_static names {named}")
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
    require((stats.replays > 0) == (case.then == "recapture"), f"{case.then} gives {stats.replays} replays")


class _Unlucky(Exception):
    pass


@attack("GC-14", cases_of("warm-up", "capture", "sync"), examples=each("warm-up", "capture", "sync"), scale=0.5)
def a_failure_leaves_nothing(subject: Subject, case: Case) -> None:
    """A failure in mid-work, after draws and writes: then plain calls, the old graph, a new capture and a replay."""
    count = torch.zeros((), device=subject.device)
    bad = [False]

    def fn(x: Tensor) -> Tensor:
        count.add_(1)
        noise = torch.rand(x.shape, device=x.device)
        if bad[0] and case.word == "sync":
            return x * float(noise.sum().item())
        if bad[0]:
            raise _Unlucky("half way")
        return x + 0 * noise

    mutates = optional(subject, mutates=(count,))
    x = case.x(subject)
    with torch.no_grad():
        g = subject(fn, (x,), warmup=case.warmup if case.word != "warm-up" else 2, **mutates)
        count.fill_(5)
        torch.manual_seed(3)
        before, grad = generator_state(subject.device), torch.is_grad_enabled()
        bad[0] = True
        try:
            g(torch.cat([x, x]))
        except (CaptureError, _Unlucky) as error:
            wanted = CaptureError if case.word == "sync" else _Unlucky
            require(case.word == "capture" or isinstance(error, wanted), f"the exception came out as {error!r}")
        else:
            raise Violation("the failure went unheard")
        bad[0] = False
        require(torch.equal(generator_state(subject.device), before), "the generator moved")
        require(torch.is_grad_enabled() == grad, "the grad mode changed")
        require(not mutates or float(count) == 5, f"a mutated tensor is {float(count)}, was 5")
        if subject.device.startswith("cuda"):
            require(torch.cuda.current_stream() == torch.cuda.default_stream(), "another stream is current")
        require(equal(fn(x), x), "a plain call gives another answer")
        require(equal(g(x), x), "the graph from before gives another answer")
        require(equal(g(torch.cat([x, x])), torch.cat([x, x])), "what failed once cannot be captured")
        require(equal(subject(fn, (x,), warmup=1)(x), x), "a new capture gives another answer")
    require(torch.is_grad_enabled(), "gradients are off")


@attack("GC-15", cases_of("sync", "size"), scale=0.5)
def a_failed_capture_is_recorded(subject: Subject, case: Case) -> None:
    """One warning, every call counted, the reason told; tried again after `invalidate` and not before."""
    able = [False]

    def fn(x: Tensor) -> Tensor:
        if able[0]:
            return x * 2
        return x * float(x.sum().item()) if case.word == "sync" else x[x > 0]

    x = case.x(subject)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        g = subject(fn, (x,), on_capture_error="eager", warmup=case.warmup)
        results = [g(x) for _ in range(3)]
    require(all(equal(y, fn(x)) for y in results), "an eager call gives another answer")
    heard = [w for w in said if issubclass(w.category, FallbackWarning)]
    require(len(heard) == 1, f"{len(heard)} warnings for one function that cannot be captured")
    stats = g.stats
    require(sum(stats.eager_calls.values()) == 3, f"three eager calls are counted as {stats.eager_calls}")
    require((stats.replays, stats.captures) == (0, 0), f"{stats.replays} replays and {stats.captures} captures")
    require(bool(stats.last_error) and str(stats.last_error) in g.explain(x), f"explain says {g.explain(x)!r}")
    if case.word == "sync":
        able[0] = True
        require(equal(g(x), fn(x)) and g.stats.captures == 0, "what failed is tried again before invalidate")
        g.invalidate()
        require(equal(g(x), fn(x)) and g.stats.captures == 1, "what failed is not tried again after invalidate")


@attack("GC-16", cases_of("keep", "discard"), examples=each("keep", "discard"), scale=0.5)
def a_pause_refuses_and_ends(subject: Subject, case: Case) -> None:
    """Calls while paused; weights written meanwhile; right answers afterwards."""
    model, x = _Scaled(subject.device), case.x(subject)
    g = subject(model, (x,), warmup=case.warmup)
    g(x)
    g.pause(case.word)
    require(g.stats.state == "paused", f"the state of a paused function is {g.stats.state}")
    refused("a call while paused", lambda: g(x))
    refused("warm() while paused", g.warm)
    if case.word == "discard":
        require((g.stats.graphs, g.stats.pool_bytes) == (0, 0), f"a discard leaves {g.stats}")
    model.weight.fill_(7)
    g.resume()
    require(equal(g(x), x * 7), f"after {case.word} and resume the answer is {g(x).tolist()}")
    g.close()
    refused("a call after close", lambda: g(x))


class _Counting(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("position", torch.zeros((), dtype=torch.int64, device=device))

    def forward(self, x: Tensor) -> Tensor:
        self.position += 1
        return x * self.position


@attack("GC-17", cases_of("draws", "writes"), examples=each("draws", "writes"), scale=0.5)
def warming_up_is_undone(subject: Subject, case: Case) -> None:
    """The capture itself, later ones, and warm()."""
    x = case.x(subject)
    torch.manual_seed(5)
    before = generator_state(subject.device)
    if case.word == "draws" or "mutates" not in subject.claims:
        g = subject(lambda x: x + torch.rand(x.shape, device=x.device), (x,), warmup=case.warmup)
        g.warm([(torch.cat([x, x]),)])
        require(torch.equal(generator_state(subject.device), before), "captures moved the generator")
        return
    model = _Counting(subject.device)
    g = subject(model, (x,), mutates=(model,), warmup=case.warmup)
    g.warm([(torch.cat([x, x]),)])
    for number in (1, 2, 3):
        given = torch.cat([x] * number)
        found = g(given)
        require(int(model.position) == number, f"{number} calls are counted as {int(model.position)}")
        require(equal(found, given * number), f"call {number} reads {(found / given).unique().tolist()}")


def _put(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = x.flatten()
    return y


ILLEGAL: Final[Mapping[str, Callable[[Tensor], Any]]] = {
    "item": lambda x: x * x.sum().item(),
    "if": lambda x: x if x.sum() > 0 else -x,
    "tolist": lambda x: x + len(x.tolist()),
    "bool index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "int of a tensor": lambda x: x.new_zeros(int(x.sum())),
    "equal": lambda x: x * torch.equal(x, x + 1),
    "numpy": lambda x: x + float(x.cpu().numpy().sum()),
    "argwhere": lambda x: x.argwhere(),
    "bincount": lambda x: x.long().view(-1).bincount(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "repeat_interleave": lambda x: x[0].repeat_interleave(x[0].long()),
    "values through a mask": _put,
}


@attack("GC-19", cases_of(*ILLEGAL), examples=each(*ILLEGAL), scale=0.3)
def illegal_work_fails_the_capture(subject: Subject, case: Case) -> None:
    """Host synchronization and shapes that depend on values; and work that only looks like it."""
    x = case.x(subject)
    refused(case.word, lambda: subject(ILLEGAL[case.word], (x,), on_capture_error="raise", warmup=case.warmup))

    def lawful(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[y < 2] = 0  # a masked fill
        y[torch.arange(len(x), device=x.device)] += 1  # places, not a mask
        once = torch.ones(len(x), dtype=torch.int64, device=x.device)
        return torch.where(x > 2, y, 1), x[0].repeat_interleave(2), y.repeat_interleave(once, 0, output_size=len(x))

    require(equal(subject(lawful, (x,), warmup=case.warmup)(x), lawful(x)), "lawful work gives another answer")


@attack("GC-20", cases_of("first", "always", "canary"), examples=each("first", "always", "canary"), scale=0.5)
def a_wrong_replay_is_caught(subject: Subject, case: Case) -> None:
    """A function that is another at every run: from its first replay on, from a later one, or from an update on."""
    runs, wrong = [0], [case.word == "first"]

    def fn(x: Tensor) -> Tensor:
        runs[0] += 1
        return x + (runs[0] if wrong[0] else 0)

    def update() -> None:
        with g.weight_update(canary=(x,)):
            wrong[0] = True

    x = case.x(subject)
    verify = "never" if case.word == "canary" else case.word
    g = subject(fn, (x,), verify=verify, on_capture_error="raise", warmup=case.warmup)
    if case.word == "always":
        require(equal(g(x), x) and equal(g(x), x), "a verified replay gives another answer")
        require(g.stats.verified == 2, f"two verified replays are counted as {g.stats.verified}")
        wrong[0] = True
    refused("a replay that differs from a plain run", update if case.word == "canary" else lambda: g(x))
    count = g.stats
    require(count.graphs == 0 and bool(count.last_error), f"the graph that failed is still there: {count}")


@attack("GC-23", cases_of("weight", "input"), examples=each("weight", "input"), scale=0.5)
def nothing_is_detached_silently(subject: Subject, case: Case) -> None:
    """A weight or an input that requires grad, without autograd; the same under no_grad passes."""
    model = _Scaled(subject.device)
    model.weight.requires_grad_(case.word == "weight")
    x = case.x(subject).requires_grad_(case.word == "input")
    refused(f"{case.word} that requires grad", lambda: subject(model, (x,), on_capture_error="raise", warmup=1))
    with torch.no_grad():
        y = subject(model, (x,), warmup=1)(x)
    require(equal(y, x.detach() * 2) and not y.requires_grad, "under no_grad the answer is another")
