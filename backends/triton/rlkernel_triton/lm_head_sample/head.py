"""Logits of a head, a slab of columns at a time: the launches of one shape, and how wide a slab is.

Legend: N rows · D hidden · V vocabulary · W rows of the head, W >= V · r rank of a low-rank addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.spec.lm_head_sample import LmHeadSampleCall
from rlkernel_triton.common.device import takes_tma
from rlkernel_triton.common.host import INTERPRETED
from rlkernel_triton.common.language import triton
from rlkernel_triton.common.matmul_tiles import OPERAND_TYPES, Tile, tile_of
from rlkernel_triton.launchers import Launch, Launcher, plain_launcher_for, planned_target
from rlkernel_triton.linear_logprob.head_rows import head_like
from rlkernel_triton.linear_logprob.low_rank import InnerProduct, strides
from rlkernel_triton.lm_head_sample import decoded_logits, kernels
from rlkernel_triton.quant.layouts import check_layout

FEW: Final = 64  # rows for which a product is memory-bound
COPIED: Final = 32  # rows from which on the copy engine brings operands: it took a fifth longer for one row


class Operands(NamedTuple):
    """The tensors of a call's logits."""

    hidden: Tensor  # [N, D], D contiguous
    weight: Tensor | QuantTensor  # [W, D]
    bias: Tensor | None  # [W] contiguous
    tma: tuple[Any, Any] | None  # hidden and weight for the copy engine
    inner: Tensor | None  # [N, r] fp32 scale times hidden @ A.T
    factor: Tensor | None  # [W, r] B of LoRA
    T: Tensor | None = None  # [N] fp32 temperatures; `TrainerHead` alone has them, and
    sums: Tensor | None = None  # [laws, 3, N, P] fp32, its sums of tiles


