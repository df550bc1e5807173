"""Changes of a valid document, drawn by hypothesis: of its bytes, its words, or the values that it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Parts = dict[str, bytes]  # of a document by name: the header and the data of a file, or the files of a folder

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|[A-Za-z_][\w.]*|[^\s\w]|\s+')
_NUMBERS = (0, -1, 1, 2, 255, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)
_FLOATS = (0.0, -0.0, 1e-320, -1.5, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", " ", "\0", "\n", "a" * 70_000, "../../etc/passwd", "/etc/passwd", "..", ".", "a/../../b", "\u202e",
    "\U0001f600", "torch", "float32", "uint4", "complex128", "__class__", "nan", "-1", "cuda:99",
    "rlkernel_torch.logprob:logprob",
    "model.safetensors", "x" * 300, "%s", "{0}", "\x1b[31m", "é" * 200,
)  # fmt: skip
_WORDS = (
    b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 5000, b"{", b"}", b"[", b"]", b",", b":", b'""',
    b'"\\ud800"', b'"\\', b'"', b"[" * 500, b'{"a":' * 500, b"[[[]]]", b"=", b"\n[[a]]\n", b"a.b.c=1\n", b"'''", b'"""',
    b"1979-05-27", b"0x" + b"f" * 100, b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\r\n",
)  # fmt: skip

_SMALL = 10_000  # bytes of what is repeated many times: cases are to be large for their reader, not for us
_CHANGES = ("replace", "replace", "replace", "near", "near", "remove", "rename", "repeat", "move")


def deep(levels: int, form: str) -> Any:
    """Lists or objects in each other."""
    value: Any = 0
    for _ in range(levels):
        value = [value] if form == "list" else {"a": value}
    return value


def odd_values() -> st.SearchStrategy[Any]:
    """Values that no field expects, or only just."""
    plain = st.sampled_from((None, True, False, *_NUMBERS, *_FLOATS, *_TEXTS, [], {}, [[]], [None], {"": None}))
    large = st.builds(lambda n: [0] * n, st.sampled_from((1000, 200_000)))
    nested = st.builds(deep, st.sampled_from((3, 60, 70, 400)), st.sampled_from(("list", "object")))
    drawn = st.one_of(st.integers(), st.floats(), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
    return st.one_of(plain, plain, drawn, drawn, nested, large)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything in a document, itself included."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*path, key))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


@st.composite
def changed_value(draw: st.DrawFn, document: Any) -> Any:
    """A JSON document with one to three of its values replaced, removed, renamed, repeated or taken from elsewhere."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        paths = list(places(document))
        path = draw(st.sampled_from(paths))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(odd_values())
            continue
        try:
            holder = at(document, path[:-1])
            holder[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
        what = draw(
            st.sampled_from(("replace", "replace", "replace", "near", "near", "remove", "rename", "repeat", "move"))
        )
        key, old = path[-1], holder[path[-1]]
        if what == "remove":
            del holder[key]
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from((str(key).upper(), f"{key} ", *_TEXTS)))] = holder.pop(key)
        elif what == "repeat" and isinstance(holder, list):
            holder += [old] * (draw(st.sampled_from((1, 1, 100))) if len(json.dumps(old)) < _SMALL else 1)
        elif what == "near" and isinstance(old, int | float) and not isinstance(old, bool):
            holder[key] = draw(
                st.sampled_from((old + 1, old - 1, -old, old * 2, old // 2 if isinstance(old, int) else 0, 0))
            )
        elif what == "near" and isinstance(old, str):
            holder[key] = draw(st.sampled_from((old[:-1], old + "x", old * 2, old.upper(), old[::-1])))
        elif what == "move":
            other = draw(st.sampled_from(paths))
            holder[key] = json.loads(json.dumps(at(document, other))) if _leads(document, other) else None
        else:
            holder[key] = draw(odd_values())
    return document


def _leads(document: Any, path: tuple[Any, ...]) -> bool:
    try:
        at(document, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


@st.composite
def changed_tokens(draw: st.DrawFn, text: bytes) -> bytes:
    """A text with some of its words replaced, removed, repeated or exchanged."""
    tokens = _TOKEN.findall(text) or [b""]
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(tokens) - 1))
        what = draw(st.sampled_from(("replace", "replace", "remove", "repeat", "exchange", "insert")))
        if what == "remove":
            tokens[i] = b""
        elif what == "repeat":
            tokens[i] *= draw(st.sampled_from((2, 2, 1000))) if len(tokens[i]) < _SMALL else 2
        elif what == "exchange":
            j = draw(st.integers(0, len(tokens) - 1))
            tokens[i], tokens[j] = tokens[j], tokens[i]
        else:
            tokens[i] = (tokens[i] if what == "insert" else b"") + draw(st.sampled_from(_WORDS))
    return b"".join(tokens)


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes flipped, overwritten, removed, inserted, repeated or cut off."""
    out = bytearray(data)
    for _ in range(draw(st.sampled_from((1, 1, 2, 4)))):
        i = draw(st.integers(0, max(0, len(out) - 1)))
        what = draw(st.sampled_from(("flip", "flip", "number", "remove", "insert", "repeat", "cut", "zero")))
        if what == "flip" and out:
            out[i] ^= 1 << draw(st.integers(0, 7))
        elif what == "number":
            size = draw(st.sampled_from((1, 2, 4, 8)))
            number = draw(st.sampled_from((0, 1, 2**7, 2**15, 2**31, 2**32 - 1, 2**63, 2**64 - 1))) % 256**size
            out[i : i + size] = number.to_bytes(size, "little")
        elif what == "remove":
            del out[i : i + draw(st.sampled_from((1, 4, 100)))]
        elif what == "insert":
            out[i:i] = draw(st.binary(min_size=1, max_size=16))
        elif what == "repeat":
            out[i:i] = out[i : i + 64] * draw(st.sampled_from((1, 50)))
        elif what == "cut":
            del out[i:]
        elif what == "zero":
            out[i : i + 16] = bytes(len(out[i : i + 16]))
    return bytes(out)


@dataclass(frozen=True)
class Case:
    """A damaged document: its files, and how it was damaged."""

    level: str
    files: Parts


@st.composite
def cases(draw: st.DrawFn, parts: Parts, join: Callable[[Parts], Parts]) -> Case:
    """A document damaged at one level.

    Args:
        draw: of hypothesis.
        parts: what it is made of; those that are JSON are changed by value, too.
        join: makes the files of parts: with lengths and hashes that fit, so that what is inside is read.
    """
    level = draw(st.sampled_from(("byte", "token", "value", "value", "file")))
    if level == "file":
        files = join(parts)
        name = draw(st.sampled_from(sorted(files)))
        return Case(level, {**files, name: draw(changed_bytes(files[name]))})
    texts = [name for name, data in sorted(parts.items()) if _document(data) is not None]
    if level == "value" and texts:
        name = draw(st.sampled_from(texts))
        made = draw(changed_value(_document(parts[name])))
        return Case(level, join({**parts, name: json.dumps(made).encode()}))
    name = draw(st.sampled_from(sorted(parts)))
    change = changed_bytes if level == "byte" else changed_tokens
    return Case("token" if change is changed_tokens else level, join({**parts, name: draw(change(parts[name]))}))


def _document(data: bytes) -> Any:
    if not data.lstrip().startswith((b"{", b"[")):
        return None
    try:
        return json.loads(data)
    except ValueError:
        return None
