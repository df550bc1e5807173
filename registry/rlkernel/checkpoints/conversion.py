"""From one spelling of a checkpoint to another: weights one by one, the target at the end, whole or not at all.

Memory: the file that is written, of a folder one shard, and one weight in full precision where it is quantized anew.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel.checkpoints import files, floats, folders, methods
from rlkernel.checkpoints.schemes import SCHEMES, Item, items
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.quant import QuantTensor
from rlkernel_core.quant.spec import row_of

if TYPE_CHECKING:
    from torch import Tensor

SKIPPED: Final = ("*embed*", "*embd*", "*norm*", "*lm_head*", "output.weight", "*.bias", "*router*", "*.gate.weight")
OWN: Final = "rlkernel"
_WEIGHT: Final = ".weight"
TARGETS: Final = (OWN, "dense", "gguf", "gpt-oss", *(name for name, s in SCHEMES.items() if s.write is not None))


@dataclass
class Summary:
    """What a conversion did."""

    kept: int = 0  # weights that stayed in their format
    quantized: int = 0  # dense weights quantized, or others quantized anew
    dense: int = 0
    bytes: int = 0  # of tensors written
    note: str = ""  # what the reader of a folder still has to be told


def convert(
    source: Path | str,
    target: Path | str,
    *,
    scheme: str = OWN,
    format: str | None = None,  # noqa: A002  the field's noun
    skip: Sequence[str] = SKIPPED,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = folders.SHARD_BYTES,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Summary:
    """Write the weights of a checkpoint into another.

    Args:
        source: a safetensors or GGUF file, or the folder or the index of a sharded checkpoint.
        target: what to write; it appears when it is whole. A name that ends in .safetensors or .gguf is one file, any
            other a folder: shards and their index, what else stands in the folder of the source (tokenizer and so on),
            and a config.json whose `quantization_config` tells transformers and engines what the weights are.
        scheme: how weights are spelt: a name of TARGETS; "dense" dequantizes them, "gguf" writes a GGUF file.
        format: a name of a format: every weight [N, K] that no pattern of `skip` matches is quantized to it, from its
            dequantized value where it has another. None leaves each in its own.
        skip: shell patterns of names that stay as they are.
        config: in place of the `quantization_config` beside the source: {"checkpoint_format": "gptq_v2"}.
        shard_bytes: a folder's shards are at most this large, unless one weight is larger.
        progress: called with weights done, weights in all, and a name.

    Raises:
        ArgumentError: a damaged or unknown source, a folder that is there already, or a weight that the scheme cannot
            hold; nothing is written.
        UnknownNameError: no such format or scheme.
    """
    if scheme not in TARGETS:
        raise UnknownNameError("scheme", scheme, TARGETS)
    if format is not None:
        row_of(format)
    source, target = Path(source), Path(target)
    if target.exists() and target.samefile(source):
        raise ArgumentError("target", str(target), "is the source", "Write to another file.")
    if scheme == "gguf" and _is_folder(target):
        raise ArgumentError("target", str(target), "must end in .gguf", "A GGUF checkpoint is one file here.")
    told, summary = methods.Told(scheme), Summary()
    with ExitStack() as stack:
        opened = stack.enter_context(files.opened(source))
        out = _out(source, target, scheme, shard_bytes, stack)
        found = list(items(opened))
        for done, item in enumerate(found):
            progress(done, len(found), item.name)
            weights = _wanted(item, item.read(opened, config), format, skip, summary)
            told.see(_module(item), _named(item, weights))
            out.add(_spelt(item, weights, scheme))
        out.finish(told.config)
    summary.bytes = out.bytes
    summary.note = told.note if _is_folder(target) else ""
    progress(len(found), len(found), "")
    return summary


def _is_folder(target: Path) -> bool:
    return target.suffix not in folders.SUFFIXES


def _out(source: Path, target: Path, scheme: str, shard_bytes: int, stack: ExitStack) -> files.Out:
    """What weights are written to."""
    if _is_folder(target):
        return stack.enter_context(folders.Folder(target, shard_bytes, _folder_of(source)))
    return files.OneGguf(target) if scheme == "gguf" else files.OneFile(target)


def _folder_of(source: Path) -> Path | None:
    """Where the rest of a sharded checkpoint stands."""
    if source.is_dir():
        return source
    return source.parent if source.name.endswith(folders.INDEX) else None


def _wanted(
    item: Item,
    weights: list[QuantTensor] | Tensor,
    format: str | None,  # noqa: A002
    skip: Sequence[str],
    summary: Summary,
) -> list[QuantTensor] | Tensor:
    """The weights of an item in the format they are to have."""
    import torch

    from rlkernel_core.quant import dequantize, quantize

    named = any(fnmatch.fnmatch(item.name, pattern) for pattern in skip)
    if isinstance(weights, list):
        if format is None or named or all(w.format == format for w in weights):
            summary.kept += len(weights)
            return weights
        summary.quantized += len(weights)
        return [quantize(dequantize(w, dtype=torch.float32), format, dtype=w.dtype) for w in weights]
    if format is None or named or weights.dim() != 2 or not weights.is_floating_point():
        summary.dense += 1
        return weights
    summary.quantized += 1
    return [quantize(weights, format)]


def _named(item: Item, weights: list[QuantTensor] | Tensor) -> Mapping[str, QuantTensor | Tensor]:
    return _parts(item, weights) if isinstance(weights, list) else {item.name: weights}


def _parts(item: Item, weights: list[QuantTensor]) -> dict[str, QuantTensor]:
    """Quantized weights by name: experts that are stacked have one each."""
    if len(weights) == 1:
        return {_module(item) + _WEIGHT: weights[0]}
    return {f"{item.name}.{i}{_WEIGHT}": w for i, w in enumerate(weights)}


def _spelt(item: Item, weights: list[QuantTensor] | Tensor, scheme: str) -> Mapping[str, QuantTensor | Tensor]:
    """Tensors of a weight by name; in GGUF a weight is one."""
    from rlkernel_core.quant import dequantize

    if not isinstance(weights, list) or scheme == "gguf":
        return _named(item, weights)
    if scheme == "dense":
        return {name: dequantize(w) for name, w in _parts(item, weights).items()}
    if scheme == "gpt-oss":
        return {item.name + ending: t for ending, t in floats.write_gpt_oss(item.name, weights).items()}
    found: dict[str, Tensor] = {}
    for name, w in _parts(item, weights).items():
        base = name.removesuffix(_WEIGHT)
        write = None if scheme == OWN else SCHEMES[scheme].write
        found |= {base + ending: t for ending, t in write(base, w).items()} if write else w.state_dict(f"{name}.")
    return found


def _module(item: Item) -> str:
    """Name of the module that a weight belongs to."""
    return item.name.removesuffix(_WEIGHT)
