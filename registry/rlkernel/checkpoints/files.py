"""Files of tensors: safetensors and GGUF, opened without loading anything, and written whole or not at all.

Imports torch, safetensors and gguf inside functions only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rlkernel.checkpoints import folders, gguf_blocks
from rlkernel.checkpoints.schemes import Entry, Source
from rlkernel_core.errors import ArgumentError
from rlkernel_core.paths import missing

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.quant import QuantTensor

_GGUF_MAGIC: Final = b"GGUF"
_ARCHITECTURE: Final = "llama"  # a GGUF file has to name one; its weights do not depend on it
_SIZES: Final = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_GGUF_DENSE: Final = frozenset({"F64", "F32", "F16", "BF16"})


@contextmanager
def opened(path: Path | str | Sequence[Path | str]) -> Iterator[Source]:
    """What is at `path`: a safetensors or GGUF file, the folder or the index of a sharded checkpoint, or its shards.

    Raises:
        ArgumentError: no such file, one that is cut off, or of another kind; a tensor that two files hold, or that an
            index promises and no file holds; a package that reads it is missing.
    """
    told: Mapping[str, str] = {}
    if not isinstance(path, Path | str):
        files, path = [Path(shard) for shard in path], "shards"
    elif Path(path).is_dir() or str(path).endswith(folders.INDEX):
        files, told = folders.files_of(there(Path(path)))
    else:
        files = [Path(path)]
    sources = [_file(file) for file in files]
    yield sources[0] if len(sources) == 1 and not told else folders.Joined(Path(path), files, sources, told)


def _file(path: Path) -> Source:
    with there(path).open("rb") as file:
        magic = file.read(4)
    return _gguf(path) if magic == _GGUF_MAGIC else _safetensors(path)


def there(path: Path) -> Path:
    """A path, which must lead to something.

    Raises:
        ArgumentError: it does not; the message has the nearest name.
    """
    if not path.exists():
        raise ArgumentError("file", str(path), missing(path), "Pass a .safetensors or .gguf file, or a folder.")
    return path


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


class Out(Protocol):
    """What a checkpoint is written to."""

    bytes: int  # of what was added

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Tensors of one weight by name."""
        ...

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """All is added: let it appear, with what a reader has to know besides (`quantization_config`)."""
        ...


class OneFile:
    """A safetensors file; its tensors are held until the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Tensor] = {}
        self.bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Hold them."""
        self._tensors |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.bytes += sum(t.nbytes for t in tensors.values())

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Write all, with the config in the file's metadata."""
        from safetensors.torch import save_file

        metadata = {"format": "pt", **({"quantization_config": json.dumps(dict(config))} if config else {})}
        with whole(self.path) as draft:
            save_file(self._tensors, draft, metadata=metadata)


class OneGguf:
    """A GGUF file; its weights are held until the end, and say themselves what they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._items: dict[str, QuantTensor | Tensor] = {}
        self.bytes = 0

    def add(self, tensors: Mapping[str, QuantTensor | Tensor]) -> None:
        """Hold them."""
        self._items |= tensors
        self.bytes += sum(t.nbytes for t in tensors.values())

    def finish(self, _: Mapping[str, Any] | None) -> None:
        """Write blocks and dense tensors."""
        try:
            import gguf
        except ImportError as error:
            raise _missing("gguf") from error
        import torch

        with whole(self.path) as draft:
            writer = gguf.GGUFWriter(draft, _ARCHITECTURE)
            for name, item in self._items.items():
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