class Head:
    """The logits of calls of one shape."""

    spare_tiles: int = 0  # that a slab has beside those that its columns fill

    def __init__(self, launcher: Launcher, call: LmHeadSampleCall, V: int) -> None:
        hidden, head, bias = call.hidden, call.weight, call.bias
        self._launcher, self.V, (self.N, self.D), self.device = launcher, V, hidden.shape, hidden.device
        self._hidden_as_it_is = hidden.stride(1) == 1
        self._bias_as_it_is = bias is None or bias.is_contiguous()
        near = hidden if self._hidden_as_it_is else hidden.contiguous()
        weight, quantized = head_like(hidden, head), not isinstance(head, Tensor)
        kind = "small_m" if self.N <= FEW else "product"
        many = self.N >= COPIED and not quantized
        self._tma = many and takes_tma(near) and takes_tma(weight) and hidden.dtype == weight.dtype
        self.tile = decoded_logits.TILE if quantized else tile_of(hidden, weight, f"tma {kind}" if self._tma else kind)
        self._capped = self.tile if call.softcap is None or quantized else tile_of(hidden, weight, "stats+")
        same = hidden.dtype == weight.dtype and not INTERPRETED  # the interpreter's 16-bit products are wrong
        self._softcap, self._scale = call.softcap, float(call.logit_scale)
        self.left_to_cap = call.softcap  # what `logits` leaves to do where it does not cap
        self._fixed: dict[str, Any] = {
            "D": self.D, "x_stride": near.stride(0), "scale": self._scale, "softcap": call.softcap or 0.0,
            "HAS_BIAS": bias is not None, "OPERAND": OPERAND_TYPES[hidden.dtype if same else torch.float32],
            **strides(call.lora),
        }  # fmt: skip
        self._strides: dict[str, Any] = {"head_stride": weight.stride(0), "head_step": weight.stride(1)}
        self._launches: dict[bool, Launch] = {}
        self._decoded: dict[bool, Callable[..., None]] = {}
        if not isinstance(head, Tensor):
            check_layout("weight", head)
        self._low_rank = strides(call.lora)
        self._inner = None if call.lora is None else InnerProduct(launcher, near, call.lora, self.N)

    def of(self, call: LmHeadSampleCall) -> Operands:
        """The operands of a call as the kernels read them."""
        hidden = call.hidden if self._hidden_as_it_is else call.hidden.contiguous()
        bias = call.bias if self._bias_as_it_is else call.bias.contiguous()  # type: ignore[union-attr]  # it is there
        tma = None
        if self._tma:
            from triton.tools.tensor_descriptor import TensorDescriptor

            tile = self.tile
            tma = (
                TensorDescriptor.from_tensor(hidden, [tile.BM, tile.BK]),
                TensorDescriptor.from_tensor(call.weight[: self.V], [tile.BN, tile.BK]),  # type: ignore[index]  # stored
            )
        inner, factor, lora = None, None, call.lora
        if lora is not None and self._inner is not None:
            inner, factor = self._inner(hidden, lora), lora.B
        return Operands(hidden, call.weight, bias, tma, inner, factor)

    def logits(self, of: Operands, first: int, width: int, out: Tensor | None = None, *, cap: bool = True) -> Tensor:
        """[N, width] fp32, written to `out` if it is given; without the softcap unless `cap`."""
        if out is None:
            out = torch.empty(self.N, width, dtype=torch.float32, device=self.device)
        if self.N == 0:
            return out
        has_cap = cap and self._softcap is not None
        tile = self._capped if has_cap else self.tile
        grid = (triton.cdiv(self.N, tile.BM) * triton.cdiv(width, tile.BN), 1, 1)
        if of.tma is not None and not has_cap:
            # Through Triton, which makes the copy engine's descriptors of what is passed.
            tma = plain_launcher_for(self.device).bind(
                kernels.head_logits_tma, num_warps=tile.num_warps, num_stages=tile.num_stages, n=self.N, D=self.D,
                scale=self._scale, HAS_BIAS=of.bias is not None, **self._low_rank, BM=tile.BM, BN=tile.BN,
                BK=tile.BK, GROUP=tile.GROUP,
            )  # fmt: skip
            tma(grid, *of.tma, of.bias, of.inner, of.factor, out, first, width)
            return out
        weight, bias, factor = of.weight, of.bias, of.factor
        if not isinstance(weight, Tensor):
            write = self._decoded.get(has_cap)
            if write is None:
                write = self._decoded[has_cap] = decoded_logits.bind_decoded_logits(
                    self._launcher, weight, self.N, HAS_CAP=has_cap, **self._fixed
                )
            write(of.hidden, weight, bias, (of.inner, factor), out, first, width)
            return out
        if first:
            weight, bias, factor = weight[first:], *(None if x is None else x[first:] for x in (bias, factor))
        launch = self._launches.get(has_cap)
        if launch is None:
            launch = self._launches[has_cap] = self._launcher.bind(
                kernels.head_logits, num_warps=tile.num_warps, num_stages=tile.num_stages, HAS_CAP=has_cap, BM=tile.BM,
                BN=tile.BN, BK=tile.BK, GROUP=tile.GROUP, n=self.N, **self._strides, **self._fixed,
            )  # fmt: skip
        launch(grid, of.hidden, weight, bias, of.inner, factor, out, width)
        return out

    def cuts(self, N: int) -> list[tuple[int, int]]:
        """(first, width) of the slabs that are drawn from as they are.

        As many tiles as run at a time, or what takes their memory where rows are few: two slabs take the same however
        many rows there are.
        """
        if N == 0:
            return []
        tiles = at_a_time(self.device, self.tile, N) // triton.cdiv(N, self.tile.BM)
        columns = max(tiles - self.spare_tiles, 1) * self.tile.BN
        block, group = kernels.BLOCK.value, kernels.GROUP.value
        if columns >= block:
            columns -= columns % block  # no piece is begun for a rest
        else:  # so many rows that a slab would be less than what a draw looks at together
            columns = max(columns, min(block, self.V // 8) // group * group)
        if N <= FEW and 2 * columns >= self.V:  # two slabs would hold the whole head
            columns = self.V
        return [(first, min(columns, self.V - first)) for first in range(0, self.V, columns)]


def at_a_time(device: torch.device, tile: Tile, N: int) -> int:
    """Tiles of a slab: programs of a product that run at a time, more of them the fewer rows there are.

    One in the interpreter.
    """
    if (target := planned_target()) is not None:
        multiprocessors = target.planned
    elif device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        return 1
    return multiprocessors * (1 if tile.num_warps > 4 else 2) * max(FEW // N, 1)
