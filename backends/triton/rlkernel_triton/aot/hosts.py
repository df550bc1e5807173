"""The host modules of rlkernel_triton once more, with another `triton`.

Host code and kernels live in modules that say `import triton`. A `Host` imports them a second time under names of its
own (`rlkernel_triton.aot.NAME.logprob` runs the source of `rlkernel_triton.logprob`), and there `triton` is what the
host was given and `rlkernel_triton` is the host. So kernels compiled on the spot and kernels from a bundle run side by
side in one process, a gradient runs where its forward pass ran, and no kernel module knows of either.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, Final

from rlkernel_triton.claims import CLAIMS

_ROOT: Final = "rlkernel_triton"
_SHARED: Final = (f"{_ROOT}.aot", f"{_ROOT}.builds", f"{_ROOT}.claims")  # the same for every host


class Host(MetaPathFinder):
    """A second copy of the host modules."""

    def __init__(self, name: str, triton: Any) -> None:
        self.package, self.triton = f"{_ROOT}.aot.{name}", triton
        root = ModuleType(self.package)
        root.__path__ = []  # a package, whose modules come from `find_spec`
        sys.modules[self.package] = root
        sys.meta_path.insert(0, self)

    def module(self, name: str) -> Any:
        """The copy of a module: "rlkernel_triton.logprob"."""
        return import_module(self._own(name))

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002 a finder's
        """The source of the original under the copy's name."""
        if not name.startswith(f"{self.package}."):
            return None
        root = find_spec(_ROOT)
        if root is None or root.origin is None:
            return None
        # Looked for by hand: importlib would import the packages that the original lies in.
        *packages, _ = name.removeprefix(f"{self.package}.").split(".")
        folder = Path(root.origin).parent.joinpath(*packages)
        original = PathFinder.find_spec(_ROOT + name.removeprefix(self.package), [str(folder)])
        if original is None or original.origin is None:
            return None
        loader = _Loader(name, original.origin, self._import)
        return spec_from_file_location(
            name, original.origin, loader=loader, submodule_search_locations=original.submodule_search_locations
        )

    def _own(self, name: str) -> str:
        shared = any(name == s or name.startswith(f"{s}.") for s in _SHARED)
        return name if shared or name.partition(".")[0] != _ROOT else self.package + name.removeprefix(_ROOT)

    def _import(
        self, name: str, globals_: Any = None, locals_: Any = None, fromlist: tuple[str, ...] = (), level: int = 0
    ) -> Any:
        """`__import__` as modules of this host see it."""
        if level == 0 and name.partition(".")[0] == "triton":
            return self.triton.language if fromlist and name != "triton" else self.triton
        if level == 0 and name.partition(".")[0] == _ROOT:
            own = self._own(name)
            found = import_module(own)
            for part in fromlist:  # `from rlkernel_triton import logprob` may name a module
                if not hasattr(found, part):
                    import_module(f"{own}.{part}" if own != _ROOT else self._own(f"{_ROOT}.{part}"))
                if own == self.package and not hasattr(found, part):
                    setattr(found, part, import_module(self._own(f"{_ROOT}.{part}")))
            return found
        return builtins.__import__(name, globals_, locals_, fromlist, level)


def implementation(host: Host, op: str, *, check: bool = False) -> Callable[..., Any]:
    """An operator's implementation in a host, or the check that is asked before it."""
    claim = CLAIMS[op]
    module, _, name = str(claim.check if check else claim.target).partition(":")
    found: Callable[..., Any] = getattr(host.module(module), name)
    return found if check or not claim.prepared else lambda call: found(call)(call)


class _Loader(SourceFileLoader):
    """Runs a source file whose imports are answered by a host; files are read once for all hosts."""

    _read: ClassVar[dict[str, CodeType | None]] = {}

    def __init__(self, name: str, path: str, imports: Callable[..., Any]) -> None:
        super().__init__(name, path)
        self._imports = imports

    def get_code(self, fullname: str) -> CodeType | None:
        if self.path not in self._read:
            self._read[self.path] = super().get_code(fullname)
        return self._read[self.path]

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._imports}
        super().exec_module(module)
