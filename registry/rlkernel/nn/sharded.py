"""What one rank holds of linear weights that share an input, filled from a checkpoint tensor by tensor, in any order.

Pieces (q, k and v, or gate and up) are one weight below each other. A checkpoint has each of them whole, packed as
`QuantTensor.state_dict` names it or dense; the rank takes its rows or columns of it when all its tensors are there, and
the pieces become one weight when the last of them is. Filled again, it keeps its addresses: recorded graphs see the new
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec, QuantTensor, stack
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.slicing import columns, rows
from rlkernel_core.quant.tensor import META, QuantMeta, told

_NAMED: Final = {"q": 0, "k": 1, "v": 2}  # how engines call the pieces of attention
Shard = int | str | tuple[int, ...] | None  # which pieces a tensor is of; None: all, already below each other


@dataclass(frozen=True)
class Share:
    """What a rank wants of a layer's weight."""

    rows: tuple[int, ...]  # of each piece, on this rank
    columns: int  # on this rank
    rank: int = 0
    world: int = 1

    def of(self, shape: tuple[int, int], pieces: Sequence[int]) -> tuple[tuple[int, int], list[tuple[int, int]]]:
        """Columns, and rows of each piece, that the rank takes of a weight of this shape in the checkpoint.

        Pieces that have fewer parts than there are ranks (the heads of k and v) go to neighboring ranks.

        Raises:
            ArgumentError: the shape is none that these ranks can share.
        """
        height, width = shape
        wanted = sum(self.rows[p] for p in pieces)
        parts, left = divmod(height, wanted)
        fits = not left and parts > 0 and self.world % parts == 0 and (parts in {1, self.world} or len(pieces) == 1)
        if width not in {self.columns, self.columns * self.world} or not fits:
            said = f"rank {self.rank} of {self.world} wants [{wanted}, {self.columns}]"
            raise ArgumentError(
                "weight", list(shape), f"is not shared so: {said}", "Load the model of this checkpoint."
            )
        first = 0 if width == self.columns else self.rank * self.columns
        place = self.rank // (self.world // parts)
        spans, at = [], 0
        for p in pieces:
            spans.append((at + place * self.rows[p], at + (place + 1) * self.rows[p]))
            at += parts * self.rows[p]
        return (first, first + self.columns), spans


