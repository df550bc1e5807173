"""A safetensors file as tensors of the GPU that are the page cache's own pages: read once from disk, held once.

The file is mapped shared and read-only and registered whole; `rlkernel.nn.load_quantized(model, MappedFile(path), …)`
quantizes from it with nothing in between. Writing to such a tensor from the GPU faults: what is trained without being
quantized wants `place=torch.clone`. Pages stay pinned while any tensor made of them lives. Imports torch inside
functions only.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import weakref
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlkernel_core.errors import ArgumentError, RLKernelError
from rlkernel_jetson import driver as calls
from rlkernel_jetson.adopt import Adopter

if TYPE_CHECKING:
    from torch import Tensor

_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
# safetensors' names -> torch's
_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


class Entry(NamedTuple):
    """What a file says of a tensor before it is loaded."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    first: int  # byte of the file that it starts at


class Pages:
    """A file's pages, mapped shared and read-only."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.nbytes = path.stat().st_size
        with path.open("rb") as opened:
            found = libc.mmap(None, self.nbytes, _PROT_READ, _MAP_SHARED, opened.fileno(), 0)
        if found == ctypes.c_void_p(-1).value:
            raise RLKernelError(f"{path} cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self.address = int(found)
        weakref.finalize(self, libc.munmap, self.address, self.nbytes).atexit = False


class MappedFile:
    """A safetensors file on a device: `entries`, `config` and `load`, as `rlkernel.checkpoints.opened` has them.

    Raises:
        ArgumentError: no such file, or one that is cut off.
        RLKernelError: the device cannot; the message says why. Load the file in the ordinary way then.
    """

    config: dict[str, Any]

    def __init__(self, path: Path | str, adopter: Adopter | None = None) -> None:
        adopter = adopter or Adopter()
        path = Path(path)
        self.entries, metadata = _header(path)
        self.config = json.loads(metadata.get("quantization_config", "{}"))
        why = adopter.unsupported(read_only=True)
        if why is not None:
            raise RLKernelError(f"{path} is not adopted: {why}")
        pages = Pages(path)
        flags = calls.DEVICE_MAP | calls.READ_ONLY
        self._bytes = adopter.registered(pages.address, pages.nbytes, flags, pages)

    def load(self, name: str) -> Tensor:
        """One tensor; copied where the file has it at an address that its dtype cannot have."""
        import torch

        entry = self.entries[name]
        dtype = getattr(torch, _DTYPES[entry.dtype])
        part = self._bytes[entry.first : entry.first + entry.nbytes]
        return (part.clone() if entry.first % dtype.itemsize else part).view(dtype).view(entry.shape)

    def weight(self, name: str) -> Tensor:
        """The same: these files have no formats of their own."""
        return self.load(name)


def _header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors of a safetensors file and its metadata (safetensors, "Format")."""
    import torch

    if not path.is_file():
        raise ArgumentError("path", str(path), "does not exist", "Pass a .safetensors file.")
    size = path.stat().st_size
    with path.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if 8 + length > size:
            raise ArgumentError("path", str(path), "is no whole safetensors file", "Download it anew.")
        said: dict[str, Any] = json.loads(opened.read(length))
    metadata = said.pop("__metadata__", {})
    found = {}
    for name, row in said.items():
        begin, end = row["data_offsets"]
        if row["dtype"] not in _DTYPES:
            raise ArgumentError(name, row["dtype"], f"is none of {', '.join(_DTYPES)}", "Load it in the ordinary way.")
        item = getattr(torch, _DTYPES[row["dtype"]]).itemsize
        if end - begin != prod(row["shape"]) * item or 8 + length + end > size:
            raise ArgumentError(name, row["data_offsets"], "is cut off, or of another size", "Download it anew.")
        found[name] = Entry(row["dtype"], tuple(row["shape"]), end - begin, 8 + length + begin)
    return found, metadata
