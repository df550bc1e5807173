"""host: what a call of every operator costs the thread that makes it, beside the plain torch calls of the same job.

Small calls, where the host decides, in three ways: through the public function (`eager`), bound once (`bound`), and
replayed by rlkernel.capture (`captured`, beside a bare replay of a graph of the same calls). Batches of a few dozen
calls, those of all candidates in turns, each begun with an idle device, so that no launch waits for room in the queue:
median, best, and the ratio to torch round by round. Then the way to an implementation that does nothing, and the first
call of a process: with empty caches, with those that the process before left on disk, and after `rlkernel warmup`.

On a CPU the reference's own work is in every number: what it says there is the dispatch, by the implementation that
does nothing.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel import policy
from rlkernel.discover import guarded
from rlkernel_bench.candidates import Candidate, claims, in_scope, named, scope_of
from rlkernel_bench.gates import frobenius
from rlkernel_bench.stub import KERNELS, RESULTS, STUB, stubbed
from rlkernel_bench.suites.common import Draw
from rlkernel_bench.suites.host_calls import CASES
from rlkernel_bench.suites.host_case import Case
from rlkernel_bench.suites.host_first import first_calls
from rlkernel_bench.suites.host_graphs import bare_replay, captured_step, copied_step, graphed, step
from rlkernel_bench.work import Call, Goal, Inputs, Judgment, Outputs, Problem, Work

RULER: Final = "torch"
BARE: Final = "bare replay"
_BACKWARD: Final = 1.3  # forward and backward together over torch's
_REPLAY: Final = 3.0  # a replay of ours over a bare one
_DISPATCH: Final = 4.0  # us from the public function to the implementation, a look at the shape included
_WARM_DISK: Final = 150e3  # us of a first call whose builds lie on disk
_CLOSE: Final = 0.02  # of what the definition gives, or of 1
_COARSE: Final = 0.16  # rounded to 16 bits on the way
_KINDS: Final = ("grpo", "gae")  # of advantage: one over groups, one over time


def _work(case: Case, task: str, ruler: str, *goals: Goal, **options: Any) -> Work:
    batch = case.batch if task == "forward" else max(5, case.batch // 2)
    said = {**case.options, **options, "batch": batch}
    clock = "process" if task == "first call" else "host"
    return Work(
        "host", case.op, case.sizes, case.dtype, task, said, goals=goals, ruler=ruler, clock=clock, why=case.says
    )


def _goal(number: float | None, variant: str = "eager") -> tuple[Goal, ...]:
    return (Goal(number, "times", variant=variant),) if number else ()


_FORWARD: Final = {case: _work(case, "forward", RULER, *_goal(case.goal)) for case in CASES}
_BACK: Final = {case: _work(case, "forward+backward", RULER, *_goal(_BACKWARD)) for case in CASES if case.wanted}
_GRAPHS: Final = {case: _work(case, "captured", BARE, *_goal(_REPLAY, "captured")) for case in CASES if case.graphs}
_FIRST: Final = {
    case: replace(
        _work(case, "first call", "", Goal(_WARM_DISK, "us", variant="warm disk"), processes=1),
        ruler=None,
        why="a process's first call, to its result on the device",
    )
    for case in CASES
    if case.op != "rollout_buffer" and (case.op != "advantage" or case.options["kind"] in _KINDS)
}
_REPLAYED: Final = tuple(
    Work(
        "host",
        "capture",
        {"N": 1024, "inputs": inputs},
        task="replay",
        dtype="float32",
        options={"batch": 50},
        goals=_goal(_REPLAY),
        ruler=BARE,
        clock="host",
        why="a replay of two small kernels, inputs copied in and the output out, beside CUDAGraph.replay alone",
    )
    for inputs in (1, 8)
)
_STUBS: Final = {
    case: replace(
        _work(case, "dispatch", "direct", Goal(_DISPATCH, "over", variant="dispatch")),
        why="an implementation that returns at once, which looks at the shape before it takes a call",
    )
    for case in CASES
    if case.op in KERNELS
}
_OF: Final = {
    (work.op, work.name): case for table in (_FORWARD, _BACK, _GRAPHS, _FIRST, _STUBS) for case, work in table.items()
}
_EAGER: Final = (*_FORWARD.values(), *_BACK.values(), *_REPLAYED, *_STUBS.values())
WORKS: Mapping[str, tuple[Work, ...]] = {
    "toy": (
        *(work for work in _EAGER if work.op != "advantage" or work.options["kind"] in _KINDS),
        next(iter(_FIRST.values())),
    ),
    "full": (*_EAGER, *_GRAPHS.values(), *_FIRST.values()),
}


def problem(work: Work, device: str) -> Problem:
    """See `rlkernel_bench.suites`."""
    if work.op == "capture":
        return Problem(work, partial(_replayed_inputs, work, device), {}, step, _judge_all)
    case = case_of(work)
    make = partial(_made, case, device, backward=work.backward)
    if work.task == "first call":
        return Problem(work, make, {}, lambda _: {}, lambda *_: {"seconds": Judgment(0.0, 0.0)})
    if work.task == "dispatch":
        return Problem(work, make, {}, lambda _: RESULTS[work.op], _judge_stub, within=stubbed)
    return Problem(work, make, {}, partial(_defined, case, work), _judge_all)


def _replayed_inputs(work: Work, device: str, seed: int) -> Inputs:
    draw = Draw(device, seed)
    return {f"x{i}": draw.normal(work.sizes["N"]) for i in range(work.sizes["inputs"])}


def case_of(work: Work) -> Case:
    """The call that a row makes."""
    return _OF[work.op, work.name]


def _made(case: Case, device: str, seed: int, *, backward: bool) -> Inputs:
    given = case.make(Draw(device, seed))
    if backward:
        leaves = {name: given[name].requires_grad_() for name in case.wanted}
        y = next(iter(case.plain(given).values())).detach()
        given |= {"leaves": tuple(leaves.values()), "up": torch.ones_like(y, dtype=torch.float32)}
    return given


def _defined(case: Case, work: Work, given: Inputs) -> Outputs:
    """What the reference gives on the same inputs."""
    call = _forward(case, getattr(rlk, case.op))
    with rlk.use("reference", fallback="error"):
        found = _whole_task(case, work, call)(given)
        return {name: _resolved(x) for name, x in found.items()}


def _resolved(x: Any) -> Tensor:
    found: Tensor = x() if callable(x) else x
    return found.detach()


def _judge_stub(_given: Inputs, want: Any, found: Outputs) -> dict[str, Judgment]:
    off = 0.0 if found["result"] is want else torch.inf
    return {"result": Judgment(off, off)}


def _judge_all(given: Inputs, want: Outputs, found: Outputs) -> dict[str, Judgment]:
    """Close to the definition; tokens, which depend on whose noise it is, are in range."""
    out = {}
    for name, expected in want.items():
        have = _resolved(found[name])
        if name in {"token", "accepted"}:
            below = 1024 if name == "token" else 4
            inside = bool(((have >= 0) & (have < below)).all())
            out[name] = Judgment(0.0, 0.0) if inside else Judgment(torch.inf, torch.inf, torch.inf)
        elif name.startswith("grad"):
            out[name] = frobenius(have, expected, _CLOSE)
        else:
            error = (have.double() - expected.double().to(have.device)).abs() / expected.double().abs().clamp(min=1)
            worst = float(error.max().nan_to_num(nan=torch.inf))
            out[name] = Judgment(worst, worst / _CLOSE, worst / _COARSE)
    return out


def _forward(case: Case, op: Callable[..., Any]) -> Call:
    call, outputs = case.call, case.outputs
    return lambda given: outputs(call(op, given))


def _whole_task(case: Case, work: Work, forward: Call) -> Call:
    """The call, and its gradients where the work has them."""
    if not work.backward:
        return forward
    names = [f"grad_{name}" for name in case.wanted]

    def run(given: Inputs) -> Outputs:
        found = forward(given)
        y = next(iter(found.values()))
        grads = torch.autograd.grad(y, given["leaves"], given["up"])
        return found | dict(zip(names, grads, strict=True))

    return run


def candidates(problem: Problem, device: str, use: Sequence[str], against: Sequence[str] | None) -> list[Candidate]:
    """Plain torch and every backend that claims the operator, each eager and bound; or as the task says."""
    work = problem.work
    if work.op == "capture":
        return _replays(work, device, use)
    case = case_of(work)
    if work.task == "dispatch":
        return _to_a_stub(case, problem)
    if work.task == "captured":
        return _graphs(case, problem, device, use)
    if work.task == "first call":
        return [c for name in _named(work, device, use) for c in first_calls(case, name, device)]
    plain = contextvars.copy_context()  # as ours run in one
    own = _whole_task(case, work, case.plain)
    found = [Candidate(RULER, "ruler", torch.__version__, lambda given: plain.run(own, given), ran="CPU")]
    for name in _named(work, device, use):
        reason, version = policy.installed()[name].reason, policy.installed()[name].provider
        if reason is not None:
            found.append(Candidate(name, "backend", version, None, "absent", str(reason)))
            continue
        ways: dict[str, Callable[[], Call]] = {"eager": partial(_forward, case, getattr(rlk, case.op))}
        if case.op != "rollout_buffer":  # its call is a method of what the operator returned
            ways["bound"] = partial(_bound, case, problem, name)
        for way, make in ways.items():
            call = _packed(case, name, _whole_task(case, work, make()))
            found.append(Candidate(f"{name}:{way}", "backend", version, in_scope(name, call)))
    return found


def _named(work: Work, device: str, use: Sequence[str]) -> list[str]:
    """Backends that were asked for, or that are installed; those that do not claim the operator are left out."""
    known = policy.installed()
    return [n for n in named(use) if known[n].reason is not None or claims(n, work.op, device)]


def _bound(case: Case, problem: Problem, backend: str) -> Call:
    """The operator bound to the kind of call that the row makes, at the first call: before the time."""
    held: list[Callable[..., Any]] = []
    packed = _packed(case, backend, lambda given: given)

    def bind(given: Inputs) -> Outputs:
        op = getattr(rlk, case.op)
        held.append(case.call(op.bind, packed(given)))
        return {}

    def run(given: Inputs) -> Outputs:
        if not held:
            bind(given)
        return case.outputs(case.call(held[0], given))

    return run


def _packed(case: Case, backend: str, call: Call) -> Call:
    """The call on a weight that the backend has packed for itself, where it can; once, and outside the time."""
    if case.op != "qmatmul":
        return call
    held: list[tuple[Inputs, Inputs]] = []  # the inputs are one set: the first of the pair keeps it taken

    def run(given: Inputs) -> Outputs:
        if not held or held[0][0] is not given:
            packed, _ = guarded(lambda: scope_of(qmatmul=backend, prepack=backend).run(rlk.prepack, given["w"]))
            held[:] = [(given, {**given, "w": packed or given["w"]})]
        return call(held[0][1])

    return run


def _to_a_stub(case: Case, problem: Problem) -> list[Candidate]:
    """The implementation itself, the public function over it, the operator bound to it."""
    op, direct = getattr(rlk, case.op), KERNELS[case.op]
    with rlk.use(STUB):
        bound = case.call(op.bind, problem.make(0))
    ways = {"direct": direct, "dispatch": op, "bound": bound}
    return [
        Candidate(
            name if name == "direct" else f"stub:{name}",
            "ruler" if name == "direct" else "backend",
            run=in_scope(STUB, lambda given, f=f: {"result": case.call(f, given)}),
            ran="anywhere",
        )
        for name, f in ways.items()
    ]


def _graphs(case: Case, problem: Problem, device: str, use: Sequence[str]) -> list[Candidate]:
    """A bare graph of the operator's kernels, one of torch's, and rlkernel.capture of the operator."""
    name = ",".join(use) or "auto"
    missing = {} if device.startswith("cuda") else {"status": "absent", "message": "there are no graphs on this device"}
    if missing:
        return [
            Candidate(n, k, **missing) for n, k in ((BARE, "ruler"), (RULER, "peer"), (f"{name}:captured", "backend"))
        ]
    scope = scope_of(*use, "reference") if use else scope_of()
    call = _forward(case, getattr(rlk, case.op))
    return [
        Candidate(f"{name}:captured", "backend", run=partial(scope.run, graphed(call, case.graphs))),
        Candidate(BARE, "ruler", run=partial(scope.copy().run, bare_replay(call))),
        Candidate(RULER, "peer", torch.__version__, bare_replay(case.plain)),
    ]


def _replays(work: Work, device: str, use: Sequence[str]) -> list[Candidate]:
    """Two small kernels in a graph: replayed alone, with inputs and output copied by hand, and by rlkernel.capture."""
    gpu = device.startswith("cuda")
    found = [Candidate(BARE, "ruler", run=bare_replay(step) if gpu else step)]
    if gpu:
        found.append(Candidate("replay and copies", "peer", run=copied_step(together=False)))
        found.append(Candidate("replay and one copy", "peer", run=copied_step(together=True)))
    for name in _named(work, device, use):
        if policy.installed()[name].reason is None:
            for way, outputs in (("eager", "clone"), ("view", "view")):
                found.append(Candidate(f"{name}:{way}", "backend", run=in_scope(name, captured_step(outputs))))
    return found
