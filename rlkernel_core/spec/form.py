"""The form in which every operator is specified: signature, results, features, clauses, tolerances.

A spec is data. The call record *is* the contract: its fields are the operator's arguments with their defaults, its
docstring gives shapes, dtypes, units, errors and the source of the formula. The public function builds the record, and
every implementation is a function of it. `features` is the closed list of what an implementation may claim; `clauses`
is what the conformance suite attacks; `tolerances` is how close is close, each with its source.

Imports no torch: `Tensor` stands in annotations only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Generic, ParamSpec, Self, TypeVar

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentTypeError, did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class Feature:
    """Something an implementation may or may not support, and that a call may need."""

    name: str  # "entropy", "per_row_temperature", "kind:grpo", "format:nf4"
    text: str  # one sentence: what is promised by claiming it


@dataclass(frozen=True)
class Clause:
    """One numbered, attackable sentence of the contract."""

    id: str  # "LP-07"; ids are never reused
    title: str  # behavior, in a few words
    text: str  # what must hold, exactly
    judges: str  # accuracy | gradient | invariance | side_effect | refusal | determinism | capture | law
    feature: str | None = None  # attacked only where this feature is claimed; None: always


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the float64 definition on the same stored inputs."""

    output: str  # name of the result
    dtype: str  # dtype of the inputs the row is about
    atol: float  # absolute
    rtol: float  # relative to the expected value
    source: str  # where the number comes from


class OpCall(Generic[R_co]):
    """Base of the call records; R_co is what the operator returns.

    A record is a dataclass with slots, one field an argument. Implementations read it and never write to it.
    """

    __slots__ = ()

    @classmethod
    def of(cls, other: OpCall[Any], **changes: Any) -> Self:
        """A record with the fields of `other` that this operator has too, and `changes`."""
        names = {f.name for f in fields(cls) if f.init}  # type: ignore[arg-type]  # every subclass is a dataclass
        shared = {f.name: getattr(other, f.name) for f in fields(other) if f.name in names}  # type: ignore[arg-type]
        return cls(**{**shared, **changes})

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]


def filled(result: type[T], **fields_: Any) -> T:
    """A frozen dataclass of results with these fields, all that have no default among them.

    For implementations whose host time matters: `__init__` of a frozen dataclass makes a call for each field.
    """
    made = object.__new__(result)
    made.__dict__.update(fields_)
    return made


