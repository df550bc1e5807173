"""Files of tensors: safetensors and GGUF, opened without loading anything, and written whole or not at all.

Imports torch, safetensors and gguf inside functions only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel.checkpoints import gguf_blocks
from rlkernel.checkpoints.schemes import Entry, Source
from rlkernel_core.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.quant import QuantTensor

_GGUF_MAGIC: Final = b"GGUF"
_SIZES: Final = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_GGUF_DENSE: Final = frozenset({"F64", "F32", "F16", "BF16"})


@contextmanager
def opened(path: Path | str) -> Iterator[Source]:
    """A safetensors or GGUF file.

    Raises:
        ArgumentError: no such file, one that is cut off, or of another kind; a package that reads it is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise ArgumentError("file", str(path), "does not exist", "Pass a .safetensors or .gguf file.")
    with path.open("rb") as file:
        magic = file.read(4)
    yield _gguf(path) if magic == _GGUF_MAGIC else _safetensors(path)


class _SafetensorsFile:
    """`Source` of a safetensors file."""

    def __init__(self, path: Path, handle: Any, config: Mapping[str, Any]) -> None:
        self.path, self.handle, self.config = path, handle, config
        self.entries = {name: self._entry(name) for name in handle.keys()}  # noqa: SIM118 no mapping

    def _entry(self, name: str) -> Entry:
        part = self.handle.get_slice(name)
        shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
        count = 1
        for size in shape:
            count *= size
        return Entry(dtype, shape, count * _SIZES.get(dtype, 1))

    def load(self, name: str) -> Tensor:
        found: Tensor = self.handle.get_tensor(name)
        return found

    def weight(self, name: str) -> Tensor:
        return self.load(name)


class _GgufFile:
    """`Source` of a GGUF file."""

    config: Mapping[str, Any] = {}

    def __init__(self, path: Path, reader: Any) -> None:
        self.path, self.reader = path, reader
        self.tensors = {t.name: t for t in reader.tensors}
        self.entries = {
            t.name: Entry(t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes))
            for t in reader.tensors
        }

    def load(self, name: str) -> Tensor:
        import torch

        found = self.tensors[name]
        raw = torch.from_numpy(found.data.copy())
        if found.tensor_type.name == "BF16":
            raw = raw.contiguous().view(torch.bfloat16)
        return raw.view(self.entries[name].shape) if found.tensor_type.name in _GGUF_DENSE else raw

    def weight(self, name: str) -> QuantTensor | Tensor:
        kind, shape = self.entries[name].dtype, self.entries[name].shape
        if kind in _GGUF_DENSE:
            return self.load(name)
        if kind not in gguf_blocks.BLOCKS:
            known = ", ".join(gguf_blocks.BLOCKS)
            raise ArgumentError(name, kind, f"blocks of {known} are read", "Convert it with llama.cpp first.")
        raw = self.load(name)
        return gguf_blocks.read_blocks(name, raw.reshape(-1, raw.shape[-1]), kind, shape[-1])


def _safetensors(path: Path) -> Source:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise _missing("safetensors") from error
    try:
        handle = safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ArgumentError("file", str(path), f"is no whole safetensors file: {error}", "Download it anew.") from error
    untyped: Any = handle
    return _SafetensorsFile(path, handle, _config(path, dict(untyped.metadata() or {})))


def _config(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """`quantization_config`, from the file's own metadata or from config.json beside it."""
    if "quantization_config" in metadata:
        found: Mapping[str, Any] = json.loads(metadata["quantization_config"])
        return found
    beside = path.parent / "config.json"
    if not beside.is_file():
        return {}
    try:
        said = json.loads(beside.read_text())
    except ValueError as error:
        raise ArgumentError("config.json", str(beside), f"is no JSON: {error}", "Mend or move it.") from error
    return said.get("quantization_config") or {} if isinstance(said, dict) else {}


def _gguf(path: Path) -> Source:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise _missing("gguf") from error
    try:
        return _GgufFile(path, GGUFReader(path))
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what slicing beyond the end of a map raises
        raise ArgumentError("file", str(path), f"is no whole GGUF file: {error}", "Download it anew.") from error


def _missing(package: str) -> ArgumentError:
    return ArgumentError("file", package, "is not installed, and reads this file", f"pip install {package}")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end, and is removed if anything fails."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """All tensors and the quantization config into one file, whole or not at all."""
    from safetensors.torch import save_file

    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt", **({"quantization_config": json.dumps(dict(config))} if config else {})}
    with whole(path) as draft:
        save_file(held, draft, metadata=metadata)


def write_gguf(path: Path, items: Mapping[str, QuantTensor | Tensor], architecture: str) -> None:
    """Weights in GGUF blocks and dense tensors into one file, whole or not at all."""
    try:
        import gguf
    except ImportError as error:
        raise _missing("gguf") from error
    import torch

    with whole(path) as draft:
        writer = gguf.GGUFWriter(draft, architecture)
        for name, item in items.items():
            if isinstance(item, torch.Tensor):
                dense = item.float() if item.dtype not in {torch.float16, torch.float32} else item
                writer.add_tensor(name, dense.contiguous().numpy())
            else:
                kind, raw = gguf_blocks.write_blocks(name, item)
                writer.add_tensor(name, raw.numpy(), raw_dtype=gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
