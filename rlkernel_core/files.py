"""Files: written whole or not at all, and read within a bound; whatever goes wrong is a FileError.

A process that is ended, or a disk that is full, leaves the old file or the new one: a draft beside the file is written,
flushed to the disk, and renamed. What a killed process leaves behind is its draft, `.NAME.HEX.part`.
Imports nothing outside the standard library.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

from rlkernel_core.errors import FileError
from rlkernel_core.paths import absent

MOST: Final = 16 << 20  # bytes of a file that is read whole: JSON of that size takes up to half a GiB in memory
_ROOM: Final = "Name a file in a folder that exists, that you may write to, and that has room."
_NAME: Final = 100  # characters of a file's name that its draft keeps: a file system takes 255


@contextmanager
def whole(path: Path | str) -> Iterator[Path]:
    """A path beside `path` to write to: the file there takes its place when the block ends well, and is removed if not.

    The mode of a file that is replaced is kept, and of a link its target is replaced. What is no file, such as
    /dev/stdout, is written to as it is.

    Raises:
        FileError: the operating system refuses: the folder is absent or closed, the disk is full.
    """
    path = Path(path)
    try:
        path = path.resolve() if path.is_symlink() else path
        if path.exists() and not path.is_file():
            if path.is_dir():
                raise FileError(path, "", "is a folder", "Name a file.")
            yield path
            return
        draft = _draft(path)
        try:
            yield draft
            if path.exists():
                draft.chmod(stat.S_IMODE(path.stat().st_mode))
            _flush(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        _flush(path.parent)
    except (OSError, ValueError) as error:
        _raise(path, error)


@contextmanager
def whole_folder(path: Path | str) -> Iterator[Path]:
    """An empty folder beside `path` to fill: it takes the place of `path` when the block ends well, else it is removed.

    `path` is absent or an empty folder.

    Raises:
        FileError: it is neither, or the operating system refuses.
    """
    path = Path(path)
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileError(path, "", "exists already", "Remove it, or name another folder.")
        draft = _draft(path)
        draft.mkdir(parents=True)
        try:
            yield draft
            for inside in (*draft.rglob("*"), draft):
                _flush(inside)
            draft.replace(path)  # takes the place of an empty folder too
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _flush(path.parent)
    except (OSError, ValueError) as error:
        _raise(path, error)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a file whole.

    Raises:
        FileError: as `whole`.
    """
    with whole(path) as draft:
        draft.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    """Write a file of UTF-8 whole, line ends as they are in the text.

    Raises:
        FileError: as `whole`, and where the text cannot be encoded.
    """
    with whole(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path | str, content: Mapping[str, Any] | list[Any], indent: int | None = 1) -> None:
    """Write a file of JSON whole.

    Raises:
        FileError: as `whole`.
    """
    write_text(path, json.dumps(content, indent=indent) + "\n")


def make_folder(path: Path | str) -> None:
    """Make a folder and those above it, where they are not there.

    Raises:
        FileError: the operating system refuses.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        _raise(path, error)


def read_bytes(path: Path | str, remedy: str, most: int = MOST) -> bytes:
    """The content of a file of at most `most` bytes.

    Args:
        path: of the file.
        remedy: what makes a new file, for the message.
        most: bytes; no more are read.

    Raises:
        FileError: absent, no file, closed, or larger.
    """
    data = read_start(path, remedy, most + 1)
    if len(data) > most:
        raise FileError(path, "", f"is larger than the {most} bytes that are read", remedy)
    return data


def read_start(path: Path | str, remedy: str, count: int) -> bytes:
    """The first `count` bytes of a file, or all where it has less.

    Raises:
        FileError: absent, no file, or closed.
    """
    try:
        with Path(path).open("rb") as file:
            return file.read(count)
    except FileNotFoundError as error:
        raise FileError(path, "", absent(path), remedy) from error
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        problem = "is no file" if isinstance(error, IsADirectoryError) else f"cannot be read: {_said(error)}"
        raise FileError(path, "", problem, remedy) from error


def read_text(path: Path | str, remedy: str, most: int = MOST) -> str:
    """The text of a file of UTF-8.

    Raises:
        FileError: as `read_bytes`, and where it is not UTF-8.
    """
    data = read_bytes(path, remedy, most)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"byte {error.start}", "is not UTF-8", remedy) from error


def inside(folder: Path, name: str, source: Path | str, remedy: str, *, also: Path | None = None) -> Path:
    """The path of a file that another file names: it lies in `folder` or below, links followed.

    Args:
        folder: that it must lie in.
        name: relative path, as the other file has it.
        source: the other file, for the message.
        remedy: for the message.
        also: a folder that links may lead to besides.

    Raises:
        FileError: the name is absolute, leads out of the folder, or is none.
    """
    parts = Path(name).parts
    try:
        if parts and ".." not in parts and not Path(name).is_absolute():
            path = (folder / name).resolve()
            if any(path.is_relative_to(root.resolve()) for root in (folder, also) if root is not None):
                return folder / name
    except (OSError, RuntimeError, ValueError):  # a circle of links, a name that is too long or holds a zero
        pass
    raise FileError(source, "", f"names {name[:_NAME]!r}, which is no file in {folder}", remedy)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name[:_NAME]}.{secrets.token_hex(8)}.part")


def _flush(path: Path) -> None:
    """See that a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise(path: Path | str, error: OSError | ValueError) -> NoReturn:
    if isinstance(error, OSError) or "\0" in str(path) or isinstance(error, UnicodeEncodeError):
        raise FileError(path, "", f"cannot be written: {_said(error)}", _ROOM) from error
    raise error


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
