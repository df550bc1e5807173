"""Attacks on the clauses that every operator has, whatever it computes: numbers 91 to 96 of each spec.

They are built from the spec itself (record, features, check) and from one plain call of the operator; so is "may
run in a graph", where an operator has no attack of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from rlkernel.discover import guarded
from rlkernel_conformance.attack import attack
from rlkernel_conformance.bad_arguments import REFUSED, bad_values
from rlkernel_conformance.call_checks import SHARED, leaves, same_results
from rlkernel_conformance.clauses.derived_attacks import derive, has_gradients, storage
from rlkernel_conformance.compare import Violation, plain, require, same_bits
from rlkernel_conformance.example_calls import Call, base, calls
from rlkernel_conformance.memory import growth
from rlkernel_conformance.poisoned_storage import Poisoned
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import ArgumentError, LayoutError, ResolutionError, RLKernelError, UnknownNameError
from rlkernel_core.spec.form import OpSpec, common_clauses, prefix_of
from rlkernel_core.tree import flatten

SIZES: Final = (1, 2, 3, 5, 8, 11, 17)


def refuses_what_it_cannot_do(subject: Subject, case: Call) -> None:
    """Every feature that is not claimed; then calls of many sizes, each answered or refused with a Reason."""
    for feature, given in _unclaimed(subject, case):
        _, error = guarded(lambda given=given: subject(**given))  # type: ignore[misc]
        named = isinstance(error, ResolutionError) and feature in str(error)
        require(named, f"a call that needs {feature}, which is not claimed: {error!r}")
    for rows in SIZES:
        sized = Call(case.seed, rows)
        _, error = guarded(lambda sized=sized: sized.run(subject))  # type: ignore[misc]
        require(
            error is None or isinstance(error, ResolutionError), f"a call of {rows} rows is taken, and fails: {error!r}"
        )


def _unclaimed(subject: Subject, case: Call) -> Iterator[tuple[str, dict[str, Any]]]:
    """Features that are not claimed, each with a call that needs it and that the operator's check lets through."""
    spec, good = subject.spec, case.given(subject)
    words = [f.name.partition(":")[2] for f in spec.features if ":" in f.name]
    for name, parameter in spec.parameters.items():
        values = {"bool": (True,), "str": words, "str | None": words, "int": (1, 3), "float": (0.5,)}
        for value in values.get(str(parameter.annotation), ()):
            given = {**good, name: value}
            needed, error = guarded(lambda given=given: _needs(subject, given))  # type: ignore[misc]
            if error is None and needed:
                yield min(needed), given


def _needs(subject: Subject, given: dict[str, Any]) -> frozenset[str]:
    call = subject.spec.call(**given)
    if subject.spec.check is not None:
        subject.spec.check(call)
    return subject.spec.needs(call) - subject.claims


def refuses_what_the_check_refuses(subject: Subject, case: Call) -> None:
    """Each argument in turn becomes what the operator's check refuses; for the front door and for what bind gives."""
    spec, good = subject.spec, case.given(subject)
    if spec.check is None:
        return
    check = spec.check
    check(spec.call(**good))
    subject(**good)
    raw = subject.operator.bind(**good)
    for name, what, bad in bad_values(subject.op, good):
        given = {**good, name: bad}
        _, expected = guarded(lambda given=given: check(spec.call(**given)))  # type: ignore[misc]
        if not isinstance(expected, RLKernelError):
            continue
        for door, call in (("the front door", subject), ("the bound implementation", raw)):
            _, error = guarded(lambda call=call, given=given: call(**given))  # type: ignore[misc]
            if error is None:
                raise Violation(f"{name}={what} is accepted by {door}; the operator's check says: {expected}")
            require(isinstance(error, RLKernelError), f"{name}={what} fails in {door} with {error!r}")
            if isinstance(expected, ArgumentError) and isinstance(error, ArgumentError):
                known = {expected.argument, name, spec.primary}
                require(error.argument in known, f"{door} blames {name}={what} on {error.argument}")


def refuses_bad_arguments_by_name(subject: Subject, case: Call) -> None:
    """Every argument in turn, given what no call takes there; then what only other arguments make wrong.

    A good call goes before them: a plan that lies there already is not taken for one of another shape.
    """
    spec, good = subject.spec, case.given(subject)
    subject(**good)
    for name, what, bad in bad_values(subject.op, good):
        _, error = guarded(lambda name=name, bad=bad: subject(**{**good, name: bad}))  # type: ignore[misc]
        if error is None:
            raise Violation(f"a bad {name} is accepted: {what}")
        named = isinstance(error, ArgumentError) and (name in str(error) or spec.primary in {name, error.argument})
        required = named or isinstance(error, UnknownNameError | LayoutError)
        require(required, f"{name}={what} is refused with {error!r}")
    for argument, change in REFUSED[subject.op]() if subject.op in REFUSED else ():
        given = moved({**base(subject.op), **change}, subject.device)
        _, error = guarded(lambda given=given: subject(**given))  # type: ignore[misc]
        if isinstance(error, ResolutionError):  # a limit that an implementation finds, of a feature that is not claimed
            require(not spec.needs(spec.call(**given)) <= subject.claims, f"a bad {argument} is refused with {error!r}")
            continue
        if error is None:
            raise Violation(f"a bad {argument} is accepted: {change}")
        blamed = error.argument if isinstance(error, ArgumentError) else str(error)
        require(blamed.startswith(argument), f"a bad {argument} is blamed on {blamed}")


