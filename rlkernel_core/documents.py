"""JSON and TOML from outside: bounded before they are parsed, and of the form that their reader expects.

A form is plain data, after which a value is walked; what differs first is a FileError that names its place:

    LOCK = {"version": int, "operators": {str: [{"backend": str, "target": str, "provider": str}]}}

    str, int, float, bool, None    a value of that type; an int has 64 bits and is a float too, a bool neither
    object                         anything
    (A, B)                         one of several forms
    frozenset({1, 2})              one of several values
    [A]                            a list
    {str: A}                       an object with any keys
    {"key": A, "other?": B}        an object with these keys, and any others; a key with ? may be absent

Imports nothing outside the standard library.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

from rlkernel_core.errors import FileError
from rlkernel_core.files import MOST, read_text

DEPTH: Final = 64  # of lists and objects in each other
TOML_MOST: Final = 256 << 10  # bytes: a dotted key of n parts makes n tables
# A text in quotes, to its end or to that of the document: brackets in it nest nothing.
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS: Final = re.compile(r"[\[\]{}]")
_LONE: Final = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair of UTF-16, perhaps without the other
_SHORT: Final = Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 60, 60


def read_json(path: Path | str, form: Any, remedy: str, most: int = MOST) -> Any:
    """A file of JSON, of a form.

    Args:
        path: of the file.
        form: that its content must have.
        remedy: what makes a new file, for the message.
        most: bytes of the file.

    Raises:
        FileError: absent, too large, no JSON, nested too deep, or of another form.
    """
    return json_of(read_text(path, remedy, most), form, path, remedy, most)


def json_of(text: str, form: Any, source: Path | str, remedy: str, most: int = MOST, line: int = 1) -> Any:
    """The same for a text that stands in a file, whose first line is `line` there."""
    if len(text) > most:
        raise FileError(source, "", f"is larger than the {most} bytes that are read", remedy)
    depth = 0
    for bracket in _BRACKETS.finditer(_QUOTED.sub("", text)):
        depth += 1 if bracket.group() in "[{" else -1
        if depth > DEPTH:
            raise FileError(source, "", f"nests more than {DEPTH} lists and objects", remedy)
    try:
        found = json.loads(text)  # NaN and Infinity are numbers, as json.dumps writes them
        if _LONE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno + line - 1} column {error.colno}"
        raise FileError(source, place, f"is no JSON: {error.msg}", remedy) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, half a character
        raise FileError(source, "", f"is no JSON: {_one_line(error)}", remedy) from error
    return formed(found, form, source, remedy)


def read_lines(path: Path | str, form: Any, remedy: str, most: int = MOST) -> list[Any]:
    """The documents of a file that has one of JSON a line; empty lines count for nothing.

    Raises:
        FileError: as `read_json`.
    """
    lines = read_text(path, remedy, most).split("\n")
    return [json_of(text, form, path, remedy, most, i + 1) for i, text in enumerate(lines) if text.strip()]


def read_toml(path: Path | str, form: Any, remedy: str) -> Any:
    """A file of TOML, of a form.

    Raises:
        FileError: as `read_json`.
    """
    text = read_text(path, remedy, TOML_MOST)
    try:
        found = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:  # RecursionError: its parser calls itself
        raise FileError(path, "", f"is not valid TOML: {_one_line(error)}", remedy) from error
    _shallow(found, path, remedy)
    return formed(found, form, path, remedy)


def formed(value: Any, form: Any, source: Path | str, remedy: str, place: str = "") -> Any:
    """The value, which must have a form.

    Raises:
        FileError: it has not; the message has the place of the first difference.
    """
    if problem := _differs(value, form, place):
        raise FileError(source, problem[0], problem[1], remedy)
    return value


def _differs(value: Any, form: Any, place: str) -> tuple[str, str] | None:
    """Where a value first differs from a form, and how."""
    match form:
        case tuple():
            tried = [_differs(value, each, place) for each in form]
            deepest = max(tried, key=lambda p: len(p[0]) if p else -1)
            return None if None in tried else deepest
        case frozenset():
            fits = isinstance(value, str | int) and type(value) in {type(v) for v in form} and value in form
            return None if fits else (place, f"must be {' or '.join(sorted(map(repr, form)))}; got {short(value)}")
        case list():
            if not isinstance(value, list):
                return place, f"must be a list; got {short(value)}"
            return next((p for i, v in enumerate(value) if (p := _differs(v, form[0], f"{place}[{i}]"))), None)
        case dict():
            return _object(value, form, place)
    if form is object or (form is int and type(value) is int and value.bit_length() < 64):
        return None
    if form is not int and type(value) in {type(None) if form is None else form, int if form is float else form}:
        return None
    return place, f"must be {_NAMES.get(form, form)}; got {short(value)}"


_NAMES: Final = {str: "text", int: "an integer of 64 bits", float: "a number", bool: "true or false", None: "null"}


def _object(value: Any, form: dict[Any, Any], place: str) -> tuple[str, str] | None:
    if not isinstance(value, dict):
        return place, f"must be an object; got {short(value)}"
    if str in form:
        return next((p for k, v in value.items() if (p := _differs(v, form[str], _below(place, k)))), None)
    for key, inner in form.items():
        name = key.removesuffix("?")
        if name in value:
            if problem := _differs(value[name], inner, _below(place, name)):
                return problem
        elif name == key:
            return place, f"has no {name!r}"
    return None


def _below(place: str, key: str) -> str:
    said = key if key.isprintable() and len(key) < 80 else short(key)
    return f"{place}.{said}" if place else said


def short(value: Any) -> str:
    """The repr of a value, of a bounded length."""
    return _SHORT.repr(value)


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _shallow(value: Any, path: Path | str, remedy: str) -> None:
    """See that nothing nests too deep; without recursion."""
    layer, depth = [value], 0
    while layer:
        depth += 1
        if depth > DEPTH:
            raise FileError(path, "", f"nests more than {DEPTH} tables and lists", remedy)
        layer = [v for x in layer for v in (x.values() if isinstance(x, dict) else x) if isinstance(v, dict | list)]
