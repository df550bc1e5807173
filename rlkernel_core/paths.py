"""What errors say of a path that is not there: the nearest name beside it.

Imports nothing outside the standard library.
"""

from __future__ import annotations

import difflib
from pathlib import Path

_SHOWN = 500  # characters of a path


def absent(path: Path | str) -> str:
    """The same without the path: `does not exist; did you mean x/model.gguf?`, for errors that name it already."""
    return missing(path).removeprefix(f"{str(Path(path))[:_SHOWN]} ")


def missing(path: Path | str) -> str:
    """`x/modle.gguf does not exist; did you mean x/model.gguf?`, or which folder of the path is not there.

    Of a folder where a file was asked for, `x is no file`.
    """
    path, shown = Path(path), str(path)[:_SHOWN]
    try:
        there = path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero
        return f"{shown} is no name of a file: {getattr(error, 'strerror', None) or error}"
    if there:
        return f"{shown} is no file"
    gone = path
    while not gone.parent.is_dir() and gone.parent != gone:
        gone = gone.parent
    said = f"{shown} does not exist" + (f": there is no {gone}" if gone != path else "")
    try:
        names = [file.name for file in gone.parent.iterdir()]
    except OSError:
        return said
    near = difflib.get_close_matches(gone.name, names, n=1)
    return f"{said}; did you mean {gone.parent / near[0]}?" if near else said
