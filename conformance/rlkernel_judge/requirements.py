"""Whether what a command of the judge needs is installed."""

from __future__ import annotations

import importlib.util

from rlkernel.installation import extras
from rlkernel_core.errors import ConfigError


def require(what: str, *packages: str) -> None:
    """See that packages are installed.

    Raises:
        ConfigError: some are missing; it names the line that installs them.
    """
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{what} needs {', '.join(missing)}: {extras('cpu', 'judge')}")
