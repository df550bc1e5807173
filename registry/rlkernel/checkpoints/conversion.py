"""From one spelling of a checkpoint to another: weights one by one, the file at the end, whole or not at all.

Memory: what is written, and one weight in full precision where it is quantised anew.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rlkernel.checkpoints import files, floats
from rlkernel.checkpoints.schemes import SCHEMES, Item, items
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.quant import QuantTensor
from rlkernel_core.quant.spec import row_of

if TYPE_CHECKING:
    from torch import Tensor

SKIPPED: Final = ("*embed*", "*embd*", "*norm*", "*lm_head*", "output.weight", "*.bias", "*router*", "*.gate.weight")
OWN: Final = "rlkernel"
TARGETS: Final = (OWN, "dense", "gguf", "gpt-oss", *(name for name, s in SCHEMES.items() if s.write is not None))


@dataclass
class Summary:
    """What a conversion did."""

    kept: int = 0  # weights that stayed in their format
    quantised: int = 0  # dense weights quantised, or others quantised anew
    dense: int = 0
    bytes: int = 0  # of tensors written


def convert(
    source: Path | str,
    target: Path | str,
    *,
    scheme: str = OWN,
    format: str | None = None,  # noqa: A002  the field's noun
    skip: Sequence[str] = SKIPPED,
    config: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Summary:
    """Write the weights of one file into another.

    Args:
        source: a safetensors or GGUF file.
        target: the file to write; it appears when it is whole.
        scheme: how weights are spelt: a name of TARGETS; "dense" dequantises them, "gguf" writes a GGUF file.
        format: a name of a format: every weight [N, K] that no pattern of `skip` matches is quantised to it, from its
            dequantised value where it has another. None leaves each in its own.
        skip: shell patterns of names that stay as they are.
        config: in place of the `quantization_config` beside the source: {"checkpoint_format": "gptq_v2"}.
        progress: called with weights done, weights in all, and a name.

    Raises:
        ArgumentError: a damaged or unknown source, or a weight that the scheme cannot hold; nothing is written.
        UnknownNameError: no such format or scheme.
    """
    if scheme not in TARGETS:
        raise UnknownNameError("scheme", scheme, TARGETS)
    if format is not None:
        row_of(format)
    source, target = Path(source), Path(target)
    if target.exists() and target.samefile(source):
        raise ArgumentError("target", str(target), "is the source", "Write to another file.")
    out: dict[str, Tensor] = {}
    blocks: dict[str, QuantTensor | Tensor] = {}
    summary = Summary()
    with files.opened(source) as opened:
        found = list(items(opened))
        for done, item in enumerate(found):
            progress(done, len(found), item.name)
            weights = _wanted(item, item.read(opened, config), format, skip, summary)
            if scheme == "gguf":
                blocks |= _named(item, weights)
            else:
                out |= _spelt(item, weights, scheme)
    written = {**out, **{n: w for n, w in blocks.items() if not isinstance(w, QuantTensor)}}
    packed = [w for w in blocks.values() if isinstance(w, QuantTensor)]
    summary.bytes = sum(t.numel() * t.element_size() for t in written.values()) + sum(w.nbytes for w in packed)
    if scheme == "gguf":
        files.write_gguf(target, blocks, "llama")
    else:
        files.write_safetensors(target, out, _config_of(scheme))
    progress(len(found), len(found), "")
    return summary


def _config_of(scheme: str) -> Mapping[str, Any]:
    """What a reader of the file has to know beside its tensors."""
    return {"quant_method": "gptq", "checkpoint_format": scheme} if scheme.startswith("gptq") else {}


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
        summary.quantised += len(weights)
        return [quantize(dequantize(w, dtype=torch.float32), format, dtype=w.dtype) for w in weights]
    if format is None or named or weights.dim() != 2 or not weights.is_floating_point():
        summary.dense += 1
        return weights
    summary.quantised += 1
    return [quantize(weights, format)]


def _named(item: Item, weights: list[QuantTensor] | Tensor) -> dict[str, QuantTensor | Tensor]:
    if not isinstance(weights, list):
        return {item.name: weights}
    if len(weights) == 1:
        return {_module(item) + ".weight": weights[0]}
    return {f"{item.name}.{i}.weight": w for i, w in enumerate(weights)}


def _spelt(item: Item, weights: list[QuantTensor] | Tensor, scheme: str) -> dict[str, Tensor]:
    """Tensors of a weight by name."""
    from rlkernel_core.quant import dequantize

    if not isinstance(weights, list):
        return {item.name: weights}
    if scheme == "dense":
        return {name: dequantize(w) for name, w in _named(item, weights).items() if isinstance(w, QuantTensor)}
    if scheme == "gpt-oss":
        return {item.name + ending: t for ending, t in floats.write_gpt_oss(item.name, weights).items()}
    found: dict[str, Tensor] = {}
    for i, w in enumerate(weights):
        base = _module(item) if len(weights) == 1 else f"{item.name}.{i}"
        if scheme == OWN:
            found |= w.state_dict(f"{base}.weight.")
            continue
        write = SCHEMES[scheme].write
        if write is not None:
            found |= {base + ending: t for ending, t in write(base, w).items()}
    return found


def _module(item: Item) -> str:
    """Name of the module that a weight belongs to."""
    return item.name.removesuffix(".weight")
