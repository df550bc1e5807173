"""Several ids of each row: the launches that both operators share, bound for calls of one shape.

Legend: N rows · K listed ids of a row · M those of all rows, N * K where all have as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_triton.common import listed_ids as kernels
from rlkernel_triton.common.softmax_rows import RowShape, RowTensors, SoftmaxStats
from rlkernel_triton.launchers import Launch, Launcher

NO_ID: Final = -(1 << 62)  # among ids counted from a shard's first: below any that another rank has


def local_ids(ids: Tensor, offset: Tensor | int) -> Tensor:
    """Ids counted from a shard's first, `NO_ID` where there is none."""
    return torch.where(ids >= 0, ids - offset, NO_ID)


class Lists(NamedTuple):
    """The ids of a call's lists as kernels read them."""

    ids: Tensor  # M, contiguous
    offsets: Tensor | None = None  # [N + 1] contiguous, where lists are ragged

    @property
    def pointers(self) -> tuple[Tensor, Tensor]:
        """Ids and offsets; the pointer of ids in the place of offsets that are not there."""
        return self.ids, self.ids if self.offsets is None else self.offsets


class Listed(NamedTuple):
    """What the gradient needs of the listed ids."""

    lists: Lists  # counted from a shard's first where the vocabulary is split
    y: Tensor  # [M] fp32 logits under the cap


class ListedGradient(NamedTuple):
    """Gradients that belong to listed ids."""

    sums: Tensor  # [N] of those that arrive at a row's listed ids
    values: Tensor  # [M] of the logits


# Writes to a block [n, width] of a gradient: of how many rows, from which place of their order and which column on.
Put = Callable[[Tensor, int, int, int, int], None]


class ListedRows:
    """Calls of one shape.

    Args:
        launcher: what binds the kernels.
        rows: of the call; its masked rows are known by a mask, or by an order.
        sizes: N and K, or 1 and M where lists are ragged.
        ragged: they are.
        whole: size of the whole vocabulary.
        sharded: the vocabulary is split, and ids are counted from a shard's first on the way back.
        ordered: masked rows stand last in an order, see `putting`.
        scale: factor of the logits.
    """

    def __init__(
        self, launcher: Launcher, rows: RowShape, sizes: tuple[int, int], whole: int, *, ragged: bool,
        sharded: bool = False, ordered: bool = False, scale: float = 1.0,
    ) -> None:  # fmt: skip
        self._launcher, self._N, self.M, self._grid = launcher, rows.N, sizes[0] * sizes[1], (rows.N, 1, 1)
        self.ragged, K = ragged, 0 if ragged else sizes[1]
        self._sizes = {"N": rows.N, "K": K, "whole": whole, "RAGGED": ragged, "ENTRIES": kernels.ENTRIES}
        self._new = torch.zeros if ragged else torch.empty  # entries beyond the last list are not written
        T = {name: x for name, x in rows.fixed.items() if name != "SUPPORT"}
        masked = rows.masked
        self._choose = self._bind(kernels.choose_listed, **self._sizes, HAS_MASK=masked)
        self._logprobs = self._bind(kernels.listed_logprobs, **self._sizes, **T, HAS_MASK=masked)
        self._back: dict[str, Any] = {
            **self._sizes, **T, "HAS_MASK": masked and not ordered, "logit_scale": scale, "SHARDED": sharded,
            "softcap": rows.softcap or 0.0, "HAS_CAP": rows.softcap is not None,
        }  # fmt: skip
        self._gradients: dict[tuple[bool, bool], Launch] = {}
        put = {name: x for name, x in self._sizes.items() if name != "N"}
        self._put = self._bind(
            kernels.put_listed, **put, HAS_MASK=masked and not ordered, HAS_INDEX=masked and ordered, SHARDED=sharded
        )

    def _bind(self, kernel: Any, **fixed: Any) -> Launch:
        return self._launcher.bind(kernel, num_warps=kernels.WARPS, **fixed)

    def chosen(self, lists: Lists, mask: Tensor | None, y: Tensor) -> Tensor:
        """[N] the id of each row with the largest logit; -1: none."""
        found = torch.empty(self._N, dtype=torch.int64, device=y.device)
        if self._N:
            self._choose(self._grid, *lists.pointers, lists.ids if mask is None else mask, y, found)
        return found

    def results(
        self, lists: Lists, of: RowTensors, y: Tensor, row: SoftmaxStats, shape: torch.Size
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Log-probabilities and whether ids are invalid, of the shape of the ids; `of` has the chosen ids."""
        logprob = self._new(shape, dtype=torch.float32, device=y.device)
        invalid = self._new(shape, dtype=torch.bool, device=y.device)
        if self._N:
            self._logprobs(
                self._grid, *lists.pointers, of.mask_or_any, *of.temperatures, of.ids, y, row.logprob, row.saved,
                logprob, invalid.view(torch.int8),
            )  # fmt: skip
        return logprob, invalid

    def gradient(
        self, listed: Listed, of: RowTensors, saved: Tensor, upstream: tuple[Tensor | None, ...]
    ) -> ListedGradient | None:  # fmt: skip
        """What replaces the gradient of the results, and is put at the listed ids; None where none arrives."""
        g, g_lse, g_entropy, *_ = upstream
        if g is None or not self._N:
            return None
        arriving = g_lse is not None, g_entropy is not None
        launch = self._gradients.get(arriving)
        if launch is None:
            asked = ("g", *[name for name, there in zip(("g_lse", "g_entropy"), arriving, strict=True) if there])
            flags = dict(zip(("G_LSE", "G_ENTROPY"), arriving, strict=True))
            launch = self._gradients[arriving] = self._bind(
                kernels.listed_gradient, any_alignment=asked, **self._back, **flags
            )
        sums, values = torch.empty(
            self._N + self.M, dtype=torch.float32, device=saved.device
        ).unsafe_split_with_sizes((self._N, self.M))  # fmt: skip
        launch(
            self._grid, *listed.lists.pointers, of.mask_or_any, *of.temperatures, of.ids, listed.y, saved,
            g.contiguous(), *[saved if x is None else x.contiguous() for x in (g_lse, g_entropy)], sums, values,
        )  # fmt: skip
        return ListedGradient(sums, values)

    def putting(
        self, listed: Listed, found: ListedGradient, order: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Put:  # fmt: skip
        """What writes values at the listed ids among the columns of a block.

        Args:
            listed: the ids.
            found: their values.
            order: index and count of the rows where masked ones stand last; anything where there is no order.
            mask: [N] where there is one and no order.
        """
        lists = listed.lists
        rows = (*lists.pointers, lists.ids if mask is None else mask, *order, found.values)

        def put(out: Tensor, n: int, first: int, start: int, width: int) -> None:
            self._put((n, 1, 1), *rows, out, first, start, width)

        return put
