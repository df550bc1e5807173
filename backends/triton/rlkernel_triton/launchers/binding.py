"""A kernel with all that is known before a call: constants, sizes, warps, stages; what remains is passed at run time.

Imports no operator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Protocol

from rlkernel_triton.launchers.specialization import Parameter, parameters
from rlkernel_triton.launchers.targets import Target

Grid = tuple[int, ...]  # one to three numbers of programs
_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class Launch(Protocol):
    """A bound kernel."""

    def __call__(self, grid: Grid, *args: Any) -> None:
        """Run it: the arguments that are not bound, in the kernel's order."""


class Launcher(ABC):
    """What host code binds kernels with."""

    target: Target | None = None  # the GPU that launches are planned for; None: that of the tensors
    overlaps: bool = True  # whether a launch may begin before the one ahead of it has ended, where the GPU can

    def bind(
        self,
        kernel: Any,
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        options: Mapping[str, Any] = _NO_OPTIONS,
        any_alignment: Collection[str] = (),
        **fixed: Any,
    ) -> Launch:
        """A launch of a kernel.

        Args:
            kernel: what `triton.jit` made.
            num_warps: warps of a program.
            num_stages: of software pipelines; None for Triton's default.
            options: further options of the compiler: {"waves_per_eu": 2}. `enable_fp_fusion` is on unless given.
            any_alignment: pointers whose alignment may differ from run to run, as that of a gradient that arrives;
                that of all others is the same whenever the launch runs.
            fixed: parameters by name: every constexpr, and those numbers that are the same whenever the launch runs,
                such as sizes and strides. A number that may differ from run to run is passed at run time.

        Raises:
            TypeError: a name is no parameter, or a constexpr has no value.
        """
        return self.launch_of(Binding(kernel, num_warps, num_stages, options, fixed, any_alignment))

    @abstractmethod
    def launch_of(self, binding: Binding) -> Launch:
        """The launch of a bound kernel."""


@dataclass(frozen=True)
class Binding:
    """What a launcher keeps of a bound kernel."""

    kernel: Any
    num_warps: int
    num_stages: int | None
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    any_alignment: Collection[str] = ()
    parameters: tuple[Parameter, ...] = field(init=False)

    def __post_init__(self) -> None:
        known = parameters(self.kernel)
        object.__setattr__(self, "parameters", known)
        names = {p.name for p in known}
        unknown = sorted({*self.fixed, *self.any_alignment} - names)
        if unknown:
            raise TypeError(f"{self.name} has no parameter {', '.join(unknown)}; it has {', '.join(sorted(names))}")
        missing = [p.name for p in known if p.constexpr and p.name not in self.fixed]
        if missing:
            raise TypeError(f"{self.name} is bound without its constants {', '.join(missing)}")

    @property
    def name(self) -> str:
        """Of the kernel, with its module: "rlkernel_triton.logprob.kernels:partial_softmax"."""
        return f"{self.kernel.fn.__module__}:{self.kernel.fn.__name__}"

    @cached_property
    def passed(self) -> tuple[Parameter, ...]:
        """The parameters that are passed at run time."""
        return tuple(p for p in self.parameters if p.name not in self.fixed)

    @cached_property
    def tail(self) -> tuple[Any, ...]:
        """The fixed values, in the kernel's order."""
        return tuple(self.fixed[p.name] for p in self.parameters if p.name in self.fixed)

    @cached_property
    def ordered(self) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
        """From what is passed and then `tail` to the kernel's order; None where that is the kernel's order."""
        given = [p.name for p in self.passed] + [p.name for p in self.parameters if p.name in self.fixed]
        order = [given.index(p.name) for p in self.parameters]
        return None if order == sorted(order) else itemgetter(*order)

    @property
    def keywords(self) -> dict[str, Any]:
        """Fixed values and options, as `kernel[grid](…)` takes them."""
        stages = {} if self.num_stages is None else {"num_stages": self.num_stages}
        return {**self.fixed, "num_warps": self.num_warps, **stages, "enable_fp_fusion": True, **self.options}

    def by_name(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Run-time arguments by name.

        Raises:
            TypeError: there are more or fewer than the kernel has.
        """
        if len(args) != len(self.passed):
            names = ", ".join(p.name for p in self.passed)
            raise TypeError(f"{self.name} takes {len(self.passed)} arguments at run time ({names}), got {len(args)}")
        return {p.name: value for p, value in zip(self.passed, args, strict=True)}