def moved(given: dict[str, Any], device: str) -> dict[str, Any]:
    """The arguments with their tensors on a device, but for those that hold no values."""
    values, structure = flatten(given)
    placed = [x.to(device) if isinstance(x, Tensor) and not x.is_meta else x for x in values]
    built: dict[str, Any] = structure.build(placed)
    return built


def writes_all_of_its_results(subject: Subject, case: Call) -> None:
    """Fresh storage that holds NaN and the largest integers, against fresh storage that holds small numbers."""
    with Poisoned(high=False):
        low = case.run(subject)
    with Poisoned(high=True):
        high = case.run(subject)
    if "deterministic" in subject.claims or "deterministic" not in subject.spec.feature_names:
        same_results(high, low, "when fresh storage holds something else")
        return
    for name, x in leaves(low).items():
        near = torch.allclose(leaves(high)[name].double(), x.double(), 1e-4, 1e-4, equal_nan=True)
        require(near, f"{name} depends on what fresh storage held")


def gives_results_of_its_own(subject: Subject, case: Call) -> None:
    """Plain tensors, apart from arguments and from the results of other calls, which leave them as they are."""
    given = case.given(subject)
    first = leaves(case.run(subject, given))
    kept = {n: x.detach().clone() for n, x in first.items()}
    second = leaves(Call(case.seed + 1, case.N).run(subject))
    theirs = {storage(x): name for name, x in leaves(given).items() if x.numel()}
    later = {storage(x): name for name, x in second.items() if x.numel()}
    for name, x in first.items():
        _ = x if x.element_size() == 1 else plain(x, name)  # 8-bit floats have no numpy
        require(type(x) in {Tensor, torch.nn.Parameter}, f"{name} is a {type(x).__name__}, not a torch.Tensor")
        owner = theirs.get(storage(x), "")
        allowed = any(owner.startswith(a) for a in SHARED.get(subject.op, ()))
        require(not owner or not x.numel() or allowed, f"{name} is memory of the argument {owner}")
        require(not x.numel() or storage(x) not in later, f"{name} is memory of a later result")
        same_bits(name, x, kept[name], "after a later call")


def gives_gradients_of_its_own(subject: Subject, case: Call) -> None:
    """Gradients too are memory of their own, also those of a second backward pass, and results may be written to.

    Torch refuses to change a result in place that a node of autograd made as a view of what autograd does not know.
    """
    gives_results_of_its_own(subject, case)
    if not has_gradients(subject):
        return
    spec, (values, structure) = subject.spec, flatten(case.given(subject))
    wanted = {
        n: x.detach().requires_grad_()
        for n, x in zip(structure.names(), values, strict=True)
        if n.partition(".")[0] in spec.differentiable and isinstance(x, Tensor) and x.is_floating_point()
    }
    given = structure.build([wanted.get(n, x) for n, x in zip(structure.names(), values, strict=True)])
    out = subject(**given)
    carrying = {n or "the result": getattr(out, n) if n else out for n in spec.carrying}
    results = {n: x for n, x in carrying.items() if x is not None and x.requires_grad}
    for name, x in results.items():
        require(x._base is None, f"{name} is a view, which torch refuses to change in place")  # noqa: SLF001
    upstream = {f"the gradient of {n}": torch.ones_like(x).contiguous() for n, x in results.items()}
    owners = {storage(x): n for n, x in {**leaves(given), **leaves(out), **upstream}.items() if x.numel()}
    kept = []  # so that no address is used again
    for last in (False, True):
        ends = list(results.values()), list(wanted.values()), list(upstream.values())
        kept.append(torch.autograd.grad(*ends, allow_unused=True, retain_graph=not last))
        for name, g in zip(wanted, kept[-1], strict=True):
            if g is not None and g.numel():
                owner = owners.setdefault(storage(g), f"d_{name} of backward pass {len(kept)}")
                mine = owner == f"d_{name} of backward pass {len(kept)}"
                require(mine, f"d_{name} of backward pass {len(kept)} is memory of {owner}")


