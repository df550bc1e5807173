"""A manifest by where it stands, "module:attribute": for backends that no installed distribution provides."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING

from rlkernel.discover import brief, guarded
from rlkernel_core.errors import ConfigError

if TYPE_CHECKING:
    from rlkernel_core.manifest import Backend


def load(where: str) -> Backend:
    """Import a manifest.

    Raises:
        ConfigError: it cannot be imported, or is no manifest.
    """
    from rlkernel_core.manifest import Backend

    module, _, name = where.partition(":")
    found, error = guarded(lambda: getattr(import_module(module), name))
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
