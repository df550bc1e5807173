"""Names of SGLang's compiled parts, to import its Python where they are not: nothing of them can be called."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# torchvision has no build for this torch's CPU, cv2 reads images, cutlass is of kernels for other GPUs.
PARTS = ("sgl_kernel", "torchvision", "cv2", "cutlass")
DECORATES = ("cutlass",)  # its names are called as modules are imported, and what they make is never used
ANSWERS = {"sgl_kernel.utils.is_arch_support_pdl": False}  # what a call of a name returns; others are an error


class Absent(ModuleType):
    """A module, or a name in one, that may be imported and not used."""

    __path__: list[str] = []  # noqa: RUF012 a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        if self.__name__.partition(".")[0] in DECORATES:
            return self
        if self.__name__ in ANSWERS:
            return ANSWERS[self.__name__]
        raise RuntimeError(f"{self.__name__} is a stub")


class Finder:
    """What answers imports of the parts."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        self.parts = parts

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.parts else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def stub() -> tuple[str, ...]:
    """Stub the parts that are not installed; their names."""
    absent = tuple(part for part in PARTS if find_spec(part) is None)
    if "torchvision" in absent:  # transformers wants the version of what it finds
        import transformers.utils.import_utils as theirs

        theirs.is_torchvision_available = lambda: False
        theirs.is_torchvision_greater_or_equal = lambda *_, **__: False
    sys.meta_path.insert(0, Finder(absent))
    return absent
