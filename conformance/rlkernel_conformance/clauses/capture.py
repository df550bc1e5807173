"""Attacks on capture@1: what replays give. `capture_side_effects` holds what captures leave and refuse."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses import (
    capture_arguments,
    capture_bounds,
    capture_collectives,
    capture_side_effects,
    capture_weights,
)
from rlkernel_conformance.clauses.capture_side_effects import refused
from rlkernel_conformance.clauses.capture_state_machine import (
    EVENTS,
    SEEDS,
    SIZES,
    WRITES,
    Machine,
    Program,
    calls,
    equal,
    programs,
)
from rlkernel_conformance.compare import Violation, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import CaptureError
from rlkernel_core.spec.graphed import Bucket, CaptureGroup
from rlkernel_torch.direct import capture as reference

# Their attacks belong to this operator.
__all__ = ["capture_arguments", "capture_bounds", "capture_collectives", "capture_side_effects", "capture_weights"]

OFTEN: Final = (calls(),) * 4  # among many kinds of events


@dataclass(frozen=True)
class Rows:
    """A call of one tensor [n, 3]."""

    n: int
    seed: int
    word: str = ""  # what the attack varies

    def x(self, subject: Subject, salt: int = 0) -> Tensor:
        """Small integers."""
        g = torch.Generator().manual_seed(self.seed + 1000 * salt)
        return torch.randint(1, 9, (self.n, 3), generator=g).float().to(subject.device)


def some_rows(*words: str, least: int = 1) -> Any:
    """Cases of up to eight rows."""
    return lambda s: st.builds(Rows, n=st.integers(least, 8), seed=st.integers(0, 999), word=st.sampled_from(words))


@attack(
    "GC-01",
    lambda s: programs(s, *OFTEN, EVENTS),
    examples=(
        Program((("call", 8, 1.0, 3, "plain"), ("call", 5, 1.0, 1, "plain"))),  # a larger call before a smaller one
        Program((("call", 3, 1.0, 1, "plain"), ("rebind", 2), ("call", 3, 1.0, 1, "plain"))),
    ),
)
def a_replay_is_the_plain_run(subject: Subject, case: Program) -> None:
    """Whatever happened before: results of every call, padding included, bit by bit."""
    Machine(subject, case).run("result", "state")


@attack(
    "GC-02",
    lambda s: programs(s, calls(), calls(most=4), longest=8),
    examples=(Program((("call", 4, 1.0, 1, "same storage"), ("call", 4, 1.0, 1, "same storage"))),),
)
def inputs_are_read_anew(subject: Subject, case: Program) -> None:
    """Views, strides, expanded rows, new values in old storage."""
    steps = tuple((word, n, 1.0, 1, layout) for word, n, _, _, layout in case.steps)
    Machine(subject, replace(case, steps=steps)).run("result")


def _total(x: Tensor, **sizes: Tensor) -> dict[str, Tensor]:
    """The sum of the first rows, as many as the keyword says, and that number."""
    [rows] = sizes.values() or [torch.tensor(len(x), device=x.device)]
    alive = torch.arange(len(x), device=x.device) < rows
    return {"total": torch.where(alive[:, None], x, 0).sum(0), "rows": rows + 0}


@attack("GC-03", some_rows("nan", "inf", "-inf", "3e38"))
def padding_stays_where_it_is(subject: Subject, case: Rows) -> None:
    """A function of single rows, with pad values that poison whatever they reach; results that no bucket can cut.

    And a function that masks: it gets the true size under any keyword that it takes, in a graph and without one.
    """

    def largest(x: Tensor) -> Tensor:
        return x / x.amax(-1, keepdim=True)

    poison, x = float(case.word), case.x(subject)
    bucket = Bucket({"x": 0}, SIZES, out=-2 * (case.n % 2))  # the first dimension, by either number
    g = subject(largest, (torch.ones_like(x[:1]),), buckets=(bucket,), pad={"x": poison}, warmup=1)
    want, have = largest(x), g(x)
    require(equal(have, want), f"{case.n} rows padded with {poison} give {have.tolist()}, alone {want.tolist()}")
    for sizes in (SIZES, (1,)):
        masked = Bucket({"x": 0}, sizes, out=None, valid="rows", over="eager")
        total = subject(_total, (torch.ones_like(x[:1]),), buckets=(masked,), pad={"x": poison}, warmup=1)(x)
        true = {"total": x.sum(0), "rows": torch.tensor(case.n, device=x.device)}
        require(equal(total, true), f"{case.n} rows padded with {poison} give valid rows {total}, expected {true}")
    for out in (1, 2, -3, {"nobody": 0}):
        uncut = (Bucket({"x": 0}, SIZES, out=out),)
        refused(f"a bucket with out={out}", lambda uncut=uncut: subject(largest, (x,), buckets=uncut, warmup=0)(x))


@attack(
    "GC-05",
    lambda s: programs(s, calls(most=4), SEEDS, WRITES, longest=8),
    examples=(Program((("call", 2, 1.0, 1, "plain"), ("call", 2, 1.0, 1, "plain"), ("seed", 1))),),
)
def randomness_follows(subject: Subject, case: Program) -> None:
    """Every draw, the generators after every call, and a second captured function that draws in between."""
    own = torch.Generator(subject.device) if "generators" in subject.claims and len(case.steps) % 2 else None
    one, two = (Machine(subject, case, draws=True, own=own) for _ in range(2))
    one.state = two.state  # both were captured by now, and one stream goes through them
    for word, *given in case.steps:
        for machine, other in ((one, two), (two, one)):
            getattr(machine, word)(*given)
            other.state = machine.state
            for aspect in ("noise", "generator"):
                require(aspect not in machine.wrong, f"{aspect} at {word}: {machine.wrong.get(aspect)}")


@attack("GC-07", lambda s: programs(s, calls(most=4), WRITES, longest=8))
def a_weight_written_in_place_is_seen(subject: Subject, case: Program) -> None:
    """Writes between calls of one size."""
    steps = tuple(("call", 2, 1.0, 1, "plain") if word == "call" else (word, *rest) for word, *rest in case.steps)
    Machine(subject, replace(case, steps=(*steps, ("write", 2), ("call", 2, 1.0, 1, "plain")))).run("result")


MODES: Final = ("no_grad", "inference", "autocast", "deterministic", "training")


def _mode(name: str, model: nn.Module, device: str) -> AbstractContextManager[Any]:
    if name == "no_grad":
        return torch.no_grad()
    if name == "inference":
        return torch.inference_mode()
    if name == "autocast":
        return torch.autocast(device.partition(":")[0], dtype=torch.bfloat16)
    model.train(name == "training")
    return nullcontext()


def _ambient(x: Tensor, weight: Tensor, model: nn.Module) -> dict[str, Any]:
    """What a graph would freeze, shown."""
    flags = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(x.device.type),
        torch.are_deterministic_algorithms_enabled(),
        model.training,
    )
    return {"y": x @ weight, "flags": flags}


class _Ambient(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.register_buffer("weight", 2 * torch.eye(3, device=device))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return _ambient(x, self.weight, self)


@attack("GC-09", some_rows(*MODES, least=2), scale=0.5)
def a_mode_is_a_key(subject: Subject, case: Rows) -> None:
    """Captured in one mode, called in another, and in the first again."""
    model, x = _Ambient(subject.device).eval(), case.x(subject)
    g = subject(model, (x,), warmup=1)
    for name in ("plain", case.word, "plain"):
        was = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(mode=was or name == "deterministic", warn_only=True)
        try:
            with _mode(name, model, subject.device):
                want, have = model(x), g(x)
        finally:
            torch.use_deterministic_algorithms(was)
            model.eval()
        require(equal(have, want), f"with {name}, {have} is not {want}")


@attack("GC-10", some_rows("x"), scale=0.5)
def a_view_holds_the_latest_replay(subject: Subject, case: Rows) -> None:
    """The first result, after the second call of the same size."""
    g = subject(lambda x: {"y": x * 2, "same": x}, (case.x(subject),), outputs="view", warmup=1)
    first = g(case.x(subject))
    second = g(case.x(subject, 1))
    require(equal(first, second), f"a view holds {first} after a replay that gave {second}")
    require(first["y"].data_ptr() == second["y"].data_ptr(), "a view moved from one replay to the next")


@attack("GC-11", some_rows("x"), scale=0.5)
def a_clone_never_changes(subject: Subject, case: Rows) -> None:
    """Results that are new, that are an input, that are one tensor twice, and one that is alone of its dtype."""

    def fn(x: Tensor) -> dict[str, Tensor]:
        y = x * 2
        return {"y": y, "same": x, "again": y, "view": y[0], "whole": y.long()}

    g = subject(fn, (case.x(subject),), outputs="clone", warmup=1)
    x = case.x(subject)
    first, want = g(x), {k: v.clone() for k, v in fn(x).items()}
    x.zero_()
    g(case.x(subject, 1))
    require(equal(first, want), f"a clone became {first}, was {want}")
    first["y"].zero_()
    require(equal(g(case.x(subject)), fn(case.x(subject))), "writing to a result reached the graph")


COUNTED: Final = ("state", "graphs", "captures", "replays", "eager_calls", "recaptures", "evictions")


@attack(
    "GC-18",
    lambda s: programs(s, *OFTEN, EVENTS, longest=16),
    examples=(
        Program((("call", 3, 1.0, 1, "plain"), ("rebind", 1), ("call", 3, 1.0, 1, "plain"), ("warm",))),
        Program(
            (*[("call", n, 1.0, 1, "plain") for n in (5, 3, 3, 3)], ("update", 2), ("call", 5, 1.0, 1, "plain")),
            over="eager",
        ),
        Program((("pause", "keep"), ("invalidate", "other weights"), ("resume",), ("call", 2, 1.0, 1, "plain"))),
        Program((("pause", "discard"), ("resume",), ("call", 2, 1.0, 1, "plain")), passed=True),
        Program(
            (
                ("rebind", 2),
                ("call", 3, 1.0, 1, "plain"),
                ("invalidate", "other weights"),
                ("call", 3, 1.0, 1, "plain"),
            ),
            moved="eager",
        ),
    ),
)
def counts_are_exact(subject: Subject, case: Program) -> None:
    """Beside the reference, which runs the same program; nothing is evicted, for that is each one's own affair.

    The reference does not warm up: each capture is after one plain run, as a machine's `warmup` says.
    """
    began = time.perf_counter_ns()
    machine, model = Machine(subject, case), _Modelled(subject, case)
    for at, (word, *given) in enumerate(case.steps):
        for m in (machine, model):
            getattr(m, word)(*given)
        have, want = machine.captured.stats, model.captured.stats
        names = (*COUNTED, "pad_rows", "copied_bytes", *(("verified",) if case.verify == "always" else ()))
        for name in names:
            a, b = getattr(have, name), getattr(want, name)
            require(a == b, f"{name} is {a} after step {at} of {case.steps}, expected {b}")
        warm = have.warmup_calls, have.captures * machine.options["warmup"]
        require(warm[0] == warm[1], f"warmup_calls is {warm[0]} after step {at} of {case.steps}, expected {warm[1]}")
        told = f"step {at} of {case.steps} says {machine.said!r}, expected {model.said!r}"
        require(machine.said == model.said, told)
    stats, passed = machine.captured.stats, time.perf_counter_ns() - began
    spent = stats.capture_ms * 1e6, stats.guard_ns
    require(min(spent) >= 0 and sum(spent) <= passed, f"{spent} ns in captures and guards, of {passed} that passed")


class _Modelled(Machine):
    def make(self, _: Any) -> Any:
        return super().make(reference)


@attack("GC-21", some_rows("x"), scale=0.3)
def threads_get_their_own_answers(subject: Subject, case: Rows) -> None:
    """Two threads that meet inside the function, where nothing keeps them apart; then four that do not care."""
    meeting = threading.Barrier(2)
    armed = threading.Event()

    def fn(x: Tensor) -> Tensor:
        if armed.is_set():
            with suppress(threading.BrokenBarrierError):  # the other waits its turn, as it should
                meeting.wait(0.02)
        return x * 2

    x = torch.ones(case.n, 3, device=subject.device)
    group = {"group": CaptureGroup("threads")} if "group" in subject.claims else {}
    with torch.no_grad():
        g = subject(fn, (x,), warmup=1, **group)
    wrong: list[str] = []

    def work(number: int, times: int) -> None:
        with torch.no_grad():
            for i in range(times):
                given = x * (100 * number + i)
                found = g(given)
                if subject.device.startswith("cuda"):
                    torch.cuda.synchronize()
                if not equal(found, given * 2):
                    wrong.append(f"thread {number} got {found[0].tolist()} for {given[0].tolist()}")

    for threads, times in ((2, 1), (4, 20)):
        (armed.set if times == 1 else armed.clear)()
        running = [threading.Thread(target=work, args=(i + 1, times)) for i in range(threads)]
        for t in running:
            t.start()
        for t in running:
            t.join()
    require(not wrong, "; ".join(wrong[:2]))


class _Square(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0, device=device))

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Two results with a gradient, one without, and a number."""
        y = (x * self.weight).square()
        return {"y": y, "kept": x.detach() * 2, "row": (x * self.weight).sum(-1), "rank": x.dim()}


