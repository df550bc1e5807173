"""How libraries spell a quantized weight: a row per scheme, and which tensors of a file make one weight.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from rlkernel.checkpoints import floats, integers
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

META: Final = "quant_meta"


@dataclass(frozen=True)
class Entry:
    """What a file says of a tensor before it is loaded."""

    dtype: str  # as safetensors spells it: F16, BF16, F32, U8, I32, F8_E4M3; or a GGUF type
    shape: tuple[int, ...]
    nbytes: int


@runtime_checkable
class Source(Protocol):
    """An open checkpoint."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor by name, in the order of the file."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """`quantization_config` of the model."""
        ...

    def load(self, name: str) -> Tensor:
        """One tensor."""
        ...

    def weight(self, name: str) -> QuantTensor | Tensor:
        """One tensor of a file whose tensors say their own format (GGUF)."""
        ...


Fits = Callable[[Mapping[str, Entry]], bool]
Reader = Callable[[str, Mapping[str, "Tensor"], Mapping[str, Any]], list[QuantTensor]]


@dataclass(frozen=True)
class Scheme:
    """One way to spell a weight."""

    name: str
    text: str
    needs: tuple[str, ...]  # endings of tensor names
    read: Reader | None = None  # None: nothing to recognize it by, or the reader of another scheme
    write: Callable[[str, QuantTensor], dict[str, Tensor]] | None = None
    may: tuple[str, ...] = ()
    fits: Fits = field(default=lambda _: True)


def _dtype(ending: str, *names: str) -> Fits:
    return lambda entries: entries[ending].dtype in names


def _packed_along(axis: int) -> Fits:
    """GPTQ packs inputs, so a word's row has all N columns; AWQ packs outputs."""
    return lambda entries: entries[".qweight"].shape[1] * (1, 8)[axis] == entries[".scales"].shape[1]


_FP8: Final = ("F8_E4M3", "F8_E5M2")
_GPTQ: Final = (".qweight", ".qzeros", ".scales")
_SCALED: Final = (".weight", ".weight_scale")
_INPUTS: Final = (".input_scale", ".input_activation_scale")
_HQQ: Final = ("nbits", "axis", "group_size", "packing", "view_as_float", "unpack_view_dtype", "channel_wise",
               "optimize", "round_zero", "stores_quant_config", "compute_dtype", "offload_meta", "encoded_state_dict",
               "quant_scale", "quant_zero")  # fmt: skip
_ROWS: Final = (
    Scheme(
        "gptq",
        "GPTQ, zero-points stored less one",
        _GPTQ,
        integers.read_gptq,
        integers.write_gptq,
        (".g_idx",),
        _packed_along(0),
    ),
    Scheme("gptq_v2", "GPTQ, zero-points as they are", (), None, partial(integers.write_gptq, v2=True)),
    Scheme("awq", "AWQ (gemm)", _GPTQ, integers.read_awq, integers.write_awq, (), _packed_along(1)),
    Scheme(
        "compressed-tensors",
        "compressed-tensors pack-quantized",
        (".weight_packed", ".weight_scale", ".weight_shape"),
        integers.read_compressed,
        integers.write_compressed,
        (".weight_zero_point", ".weight_g_idx"),
    ),
    Scheme(
        "compressed-mx",
        "compressed-tensors mxfp4",
        (".weight_packed", ".weight_scale"),
        floats.read_packed_mx,
        floats.write_packed_mx,
        (),
        _dtype(".weight_scale", "U8"),
    ),
    Scheme(
        "bitsandbytes",
        "bitsandbytes nf4 and fp4, nested scales too",
        (".weight", ".weight.absmax", ".weight.quant_map"),
        floats.read_bitsandbytes,
        floats.write_bitsandbytes,
        (".weight.nested_absmax", ".weight.nested_quant_map", floats.STATE + "nf4", floats.STATE + "fp4"),
    ),
    Scheme(
        "hqq",
        "HQQ, 4 bits, axis 1",
        (".W_q", ".scale", ".zero", ".shape"),
        integers.read_hqq,
        integers.write_hqq,
        tuple(f".{key}" for key in _HQQ),
    ),
    Scheme("gpt-oss", "gpt-oss mxfp4, experts stacked", ("_blocks", "_scales"), floats.read_gpt_oss),
    Scheme(
        "modelopt",
        "ModelOpt nvfp4",
        (".weight", ".weight_scale", ".weight_scale_2"),
        floats.read_modelopt,
        floats.write_modelopt,
        _INPUTS,
        _dtype(".weight", "U8"),
    ),
    Scheme(
        "deepseek",
        "fp8 with a scale per 128 x 128 block, as DeepSeek-V3",
        (".weight", ".weight_scale_inv"),
        floats.read_scaled,
        floats.write_blocks,
        _INPUTS,
        _dtype(".weight", *_FP8),
    ),
    Scheme(
        "compressed-mxfp8",
        "compressed-tensors mxfp8",
        _SCALED,
        floats.read_packed_mx,
        floats.write_packed_mx,
        (),
        lambda e: e[".weight"].dtype in _FP8 and e[".weight_scale"].dtype == "U8",
    ),
    Scheme(
        "scaled",
        "fp8 or int8 with a scale per row or for all: compressed-tensors, ModelOpt, Flash-RL",
        _SCALED,
        floats.read_scaled,
        floats.write_scaled,
        _INPUTS,
        _dtype(".weight", "I8", *_FP8),
    ),
)
# name -> how a library spells a quantized weight
SCHEMES: Final[Mapping[str, Scheme]] = {scheme.name: scheme for scheme in _ROWS}


