"""A safetensors file as tensors of the GPU that are the page cache's own pages: read once from disk, held once.

The file is mapped shared and read-only and registered whole; `rlkernel.nn.load_quantized(model, MappedFile(path), …)`
quantizes from it with nothing in between. Writing to such a tensor from the GPU faults: what is trained without being
quantized wants `place=torch.clone`. Pages stay pinned while any tensor made of them lives. Imports torch inside
functions only.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.documents import json_of
from rlkernel_core.errors import RLKernelError
from rlkernel_core.tensor_file import DTYPES, REMEDY, read_header
from rlkernel_jetson import driver as calls
from rlkernel_jetson.adopt import Adopter

if TYPE_CHECKING:
    from torch import Tensor

_PROT_READ: Final = 1
_MAP_SHARED: Final = 1


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
        FileError: no such file, or one that is damaged or cut off.
        RLKernelError: the device cannot; the message says why. Load the file in the ordinary way then.
    """

    config: dict[str, Any]

    def __init__(self, path: Path | str, adopter: Adopter | None = None) -> None:
        adopter = adopter or Adopter()
        path = Path(path)
        self.entries, metadata = read_header(path)
        self.config = json_of(metadata.get("quantization_config", "{}"), {str: object}, path, REMEDY)
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
        dtype = getattr(torch, DTYPES[entry.dtype][0])
        part = self._bytes[entry.first : entry.first + entry.nbytes]
        return (part.clone() if entry.first % dtype.itemsize else part).view(dtype).view(entry.shape)

    def weight(self, name: str) -> Tensor:
        """The same: these files have no formats of their own."""
        return self.load(name)
