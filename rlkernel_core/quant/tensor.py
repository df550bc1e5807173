"""A quantized weight: packed tensors, the spec that says what they mean, and the layout they are arranged in.

Imports no torch until a method needs it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rlkernel_core.documents import json_of
from rlkernel_core.errors import ArgumentError, FileError, LayoutError, UnknownNameError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import QuantSpec, spec_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CANONICAL: Final = "canonical"  # layout id of the storage that the formats define
META: Final = "quant_meta"  # key of a state dict: JSON as a uint8 tensor, so that any tensor file can hold it


_MOST_NOTE: Final = 1 << 16  # bytes
_SPEC: Final = {f.name: {"str": str, "int": int, "bool": bool}[str(f.type)] for f in dataclasses.fields(QuantSpec)}
_NOTE: Final = {
    "spec": {name if name == "format" else f"{name}?": kind for name, kind in _SPEC.items()},
    "shape": [int],
    "dtype": str,
    "layout": str,
    "parts": [str],
}


class QuantMeta(NamedTuple):
    """What is left of a QuantTensor without its tensors; hashable."""

    spec: QuantSpec
    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    names: tuple[str, ...]


_PLAN_KEYS: Final[dict[Any, int]] = {}


@dataclass(frozen=True, eq=False, repr=False)
class QuantTensor:
    """A weight [Nout, K] in a quantized format.

    Made by `quantize` or `prepack`; never changed except by writing into its storage (`quantize(..., out=w)`), which
    keeps every address, so that recorded graphs see the new values.
    """

    spec: QuantSpec  # what the parts mean
    shape: tuple[int, int]  # (Nout, K)
    dtype: torch.dtype  # what dequantize gives by default
    parts: dict[str, Tensor]  # codes [Nout, bytes], scale, zero, absmax, ...: names and shapes are the format's
    layout: str = CANONICAL  # who may read `codes`: canonical, or what a backend's prepack made

    @property
    def format(self) -> str:
        """Name of the format."""
        return self.spec.format

    @property
    def device(self) -> torch.device:
        """Where the parts live."""
        return next(iter(self.parts.values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    @cached_property
    def plan_key(self) -> int:
        """A number that weights of one spec, layout, size, place and alignment share: what a plan may depend on."""
        parts = tuple((n, t.dtype, t.shape, t.stride(), t.device, t.data_ptr() % 16) for n, t in self.parts.items())
        return _PLAN_KEYS.setdefault((self.spec, self.shape, self.dtype, self.layout, parts), len(_PLAN_KEYS))

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same weight on another device; itself if it is there already."""
        moved = {name: t.to(device) for name, t in self.parts.items()}
        if all(moved[name] is t for name, t in self.parts.items()):
            return self
        return dataclasses.replace(self, parts=moved)

    def flatten(self) -> tuple[list[Tensor], QuantMeta]:
        """Tensors of the parts, [...] each, and hashable data to put them together again."""
        return list(self.parts.values()), QuantMeta(self.spec, self.shape, self.dtype, self.layout, tuple(self.parts))

    @staticmethod
    def unflatten(tensors: Sequence[Tensor], meta: QuantMeta) -> QuantTensor:
        """Inverse of `flatten`, of its `tensors` and its `meta`; the tensors have the shapes [...] they had."""
        parts = dict(zip(meta.names, tensors, strict=True))
        return QuantTensor(meta.spec, meta.shape, meta.dtype, parts, meta.layout)

    def same_bits(self, other: QuantTensor) -> bool:
        """Equal to `other` in spec, shape, layout and every stored bit (NaN scales included); reads the device."""
        import torch

        mine, theirs = self.flatten(), other.flatten()
        return mine[1] == theirs[1] and all(
            a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b).to(a.device))
            for a, b in zip(mine[0], theirs[0], strict=True)
        )

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Tensors by `prefix` and name, with one uint8 [bytes] that holds the rest as JSON; nothing is copied."""
        import torch

        meta = {
            "spec": dataclasses.asdict(self.spec),
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layout": self.layout,
            "parts": list(self.parts),
        }
        packed = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8, device="cpu")
        return {**{prefix + name: t for name, t in self.parts.items()}, prefix + META: packed}

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor], prefix: str = "") -> QuantTensor:
        """Inverse of `state_dict`: the weight that `state`, tensors [...] by name, holds under `prefix`.

        Raises:
            ArgumentError: a tensor is missing, or has not the size and dtype that the format says.
            UnknownNameError: it was written with a format that is not known here.
        """
        import torch

        if prefix + META not in state:
            raise ArgumentError(
                "state", sorted(state), f"has no {prefix + META!r}", "Pass the prefix it was saved with."
            )
        spec, meta = told(state[prefix + META])
        missing = [prefix + name for name in meta["parts"] if prefix + name not in state]
        if missing:
            raise ArgumentError(
                "state", sorted(state), f"lacks {', '.join(missing)}", "Load all tensors of the weight."
            )
        rows, columns = meta["shape"]
        parts = {name: state[prefix + name] for name in meta["parts"]}
        weight = QuantTensor(spec, (rows, columns), getattr(torch, meta["dtype"]), parts, meta["layout"])
        weight.validate()
        return weight

    def validate(self) -> None:
        """Hold sizes and dtypes of a canonical weight's parts against its format; reads metadata only.

        Raises:
            ArgumentError: a part is missing, or has another size or dtype.
        """
        if self.layout != CANONICAL:
            return
        want = codec_of(self.spec).storage(self.spec, self.shape)
        if set(want) != set(self.parts):
            raise ArgumentError(
                "parts", sorted(self.parts), f"{self.spec} has {sorted(want)}", "Quantize the weight anew."
            )
        for name, (shape, dtype) in want.items():
            have = self.parts[name]
            if tuple(have.shape) != shape or have.dtype != dtype:
                got, said = f"{have.dtype}{list(have.shape)}", f"{dtype}{list(shape)}"
                raise ArgumentError(
                    f"parts[{name!r}]", got, f"{self.spec} of {self.shape} needs {said}", "Check the file."
                )

    def __repr__(self) -> str:
        rows, columns = self.shape
        kept = "" if self.layout == CANONICAL else f", layout={self.layout}"
        return f"QuantTensor({self.spec}, [{rows}, {columns}], {self.nbytes} bytes on {self.device}{kept})"


def told(note: Tensor) -> tuple[QuantSpec, dict[str, Any]]:
    """What the tensor under `META` says: the spec, and all of it.

    Raises:
        UnknownNameError: it was written with a format or an option that is not known here.
        ArgumentError: it is no text of JSON that says a spec, sizes, a dtype, a layout and names of parts.
    """
    import torch

    meta: dict[str, Any] = noted(META, note, _NOTE)
    spec = spec_of(meta["spec"]["format"])  # an unknown name is told before unknown fields are
    for option in meta["spec"]:
        if option not in _SPEC:
            raise UnknownNameError("option of a format", option, _SPEC)
    dtype = getattr(torch, meta["dtype"], None)
    if not isinstance(dtype, torch.dtype) or len(meta["shape"]) != 2 or min(meta["shape"]) < 0:
        got = f"{meta['dtype']}{meta['shape']}"
        raise ArgumentError(META, got, "must say a dtype of torch and two sizes", "Write the weight anew.")
    return spec_of(dataclasses.replace(spec, **meta["spec"])), meta


def noted(name: str, note: Tensor, form: Any) -> Any:
    """What a tensor uint8 [bytes] says as JSON of a form (`rlkernel_core.documents`).

    Raises:
        ArgumentError: it is no such tensor, or its text no such JSON.
    """
    remedy = "Write the weight anew."
    if str(note.dtype) != "torch.uint8" or note.dim() != 1 or note.numel() > _MOST_NOTE:
        got = f"{note.dtype}{list(note.shape)}"
        raise ArgumentError(name, got, f"must be the bytes of a text, at most {_MOST_NOTE}", remedy)
    try:
        return json_of(bytes(note.tolist()).decode(), form, name, remedy)
    except FileError as error:
        raise ArgumentError(name, error.place or "its text", error.problem, remedy) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(name, f"byte {error.start}", "is not UTF-8", remedy) from error


def check_layout(name: str, w: QuantTensor, layouts: Collection[str]) -> None:
    """`w` has one of the layouts that the caller reads."""
    if w.layout not in layouts:
        raise LayoutError(
            f"{name}: is packed as {w.layout!r}; read here: {', '.join(sorted(layouts))}. Run it on the backend that "
            f"packed it, or undo that there with prepack({name}, layout={CANONICAL!r})."
        )


def _bits(x: Tensor) -> Tensor:
    import torch

    return x.contiguous().view(torch.uint8)
