"""Manifests by where they stand, "module:attribute": of backends that are installed, lie in the clone, or are named.

And what a manifest's implementations are made of, as one fingerprint an operator.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from hashlib import sha256
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rlkernel import policy
from rlkernel.discover import GROUP, brief, entries, guarded
from rlkernel.manifest_rules import broken_rules
from rlkernel.resolve import claims
from rlkernel.sources import CLONE, DIGITS, fingerprint, targets_of
from rlkernel_core.decision import ALIASES
from rlkernel_core.documents import read_toml
from rlkernel_core.errors import ConfigError
from rlkernel_core.spec import OPERATORS

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend

_PROJECT: Final = {"project": {"entry-points?": {str: {str: str}}}}  # of pyproject.toml


def load(where: str) -> Backend:
    """Import a manifest.

    Raises:
        ConfigError: it cannot be imported, or is no manifest.
    """
    from pydantic import ValidationError

    from rlkernel_core.manifest import Backend

    module, _, name = where.partition(":")
    found, error = guarded(lambda: getattr(import_module(module), name))
    if isinstance(error, ValidationError):
        raise ConfigError(f"the manifest at {where!r} breaks a rule: {broken_rules(error)}") from error
    if error is not None:
        raise ConfigError(f"no manifest at {where!r} (module:attribute): {brief(error)}") from error
    if not isinstance(found, Backend):
        raise ConfigError(f"{where!r} is a {type(found).__name__}, not a rlkernel_core.Backend")
    return found


def provider(where: str) -> str:
    """Distribution and version that a manifest comes from, or its module where no distribution has it."""
    module = where.partition(":")[0]
    dists = packages_distributions().get(module.partition(".")[0])
    return f"{dists[0]} {version(dists[0])}" if dists else f"{module} (not installed)"


def known() -> dict[str, str]:
    """Backend -> where its manifest stands: all that are installed, and those of the clone, installed or not."""
    found = {entry.name: entry.value for entry in entries(GROUP)[0]}
    for file in _projects():
        found |= entry_points(file)
    return found


def entry_points(file: Path) -> dict[str, str]:
    """Backend -> where its manifest stands, as a pyproject.toml says.

    Raises:
        FileError: it is damaged.
    """
    found: dict[str, str] = read_toml(file, _PROJECT, "Mend it.")["project"].get("entry-points", {}).get(GROUP, {})
    return found


def _projects() -> list[Path]:
    """pyproject.toml of each backend in the clone, except the template: it is an example of a third party's plugin."""
    return [file for file in sorted(CLONE.glob("backends/*/pyproject.toml")) if file.parent.name != "template"]


def here(backend: str, where: str | None = None) -> Backend | None:
    """The manifest of a backend as it is now: the one named, the installed one, or the clone's; None without any."""
    name = ALIASES.get(backend, backend)
    if where is None and name in policy.installed():
        return policy.installed()[name].manifest
    where = where or known().get(name)
    if where is None:
        return None
    with importable():
        return guarded(partial(load, where))[0]


@contextmanager
def importable() -> Iterator[None]:
    """The scope in which manifests of the clone can be loaded although its backends and tools are not installed."""
    folders = [str(folder) for file in _projects() for folder in (file.parent, file.parent / "tools")]
    added = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def sources_of(manifest: Backend, op_id: str, device: str) -> str:
    """Fingerprint of what the implementations of an operator on a kind of device are made of, and of its tolerances."""
    kind = device.partition(":")[0]
    mine = {t for i in manifest.of(op_id) if claims(i.requires.device, kind) for t in targets_of(i)}
    others = _by_operator() + [(i.op, t) for i in manifest.impls for t in targets_of(i)]
    own = {t for op, t in others if op == op_id} | mine
    code = fingerprint(mine, frozenset(t for _, t in others) - own)
    numbers = [(t.output, t.dtype, t.atol, t.rtol) for t in OPERATORS[op_id.partition("@")[0]].tolerances]
    return sha256(json.dumps([code, sorted(numbers)]).encode()).hexdigest()[:DIGITS]


@cache
def _by_operator() -> list[tuple[str, str]]:
    """The functions that manifests name, each with its operator."""
    with importable():
        found = [guarded(partial(load, where))[0] for where in known().values()]
    return [(i.op, t) for manifest in found if manifest is not None for i in manifest.impls for t in targets_of(i)]
