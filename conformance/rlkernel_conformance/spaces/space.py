"""The calls that an operator takes, as factors with levels: options, sizes, layouts, dtypes, modes, upstream gradients.

A module per operator gives its own factors, how a call is made of their levels, and what the definition says of it.
Layouts and dtypes of every tensor, modes and upstream gradients are factors of all operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.call_checks import SHARED, leaves
from rlkernel_conformance.compare import Violation, norm_within, plain, require, same_bits, within
from rlkernel_conformance.spaces.covering import Array, Rule, covering
from rlkernel_conformance.spaces.layouts import ANY, laid_out
from rlkernel_conformance.spaces.modes import GRADLESS, MODES, WITHOUT_SYNCHRONIZATION, under
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import CaptureError, RLKernelError
from rlkernel_core.tree import flatten

__all__ = ["UPSTREAM", "Argument", "Point", "Rule", "Space", "Want", "claimed"]

Given = dict[str, Any]
# What comes back from whatever used the results: what `.sum()` sends, numbers of either sign, nothing, a large loss
# scale, a view of wider storage, numbers for one result alone; backward twice; a gradient of a gradient.
UPSTREAM: Final = ("none", "ones", "normal", "zero", "large", "padded", "some", "twice", "second order")


@dataclass(frozen=True)
class Point:
    """One call: the level of every factor, and a seed of its values."""

    seed: int
    levels: Mapping[str, Any]

    def __getitem__(self, factor: str) -> Any:
        return self.levels[factor]

    def generator(self, salt: int = 0) -> torch.Generator:
        """Of values on the CPU."""
        return torch.Generator().manual_seed(1009 * self.seed + salt)

    @property
    def in_autocast(self) -> bool:
        """Whether the backward pass runs under autocast, in whatever mode the call is made."""
        return bool(self.seed % 2)


@dataclass(frozen=True)
class Want:
    """What the definition says of one result."""

    values: Any  # array of the result's shape, float64 or integers
    allowed: Any = 0.0  # largest absolute error, a number or an array
    dtype: str | None = None  # of the result; None: whatever holds it
    signed: bool = False  # -0 is another result than 0
    norm: bool = False  # what is allowed is the norm of the whole error

    @classmethod
    def near(
        cls, subject: Subject, output: str, dtype: str, values: Any, *, scale: Any = 1.0, stored: str | None = None
    ) -> Want:
        """Within the spec's tolerance of `output` for inputs of `dtype`; `scale` multiplies the absolute part."""
        atol, rtol = subject.tolerance(output, dtype)
        values = np.asarray(values, np.float64)
        return cls(values, atol * np.asarray(scale, np.float64) + rtol * np.abs(np.nan_to_num(values)), stored)


@dataclass(frozen=True)
class Argument:
    """How a tensor argument may be given."""

    layouts: tuple[str, ...] = ANY
    dtypes: tuple[str, ...] = ()  # the first is the usual one; "" as it is made
    given: Rule | None = None  # the calls that have it; None: all