@attack("GC-22", some_rows("clone", "view"), examples=(Rows(3, 0, "clone"), Rows(3, 0, "view")), scale=0.5)
def gradients_are_those_of_fn(subject: Subject, case: Rows) -> None:
    """To inputs and weights, through padding; and a backward that comes too late; of results of their own and views."""
    if f"outputs:{case.word}" not in subject.claims:
        return
    model, shape = _Square(subject.device), {}
    if "buckets" in subject.claims:
        shape = {"buckets": (Bucket({"x": 0}, SIZES),), "pad": {"x": 3.0}}
    example = case.x(subject).requires_grad_()
    g = subject(model, (example,), autograd=True, outputs=case.word, warmup=1, **shape)
    for salt in (0, 1):
        x = case.x(subject, salt).requires_grad_()
        upstream = {"y": case.x(subject, salt + 5), "row": case.x(subject, salt + 6)[:, 0]}
        for names in (("y", "row"), ("y",), ("row",)):
            have = _gradients(g(x), {n: upstream[n] for n in names}, x, model.weight)
            want = _gradients(model(x), {n: upstream[n] for n in names}, x, model.weight)
            require(equal(have, want), f"gradients of {names} are {have}, those of fn {want}")
    if shape:
        padded = g.stats.replays * (next(size for size in SIZES if size >= case.n) - case.n)
        require(g.stats.pad_rows == padded, f"pad_rows is {g.stats.pad_rows}, expected {padded}")
    first = g(x)["y"]
    g(x)
    try:
        first.sum().backward()
    except CaptureError:
        return
    raise Violation("a backward after the next replay is answered with what that left")


def _gradients(out: dict[str, Any], upstream: Mapping[str, Tensor], *of: Tensor) -> list[Any]:
    """The gradients, and the results without one."""
    needy = [n for n, y in out.items() if isinstance(y, Tensor) and y.requires_grad]
    require(needy == ["y", "row"], f"{needy} require grad, expected y and row")
    found = torch.autograd.grad([out[n] for n in upstream], of, [*upstream.values()], allow_unused=True)
    return [out["kept"], out["rank"]] + [
        torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)
    ]


@attack("GC-24", some_rows("1", "3"), scale=0.3)
def no_rows_give_none(subject: Subject, case: Rows) -> None:
    """None, between calls that have rows."""
    bucket = Bucket({"x": 0}, SIZES, out={"y": 0})
    g = subject(lambda x: {"y": x * 2, "n": x.sum(0)}, (case.x(subject),), buckets=(bucket,), warmup=1)
    for n in (case.n, 0, case.n):
        x = case.x(subject)[:n]
        y = g(x)["y"]
        require(equal(y, x * 2), f"{n} rows give {y.tolist()}, expected {(x * 2).tolist()}")
