"""Single files of packages whose top level needs more than the file does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load(package: str, path: str, *, stubs: Mapping[str, ModuleType] | None = None) -> ModuleType:
    """A module from a file inside an installed package, without importing the package.

    Args:
        package: top-level name.
        path: of the file, within it.
        stubs: module name -> what stands in for it while the file is imported.

    Raises:
        ImportError: the package or the file is not there.
    """
    name = f"_rlkernel_bench_{package}_{path.removesuffix('.py').replace('/', '_')}"
    if name in sys.modules:
        return sys.modules[name]
    found = find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    file = next((f for folder in folders if (f := Path(folder) / path).exists()), None)
    spec = spec_from_file_location(name, file) if file else None
    if spec is None or spec.loader is None:
        raise ImportError(f"{package}/{path} is not there")
    module = module_from_spec(spec)
    before = {n: sys.modules.get(n) for n in stubs or ()}
    sys.modules[name] = module
    sys.modules.update(stubs or {})
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for n, kept in before.items():
            del sys.modules[n]
            if kept is not None:
                sys.modules[n] = kept
    return module