@dataclass(frozen=True, eq=False)
class Space:
    """The calls of one operator."""

    op: str
    # Levels by factor, of what the subject claims; the first level is the simplest.
    factors: Callable[[Subject], Mapping[str, Sequence[Any]]]
    # Arguments by name, made anew each time, on the subject's device.
    arguments: Callable[[Subject, Point], Given]
    # What the definition says of the arguments as they are stored, by result; with upstream gradients by result, also
    # "d_NAME" for every argument that may want one.
    expected: Callable[[Subject, Point, Given, Mapping[str, Any]], Mapping[str, Want]]
    tensors: Mapping[str, Argument]
    rules: tuple[Rule, ...] = ()
    # Levels of sizes of real models: changes to the simplest call, each with as much else as a size needs.
    real: Callable[[Subject], Sequence[Mapping[str, Any]]] = field(default=lambda _: ())
    # What is done with a result that is an object with methods, by the arguments of its call; None: it is the result.
    use: Callable[[Subject, Point, Given, Any], Any] | None = None
    # Tensors by name that are compared in place of a result which is an object; None: those within the result.
    read: Callable[[Subject, Point, Given, Any], Mapping[str, Tensor]] | None = None
    written: tuple[str, ...] = ()  # arguments that the call writes to
    # The operator draws and has no gradient: `expected` is given the results in place of upstream gradients, by name,
    # and says what they must be beside a choice among those that the noise leaves open.
    draws: bool = False
    # Levels by factor that mask a bug in the others, e.g. a size of 0; modes and gradients have some too.
    masking: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    constants: bool = False  # no result wants a gradient, whatever arguments do: every other call has some that do
    smooth: bool = True  # the gradient has no jumps: a second derivative, where it is given, can be judged

    def differentiable(self, subject: Subject) -> tuple[str, ...]:
        """Paths of the tensors that may want gradients: arguments, or tensors within one."""
        within = {n: tuple(t for t in self.tensors if t.startswith(f"{n}.")) for n in subject.spec.differentiable}
        return tuple(path for name, paths in within.items() for path in paths or (name,))

    def all_factors(self, subject: Subject) -> dict[str, tuple[Any, ...]]:
        """The operator's factors and those that all operators have."""
        spec, found = subject.spec, {name: tuple(levels) for name, levels in self.factors(subject).items()}
        for name, how in self.tensors.items():
            found[f"layout of {name}"] = how.layouts
            if how.dtypes:
                found[f"dtype of {name}"] = how.dtypes
        found["mode"] = tuple(m for m in MODES if m != WITHOUT_SYNCHRONIZATION or "capturable" in subject.claims)
        graded = "grad" in subject.claims and spec.carrying
        found["upstream"] = UPSTREAM if graded else UPSTREAM[:1]
        if graded and len(wants := self.differentiable(subject)) > 1:
            found["wants"] = ("all", *wants)
        return {name: levels for name, levels in found.items() if len(levels) != 1 or name in self.factors(subject)}

    def all_rules(self, factors: Mapping[str, Sequence[Any]]) -> tuple[Rule, ...]:
        """The operator's rules about these factors, and those that all operators have."""
        found = list(self.rules)
        for name, how in self.tensors.items():
            whats = [what for what in (f"layout of {name}", f"dtype of {name}") if what in factors]
            given = how.given
            found += [_only_where(given, what, factors[what][0]) for what in whats] if given is not None else []
        if "upstream" in factors:
            found.append(Rule(("mode", "upstream"), lambda mode, up: mode not in GRADLESS or up == "none"))
        if "wants" in factors:
            found.append(Rule(("upstream", "wants"), lambda up, wants: up != "none" or wants == "all"))
            optional = {n: a.given for n, a in self.tensors.items() if a.given is not None}
            found += [_only_where(optional[n], "wants", n, other=True) for n in factors["wants"] if n in optional]
        return tuple(r for r in found if all(f in factors for f in r.factors))


def _only_where(given: Rule, factor: str, level: Any, *, other: bool = False) -> Rule:
    """Where the argument is not given the factor has this level, or with `other` any but this one."""

    def holds(*levels: Any) -> bool:
        *theirs, mine = levels
        return given.holds(*theirs) or (mine != level if other else mine == level)

    return Rule((*given.factors, factor), holds)


def claimed(subject: Subject, levels: Mapping[Any, str]) -> tuple[Any, ...]:
    """The levels whose feature is claimed; an empty one needs nothing."""
    return tuple(level for level, feature in levels.items() if not feature or feature in subject.claims)


def array(space: Space, subject: Subject) -> Array:
    """The covering array of a space for what a subject claims."""
    return _array(space, tuple(space.all_factors(subject).items()))


@lru_cache(256)
def _array(space: Space, levels: tuple[tuple[str, tuple[Any, ...]], ...]) -> Array:
    """The same for all that claim what leaves these levels, such as a backend and its mutants."""
    factors = dict(levels)
    if not all(factors.values()):
        return Array((), frozenset())
    masking = dict(space.masking)
    if "upstream" in factors:
        masking |= {"mode": GRADLESS, "upstream": ("none", "zero")}
    return covering(factors, space.all_rules(factors), masking=masking)


def points(space: Space, subject: Subject) -> tuple[Point, ...]:
    """All rows of the array, the seed of each its place."""
    return tuple(Point(i, row) for i, row in enumerate(array(space, subject).rows))


def real_sizes(space: Space, subject: Subject) -> tuple[Point, ...]:
    """The simplest call at every real size."""
    factors = space.all_factors(subject)
    if any(not levels for levels in factors.values()):
        return ()
    simplest = {name: levels[0] for name, levels in factors.items()}
    return tuple(Point(i, {**simplest, **changes}) for i, changes in enumerate(space.real(subject)))


def simpler(space: Space, subject: Subject, point: Point) -> Iterator[Point]:
    """The point with one level replaced by a simpler one, the simplest first."""
    factors = space.all_factors(subject)
    rules = space.all_rules(factors)
    for name, levels in factors.items():
        now = levels.index(point[name]) if point[name] in levels else len(levels)
        for level in levels[:now]:
            changed = {**point.levels, name: level}
            if all(r.holds(*(changed[f] for f in r.factors)) for r in rules):
                yield Point(point.seed, changed)