@dataclass(frozen=True)
class Item:
    """A weight of a checkpoint, or a tensor that is none of a scheme."""

    name: str  # of the module for a scheme, of the tensor otherwise
    scheme: str  # of SCHEMES, "rlkernel", a GGUF type, or "dense"
    entries: Mapping[str, Entry]  # ending -> entry

    def read(self, source: Source, config: Mapping[str, Any] | None = None) -> list[QuantTensor] | Tensor:
        """Load it from `source`: QuantTensors (several where experts are stacked), or a tensor [...] as stored.

        `config` stands in place of the checkpoint's own quantization config.

        Raises:
            ArgumentError: sizes, groups, zero-points or scales that the scheme does not allow.
        """
        if self.scheme == "dense":
            return source.load(self.name)
        if self.scheme == "rlkernel":
            state = {ending: source.load(self.name + ending) for ending in self.entries}
            return [QuantTensor.from_state_dict(state, ".")]
        scheme = SCHEMES.get(self.scheme)
        if scheme is None or scheme.read is None:
            found = source.weight(self.name)
            return [found] if isinstance(found, QuantTensor) else found
        tensors = {ending: source.load(self.name + ending) for ending in self.entries}
        return scheme.read(self.name, tensors, source.config if config is None else config)


def items(source: Source) -> Iterator[Item]:
    """The weights of a checkpoint, `source`, in the order of the file; nothing is loaded.

    Raises:
        ArgumentError: a tensor of integers or small floats that belongs to no weight.
    """
    left = dict(source.entries)
    found: dict[str, Item] = {}
    for name in [n for n in left if n.endswith(f".{META}")]:
        base = name[: -len(META) - 1]
        endings = [n.removeprefix(base) for n in left if n.startswith(base + ".")]
        found[name] = Item(base, "rlkernel", {ending: left.pop(base + ending) for ending in endings})
    for scheme in _ROWS:
        if scheme.read is not None:
            for name in [n for n in left if n.endswith(scheme.needs[0])]:
                if item := _claimed(name, scheme, left):
                    found[name] = item
    for name, entry in left.items():
        if entry.dtype in _UNCLAIMED:
            near = ", ".join(
                f"{s.name} ({', '.join(s.needs)})" for s in _ROWS if any(name.endswith(n) for n in s.needs)
            )
            problem = f"is of {entry.dtype}, and with its neighbors no weight of a scheme that is read"
            raise ArgumentError(name, f"{entry.dtype}{list(entry.shape)}", problem, f"Nearest: {near or 'none'}.")
        found[name] = Item(name, entry.dtype if entry.dtype not in _DENSE else "dense", {"": entry})
    return iter(found[name] for name in source.entries if name in found)


_DENSE: Final = frozenset({"F64", "F32", "F16", "BF16", "I64", "BOOL"})
_UNCLAIMED: Final = frozenset({"I32", "I16", "I8", "U8", "U16", "U32", *_FP8})


def _claimed(name: str, scheme: Scheme, left: dict[str, Entry]) -> Item | None:
    """The weight that starts with this tensor, taken out of `left`."""
    base = name[: -len(scheme.needs[0])]
    if any(base + ending not in left for ending in scheme.needs):
        return None
    entries = {ending: left[base + ending] for ending in (*scheme.needs, *scheme.may) if base + ending in left}
    if not scheme.fits(entries):
        return None
    for ending in entries:
        del left[base + ending]
    return Item(base, scheme.name, entries)
