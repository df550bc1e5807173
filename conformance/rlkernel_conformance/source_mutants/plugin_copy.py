"""Plain torch as a plugin of its own: a copy of its packages under other names, in a folder, with or without a change.

The copy shares nothing with the suite that judges it but the contract: specs, formats by name, the class of quantized
weights. So a bug that is planted in a codec does not reach the weights that the suite makes.
"""

from __future__ import annotations

import compileall
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlkernel_core.errors import RLKernelError

if TYPE_CHECKING:
    from rlkernel_conformance.source_mutants.mutations import Mutation
    from rlkernel_core.manifest import Backend

NAME: Final = "torch-copy"  # of the copy as a backend
# Package -> its name in the copy.
PACKAGES: Final = {
    "rlkernel_torch": "copied_torch",
    "rlkernel_common": "copied_common",
    "rlkernel_core.quant": "copied_quant",
}
# The contract: the meaning of formats, the class of quantized weights, how they are cut and joined.
_SHARED: Final = ("spec", "tensor", "slicing", "stacking")
_CONTRACT: Final = tuple(f"{PACKAGES['rlkernel_core.quant']}/{name}.py" for name in _SHARED)
# Whether a run is being recorded for a graph is what the capture says that the suite uses, not the copy's.
_RECORDING: Final = "rlkernel_common.graphs.audit import recording"
_NAMES: Final = re.compile(
    rf"\b(?!{re.escape(_RECORDING)})"
    rf"(rlkernel_torch|rlkernel_common|rlkernel_core\.quant(?!\.(?:{'|'.join(_SHARED)})\b))(?![\w-])"
)
# The contract says where codecs are. `codec.py` imports them as it runs: there, too, the copy's own.
_IMPORT: Final = (
    "import_module(module)",
    f'import_module(module.replace("rlkernel_core.quant", "{PACKAGES["rlkernel_core.quant"]}"))',
)


@dataclass(frozen=True)
class PluginCopy:
    """A folder that holds the copy."""

    folder: Path

    @classmethod
    def written(cls, folder: Path) -> PluginCopy:
        """Write the unchanged copy into a new folder, compiled."""
        for package, name in PACKAGES.items():
            shutil.copytree(home(package), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in sorted(folder.rglob("*.py")):
            file.write_bytes(_renamed(file.read_bytes()))
        compileall.compile_dir(folder, quiet=2)
        return cls(folder)

    def mutant(self, folder: Path, file: str, mutation: Mutation) -> PluginCopy:
        """Write a copy of this one with one change of `file`, as `files` names it, into a new folder."""
        shutil.copytree(self.folder, folder)
        changed = folder / file
        changed.write_bytes(_renamed(mutation.applied(source_of(file))))
        for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
            compiled.unlink()
        return PluginCopy(folder)

    @contextmanager
    def importable(self) -> Iterator[Backend]:
        """The scope in which the copy can be imported, once a process; gives its manifest."""
        loaded = [name for name in PACKAGES.values() if name in sys.modules]
        if loaded:
            raise RLKernelError(f"{', '.join(loaded)} is imported already: a process imports one copy")
        sys.path.insert(0, str(self.folder))
        try:
            backend: Backend = import_module(PACKAGES["rlkernel_torch"]).backend
            yield backend.model_copy(update={"name": NAME})
        finally:
            sys.path.remove(str(self.folder))


def home(package: str) -> Path:
    """The folder of a package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise RLKernelError(f"the sources of {package} are not here: install rlkernel from a wheel or a clone")
    return Path(next(iter(spec.submodule_search_locations)))


def files() -> list[str]:
    """Files of the copy that may be changed, each as package and path: no claims, and no part of the contract."""
    found = [
        f"{name}/{path.relative_to(home(package)).as_posix()}"
        for package, name in PACKAGES.items()
        for path in sorted(home(package).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return [file for file in found if file not in _CONTRACT]


def original(file: str) -> Path:
    """The file of which a file of the copy is one."""
    name, _, rest = file.partition("/")
    package = next(package for package, copied in PACKAGES.items() if copied == name)
    return home(package) / rest


def source_of(file: str) -> bytes:
    """The text that a file of the copy has in the original; its lines are the same."""
    return original(file).read_bytes()


def _renamed(source: bytes) -> bytes:
    return _NAMES.sub(lambda match: PACKAGES[match.group(1)], source.decode()).replace(*_IMPORT).encode()