State = tuple[Callable[[], Any], Callable[[Any], object]]
# What a call could change for the rest of the process: how to read it, and how to put it back.
PROCESS: Final[Mapping[str, State]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "inference mode": (torch.is_inference_mode_enabled, lambda _: None),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "denormals": (lambda: bool(torch.tensor(1e-40) * 1 != 0), lambda kept: torch.set_flush_denormal(not kept)),
    "the generator": (lambda: torch.get_rng_state().tolist(), lambda s: torch.set_rng_state(torch.tensor(s).byte())),
}
# Functions that measure time, as they were before any backend was loaded.
TIMERS: Final[Mapping[tuple[Any, str], Any]] = {
    **{(time, n): getattr(time, n) for n in ("perf_counter", "perf_counter_ns", "time", "monotonic", "process_time")},
    **{(torch.cuda, n): getattr(torch.cuda, n) for n in ("Event", "synchronize")},
    **{(torch.cuda.Event, n): getattr(torch.cuda.Event, n) for n in ("record", "elapsed_time", "synchronize")},
}


def leaves_the_process_as_it_is(subject: Subject, case: Call) -> None:
    """Defaults and modes, threads, timers; on a CUDA device also streams."""
    for unusual in (False, True):
        with _restored(), _unusual() if unusual else _usual():
            before = {name: read() for name, (read, _) in PROCESS.items()}
            running = set(threading.enumerate())
            given = case.given(subject)
            held = {n: x.detach().clone() for n, x in leaves(given).items()}
            out = case.run(subject, given)
            _is_done(subject, out)
            for name, (read, _) in PROCESS.items():
                now = read()
                said = "moved" if name == "the generator" else f"is {now}, was {before[name]}"
                require(now == before[name], f"{name} {said}")
            more = [t.name for t in threading.enumerate() if t not in running]
            require(not more, f"threads run on: {more}")
            for (owner, name), true in TIMERS.items():
                require(getattr(owner, name) is true, f"{owner.__name__}.{name} was replaced")
            for name, x in leaves(given).items():
                same_bits(name, x, held[name], "after the call")


@contextmanager
def _restored() -> Iterator[None]:
    """The process and its timers are put back at the end."""
    before = {name: read() for name, (read, _) in PROCESS.items()}
    try:
        yield
    finally:
        for (owner, name), true in TIMERS.items():
            setattr(owner, name, true)
        for name, (read, write) in PROCESS.items():
            if read() != before[name]:
                write(before[name])


@contextmanager
def _usual() -> Iterator[None]:
    yield


@contextmanager
def _unusual() -> Iterator[None]:
    """Everything is set to what it mostly is not: what is put back to the usual shows."""
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(torch.get_num_threads() + 1)
    with torch.no_grad():
        yield


def _is_done(subject: Subject, out: Any) -> None:
    """What this stream sees of the results is what they are when everything has ended."""
    if not subject.device.startswith("cuda"):
        return
    torch.cuda.current_stream().synchronize()
    early = {n: x.detach().clone() for n, x in leaves(out).items()}
    torch.cuda.synchronize()
    for name, x in leaves(out).items():
        same_bits(name, x, early[name], "when side streams are done")


def keeps_no_memory(subject: Subject, case: Call) -> None:
    """Bytes that three calls leave behind, when two were made before."""
    given = case.given(subject)
    grown = growth(subject, lambda: case.run(subject, given), times=3)
    require(grown <= 0, f"three calls leave {grown} bytes behind")


ATTACKED: Final = {
    91: (refuses_what_it_cannot_do, 0.1),
    92: (refuses_what_the_check_refuses, 0.1),
    93: (writes_all_of_its_results, 0.2),
    94: (gives_results_of_its_own, 0.2),
    95: (leaves_the_process_as_it_is, 0.2),
    96: (keeps_no_memory, 0.05),
}
GRAPHS: Final = ("LP-23", "LH-17", "VF-16", "QZ-16", "DQ-09")  # attacked with the example call of the operator


@cache
def attack_operator(spec: OpSpec[Any, Any]) -> None:
    """Register the attacks on the clauses that an operator shares with all."""
    for clause in (c for c in common_clauses(prefix_of(spec)) if int(c.id.rpartition("-")[2]) in ATTACKED):
        prop, scale = ATTACKED[int(clause.id.rpartition("-")[2])]
        if prop is gives_results_of_its_own and spec.carrying:
            prop = gives_gradients_of_its_own
        attack(clause.id, calls, scale=scale)(prop)
    for clause in (c for c in spec.clauses if c.title == "bad arguments" and spec.name in REFUSED):
        attack(clause.id, calls, scale=0.1)(refuses_bad_arguments_by_name)
    if any(c.id in GRAPHS for c in spec.clauses):
        derive(spec.name, lambda s, c: c.given(s), capture=calls)
