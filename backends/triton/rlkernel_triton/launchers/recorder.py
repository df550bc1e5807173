"""A launcher that only writes down what would be launched; it runs nothing and needs no GPU.

Tensors may lie on the CPU, on the device "meta", or be fake. What is recorded is a launch as Triton would compile it,
so that it can be compiled for another machine (`offline.compile_recorded`), listed, or counted.

Imports no operator and not Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from rlkernel_triton.launchers.binding import Binding, Grid, Launcher
from rlkernel_triton.launchers.specialization import specialization_of, within_32_bits

Constant = bool | int | float | str | None
_PAIRS: Final = ("types", "constants", "options")  # of a Build, dicts in JSON
_LISTS: Final = ("divisible", "within_32_bits")


@dataclass(frozen=True)
class Build:
    """A kernel as it is compiled for a launch. Two are the same when all of this is."""

    kernel: str  # "rlkernel_triton.logprob.kernels:partial_softmax"
    types: tuple[tuple[str, str], ...]  # (parameter, Triton's type) of what is passed, in the kernel's order
    constants: tuple[tuple[str, Constant], ...]  # (parameter, value) of the rest; a language type as "tl.float16"
    divisible: tuple[str, ...]  # parameters known to be multiples of 16
    within_32_bits: tuple[str, ...]  # pointers to storage of 2 GiB or less, which matters to AMD GPUs
    num_warps: int
    num_stages: int | None  # None: Triton's default for the target
    options: tuple[tuple[str, Any], ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return own | {n: dict(own[n]) for n in _PAIRS} | {n: list(own[n]) for n in _LISTS}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Build:
        """From JSON."""
        pairs, lists = ({n: tuple(document[n].items()) for n in _PAIRS}, {n: tuple(document[n]) for n in _LISTS})
        return cls(**{**document, **pairs, **lists})


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch that was not made."""

    build: Build
    grid: Grid


class Recorder(Launcher):
    """Binds kernels whose launches it appends to `launches`."""

    def __init__(self) -> None:
        self.launches: list[RecordedLaunch] = []

    @property
    def builds(self) -> tuple[Build, ...]:
        """What was recorded, each build once, in the order of the first launches."""
        return tuple(dict.fromkeys(launch.build for launch in self.launches))

    def launch_of(self, binding: Binding) -> _Recording:
        """See `Launcher`."""
        return _Recording(binding, self.launches)


class _Recording:
    def __init__(self, binding: Binding, launches: list[RecordedLaunch]) -> None:
        self.binding, self._launches = binding, launches

    def __call__(self, grid: Grid, *args: Any) -> None:
        """See `Launch`."""
        self._launches.append(RecordedLaunch(build_of(self.binding, args), tuple(grid)))


def build_of(binding: Binding, args: tuple[Any, ...]) -> Build:
    """What a bound kernel is compiled as for some run-time arguments.

    Raises:
        TypeError: there are more or fewer than the kernel has, or one that Triton does not take.
    """
    values = {**binding.fixed, **binding.by_name(args)}
    types, constants, divisible, within = [], [], [], []
    for p in binding.parameters:
        value = values[p.name]
        if p.constexpr:
            constants.append((p.name, plain_constant(value)))
            continue
        found = specialization_of(value, specialize=p.specialize, align=p.align)
        if found.type == "constexpr":
            constants.append((p.name, found.constant))
            continue
        types.append((p.name, found.type))
        if found.divisible:
            divisible.append(p.name)
        if p.specialize and isinstance(value, torch.Tensor) and within_32_bits(value):
            within.append(p.name)
    options = {"enable_fp_fusion": True, **binding.options}
    return Build(
        binding.name, tuple(types), tuple(constants), tuple(divisible), tuple(within),
        binding.num_warps, binding.num_stages, tuple(sorted(options.items())),
    )  # fmt: skip


def plain_constant(value: Any) -> Constant:
    """A constexpr as it is written down: `tl.float16` by its name.

    Raises:
        TypeError: it is nothing that can be written down.
    """
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, str):  # a name that stands for one of the language's, too
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__name__ == "dtype" and type(value).__module__.startswith("triton."):
        return f"tl.{_LANGUAGE.get(str(value), str(value))}"
    raise TypeError(f"a constant of a recorded launch is a number, a text, None or a type of Triton; got {value!r}")


_LANGUAGE: Final = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8e4nv",
    "fp8e5": "float8e5", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64", "u8": "uint8", "i1": "int1",
}  # fmt: skip
