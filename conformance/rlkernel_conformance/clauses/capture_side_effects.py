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


class Scaled(nn.Module):
    """A module of one weight under two names, whose first element multiplies."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 3), 2.0, device=device), requires_grad=False)
        self.tied = self.weight  # a second name, as heads and embeddings have

    def forward(self, x: Tensor) -> Tensor:
        """X times the weight's first element."""
        return x * self.weight[0, 0].to(x.dtype)


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
    model, x = Scaled(subject.device), case.x(subject)
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


WHEN: Final = ("first", "always", "canary")
WRONG: Final = tuple(f"{when}, {what}" for when in WHEN for what in ("result", "mutated", "kept"))


@attack("GC-20", cases_of(*WRONG), examples=each(*WRONG), scale=0.5)
def a_wrong_replay_is_caught(subject: Subject, case: Case) -> None:
    """A function that returns or writes something else at every run: from its first replay, a later or an update on.

    "kept": it returns a tensor that it keeps and writes, undeclared: what a plain run gave is compared as it was then.
    """
    when, _, what = case.word.partition(", ")
    if what == "mutated" and "mutates" not in subject.claims:
        return
    runs, wrong = [0], [when == "first"]
    written, kept = torch.zeros((), device=subject.device), torch.zeros_like(case.x(subject))

    def fn(x: Tensor) -> Tensor:
        runs[0] += 1
        other = runs[0] if wrong[0] else 0
        if what == "kept":
            return kept.add_(1) if wrong[0] else kept.copy_(x)
        if what == "mutated":
            written.add_(1 + other)
            return x * 1
        return x + other

    def update() -> None:
        with g.weight_update(canary=(x,)):
            wrong[0] = True

    x = case.x(subject)
    verify = "never" if when == "canary" else when
    mutates = optional(subject, mutates=(written,))
    g = subject(fn, (x,), verify=verify, on_capture_error="raise", warmup=case.warmup, **mutates)
    if when == "always":
        require(equal(g(x), x) and equal(g(x), x), "a verified replay gives another answer")
        require(g.stats.verified == 2, f"two verified replays are counted as {g.stats.verified}")
        require(what != "mutated" or float(written) == 2, f"two verified replays write {float(written)} times")
        wrong[0] = True
    before = float(written)
    refused("a replay that differs from a plain run", update if when == "canary" else lambda: g(x))
    require(float(written) == before, f"a replay that is refused leaves {float(written)}, was {before}")
    count = g.stats
    require(count.graphs == 0 and bool(count.last_error), f"the graph that failed is still there: {count}")


@attack("GC-23", cases_of("weight", "input"), examples=each("weight", "input"), scale=0.5)
def nothing_is_detached_silently(subject: Subject, case: Case) -> None:
    """A weight or an input that requires grad, without autograd; the same under no_grad passes."""
    model = Scaled(subject.device)
    model.weight.requires_grad_(case.word == "weight")
    x = case.x(subject).requires_grad_(case.word == "input")
    refused(f"{case.word} that requires grad", lambda: subject(model, (x,), on_capture_error="raise", warmup=1))
    with torch.no_grad():
        y = subject(model, (x,), warmup=1)(x)
    require(equal(y, x.detach() * 2) and not y.requires_grad, "under no_grad the answer is another")