class ShardedWeight(torch.nn.Module):
    """A weight [sum of rows, columns] of a rank. Its tensors are attributes, empty until they are read.

    They are no parameters: an engine that reloads layer by layer takes parameters away, to fill new ones and copy them
    back, which formats that are packed while they are read do not survive. It finds tensors here by their names.

    Args:
        spec: the format. A checkpoint of another one is refused; dense tensors are quantized to it.
        share: what the rank takes.
        dtype: of the products; a packed checkpoint brings its own.
        device: where it will be.
        prepack: arrange it for the implementation that will read it.
    """

    def __init__(
        self, spec: QuantSpec, share: Share, *, dtype: torch.dtype, device: torch.device, prepack: bool = False
    ) -> None:
        super().__init__()
        self.spec, self.share, self.prepack = spec, share, prepack
        self.dtype = dtype
        self.shape = (sum(share.rows), share.columns)
        self._meta: QuantMeta | None = None
        self._tensors: dict[tuple[int, ...], dict[str, Tensor]] = {}  # of packed pieces that are not all here
        self._pieces: dict[int, QuantTensor | Tensor] = {}  # that are
        self.device = device
        for name in [*codec_of(spec).storage(spec, self.shape), META]:
            self._put(name, torch.empty(0, device=device))

    @property
    def filled(self) -> bool:
        """Whether all of it has been read once."""
        return self._meta is not None

    @property
    def tensor(self) -> QuantTensor:
        """The weight.

        Raises:
            ArgumentError: a tensor of it has not been read, at first or in an update that has begun.
        """
        if self._meta is None or self._pieces or self._tensors:
            got = sorted({*self._pieces, *(p for pieces in self._tensors for p in pieces)})
            raise ArgumentError("weight", f"pieces {got} of {len(self.share.rows)}", "is not whole", "Load all of it.")
        return self._whole(self._meta)

    def _whole(self, meta: QuantMeta) -> QuantTensor:
        return QuantTensor.unflatten([getattr(self, name) for name in meta.names], meta)

    def weight_loader(self, param: Any, loaded: Tensor, shard: Shard = None, name: str = "") -> None:
        """Take one tensor of a checkpoint: a part by its name, or with none the dense weight.

        Raises:
            ArgumentError: another format, a shape that is not shared so, or pieces that cannot be one weight.
        """
        del param
        pieces = self._places(shard)
        if not name:
            self._take(loaded, pieces)
            return
        held = self._tensors.setdefault(pieces, {})
        held[name] = loaded
        if name == META and (spec := told(loaded)[0]) != self.spec:
            raise ArgumentError("weight", spec.kind, f"was to be {self.spec.kind}", "Check the configuration.")
        if META not in held or any(part not in held for part in codec_of(self.spec).storage(self.spec, self.shape)):
            return
        self._take(QuantTensor.from_state_dict(self._tensors.pop(pieces)), pieces)

    def _take(self, whole: QuantTensor | Tensor, pieces: Sequence[int]) -> None:
        """What the rank wants of these pieces.

        A dense weight is quantized before it is cut where its parts would get other bits, so that these do not depend
        on the number of ranks: where rows are cut apart, or all rows have something in common.
        """
        N, K = whole.shape
        across, spans = self.share.of((N, K), pieces)
        if isinstance(whole, Tensor) and (across != (0, K) or (self.share.world > 1 and self._common())):
            whole = rlk.quantize(whole.to(self.device), self.spec, dtype=self.dtype)
        for p, (start, stop) in zip(pieces, spans, strict=True):
            if isinstance(whole, Tensor):
                self._pieces[p] = whole[start:stop].to(self.device)
            else:
                self._pieces[p] = columns(rows(whole, start, stop), *across).to(self.device)
        self._finish()

    def _common(self) -> bool:
        """Whether the format stores anything for all rows together, such as one scale."""
        storage, (N, K) = codec_of(self.spec).storage, self.shape
        few, many = storage(self.spec, (N, K)), storage(self.spec, (2 * N, K))
        return any(few[part] == many[part] for part in few)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Take tensors by name, "" for the dense weight; what was taken."""
        for name, loaded in weights:
            self.weight_loader(None, loaded, getattr(loaded, "shard_id", None), name)
            yield name

    def _places(self, shard: Shard) -> tuple[int, ...]:
        if shard is None:
            return tuple(range(len(self.share.rows)))
        if isinstance(shard, str):
            return (_NAMED[shard],)
        return shard if isinstance(shard, tuple) else (shard,)

    def _finish(self) -> None:
        """One weight of all pieces, where they are here."""
        if len(self._pieces) < len(self.share.rows):
            return
        held = [self._pieces[p] for p in range(len(self.share.rows))]
        self._pieces = {}
        packed = [piece for piece in held if isinstance(piece, QuantTensor)]
        dense = [piece for piece in held if isinstance(piece, Tensor)]
        if packed and dense:
            raise ArgumentError("weight", "packed and dense pieces", "are one weight", "Quantize all of them, or none.")
        with torch.no_grad():
            if self._meta is not None and dense:
                rlk.quantize(torch.cat(dense), self.spec, out=self._whole(self._meta))
                return
            made = stack(packed) if packed else rlk.quantize(torch.cat(dense), self.spec, dtype=self.dtype)
            self._install(rlk.prepack(made) if self.prepack else made)

    def _install(self, made: QuantTensor) -> None:
        parts, meta = made.flatten()
        if self._meta == meta:
            for name, part in zip(meta.names, parts, strict=True):
                getattr(self, name).copy_(part)
            return
        self._meta, self.dtype = meta, meta.dtype
        for name, part in zip(meta.names, parts, strict=True):
            self._put(name, part)

    def _put(self, name: str, value: Tensor) -> None:
        """A tensor that knows how it is read."""
        held: Any = value.detach()
        held.weight_loader = partial(self.weight_loader, name=name)
        setattr(self, name, held)
