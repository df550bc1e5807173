"""The header of a GGUF file, read step by step: nothing is allocated for a count or a length that the file only claims.

    "GGUF" · u32 version · u64 tensors · u64 pairs · pairs: name, u32 type, value · tensors: name, u32 dimensions,
    u64 each, u32 type, u64 offset · data, from the next multiple of `general.alignment`

Values of pairs are skipped: of a tokenizer's lists of hundreds of thousands of texts none is kept (gguf's own reader
makes two arrays of each). Source: ggml/docs/gguf.md. Imports gguf inside functions only, for names and sizes of types.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from rlkernel_core.errors import FileError
from rlkernel_core.paths import absent

REMEDY: Final = "Download or write it anew."
MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = "general.alignment"
_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a scalar, by type
_U32, _STRING, _ARRAY = 4, 8, 9
_MOST_TENSORS: Final = 200_000
_MOST_NAME: Final = 65_535  # bytes, as the format says of keys
_MOST_DIMS: Final = 8  # the format has 4
_MOST_NESTED: Final = 8
_MOST_ELEMENTS: Final = 1 << 59  # of at most 8 bytes: torch counts bytes in 63 bits


class Stored(NamedTuple):
    """What a file says of a tensor."""

    kind: str  # a name of GGMLQuantizationType
    shape: tuple[int, ...]  # rows first
    nbytes: int
    first: int  # byte of the file that it starts at


def read(path: Path) -> dict[str, Stored]:
    """The tensors of a GGUF file by name; no tensor is read.

    Raises:
        FileError: absent, damaged, cut off, of another version or of the other byte order.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _tensors(_Cursor(path, data))
    except FileNotFoundError as error:
        raise FileError(path, "", absent(path), "Pass a .gguf file.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(path, "", f"cannot be read: {error}", REMEDY) from error


class _Cursor:
    """A place in the bytes of a file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, 0, len(data)

    def wrong(self, problem: str) -> FileError:
        return FileError(self.path, f"byte {self.at}", f"is no whole GGUF file: {problem}", REMEDY)

    def skip(self, count: int) -> int:
        """Step over so many bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise self.wrong("it is cut off")
        self.at += count
        return start

    def u32(self) -> int:
        return int(struct.unpack_from("<I", self.data, self.skip(4))[0])

    def u64(self) -> int:
        return int(struct.unpack_from("<Q", self.data, self.skip(8))[0])

    def name(self) -> str:
        length = self.u64()
        if length > _MOST_NAME:
            raise self.wrong(f"a name of {length} bytes")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong("a name that is no UTF-8") from error

    def value(self, kind: int) -> None:
        """Step over a value; lists in lists are walked without recursion."""
        waiting = [(kind, 1)]  # type, and how many of it are still to come
        while waiting:
            kind, left = waiting.pop()
            if kind in _BYTES:
                self.skip(left * _BYTES[kind])
            elif kind == _STRING:
                for _ in range(min(left, self.size)):
                    self.skip(self.u64())
            elif kind == _ARRAY and len(waiting) < _MOST_NESTED:
                if left > 1:
                    waiting.append((kind, left - 1))
                if left:
                    waiting.append((self.u32(), self.u64()))
            else:
                raise self.wrong(f"a value of type {kind}")


def _tensors(cursor: _Cursor) -> dict[str, Stored]:
    if cursor.data[cursor.skip(4) : 4] != MAGIC:
        raise cursor.wrong("it does not begin with GGUF")
    if (version := cursor.u32()) not in _VERSIONS:
        raise cursor.wrong(f"version {version}; {' and '.join(map(str, _VERSIONS))} are read, little endian")
    count, pairs, align = cursor.u64(), cursor.u64(), 32
    if count > _MOST_TENSORS:
        raise cursor.wrong(f"{count} tensors; at most {_MOST_TENSORS} are read")
    for _ in range(min(pairs, cursor.size)):
        key, kind, at = cursor.name(), cursor.u32(), cursor.at
        cursor.value(kind)
        if key == _ALIGNMENT:
            align = struct.unpack_from("<I", cursor.data, at)[0] if kind == _U32 else 0
            if align < 1 or align & (align - 1):
                raise cursor.wrong(f"{_ALIGNMENT} is no power of two")
    rows = [_row(cursor) for _ in range(count)]
    base = -(-cursor.at // align) * align
    found: dict[str, Stored] = {}
    for name, row in rows:
        stored = row._replace(first=base + row.first)
        if name in found:
            raise cursor.wrong(f"two tensors {name[:80]!r}")
        if stored.first + stored.nbytes > cursor.size:
            raise cursor.wrong(f"it is cut off within {name[:80]!r}")
        found[name] = stored
    return found


def _row(cursor: _Cursor) -> tuple[str, Stored]:
    """A tensor, its offset still that from the start of the data."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name, dims = cursor.name(), cursor.u32()
    if dims > _MOST_DIMS:
        raise cursor.wrong(f"{name[:80]!r} of {dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(dims)]))
    kind, offset = cursor.u32(), cursor.u64()
    if prod(max(n, 1) for n in shape) > _MOST_ELEMENTS:
        raise cursor.wrong(f"{name[:80]!r} of a shape that no tensor has")
    try:
        known = GGMLQuantizationType(kind)
    except ValueError as error:
        raise cursor.wrong(f"{name[:80]!r} of type {kind}") from error
    columns, nbytes = GGML_QUANT_SIZES[known]
    if shape and shape[-1] % columns:
        raise cursor.wrong(f"{name[:80]!r} has rows of {shape[-1]}, no multiple of the {columns} of a block")
    return name, Stored(known.name, shape, prod(shape) // columns * nbytes if shape else nbytes, offset)