def judge(space: Space, subject: Subject, point: Point) -> None:
    """Make the call and compare it with the definition; raises a Violation that names the levels which matter."""
    try:
        _judge(space, subject, point)
    except Violation as violation:
        simplest = {name: levels[0] for name, levels in space.all_factors(subject).items()}
        with_ = ", ".join(f"{n}={x!r}" for n, x in point.levels.items() if x != simplest.get(n))
        if point.in_autocast and point.levels.get("upstream", "none") != "none":
            with_ = ", ".join(filter(None, (with_, "backward() under autocast")))
        raise Violation(f"{violation} (with {with_})" if with_ else str(violation)) from None


def _judge(space: Space, subject: Subject, point: Point) -> None:
    given, mode, how = _stored(space, subject, point), point["mode"], point.levels.get("upstream", "none")
    called = _with_leaves(space, subject, point, given)
    wanted = {n: x for n, x in leaves(called).items() if x.requires_grad and how != "none"}
    before = {n: x.detach().clone() for n, x in leaves(called).items()}
    if mode == WITHOUT_SYNCHRONIZATION:
        subject(**called)  # what is made once a shape may wait
    try:
        with under(mode, subject.device):
            out = subject(**called)
            out = out if space.use is None else space.use(subject, point, called, out)
        upstream, grads = _backward(space, subject, point, out, called) if wanted else ({}, {})
    except CaptureError as error:
        raise Violation(f"waits for the device, or has a shape that depends on values: {error}") from error
    made = {n: x.detach() for n, x in leaves(out).items()} | grads
    if mode in GRADLESS or space.constants:
        needy = [n for n, x in leaves(out).items() if x.requires_grad]
        require(not needy, f"{needy} want gradients" + (f" in {mode}" if mode in GRADLESS else ""))
    for name, x in leaves({n: x for n, x in called.items() if n not in space.written}).items():
        same_bits(name, x, before[name], "after the call")
    shared = (*space.written, *SHARED.get(space.op, ()))
    own = leaves({n: x for n, x in called.items() if n not in shared})
    theirs = {x.untyped_storage().data_ptr(): n for n, x in own.items() if x.numel()}
    for name, x in made.items():
        owner = theirs.get(x.untyped_storage().data_ptr()) if x.numel() else None
        require(owner is None, f"{name} is memory of the argument {owner}")
    found = made if space.read is None else leaves(space.read(subject, point, called, out)) | grads
    known = {n: plain(x, n) for n, x in (found if space.draws else upstream).items()}
    for name, want in space.expected(subject, point, _detached(given), known).items():
        unclaimed = name.partition(".")[0] in {*subject.spec.optional} - subject.claims
        if name not in found and (name.startswith("d_") or unclaimed):
            continue
        require(name in found, f"{name or 'the result'} is missing")
        have = found[name]
        (norm_within if want.norm else within)(subject, name, have, want.values, want.allowed)
        if want.signed:
            signs = np.signbit(plain(have, name)) == np.signbit(want.values)
            require(bool((signs | np.isnan(want.values)).all()), f"{name or 'the result'} has a zero of another sign")
        is_of = str(have.dtype).removeprefix("torch.")
        require(want.dtype in {None, is_of}, f"{name or 'the result'} is {is_of}, not {want.dtype}")


