"""A model filled from files, quantized on the way: the peak is what stays and one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.checkpoints import files
from rlkernel.checkpoints.footprint import WORKSPACE, Footprint, packed_bytes
from rlkernel.checkpoints.schemes import Item, Source, items
from rlkernel.nn.linear import QuantLinear
from rlkernel.nn.model import FOUR_BIT, QuantPolicy
from rlkernel_core.errors import ArgumentError, UnknownNameError
from rlkernel_core.host.memory import Memory
from rlkernel_core.quant import QuantSpec, QuantTensor

_WEIGHT: Final = ".weight"
Place = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LoadReport:
    """What a model was filled with."""

    formats: dict[str, str]  # name of a layer -> its format
    dense: int  # tensors that are not quantized
    bytes: int  # of all that was placed


def load_quantized(
    model: torch.nn.Module,
    path: Path | str | Source | Sequence[Path | str],
    policy: QuantPolicy | str | QuantSpec = FOUR_BIT,
    *,
    place: Place | torch.device | str = "cpu",
    within: Memory | None = None,
) -> LoadReport:
    """Fill a model from a checkpoint, one weight at a time; a dense weight goes when its quantized form is made.

    Build the model on the meta device (`with torch.device("meta"):`), where its weights take nothing. Linear layers
    that the policy takes become QuantLinear; weights that the file has quantized already stay in their format, bit for
    bit. On the CPU, dense tensors of a safetensors file stay mapped: the kernel reads pages when they are used, and
    takes them back when it is short.

    Args:
        model: its parameters and persistent buffers have the names of the file.
        path: a safetensors or GGUF file, the folder, index or shards of one checkpoint, or an opened one.
        policy: which layers, and to what format; int4_g128 unless one is named. A weight that two modules share stays
            dense.
        place: a device, or what takes each tensor to where it is used, such as `rlkernel_jetson.adopt.Adopter`.
        within: the memory whose budget the peak must fit into, as `rlkernel_core.host.memory.memory` finds it; None
            asks nothing.

    Raises:
        MemoryBudgetError: the peak is more than the budget of `within`. Nothing was loaded.
        ArgumentError: a tensor of the model is not in the files, or has another shape; a weight that is quantized in
            the file belongs to no Linear. All of it is checked before anything is loaded.
        UnknownNameError: the files have a tensor that the model has not, or there is no such format.
    """
    policy = policy if isinstance(policy, QuantPolicy) else QuantPolicy(policy)
    put = place if callable(place) else _to(torch.device(place))
    slots = _slots(model)
    layers = {name: m for name, m in model.named_modules() if type(m) is torch.nn.Linear}
    formats: dict[str, str] = {}
    dense = nbytes = 0
    with ExitStack() as stack, torch.no_grad():
        source = path if isinstance(path, Source) else stack.enter_context(files.opened(path))
        found = list(items(source))
        _check(model, slots, layers, found)
        chosen = {
            item.name: policy.format_of(item.name.removesuffix(_WEIGHT))
            for item in found
            if item.name.removesuffix(_WEIGHT) in layers
            and item.name.endswith(_WEIGHT)
            and item.scheme == "dense"
            and len(slots[item.name]) == 1
        }
        if within is not None:
            _footprint(found, chosen, policy).require(within, "filling this model")
        if policy.lora_rank:
            model.requires_grad_(requires_grad=False)
        for item in found:
            name, weights = item.name.removesuffix(_WEIGHT), item.read(source)
            spec = chosen.get(item.name)
            if not isinstance(weights, Tensor):
                parts, meta = weights[0].flatten()
                quantized = QuantTensor.unflatten([put(part) for part in parts], meta)
            elif spec is not None:
                quantized = rlk.quantize(put(weights), spec)
            else:
                placed = put(weights)
                for slot in slots[item.name]:
                    _set(model, slot, placed)
                dense, nbytes = dense + 1, nbytes + placed.nbytes
                continue
            del weights  # before the next layer is read
            layer = _layer(quantized, layers[name], policy)
            model.set_submodule(name, layer)
            formats[name] = quantized.spec.kind
            nbytes += layer.weight.nbytes
    return LoadReport(formats, dense, nbytes)


def _footprint(found: list[Item], chosen: Mapping[str, QuantSpec | None], policy: QuantPolicy) -> Footprint:
    """What the model takes, and one layer while it is made."""
    told = Footprint()
    largest = 0
    for item in found:
        held = packed = sum(entry.nbytes for entry in item.entries.values())
        if (spec := chosen.get(item.name)) is not None:
            rows, columns = next(iter(item.entries.values())).shape
            packed = packed_bytes(spec, (rows, columns))
            told.add("LoRA", policy.lora_rank * (rows + columns) * policy.lora_dtype.itemsize)
        told.add("quantized weights" if spec is not None or item.scheme != "dense" else "dense weights", packed)
        largest = max(largest, held + packed)
    told.passing = largest + WORKSPACE
    return told


def _to(device: torch.device) -> Place:
    """A tensor on a device; itself, still mapped, where that is the CPU."""
    return lambda tensor: tensor.to(device)


def _layer(weight: QuantTensor, old: torch.nn.Linear, policy: QuantPolicy) -> QuantLinear:
    """The layer that takes the place of a Linear; its bias is filled when that comes, or has been."""
    layer = QuantLinear(rlk.prepack(weight) if policy.prepack else weight)
    layer.bias = old.bias
    if policy.lora_rank:
        layer.add_lora(policy.lora_rank, policy.lora_alpha, policy.lora_dtype)
    layer.train(old.training)
    return layer


def _set(model: torch.nn.Module, name: str, value: Tensor) -> None:
    """A parameter or buffer replaced."""
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    old = getattr(owner, leaf)
    new: Any = value
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    setattr(owner, leaf, new)


def _slots(model: torch.nn.Module) -> dict[str, list[str]]:
    """Name of a tensor -> all its names: a head that is tied to its embedding has two."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_id.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_id.values() for name in names}


def _check(
    model: torch.nn.Module, slots: Mapping[str, list[str]], layers: Mapping[str, torch.nn.Linear], found: list[Item]
) -> None:
    """Names and shapes, before anything is loaded."""
    given: set[str] = set()
    for item in found:
        if item.scheme != "dense":
            name = item.name.removesuffix(_WEIGHT)
            if name not in layers:
                remedy = "Convert it: rlkernel quant convert FILE TARGET --scheme dense."
                raise ArgumentError(item.name, item.scheme, "is quantized, and no Linear of the model", remedy)
            given.add(name + _WEIGHT)
            continue
        if item.name not in slots:
            raise UnknownNameError("tensor of the model", item.name, slots)
        given.update(slots[item.name])
        owner, _, leaf = item.name.rpartition(".")
        have, want = (
            tuple(t.shape) for t in (next(iter(item.entries.values())), getattr(model.get_submodule(owner), leaf))
        )
        if have != want:
            raise ArgumentError(item.name, list(have), f"must be {list(want)}", "Build the model of this checkpoint.")
    missing = sorted(slots.keys() - given)
    if missing:
        got = f"{len(found)} weights"
        raise ArgumentError("path", got, f"lacks {', '.join(missing[:3])}", "Pass all shards of the checkpoint.")
