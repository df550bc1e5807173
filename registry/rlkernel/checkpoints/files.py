"""Files of tensors: safetensors and GGUF, opened without loading anything, and written whole.

Imports torch, safetensors and gguf inside functions only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from rlkernel.checkpoints import folders, gguf_blocks, gguf_header
from rlkernel.checkpoints.schemes import Entry, Source
from rlkernel_core import tensor_file
from rlkernel_core.documents import json_of, read_json
from rlkernel_core.errors import ArgumentError, FileError
from rlkernel_core.files import read_start, whole
from rlkernel_core.paths import absent

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.quant import QuantTensor

_ARCHITECTURE: Final = "llama"  # a GGUF file has to name one; its weights do not depend on it
_GGUF_DENSE: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # type -> torch's dtype


@contextmanager
def opened(path: Path | str | Sequence[Path | str]) -> Iterator[Source]:
    """What is at `path`: a safetensors or GGUF file, the folder or the index of a sharded checkpoint, or its shards.

    Raises:
        FileError: no such file, one that is damaged, cut off or of another kind; an index that names a file outside of
            its folder, or promises a tensor that no file holds.
        ArgumentError: a tensor that two files hold; a package that reads the file is missing.
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
    magic = read_start(there(path), "Pass a .safetensors or .gguf file, or a folder.", 4)
    return _GgufFile(path) if magic == gguf_header.MAGIC else _SafetensorsFile(path)


def there(path: Path) -> Path:
    """A path, which must lead to something.

    Raises:
        FileError: it does not; the message has the nearest name.
    """
    try:
        found = path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero
        raise FileError(path, "", f"is no file: {error}", "Pass a .safetensors or .gguf file, or a folder.") from error
    if not found:
        raise FileError(path, "", absent(path), "Pass a .safetensors or .gguf file, or a folder.")
    return path


class _SafetensorsFile:
    """`Source` of a safetensors file."""

    def __init__(self, path: Path) -> None:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise _missing("safetensors") from error
        stored, metadata = tensor_file.read_header(path)
        self.path, self.config = path, _config(path, metadata)
        self.entries = {name: Entry(row.dtype, row.shape, row.nbytes) for name, row in sorted(stored.items())}
        self._errors = (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError)
        with self._reading(""):
            self._handle: Any = safe_open(path, framework="pt")

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """What the package and torch say of a dtype or size that they do not know is an error of the file."""
        try:
            yield
        except self._errors as error:
            raise FileError(self.path, name, f"is no whole safetensors file: {error}", tensor_file.REMEDY) from error

    def load(self, name: str) -> Tensor:
        with self._reading(name):
            found: Tensor = self._handle.get_tensor(name)
        return found

    def weight(self, name: str) -> Tensor:
        return self.load(name)


class _GgufFile:
    """`Source` of a GGUF file."""

    config: Mapping[str, Any] = {}

    def __init__(self, path: Path) -> None:
        try:
            import gguf  # noqa: F401  names and sizes of types
        except ImportError as error:
            raise _missing("gguf") from error
        self.path, self._stored = path, gguf_header.read(path)
        self.entries = {name: Entry(row.kind, row.shape, row.nbytes) for name, row in self._stored.items()}

    def load(self, name: str) -> Tensor:
        """Dense tensors as they are; of any other type bytes [..., bytes of a row]."""
        import torch

        kind, shape, nbytes, first = self._stored[name]
        with self.path.open("rb") as file:
            file.seek(first)
            raw = bytearray(file.read(nbytes))
        if len(raw) < nbytes:
            raise FileError(self.path, name, "is no whole GGUF file: it is cut off", gguf_header.REMEDY)
        if kind in _GGUF_DENSE:
            dtype = getattr(torch, _GGUF_DENSE[kind])
            return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)
        rows = shape[:-1] or (1,)
        return (torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)).view(
            *rows, nbytes // max(1, prod(rows))
        )

    def weight(self, name: str) -> QuantTensor | Tensor:
        kind, shape = self.entries[name].dtype, self.entries[name].shape
        if kind in _GGUF_DENSE:
            return self.load(name)
        if kind not in gguf_blocks.BLOCKS:
            known = ", ".join(gguf_blocks.BLOCKS)
            raise ArgumentError(name, kind, f"blocks of {known} are read", "Convert it with llama.cpp first.")
        if not prod(shape):
            raise FileError(self.path, name, "has no elements", gguf_header.REMEDY)
        raw = self.load(name)
        return gguf_blocks.read_blocks(name, raw.reshape(-1, raw.shape[-1]), kind, shape[-1] if shape else 1)


def _config(path: Path, metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """`quantization_config`, from the file's own metadata or from config.json beside it."""
    if "quantization_config" in metadata:
        said = json_of(metadata["quantization_config"], {str: object}, path, tensor_file.REMEDY)
        return dict(said)
    beside = path.parent / "config.json"
    if not beside.is_file():
        return {}
    return read_json(beside, _CONFIG, "Mend or move it.").get("quantization_config") or {}


_CONFIG: Final = {"quantization_config?": (None, {str: object})}


def _missing(package: str) -> ArgumentError:
    return ArgumentError("file", package, "is not installed, and reads this file", f"pip install {package}")


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
