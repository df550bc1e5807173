"""A checkpoint in several files: opened as one source, and written a shard at a time, whole or not at all.

What the ecosystem calls a sharded checkpoint: `model-00001-of-00003.safetensors` and so on, and an index,
`model.safetensors.index.json`, whose `weight_map` says which file holds a tensor. Imports torch inside functions only.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rlkernel.checkpoints.schemes import Entry, Source
from rlkernel_core.documents import read_json
from rlkernel_core.errors import ArgumentError, FileError
from rlkernel_core.files import inside, whole_folder, write_json

if TYPE_CHECKING:
    from torch import Tensor

    from rlkernel_core.quant import QuantTensor

INDEX: Final = ".index.json"
SUFFIXES: Final = (".safetensors", ".gguf")  # of one file; what has neither is a folder
SHARD_BYTES: Final = 5_000_000_000  # what transformers writes by default
_INDEX_FORM: Final = {"weight_map": {str: str}}
_REMEDY: Final = "Download the checkpoint anew."
_WEIGHTS: Final = (*SUFFIXES, ".bin", ".pt", ".pth", INDEX)  # not copied beside converted weights


def files_of(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files of a folder or an index, and tensor -> name of its file where an index says so.

    Raises:
        FileError: an index that is damaged, or names a file outside of its folder.
        ArgumentError: nothing to read there, or several indices.
    """
    if path.is_dir():
        indices = sorted(path.glob(f"*.safetensors{INDEX}"))
        if len(indices) > 1:
            names = ", ".join(index.name for index in indices)
            raise ArgumentError("file", str(path), f"holds several checkpoints: {names}", "Name one of these.")
        if not indices:
            found = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))
            if not found:
                raise ArgumentError("file", str(path), "holds no .safetensors or .gguf file", "Name another folder.")
            return found, {}
        path = indices[0]
    told: dict[str, str] = read_json(path, _INDEX_FORM, _REMEDY)["weight_map"]
    also = _blobs(path.parent)
    return [inside(path.parent, file, path, _REMEDY, also=also) for file in sorted(set(told.values()))], told


def _blobs(folder: Path) -> Path | None:
    """Where the cache of the Hugging Face Hub keeps the files that a snapshot links to."""
    above = [above for above in folder.absolute().parents if above.name == "snapshots"]
    return above[0].parent / "blobs" if above else None


class Joined:
    """`Source` of several files."""

    def __init__(self, path: Path, files: Sequence[Path], sources: Sequence[Source], told: Mapping[str, str]) -> None:
        self.config = next((source.config for source in sources if source.config), {})
        self.entries: dict[str, Entry] = {}
        self._of: dict[str, Source] = {}
        where: dict[str, str] = {}
        for file, source in zip(files, sources, strict=True):
            for name, entry in source.entries.items():
                if name in where:
                    problem = f"is in {where[name]} and in {file.name}"
                    raise ArgumentError(name, str(path), problem, "Name one checkpoint: a file, or its index.")
                self.entries[name], self._of[name], where[name] = entry, source, file.name
        absent = [name for name, file in told.items() if where.get(name) != file]
        if absent:
            problem = f"says that {told[absent[0]]} holds {absent[0]}, which it does not"
            raise FileError(path, "weight_map", problem, _REMEDY)

    def load(self, name: str) -> Tensor:
        """One tensor."""
        return self._of[name].load(name)

    def weight(self, name: str) -> QuantTensor | Tensor:
        """One tensor of a file whose tensors say their own format."""
        return self._of[name].weight(name)


class Folder:
    """A folder that is written beside `path` and takes its place when it is whole; as a context, removed otherwise.

    Holds one shard in memory. What else stands in `beside`, the folder of the source, comes along: tokenizer and so on.
    """

    def __init__(self, path: Path, shard_bytes: int, beside: Path | None = None) -> None:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ArgumentError("target", str(path), "is there already", "Remove it, or name another folder.")
        if shard_bytes < 1:
            raise ArgumentError("shard_bytes", shard_bytes, "must be >= 1", "Pass bytes: 5_000_000_000.")
        self.path, self.shard_bytes, self.beside = path, shard_bytes, beside
        self._waiting: dict[str, Tensor] = {}
        self._shards: list[tuple[Path, list[str]]] = []
        self.bytes = 0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        self._draft = self._stack.enter_context(whole_folder(self.path))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors of one weight: they go into one shard."""
        more = sum(t.nbytes for t in tensors.values())
        if self._waiting and sum(t.nbytes for t in self._waiting.values()) + more > self.shard_bytes:
            self._write()
        self._waiting |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self.bytes += more

    def finish(self, config: Mapping[str, Any] | None) -> None:
        """Write what is left, the index and config.json, whose `quantization_config` is `config`, or none."""
        self._write()
        count = len(self._shards)
        told: dict[str, str] = {}
        for i, (draft, names) in enumerate(self._shards):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
            draft.rename(self._draft / name)
            told |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(told.items()))}
            write_json(self._draft / f"model.safetensors{INDEX}", index, indent=2)
        for file in self.beside.iterdir() if self.beside is not None else ():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy2(file, self._draft / file.name)
        self._configure(config)

    def _write(self) -> None:
        from safetensors.torch import save_file

        if self._waiting or not self._shards:
            draft = self._draft / f"{len(self._shards)}.draft"
            save_file(self._waiting, draft, metadata={"format": "pt"})
            self._shards.append((draft, list(self._waiting)))
            self._waiting = {}

    def _configure(self, config: Mapping[str, Any] | None) -> None:
        """Say in config.json what the weights are now; it is made where there is none and something to say."""
        path = self._draft / "config.json"
        said = read_json(path, {str: object}, "Mend or move it.") if path.is_file() else {}
        said.pop("quantization_config", None)
        if config:
            said["quantization_config"] = dict(config)
        if path.is_file() or config:
            write_json(path, said, indent=2)