def _stored(space: Space, subject: Subject, point: Point) -> Given:
    """The arguments in their dtypes and layouts."""
    values, structure = flatten(space.arguments(subject, point))

    def placed(name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        dtype, layout = (point.levels.get(f"{what} of {name}") for what in ("dtype", "layout"))
        x = x.to(getattr(torch, dtype)) if dtype else x
        return x if layout is None else laid_out(x, layout)

    built: Given = structure.build([placed(n, x) for n, x in zip(structure.names(), values, strict=True)])
    return built


def _with_leaves(space: Space, subject: Subject, point: Point, given: Given) -> Given:
    """The arguments, those that may want gradients wanting them."""
    wants = point.levels.get("wants", "all")
    how, mode = point.levels.get("upstream", "none"), point["mode"]
    if space.constants:
        named = tuple(given) if point.seed % 2 else ()
    elif "grad" not in subject.claims or (how == "none" and mode not in GRADLESS):
        return given
    else:
        named = space.differentiable(subject) if wants == "all" else (wants,)

    def leaf(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().requires_grad_() if floating else x

    values, structure = flatten(given)
    built: Given = structure.build(
        [leaf(x) if n in named else x for n, x in zip(structure.names(), values, strict=True)]
    )
    return built


def _detached(given: Given) -> Given:
    values, structure = flatten(given)
    built: Given = structure.build([x.detach() if isinstance(x, Tensor) else x for x in values])
    return built


def _backward(
    space: Space, subject: Subject, point: Point, out: Any, called: Given
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The upstream gradients by result, and the gradients as "d_NAME"."""
    how, wanted = point["upstream"], {n: x for n, x in leaves(called).items() if x.requires_grad}
    results = _carrying(subject, out)
    require(bool(results), "no result carries a gradient")
    if how == "some":
        name = list(results)[point.seed % len(results)]
        results = {name: results[name]}
    upstream = {n: _upstream(how, x, point.generator(97 + i)) for i, (n, x) in enumerate(results.items())}
    kept = {n: x.clone() for n, x in upstream.items()}
    if how == "second order":
        _judge_second_order(space, subject, point, called, upstream)
    with under(point["mode"], subject.device, autocast=point.in_autocast):
        found = _gradients(results, wanted, upstream, retain_graph=how == "twice")
        # What was saved for the first walk is there for the second.
        again = _gradients(results, wanted, upstream) if how == "twice" else found
    if "deterministic" in subject.claims:
        for name, first, second in zip(wanted, found, again, strict=True):
            if first is not None and second is not None:
                same_bits(f"d_{name}", second, first, "when the graph is walked again")
    for name, x in upstream.items():
        same_bits(f"the upstream gradient of {name}", x, kept[name], "after the backward pass")
    named = zip(wanted.items(), again, strict=True)
    grads = {f"d_{n}": torch.zeros_like(x) if g is None else g.detach() for (n, x), g in named}
    return upstream, grads


def _carrying(subject: Subject, out: Any) -> dict[str, Tensor]:
    """The results that carry gradients, by name."""
    results = {n: getattr(out, n) if n else out for n in subject.spec.carrying}
    return {n: x for n, x in results.items() if x is not None and x.requires_grad}


def _gradients(
    results: Mapping[str, Tensor], wanted: Mapping[str, Tensor], upstream: Mapping[str, Tensor], **options: Any
) -> tuple[Tensor | None, ...]:
    outputs = [results[n] for n in upstream]
    return torch.autograd.grad(outputs, list(wanted.values()), list(upstream.values()), allow_unused=True, **options)


def _upstream(how: str, x: Tensor, generator: torch.Generator) -> Tensor:
    if how == "ones":
        return torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)
    if how == "zero":
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    g = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device, x.dtype)
    g = 1000 * g if how == "large" else g
    return laid_out(g, "padded") if how == "padded" else g


STEP: Final = 1e-2  # of a difference quotient
SHARE: Final = 0.05  # of a second derivative that the quotient may be off by


def _judge_second_order(
    space: Space, subject: Subject, point: Point, called: Given, upstream: Mapping[str, Tensor]
) -> None:
    """A gradient of a gradient is refused, or it is the derivative of the gradient: v'Hv against a difference quotient.

    A backward pass that takes what it saved for constants gives another one, and autograd does not notice.
    """
    values, structure = flatten(called)
    names = structure.names()
    wanted = {n: x for n, x in zip(names, values, strict=True) if isinstance(x, Tensor) and x.requires_grad}
    along = {n: _upstream("normal", x, point.generator(197 + i)) for i, (n, x) in enumerate(wanted.items())}

    def slope(step: float, **options: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Leaves moved by `step`, and the products of their gradients with `along`."""
        moved = {n: (x.detach() + step * along[n]).requires_grad_() for n, x in wanted.items()}
        out = subject(**structure.build([moved.get(n, x) for n, x in zip(names, values, strict=True)]))
        found = zip(along.values(), _gradients(_carrying(subject, out), moved, upstream, **options), strict=True)
        return moved, [g * v for v, g in found if g is not None]

    try:
        at, products = slope(0.0, create_graph=True)
        again = [x.sum() for x in products if x.requires_grad]
        if not again:
            return  # constants for autograd, which refuses to go on from them
        second = torch.autograd.grad(again, list(at.values()), allow_unused=True)
    except (RuntimeError, RLKernelError):
        return
    if not space.smooth or any(x.dtype not in {torch.float32, torch.float64} for x in wanted.values()):
        return
    terms = [h * v for v, h in zip(along.values(), second, strict=True) if h is not None]
    exact, size = (sum(float(f(x).double().sum()) for x in terms) for f in (torch.detach, torch.abs))
    ahead, behind = (sum(float(x.detach().double().sum()) for x in slope(step)[1]) for step in (STEP, -STEP))
    quotient = (ahead - behind) / (2 * STEP)
    noise = sum(float(x.detach().abs().double().sum()) for x in products) * 1e-3
    if np.isfinite([exact, quotient]).all():
        off = abs(exact - quotient)
        require(
            off <= SHARE * (size + abs(quotient)) + noise,
            f"a gradient of a gradient is given and is {exact:.6g} along a line, where the gradient changes by "
            f"{quotient:.6g}; operators are differentiable once: refuse it",
        )
