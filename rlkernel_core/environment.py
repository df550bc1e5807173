"""Environment variables: the one place where one is looked up by name.

What cannot be text, or no path, is a ConfigError that names the variable. Imports nothing outside the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlkernel_core.errors import ConfigError


def variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The value of a variable; None where it is not set or empty.

    Raises:
        ConfigError: its bytes are no text of UTF-8.
    """
    value = (os.environ if environ is None else environ).get(name)
    if not value:
        return None
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name}: {value[:100]!a} is not UTF-8; set it to text, or unset it") from error
    return value


def path_in(name: str, environ: Mapping[str, str] | None = None) -> Path | None:
    """The path that a variable holds; None where it is not set or empty. A path may have any bytes but zero.

    Raises:
        ConfigError: it holds a zero.
    """
    value = (os.environ if environ is None else environ).get(name)
    if value and "\0" in value:
        raise ConfigError(f"{name}: {value[:100]!a} is no path; set it to one, or unset it")
    return Path(value) if value else None