@dataclass(frozen=True)
class OpSpec(Generic[P, R_co]):
    """One operator at one version of its meaning."""

    name: str  # as in `rlkernel.<name>`
    record: Callable[P, OpCall[R_co]]  # the class of its calls
    summary: str  # one line, for tables
    features: tuple[Feature, ...]  # the closed list of what an implementation may claim
    clauses: tuple[Clause, ...]  # the operator's own; those of every operator are added
    tolerances: tuple[Tolerance, ...] = ()  # how close is close, by result and dtype
    version: int = 1  # of its meaning
    # The tensor argument that decides device and dtype of a call; None where `where` does.
    primary: str | None = None
    # Tensor arguments a gradient may be asked for.
    differentiable: tuple[str, ...] = ()
    # Fields of the result that carry gradients; an empty name is the result itself.
    carrying: tuple[str, ...] = ()
    # Feature -> whether a call needs it, for those that no argument's name gives, see `needs`. May look at types, at
    # None, bools and strings, and at the *sign* of numbers, never at their size: calls that differ in size share one
    # decision.
    needed: Callable[[Any], Mapping[str, object]] = field(default=lambda _: {})
    # Fields of the result that an implementation may leave None unless it claims the feature of that name. No argument
    # asks for them: an implementation that claims one returns it in every call; `need` in the policy demands the claim.
    optional: tuple[str, ...] = ()
    # Families of features, "kind" for "kind:grpo" and its like, of which every call needs one.
    one_of: tuple[str, ...] = ()
    # Integers that change from call to call and that no plan may look at, such as the step of a draw.
    varying: tuple[str, ...] = ()
    # Whether calls of one shape share a plan; not those that make something which lives on, such as a buffer.
    planned: bool = True
    # Checks of a call's metadata; raises ArgumentError. The front door runs it once a shape, before any implementation.
    check: Callable[[Any], object] | None = None
    # "rows" and "vocab" of a call, which implementations may limit.
    sizes: Callable[[Any], Mapping[str, int]] = field(default=lambda _: {})
    # For operators without a primary tensor: call -> the tensor-like object (or device) that decides.
    where: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        common = common_clauses(self.clauses[0].id.rpartition("-")[0])
        object.__setattr__(self, "clauses", tuple(dict.fromkeys((*self.clauses, *common))))

    @property
    def id(self) -> str:
        """Name and version of the meaning: `logprob@1`."""
        return f"{self.name}@{self.version}"

    @cached_property
    def feature_names(self) -> frozenset[str]:
        """Names of all features an implementation may claim."""
        return frozenset(f.name for f in self.features)

    def family(self, name: str) -> tuple[str, ...]:
        """The features of the family `name`: of "kind", "kind:grpo" and its like."""
        return tuple(f.name for f in self.features if f.name.startswith(f"{name}:"))

    @cached_property
    def signature(self) -> inspect.Signature:
        """The operator's signature: the fields of its record, and what it returns."""
        bases: Any = getattr(self.record, "__orig_bases__")  # noqa: B009 no type checker knows it
        result = next(base.__args__[0] for base in bases if getattr(base, "__origin__", None) is OpCall)
        returns = getattr(result, "__forward_arg__", None) or result.__name__
        return inspect.signature(self.record).replace(return_annotation=returns)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the signature in order."""
        return self.signature.parameters

    def needs(self, call: Any) -> frozenset[str]:
        """Names of the features that a call needs.

        A feature named as an argument is needed where that argument is not its default (a default of None, False or a
        number), `argument:value` where it has that value, any other where `needed` says so.
        """
        found = {name for name, needed in self.needed(call).items() if needed}
        for name, parameter in self.parameters.items():
            value, default = getattr(call, name), parameter.default
            if isinstance(value, str):
                found |= {f"{name}:{value}"} & self.feature_names
            given = value is not default and (checks.is_tensor(value) or value != default)
            if given and name in self.feature_names and not isinstance(default, str):
                found.add(name)
        return frozenset(found)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The record of a call with these arguments.

        Raises:
            ArgumentTypeError: a keyword that the operator does not have; the message suggests the nearest.
            TypeError: too many arguments, or too few.
        """
        for name, value in kwargs.items():
            if name not in self.parameters:
                self.refuse_unknown(name, value)
        return self.record(*args, **kwargs)

    def refuse_unknown(self, name: str, value: object) -> None:
        """Raise ArgumentTypeError for a keyword `name`, given as `value`, that the operator does not have."""
        hint = did_you_mean(name, self.parameters).removeprefix("; ")
        raise ArgumentTypeError(name, checks.describe(value), f"{self.name} has no such argument", hint)

    def taking_arguments(self, run: Callable[[Any], Any]) -> Callable[..., Any]:
        """A function of a record, `run`, as one of the operator's arguments, which are checked at every call."""

        def with_arguments(*args: Any, **kwargs: Any) -> Any:
            call = self.call(*args, **kwargs)
            if self.check is not None:
                self.check(call)
            return run(call)

        with_arguments.__name__, with_arguments.__doc__ = self.name, self.record.__doc__
        with_arguments.__signature__ = self.signature  # type: ignore[attr-defined]
        return with_arguments


# Features every operator may have, worded once.
GRAD = Feature("grad", "gradients for every differentiable argument, accumulated in fp32 or better")
DETERMINISTIC = Feature("deterministic", "the same call twice gives the same bits, gradients included")
BATCH_INVARIANT = Feature(
    "batch_invariant",
    "a row's result is bitwise the same whatever else is in the batch, wherever it stands, "
    "however the call was chunked",
)
CAPTURABLE = Feature("capturable", "no host synchronization and no shape that depends on data: may run in a graph")


# Clauses of every operator, whatever it computes: the same number means the same sentence in every spec.
_COMMON: Mapping[int, tuple[str, str, str]] = {
    91: (
        "no more than it can",
        "what needs a feature that is not claimed is refused at selection by name; any size is answered or refused so",
        "refusal",
    ),
    92: (
        "arguments one by one",
        "what the operator's check refuses is refused by name, by the front door and by what bind hands out",
        "refusal",
    ),
    93: ("all written", "no result depends on what fresh storage held", "side_effect"),
    94: (
        "results of its own",
        "results are plain tensors, no argument's memory where the page does not say so, and later calls leave them",
        "side_effect",
    ),
    95: (
        "the process stays",
        "defaults, modes, generators, threads and timers are as before, and nothing runs on in a thread or a stream",
        "side_effect",
    ),
    96: ("nothing kept", "calls whose results are dropped leave no memory behind", "side_effect"),
    97: (
        "together",
        "the definition's results and gradients for any two of options, sizes, layouts, dtypes, modes and gradients",
        "accuracy",
    ),
    98: ("real sizes", "sizes of real models, and around powers of two, give the definition's results", "accuracy"),
}


def common_clauses(prefix: str) -> tuple[Clause, ...]:
    """The clauses of every operator, for the one whose ids start with `prefix`."""
    return tuple(Clause(f"{prefix}-{number}", title, text, judges) for number, (title, text, judges) in _COMMON.items())


def prefix_of(spec: OpSpec[Any, Any]) -> str:
    """What the ids of a spec's clauses start with."""
    return spec.clauses[0].id.rpartition("-")[0]
