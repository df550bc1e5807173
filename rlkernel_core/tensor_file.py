"""The safetensors format without its package: a header that is checked before anything is read, and a writer.

    u64 length of the header · JSON: {"name": {"dtype", "shape", "data_offsets"}, "__metadata__": {...}} · bytes

Offsets count from the end of the header; together the tensors cover the rest of the file, with no gap (safetensors,
"Format"). Imports nothing outside the standard library.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from rlkernel_core.documents import formed, json_of
from rlkernel_core.errors import FileError
from rlkernel_core.files import MOST, whole
from rlkernel_core.paths import absent

# safetensors' name -> (torch's name, bits of an element). F4 and F6, which are packed, are of no torch dtype here.
DTYPES: Final[Mapping[str, tuple[str, int]]] = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8), "U64": ("uint64", 64),
    "U32": ("uint32", 32), "U16": ("uint16", 16), "U8": ("uint8", 8), "BOOL": ("bool", 8), "C64": ("complex64", 64),
}  # fmt: skip
NAMES: Final = {torch: name for name, (torch, _) in DTYPES.items()}
REMEDY: Final = "Download or write it anew."
_METADATA: Final = "__metadata__"
_ROW: Final = {"dtype": str, "shape": [int], "data_offsets": [int]}
_MOST_ELEMENTS: Final = 1 << 59  # of at most 8 bytes: torch counts bytes in 63 bits
_MOST_DIMS: Final = 64  # torch's


class Stored(NamedTuple):
    """What a file says of a tensor."""

    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    nbytes: int
    first: int  # byte of the file that it starts at


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file in the order of their bytes, and its metadata; no tensor is read.

    Raises:
        FileError: absent, cut off, or with a header that is damaged or beyond 16 MiB.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if 8 + length > size:
                raise FileError(path, "", "is no whole safetensors file: it ends within its header", REMEDY)
            if length > MOST:
                raise FileError(path, "header", f"is larger than the {MOST} bytes that are read", REMEDY)
            text = file.read(length).decode("utf-8")
    except FileNotFoundError as error:
        raise FileError(path, "", absent(path), "Pass a .safetensors file.") from error
    except UnicodeDecodeError as error:
        raise FileError(path, f"byte {8 + error.start}", "is no whole safetensors file: no UTF-8", REMEDY) from error
    except OSError as error:
        problem = "is no file" if isinstance(error, IsADirectoryError) else f"cannot be read: {error.strerror}"
        raise FileError(path, "", problem, REMEDY) from error
    said = json_of(text, {str: object}, path, REMEDY)
    metadata: dict[str, str] = formed(said.pop(_METADATA, {}), {str: str}, path, REMEDY, _METADATA)
    rows = formed(said, {str: _ROW}, path, REMEDY)
    return _tensors(path, rows, 8 + length, size), metadata


def _tensors(path: Path, rows: Mapping[str, Mapping[str, Any]], base: int, size: int) -> dict[str, Stored]:
    """Rows of a header as tensors, which lie one behind the other and end with the file."""
    found, end = {}, base
    for name, row in sorted(rows.items(), key=lambda item: item[1]["data_offsets"]):
        if row["dtype"] not in DTYPES:
            raise FileError(path, name, f"has dtype {row['dtype'][:40]!r}; known are {', '.join(DTYPES)}", REMEDY)
        sizes = [max(n, 1) for n in row["shape"]]
        if (
            min(row["shape"], default=0) < 0
            or len(sizes) > _MOST_DIMS
            or max(sizes, default=1) > _MOST_ELEMENTS
            or prod(sizes) > _MOST_ELEMENTS
        ):
            raise FileError(path, name, "has no shape that a tensor can have", REMEDY)
        nbytes = prod(row["shape"]) * DTYPES[row["dtype"]][1] // 8
        if row["data_offsets"] != [end - base, end - base + nbytes]:
            raise FileError(path, name, "is cut off, or does not lie where the one before it ends", REMEDY)
        found[name] = Stored(row["dtype"], tuple(row["shape"]), nbytes, end)
        end += nbytes
        if end > size:
            raise FileError(path, name, "is cut off: the file ends within it", REMEDY)
    if end != size:
        raise FileError(path, "", f"has {size - end} bytes more than its tensors", REMEDY)
    return found


def write(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]], metadata: Mapping[str, str]) -> None:
    """Write a file whole.

    Args:
        path: of the file.
        tensors: name, torch's name of the dtype, shape and bytes in order of each.
        metadata: texts by name.

    Raises:
        FileError: it cannot be written.
    """
    held, end = list(tensors), 0
    header: dict[str, object] = {_METADATA: dict(metadata)}
    for name, dtype, shape, data in held:
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
    with whole(path) as draft, draft.open("wb") as file:
        for part in (struct.pack("<Q", len(text)), text, *(data for _, _, _, data in held)):
            file.write(part)
