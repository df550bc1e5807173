"""The backend under attack, for one operator on one device: what it claims, and how to call it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

import rlkernel
from rlkernel import decide, policy, resolve
from rlkernel.discover import PackageVersions
from rlkernel.dispatch import Operator, operator
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ResolutionError
from rlkernel_core.manifest import Impl
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor
from rlkernel_core.spec import OPERATORS
from rlkernel_core.spec.form import OpSpec
from rlkernel_core.spec.sample_clauses import PHILOX

__all__ = ["Subject"]

FLOATS = ("float32", "bfloat16", "float16", "float64")


@cache
def _installed(packages: tuple[str, ...]) -> bool:
    return resolve.environment("", packages, PackageVersions()) is None


@cache
def _with_check(op: str, check: str) -> Operator[Any, Any]:
    """The front-door function of an operator with another check, "module:function", in place of its own."""
    module, _, name = check.partition(":")
    return operator(replace(OPERATORS[op], check=getattr(import_module(module), name)))


def _as_stored(x: Any) -> bool:
    return isinstance(x, QuantTensor) and x.layout == CANONICAL


def arranged(x: Any) -> Any:
    """A quantized weight as some installed backend packs it, where one does; all else as it is."""
    if not _as_stored(x):
        return x
    try:
        with rlkernel.use("auto"):
            return rlkernel.prepack(x)
    except ArgumentError:
        return x


def in_words(x: Any) -> str:
    """An argument as a message shows it: of tensors dtype, sizes and, unless contiguous, strides; no values."""
    if isinstance(x, Tensor):
        kind = str(x.dtype).removeprefix("torch.")
        laid = "" if x.layout is not torch.strided or x.is_contiguous() else f" of strides {list(x.stride())}"
        return f"{kind}{list(x.shape)}{laid}{' with a gradient' if x.requires_grad else ''}"
    if isinstance(x, QuantTensor):
        return f"{checks.describe(x.spec)} weight {list(x.shape)}"
    if is_dataclass(x) and not isinstance(x, type):
        shown = {f.name: getattr(x, f.name) for f in fields(x) if f.repr}
        return f"{type(x).__name__}({', '.join(f'{n}={in_words(v)}' for n, v in shown.items() if v is not None)})"
    if isinstance(x, tuple | list):
        return f"({', '.join(map(in_words, x))})"
    return checks.describe(x)


@dataclass(frozen=True)
class Subject:
    """One backend, one operator, one device. Calls go through the front door with every fallback an error.

    The front door checks a call before any backend sees it. A mutant that passes what should be refused therefore names
    a check of its own, which stands in place of the operator's.
    """

    backend: str  # its name
    op: str  # operator name
    device: str = "cpu"
    check: str | None = None  # "module:function" in place of the operator's check; None: the operator's
    need: tuple[str, ...] = ()  # features that the policy needs, where not every implementation claims them
    measures: dict[str, float] = field(default_factory=dict, compare=False)  # worst error over tolerance, by output
    called: list[str] = field(default_factory=list, compare=False)  # the last call, in words

    @property
    def spec(self) -> OpSpec[Any, Any]:
        """The operator's spec."""
        return OPERATORS[self.op]

    @property
    def operator(self) -> Operator[Any, Any]:
        """The function of the front door that calls go through."""
        front: Operator[Any, Any] = getattr(rlkernel, self.op)
        return front if self.check is None else _with_check(self.op, self.check)

    @property
    def impls(self) -> tuple[Impl, ...]:
        """The backend's implementations that claim the device and what is needed, and have the packages they need."""
        manifest = policy.installed()[self.backend].manifest
        found = manifest.of(self.spec.id) if manifest else ()
        kind = self.device.partition(":")[0]
        there = (i for i in found if resolve.claims(i.requires.device, kind) and _installed(i.requires.packages))
        return tuple(i for i in there if i.supports.issuperset(self.need))

    @property
    def claims(self) -> frozenset[str]:
        """Features that some implementation claims."""
        return frozenset[str]().union(*(i.supports for i in self.impls))

    @property
    def exact_noise(self) -> bool:
        """Whether a draw is the contract's own token. Another's follows the law, and repeats in its row."""
        return PHILOX.name in self.claims

    def choices(self, argument: str, values: Iterable[str], default: str) -> tuple[str, ...]:
        """The default of an argument, first, and the other values whose feature, `argument:value`, is claimed."""
        return (default, *(v for v in values if v != default and f"{argument}:{v}" in self.claims))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Floating dtypes of the primary tensor that are claimed, simplest first."""
        if self.takes_any_dtype:
            return FLOATS
        claimed = {d for i in self.impls for d in i.requires.dtypes}
        return tuple(d for d in FLOATS if d in claimed)

    @property
    def takes_any_dtype(self) -> bool:
        """Whether some implementation claims no dtypes, and so takes integers too."""
        return any(not i.requires.dtypes for i in self.impls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator.

        Kernels may want a quantized weight in a layout and in multiples of a tile: one that is refused is prepacked, as
        the refusal says. A case whose weight is refused even so is no case.
        """
        self.note((*args, *kwargs.values()), (*list(self.spec.parameters)[: len(args)], *kwargs))
        run = self.operator
        try:
            return run(*args, **kwargs)
        except ResolutionError as error:
            if not self.refuses(error) or not any(map(_as_stored, (*args, *kwargs.values()))):
                raise
        try:
            return run(*map(arranged, args), **{name: arranged(a) for name, a in kwargs.items()})
        except ResolutionError as error:
            if self.refuses(error):
                raise UnsatisfiedAssumption(f"{self.backend} takes no such weight: {error}") from error
            raise

    def note(self, values: Iterable[Any], names: Iterable[str]) -> None:
        """Keep a call in words, in place of the last one: a property may make many, each with other arguments.

        Args:
            values: of the arguments.
            names: of the arguments.
        """
        given = ", ".join(f"{name}={in_words(x)}" for name, x in zip(names, values, strict=True))
        self.called[:] = [f"{self.op}({given})"]

    def refuses(self, error: ResolutionError) -> bool:
        """Whether `error` is the refusal of a call by the backend's own limits or check, with a Reason: no case.

        A check that raised has refused nothing: that is a fault.
        """
        rejected = error.decision.rejected if error.decision is not None else ()
        own = [r.reason for r in rejected if r.backend == self.backend]
        return any(reason.stage == "shape" and reason.slug != "shape/check-failed" for reason in own)

    def disclaims(self, error: ResolutionError) -> bool:
        """Whether `error` refused a call because it needs what is not claimed: such a call is no case."""
        if error.decision is None:
            return False
        call = error.decision.call
        needed = call.features | ({"grad"} if call.grad else frozenset())
        return not any(needed <= impl.supports for impl in self.impls)

    def admits(self, *args: Any, **kwargs: Any) -> bool:
        """Whether the backend's own `check` admits a call as it is."""
        check = decide.Verdicts(self.spec.call(*args, **kwargs)).of
        return any(check(i) is None for i in self.impls)

    def unless_refused(self, *args: Any, **kwargs: Any) -> Any | None:
        """Call the operator; None where the backend's own `check` refuses the call at selection, as it may."""
        try:
            return self(*args, **kwargs)
        except ResolutionError as error:
            if self.refuses(error):
                return None
            raise

    def tolerance(self, output: str, dtype: str) -> tuple[float, float]:
        """(atol, rtol) of an output for inputs of a dtype; the row of float32 where the spec has none for it."""
        rows = {t.dtype: t for t in self.spec.tolerances if t.output == output}
        row = rows.get(dtype) or rows["float32"]
        return row.atol, row.rtol

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """The scope in which calls reach the subject and nothing else, and in which its GPU is the current one.

        Attacks measure the memory of the current device, and look at its streams.

        Raises:
            ResolutionError: the backend has no implementation for this device.
        """
        if not self.impls:
            raise ResolutionError(f"{self.backend} implements no {self.spec.id} for {self.device}")
        device = torch.device(self.device)
        current = nullcontext() if device.type != "cuda" or device.index is None else torch.cuda.device(device)
        # What the subject needs, in place of what the policy does: that may be the report that comes of this.
        with current, rlkernel.use(self.backend, fallback="error", need=self.need):
            yield
