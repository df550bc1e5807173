"""Single files of packages whose top level needs more than the file does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def load(
    package: str,
    path: str,
    *,
    stubs: Mapping[str, Mapping[str, Any]] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> ModuleType:
    """A module from a file inside an installed package, without importing the package.

    Args:
        package: top-level name.
        path: of the file, within it.
        stubs: module name -> content of what stands in for it while the file is imported.
        beside: path within the package -> content of a module that the file imports from there, whenever it does.

    Raises:
        ImportError: the package or the file is not there.
    """
    top = f"_rlkernel_bench_{package}"
    name = f"{top}.{_dotted(path)}"
    if name in sys.modules:
        return sys.modules[name]
    found = find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    file = next((f for folder in folders if (f := Path(folder) / path).exists()), None)
    spec = spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"{package}/{path} is not there")
    for at, content in (beside or {}).items():
        _stand_in(f"{top}.{_dotted(at)}", content)
    module = module_from_spec(spec)
    before = {n: sys.modules.get(n) for n in stubs or ()}
    for n, content in (stubs or {}).items():
        _stand_in(n, content)
    sys.modules[name] = module
    whole = False
    try:
        spec.loader.exec_module(module)
        whole = True
    finally:
        if not whole:
            del sys.modules[name]
        for n, kept in before.items():
            del sys.modules[n]
            if kept is not None:
                sys.modules[n] = kept
    return module


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _stand_in(name: str, content: Mapping[str, Any]) -> None:
    """A module of that name, and empty packages above it where there are none."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        _stand_in(parent, {"__path__": []})
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(content)
