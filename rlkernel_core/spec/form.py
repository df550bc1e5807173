"""The form in which every operator is specified: signature, results, features, clauses, tolerances.

A spec is data. The signature function *is* the contract (its docstring gives shapes, dtypes, units, errors and
the source of the formula); `features` is the closed list of what an implementation may claim; `clauses` is what
the conformance suite attacks; `tolerances` is how close is close, each with its source.

Imports no torch: `Tensor` stands in annotations only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from rlkernel_core.errors import SpecError

P = ParamSpec("P")
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
    title: str  # behaviour, in a few words
    text: str  # what must hold, exactly
    judges: str  # accuracy | gradient | invariance | side_effect | refusal | determinism | capture | law
    feature: str | None = None  # attacked only where this feature is claimed; None: always


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the float64 definition on the same stored inputs."""

    output: str
    dtype: str  # dtype of the inputs the row is about
    atol: float
    rtol: float
    source: str  # where the number comes from


@dataclass(frozen=True)
class OpSpec(Generic[P, R_co]):
    """One operator at one version of its meaning."""

    signature: Callable[P, R_co]
    summary: str  # one line, for tables
    features: tuple[Feature, ...]
    clauses: tuple[Clause, ...]
    tolerances: tuple[Tolerance, ...] = ()
    version: int = 1
    # The tensor argument that decides device and dtype of a call; None where `where` does.
    primary: str | None = None
    # Tensor arguments a gradient may be asked for.
    differentiable: tuple[str, ...] = ()
    # Features that a call with these bound arguments (defaults applied) needs. May look at types, at None, bools
    # and strings, and at the *sign* of numbers, never at their size: calls that differ in size share one decision.
    needs: Callable[[Mapping[str, Any]], frozenset[str]] = field(default=lambda _: frozenset())
    # Argument -> expressions that tell calls apart where its class is not enough: {"w": ("w.spec.kind", "w.layout")}.
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Metadata checks shared by all implementations, with the operator's signature; raises ArgumentError.
    check: Callable[..., object] | None = None
    # For operators without a primary tensor: bound arguments -> the tensor-like object (or device) that decides.
    where: Callable[[Mapping[str, Any]], Any] | None = None

    @property
    def name(self) -> str:
        """Operator name, as in `rlkernel.<name>`."""
        return str(self.signature.__name__)

    @property
    def id(self) -> str:
        """Name and version of the meaning: `logprob@1`."""
        return f"{self.name}@{self.version}"

    @cached_property
    def feature_names(self) -> frozenset[str]:
        """Names of all features an implementation may claim."""
        return frozenset(f.name for f in self.features)

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the signature in order."""
        return inspect.signature(self.signature).parameters


# Features every operator may have, worded once.
GRAD = Feature("grad", "gradients for every differentiable argument, accumulated in fp32 or better")
DETERMINISTIC = Feature("deterministic", "the same call twice gives the same bits, gradients included")
BATCH_INVARIANT = Feature(
    "batch_invariant",
    "a row's result is bitwise the same whatever else is in the batch, wherever it stands, "
    "however the call was chunked",
)
CAPTURABLE = Feature("capturable", "no host synchronisation and no shape that depends on data: may run in a graph")


def spec_only(name: str) -> NoReturn:
    """Body of every signature function."""
    raise SpecError(f"rlkernel_core.spec.{name} is the contract, not an implementation; call rlkernel.{name}")


# Clauses of every operator, whatever it computes: the same number means the same sentence in every spec.
_OWED: Mapping[int, tuple[str, str, str]] = {
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
}


def owed(prefix: str) -> tuple[Clause, ...]:
    """The clauses of every operator, for the one whose ids start with `prefix`."""
    return tuple(Clause(f"{prefix}-{number}", title, text, judges) for number, (title, text, judges) in _OWED.items())


def prefix_of(spec: OpSpec[Any, Any]) -> str:
    """What the ids of a spec's clauses start with."""
    return spec.clauses[0].id.rpartition("-")[0]
