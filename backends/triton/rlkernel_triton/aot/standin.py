"""What stands for `triton` and `triton.language` in host code whose kernels come from a bundle.

`@triton.jit` keeps a kernel's name and parameters; `kernel[grid](...)` describes the call as Triton would, by
constants, types and what values allow to assume, and gives it to a `Launcher`. Names of the language are kept as names:
no kernel is ever executed here. Imports torch; never Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol

import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_triton.aot.builds import Argument, Constant, key
from rlkernel_triton.aot.sources import digest

# Triton's names of torch's dtypes.
POINTERS: Final = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
    torch.bool: "*i1", torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}  # fmt: skip
WARPS: Final = 4  # where a launch names none, as in Triton
STAGES: Final = 3
_OPTIONS: Final = frozenset({"num_warps", "num_stages", "enable_fp_fusion"})
_OF_COMPILERS: Final = frozenset(
    {"waves_per_eu", "matrix_instr_nonkdim", "kpack", "maxnreg"}
)  # of one target's or other
_NONE: Final = Argument("none")


class Name(str):
    """A name of the language, such as `tl.bfloat16`."""

    __slots__ = ()


class Constexpr:
    """`tl.constexpr(8)`: host code asks for its value, a launch takes it as one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)


class Language:
    """`triton.language`: every attribute but `constexpr` is its name."""

    constexpr = Constexpr

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"tl.{name}")


class Call(NamedTuple):
    """A launch as it was asked for."""

    kernel: Kernel
    grid: tuple[int, ...]
    key: tuple[Any, ...]  # what a build must equal: rlkernel_triton.aot.builds.key
    constants: dict[str, Constant]
    arguments: dict[str, Argument]
    values: list[Any]  # tensors, numbers and None by `arguments`
    num_warps: int
    num_stages: int
    fusion: bool
    options: dict[str, int]  # of the target's compiler


class Launcher(Protocol):
    """What a call is given to."""

    def target(self) -> str:
        """The target of the current device: "sm_87"."""

    def device_type(self) -> str | None:
        """A type of device other than "cuda" whose tensors are taken, if there is one."""

    def launch(self, call: Call) -> None:
        """Run it."""


class Kernel:
    """A function under `@triton.jit`."""

    def __init__(self, function: Callable[..., Any], launcher: Launcher) -> None:
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.launcher = launcher
        # Under its own name in every host: rlkernel_triton.aot.HOST.logprob_kernels is rlkernel_triton.logprob_kernels.
        self.id = f"rlkernel_triton.{'.'.join(self.__module__.split('.')[3:])}:{self.__name__}"
        parameters = inspect.signature(function).parameters
        self.arg_names = list(parameters)
        self.constexprs = frozenset(n for n, p in parameters.items() if p.annotation in {Constexpr, "tl.constexpr"})
        self.fn = function
        self.defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}

    @cached_property
    def source(self) -> str:
        """Hash of what it would be compiled from."""
        return digest(self.fn)

    def __getitem__(self, grid: Any) -> Callable[..., Launch]:
        return lambda *given, **named: self.launch(grid, given, named)

    def launch(self, grid: Any, given: Sequence[Any], named: dict[str, Any]) -> Launch:
        """Run the kernel."""
        options = {n: named.pop(n) for n in (_OPTIONS | _OF_COMPILERS) & named.keys()}
        bound = {**self.defaults, **dict(zip(self.arg_names, given, strict=False)), **named}
        unknown = bound.keys() - set(self.arg_names)
        missing = [n for n in self.arg_names if n not in bound]
        if unknown or missing or len(given) > len(self.arg_names):
            raise RLKernelError(
                f"{self.__name__} is launched with unknown {sorted(unknown)} and without {missing}; its parameters are "
                f"{', '.join(self.arg_names)}"
            )
        constants = {n: _constant(bound[n]) for n in self.arg_names if n in self.constexprs}
        values = [bound[n] for n in self.arg_names if n not in self.constexprs]
        names = [n for n in self.arg_names if n not in self.constexprs]
        arguments = {n: described(v) for n, v in zip(names, values, strict=True)}
        warps, stages = options.get("num_warps", WARPS), options.get("num_stages", STAGES)
        fusion = options.get("enable_fp_fusion", True)
        own = {n: v for n, v in options.items() if n in _OF_COMPILERS}
        asked = key(self.id, constants, warps, stages, fusion=fusion, options=own)
        self.launcher.launch(Call(self, grid, asked, constants, arguments, values, warps, stages, fusion, own))
        return Launch(self, constants, options)


class Launch:
    """What a launch returns: the same constants and options again, with other arguments."""

    def __init__(self, kernel: Kernel, constants: dict[str, Constant], options: dict[str, Any]) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options

    def __getitem__(self, grid: Any) -> Callable[..., Launch]:
        return lambda *given: self.kernel.launch(grid, given, dict(self.options))


def described(value: Any) -> Argument:
    """What Triton would know of a value."""
    if isinstance(value, torch.Tensor):
        kind = POINTERS.get(value.dtype)
        if kind is None:
            raise RLKernelError(f"no kernel takes a tensor of {value.dtype}; known: {', '.join(map(str, POINTERS))}")
        return Argument(kind, divisible=value.data_ptr() % 16 == 0)
    if value is None:
        return _NONE
    if isinstance(value, bool):
        return Argument("i1")
    if isinstance(value, int):
        kind = "i32" if -(2**31) <= value < 2**31 else "i64" if value < 2**63 else "u64"
        return Argument(kind, divisible=value % 16 == 0, one=value == 1)
    return Argument("fp32")


def _constant(value: Any) -> Constant:
    value = value.value if isinstance(value, Constexpr) else value
    return str(value) if isinstance(value, Name) else value


def triton(launcher: Launcher) -> Any:
    """A module that stands for `triton`, whose kernels go to a launcher."""

    def jit(function: Callable[..., Any] | None = None, **_: Any) -> Any:
        """The decorator, with options or without; what is not specialised is what no build promises."""
        return (lambda f: Kernel(f, launcher)) if function is None else Kernel(function, launcher)

    def current() -> Any:
        target = launcher.target()
        kind = "cuda" if target.startswith("sm_") else "hip"
        return SimpleNamespace(backend=kind, arch=int(target[3:]) if kind == "cuda" else target)

    def device() -> torch.device:
        kind = launcher.device_type()
        if kind is None:
            raise RuntimeError("no device but a GPU runs kernels of a bundle")
        return torch.device(kind)

    active = SimpleNamespace(get_current_target=current, get_active_torch_device=device)
    return SimpleNamespace(
        jit=jit,
        cdiv=lambda x, y: (x + y - 1) // y,
        next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 0,
        language=Language(),
        knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )
