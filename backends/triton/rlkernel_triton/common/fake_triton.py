"""`triton` and `triton.language` where Triton is not installed: enough to import kernels and host code.

`@triton.jit` keeps a kernel's function, whose name and parameters launchers ask for. Names of the language are kept as
names: no kernel is ever executed here, and none is launched but by a launcher that has its machine code.
Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

from rlkernel_core.errors import RLKernelError


class Name(str):
    """A name of the language, such as `tl.bfloat16`."""

    __slots__ = ()


class constexpr:  # noqa: N801 Triton's name: kernels' annotations and digests tell it by that
    """`tl.constexpr(8)`: host code asks for its value, a launch takes it as one."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        return int(self.value)


class Language:
    """`triton.language`: every attribute but `constexpr` is its name."""

    constexpr = constexpr

    def __getattr__(self, name: str) -> Name:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"tl.{name}")


class Kernel:
    """A function under `@triton.jit`."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.fn, self.__name__, self.__module__ = function, function.__name__, function.__module__
        self.kwargs = options  # of the decorator, such as `do_not_specialize`

    def __getitem__(self, grid: Any) -> Any:
        """What would launch it.

        Raises:
            RLKernelError: always; Triton launches kernels so, and is not there.
        """
        raise RLKernelError(
            f"{self.__module__}:{self.__name__} is launched by Triton, which is not installed: pip install triton, or "
            'run it from a bundle (docs/aot.md): order = ["aot", "auto"]'
        )


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The decorator, with options or without."""
    return (lambda f: Kernel(f, **options)) if function is None else Kernel(function)


def _no_device() -> Any:
    raise RuntimeError("Triton is not installed")


_ACTIVE: Final = SimpleNamespace(get_current_target=_no_device, get_active_torch_device=_no_device)
tl: Final[Any] = Language()
triton: Final[Any] = SimpleNamespace(
    jit=jit,
    cdiv=lambda x, y: (x + y - 1) // y,
    next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 0,
    language=tl,
    knobs=SimpleNamespace(runtime=SimpleNamespace(interpret=False)),
    runtime=SimpleNamespace(driver=SimpleNamespace(active=_ACTIVE)),
)
